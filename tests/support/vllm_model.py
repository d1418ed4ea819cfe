"""A small random Llama on disk, which splits over two ranks, and what transformers generates from it."""

from __future__ import annotations

import json
import shutil

PROMPTS = [[5, 17, 99, 3, 42, 7], [200, 11, 150, 8]]
NEW_TOKENS = 12


def make_model(folder, *, tied=False):
    """Writes the checkpoint; returns (folder with weights, folder without, expected tokens per prompt)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    full, bare = folder / "full", folder / "bare"
    model.save_pretrained(full)
    bare.mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(full / name, bare / name)
    expected = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    (folder / "expected.json").write_text(json.dumps(expected))
    return full, bare, expected
