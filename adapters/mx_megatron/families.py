"""Which Hugging Face names a model family gives to what Megatron trains, and the sizes a model of it has.

    model = Layout.from_hf(json.loads(Path("config.json").read_text()))
    model.family.router                                   # "mlp.gate.weight"

Values only: no framework is imported. Invariant: a layout that cannot be (groups that do not divide heads, experts without a width) is
refused, and a family that nobody compared with transformers is not guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mx_common.errors import ConfigError

__all__ = ["FAMILIES", "Family", "Layout"]


@dataclass(frozen=True)
class Family:
    """How a family names its parts, below `model.layers.N.`. `gated`: its MLP has gate and up projections. `qk_norm`: it normalises
    queries and keys. `expert` has `{expert}` where the global index goes; empty: the family has no experts."""

    gated: bool = True
    qk_norm: bool = False
    router: str = ""
    expert: str = ""
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: str = ""
    shared_gate: str = ""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "arcee": Family(gated=False),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "qwen2_moe": Family(
        router="mlp.gate.weight",
        expert="mlp.experts.{expert}",
        shared_expert="mlp.shared_expert",
        shared_gate="mlp.shared_expert_gate.weight",
    ),
    "qwen3_moe": Family(qk_norm=True, router="mlp.gate.weight", expert="mlp.experts.{expert}"),
    "mixtral": Family(
        router="block_sparse_moe.gate.weight", expert="block_sparse_moe.experts.{expert}", expert_names=("w1", "w3", "w2")
    ),
}


@dataclass(frozen=True)
class Layout:
    """The sizes of one model: `family_name` is a key of FAMILIES; `vocab_size` is without the padding that Megatron adds; `ffn`,
    `moe_ffn` and `shared_ffn` are widths of one projection, summed over tensor-parallel ranks; `experts` counts all of them. Raises
    ConfigError for sizes that contradict one another."""

    family_name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab_size: int
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        if self.family_name not in FAMILIES:
            raise ConfigError(
                f"model family {self.family_name!r} is not mapped from Megatron; known families: {', '.join(sorted(FAMILIES))}"
            )
        for name in ("layers", "hidden", "heads", "groups", "head_dim", "ffn", "vocab_size"):
            if not _whole(getattr(self, name), 1):
                raise ConfigError(
                    f"layout of a {self.family_name}: {name} is {getattr(self, name)!r}; give a whole number >= 1"
                )
        for name in ("experts", "moe_ffn", "shared_ffn"):
            if not _whole(getattr(self, name), 0):
                raise ConfigError(
                    f"layout of a {self.family_name}: {name} is {getattr(self, name)!r}; give a whole number >= 0"
                )
        if self.heads % self.groups:
            raise ConfigError(f"{self.heads} attention heads do not divide into {self.groups} query groups")
        if bool(self.experts) != bool(self.moe_ffn):
            raise ConfigError(f"{self.experts} experts of width {self.moe_ffn}: give both, or neither for a dense model")
        if self.experts and not self.family.expert:
            raise ConfigError(f"family {self.family_name} has no experts, and the layout counts {self.experts}")

    @property
    def family(self) -> Family:
        return FAMILIES[self.family_name]

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection of queries, keys and values, over all ranks."""
        return (self.heads + 2 * self.groups) * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Layout:
        """From what `config.json` of the Hugging Face model says. Raises ConfigError for a family that is not mapped and for a missing
        size."""
        family = str(config.get("model_type", ""))
        if family not in FAMILIES:
            raise ConfigError(f"model_type {family!r} is not mapped from Megatron; known: {', '.join(sorted(FAMILIES))}")

        def size(*names: str, default: int | None = None) -> int:
            for name in names:
                if config.get(name) is not None:
                    return int(config[name])
            if default is None:
                raise ConfigError(
                    f"the Hugging Face configuration of this {family} lacks {' or '.join(names)}; pass the whole config.json"
                )
            return default

        hidden, heads, ffn = size("hidden_size"), size("num_attention_heads"), size("intermediate_size")
        has_experts = bool(FAMILIES[family].expert)
        return cls(
            family_name=family,
            layers=size("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            groups=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=hidden // heads),
            ffn=ffn,
            vocab_size=size("vocab_size"),
            experts=size("num_experts", "num_local_experts") if has_experts else 0,
            moe_ffn=size("moe_intermediate_size", default=ffn) if has_experts else 0,
            shared_ffn=size("shared_expert_intermediate_size") if FAMILIES[family].shared_expert else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
        )


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
