"""Megatron's local tensors made from whole Hugging Face tensors, in the opposite direction of the code under test and by other means:
fused with numpy, then cut."""

from __future__ import annotations

import numpy as np

from mx_megatron import Ranks


class Reference:
    """Whole tensors of a layout, every element a number of its own, and what each rank's parameters hold of them."""

    def __init__(self, layout, padded, *, bias=False, style="sequential"):
        self.layout, self.padded, self.bias, self.style = layout, padded, bias, style
        self.whole, self._next = {}, 0

    def hf(self, name, *shape):
        if name not in self.whole:
            count = int(np.prod(shape))
            self.whole[name] = np.arange(self._next, self._next + count, dtype=np.int64).reshape(shape)
            self._next += count
        return self.whole[name]

    def parameters(self, ranks: Ranks):
        """{Megatron name: local array} of a rank that holds every layer."""
        lay = self.layout
        found = {"embedding.word_embeddings.weight": self.vocabulary("model.embed_tokens.weight", ranks)}
        if lay.tied:
            found["output_layer.weight"] = found["embedding.word_embeddings.weight"]
        else:
            found["output_layer.weight"] = self.vocabulary("lm_head.weight", ranks)
        found["decoder.final_layernorm.weight"] = self.hf("model.norm.weight", lay.hidden)
        for i in range(lay.layers):
            for name, values in {
                **self.attention(f"model.layers.{i}.", ranks),
                **self.mlp(f"model.layers.{i}.", ranks),
            }.items():
                found[f"decoder.layers.{i}.{name}"] = values
        return found

    def vocabulary(self, name, ranks):
        whole = self.hf(name, self.layout.vocab_size, self.layout.hidden)
        padding = np.full((self.padded - len(whole), self.layout.hidden), -1)
        return np.split(np.concatenate([whole, padding]), ranks.tp_size)[ranks.tp]

    def attention(self, hf, ranks):
        lay = self.layout
        found = {
            "input_layernorm.weight": self.hf(f"{hf}input_layernorm.weight", lay.hidden),
            "self_attention.linear_proj.weight": np.split(
                self.hf(f"{hf}self_attn.o_proj.weight", lay.hidden, lay.heads * lay.head_dim), ranks.tp_size, axis=1
            )[ranks.tp],
        }
        for kind, inner in [("weight", (lay.hidden,))] + [("bias", ())] * self.bias:
            q = self.hf(f"{hf}self_attn.q_proj.{kind}", lay.heads * lay.head_dim, *inner)
            k = self.hf(f"{hf}self_attn.k_proj.{kind}", lay.groups * lay.head_dim, *inner)
            v = self.hf(f"{hf}self_attn.v_proj.{kind}", lay.groups * lay.head_dim, *inner)
            grouped = [x.reshape(lay.groups, -1, lay.head_dim, *inner) for x in (q, k, v)]
            fused = np.concatenate(grouped, axis=1).reshape(-1, *inner)
            found[f"self_attention.linear_qkv.{kind}"] = np.split(fused, ranks.tp_size)[ranks.tp]
        if lay.family.qk_norm:
            for name in "qk":
                found[f"self_attention.{name}_layernorm.weight"] = self.hf(f"{hf}self_attn.{name}_norm.weight", lay.head_dim)
        return found

    def projections(self, under, names, width, rank, size):
        """(fc1, fc2) of one MLP on one of `size` ranks."""
        lay = self.layout
        gate, up, down = names
        stacked = [self.hf(f"{under}.{name}.weight", width, lay.hidden) for name in ((gate, up) if lay.family.gated else (up,))]
        first = np.concatenate([np.split(x, size)[rank] for x in stacked])
        return first, np.split(self.hf(f"{under}.{down}.weight", lay.hidden, width), size, axis=1)[rank]

    def mlp(self, hf, ranks):
        lay, family = self.layout, self.layout.family
        found = {"pre_mlp_layernorm.weight": self.hf(f"{hf}post_attention_layernorm.weight", lay.hidden)}
        names = ("gate_proj", "up_proj", "down_proj")
        if not lay.experts:
            fc = self.projections(f"{hf}mlp", names, lay.ffn, ranks.tp, ranks.tp_size)
            return found | {"mlp.linear_fc1.weight": fc[0], "mlp.linear_fc2.weight": fc[1]}
        found["mlp.router.weight"] = self.hf(hf + family.router, lay.experts, lay.hidden)
        if lay.shared_ffn:
            fc = self.projections(hf + family.shared_expert, names, lay.shared_ffn, ranks.tp, ranks.tp_size)
            found |= {"mlp.shared_experts.linear_fc1.weight": fc[0], "mlp.shared_experts.linear_fc2.weight": fc[1]}
            found["mlp.shared_experts.gate_weight"] = self.hf(hf + family.shared_gate, 1, lay.hidden)
        mine = lay.experts // ranks.ep_size
        experts = [
            self.projections(
                hf + family.expert.format(expert=ranks.ep * mine + j),
                family.expert_names,
                lay.moe_ffn,
                ranks.etp,
                ranks.etp_size,
            )
            for j in range(mine)
        ]
        if self.style == "legacy":
            found["mlp.experts.weight1"] = np.concatenate([fc1.T.ravel() for fc1, _ in experts]).reshape(lay.hidden, -1)
            found["mlp.experts.weight2"] = np.concatenate([fc2.T for _, fc2 in experts])
            return found
        for j, pair in enumerate(experts):
            for fc, values in zip("12", pair, strict=True):
                one = f"local_experts.{j}.linear_fc{fc}.weight" if self.style == "sequential" else f"linear_fc{fc}.weight{j}"
                found[f"mlp.experts.{one}"] = values
        return found
