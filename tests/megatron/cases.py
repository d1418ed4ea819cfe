"""The models and parallel layouts that are really run: sizes as Megatron and as transformers are told."""

from __future__ import annotations

SIZES = {"layers": 4, "hidden": 64, "heads": 4, "groups": 2, "head_dim": 16, "ffn": 96}
VOCABULARY = 250
TRAITS = {
    "llama": {},
    "arcee": {"gated": False},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 24},
    "qwen2_moe": {"qkv_bias": True, "experts": 4, "moe_ffn": 48, "shared_ffn": 32, "layers": 2},
    "qwen3_moe": {"qk_norm": True, "experts": 4, "moe_ffn": 48, "layers": 2},
    "mixtral": {"experts": 4, "moe_ffn": 96, "layers": 2},
}


def hf_config(family, sizes, tied, vocabulary):
    """config.json of the model."""
    config = {
        "model_type": family,
        "architectures": [f"{ARCHITECTURES[family]}ForCausalLM"],
        "vocab_size": vocabulary,
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["groups"],
        "head_dim": sizes["head_dim"],
        "intermediate_size": sizes["ffn"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    if sizes.get("experts"):
        config |= {
            "num_local_experts" if family == "mixtral" else "num_experts": sizes["experts"],
            "num_experts_per_tok": 2,
            "moe_intermediate_size": sizes["moe_ffn"],
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if sizes.get("shared_ffn"):
        config["shared_expert_intermediate_size"] = sizes["shared_ffn"]
    return config


ARCHITECTURES = {
    "llama": "Llama",
    "arcee": "Arcee",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
}


def case(family, world=1, *, tied=False, vocabulary=VOCABULARY, **more):
    """One model in one parallel layout: `tp`, `pp`, `vpp`, `ep`, `etp`, and how it is built."""
    sizes = SIZES | TRAITS[family] | more
    return {**sizes, "world": world, "tied": tied, "hf": hf_config(family, sizes, tied, vocabulary)}


CASES = {
    "llama-tp1": case("llama"),
    "llama-tp1-tied": case("llama", tied=True),
    "llama-tp2": case("llama", 2, tp=2),
    "llama-tp2-wrapped-in-ddp": case("llama", 2, tp=2, ddp=True),
    "llama-tp2-one-kv-group": case("llama", 2, tp=2, groups=1),
    "llama-tp4-two-kv-groups": case("llama", 4, tp=4),
    "llama-tp2-one-rank-of-padding": case("llama", 2, tp=2, vocabulary=100),
    "llama-tp2-norms-fused-as-in-transformer-engine": case("llama", 2, tp=2, fused_norms=True),
    "llama-pp2": case("llama", 2, pp=2),
    "llama-pp2-tied": case("llama", 2, pp=2, tied=True),
    "llama-pp2-vpp2": case("llama", 2, pp=2, vpp=2),
    "llama-dp2": case("llama", 2),
    "llama-tp2-dp2-replicas": case("llama", 4, tp=2, replicas=True),
    "arcee-tp2": case("arcee", 2, tp=2),
    "qwen2-tp2": case("qwen2", 2, tp=2),
    "qwen3-tp2": case("qwen3", 2, tp=2, tied=True),
    "qwen3-tp2-pp2": case("qwen3", 4, tp=2, pp=2),
    "qwen3-moe-ep2": case("qwen3_moe", 2, ep=2),
    "qwen3-moe-tp2": case("qwen3_moe", 2, tp=2),
    "qwen3-moe-tp2-ep2": case("qwen3_moe", 4, tp=2, ep=2),
    "qwen3-moe-tp2-ep2-whole-experts": case("qwen3_moe", 2, tp=2, ep=2, etp=1),
    "qwen3-moe-tp2-ep2-grouped": case("qwen3_moe", 4, tp=2, ep=2, grouped="te"),
    "qwen3-moe-tp2-ep2-grouped-legacy": case("qwen3_moe", 4, tp=2, ep=2, grouped="legacy"),
    "qwen2-moe-tp2": case("qwen2_moe", 2, tp=2),
    "mixtral-ep2": case("mixtral", 2, ep=2),
}
