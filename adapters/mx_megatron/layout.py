"""From one parameter of a Megatron rank to boxes of the tensors that Hugging Face checkpoints name.

    parts = parts_of("decoder.layers.7.self_attention.linear_qkv.weight", (384, 512), layout, Ranks(tp=1, tp_size=2))
    for part in parts:
        part.name, part.shape, part.start, part.size      # model.layers.7.self_attn.q_proj.weight, (512, 512), (256, 0), (128, 512)
        part.of(local)                                    # the same box, as a view of the local tensor

Pure: sizes and ranks in, boxes out. Layer numbers are global here. How Megatron lays tensors out: rows of linear_qkv are interleaved by
query group (its query heads, its key, its value) and cut over ranks wherever they fall; linear_fc1 holds [gate; up] of the rank;
vocabulary tensors are padded at the end; the legacy grouped MLP keeps all experts of the rank in one tensor, transposed.

Invariant: the parts that all ranks publish tile every tensor, each element once; a parameter that is not known here is an error, never
left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mx_common.errors import ConfigError
from mx_megatron.families import Layout

__all__ = ["Part", "Ranks", "parts_of", "publishes", "stripped"]

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Ranks:
    """Where a process stands: tensor parallel (`tp`), expert parallel (`ep`), tensor parallel inside experts (`etp`), and its replica
    number among the ranks that hold the same dense (`dp`) and the same expert (`edp`) parameters. `pp_size` pipeline stages share the
    layers. Raises ConfigError outside 0 <= rank < size."""

    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1
    dp: int = 0
    edp: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "etp"):
            rank, size = getattr(self, name), getattr(self, f"{name}_size")
            if not 0 <= rank < size:
                raise ConfigError(f"{name} rank {rank} of {size}: ranks count from 0 and stay below the size")


@dataclass(frozen=True)
class Part:
    """A box of the tensor `name` (`shape` in the checkpoint, beginning at `start`), and how the local tensor gives it: as `view`, at
    `index`, transposed or not. A transposed part has gaps in memory and can only be published as a copy. `replicated`: every
    tensor-parallel rank holds the same; `expert`: replicas are counted among expert-data-parallel ranks."""

    name: str
    shape: Shape
    start: Shape
    view: Shape
    index: tuple[Any, ...]
    size: Shape
    transposed: bool = False
    replicated: bool = False
    expert: bool = False

    def of(self, local: Any) -> Any:
        """This box out of a contiguous local tensor (torch or numpy); shares its memory."""
        box = local.reshape(self.view)[self.index]
        return box.T if self.transposed else box


def publishes(part: Part, ranks: Ranks) -> bool:
    """Whether this rank is the one that publishes the part: the first replica over data parallelism, and over tensor parallelism where all
    ranks hold the same."""
    if part.expert:
        return ranks.edp == 0 and (ranks.etp == 0 or not part.replicated)
    return ranks.dp == 0 and (ranks.tp == 0 or not part.replicated)


def stripped(name: str) -> str:
    """The parameter name without what wrappers (Megatron's DDP and Float16Module, torch.compile, checkpointing) put into it."""
    return ".".join(piece for piece in name.split(".") if piece not in WRAPPERS)


def parts_of(name: str, shape: Sequence[int], layout: Layout, ranks: Ranks) -> tuple[Part, ...]:
    """The parts in a local parameter; none for a rank that holds only padding, and for the output layer of a tied model, whose values the
    embedding has. `name`: stripped, with the global layer index, counted from 0. Raises ConfigError, naming the parameter, when it is
    not known or its shape is not the one that `layout` and `ranks` say."""
    return tuple(_Reader(name, tuple(shape), layout, ranks).parts())


class _Reader:
    """One parameter; `parts` finds the rule and applies it."""

    def __init__(self, name: str, shape: Shape, layout: Layout, ranks: Ranks) -> None:
        self.name, self.shape, self.layout, self.ranks, self.family = name, shape, layout, ranks, layout.family
        self.expert = False
        self.prefix = ""

    def parts(self) -> Iterator[Part]:
        if self.name == "embedding.word_embeddings.weight":
            return self.vocabulary("model.embed_tokens.weight")
        if self.name == "output_layer.weight":
            return iter(()) if self.layout.tied else self.vocabulary("lm_head.weight")
        if self.name == "decoder.final_layernorm.weight":
            return self.whole("model.norm.weight", (self.layout.hidden,))
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", self.name)
        if not found:
            raise self.unknown()
        layer, rest = int(found[1]), found[2]
        if layer >= self.layout.layers:
            raise ConfigError(
                f"{self.name}: the model has {self.layout.layers} layers; is the number global, and the right config.json given?"
            )
        self.prefix = f"model.layers.{layer}."
        if rest.startswith("mlp.experts."):
            return self.experts(rest.removeprefix("mlp.experts."))
        if rest.startswith("self_attention."):
            return self.attention(rest.removeprefix("self_attention."))
        return self.mlp(rest)

    def attention(self, rest: str) -> Iterator[Part]:
        layout, kind = self.layout, rest.rpartition(".")[2]
        if rest in ("linear_qkv.weight", "linear_qkv.bias"):
            return self.qkv(kind)
        if rest == "linear_proj.weight":
            return self.columns("self_attn.o_proj.weight", layout.hidden, layout.heads * layout.head_dim)
        if rest == "linear_proj.bias":
            return self.whole("self_attn.o_proj.bias", (layout.hidden,))
        if rest == "linear_qkv.layer_norm_weight":
            return self.whole("input_layernorm.weight", (layout.hidden,))
        if rest in ("q_layernorm.weight", "k_layernorm.weight") and self.family.qk_norm:
            return self.whole(f"self_attn.{rest[0]}_norm.weight", (layout.head_dim,))
        raise self.unknown()

    def mlp(self, rest: str) -> Iterator[Part]:
        layout, family = self.layout, self.family
        if rest == "input_layernorm.weight":
            return self.whole("input_layernorm.weight", (layout.hidden,))
        if rest in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
            return self.whole("post_attention_layernorm.weight", (layout.hidden,))
        if rest == "mlp.router.weight" and family.router:
            return self.whole(family.router, (layout.experts, layout.hidden))
        if rest == "mlp.shared_experts.gate_weight" and family.shared_gate:
            return self.whole(family.shared_gate, (1, layout.hidden))
        found = re.fullmatch(r"mlp\.(shared_experts\.)?linear_fc([12])\.(weight|bias)", rest)
        if found and not (found[1] and not family.shared_expert):
            under, width = (family.shared_expert, layout.shared_ffn) if found[1] else ("mlp", layout.ffn)
            return self.projection(found[2], under, ("gate_proj", "up_proj", "down_proj"), width, found[3])
        raise self.unknown()

    def experts(self, rest: str) -> Iterator[Part]:
        self.expert = True
        layout, ranks, family = self.layout, self.ranks, self.family
        if not layout.experts or layout.experts % ranks.ep_size:
            raise ConfigError(f"{self.name}: {layout.experts} experts do not divide over {ranks.ep_size} expert-parallel ranks")
        mine = layout.experts // ranks.ep_size
        if rest in ("weight1", "weight2"):
            return self.fused(rest, mine)
        for pattern in (
            r"local_experts\.(?P<j>\d+)\.linear_fc(?P<fc>[12])\.(?P<kind>weight)",
            r"linear_fc(?P<fc>[12])\.weight(?P<j>\d+)",
        ):
            if found := re.fullmatch(pattern, rest):
                if int(found["j"]) >= mine:
                    raise ConfigError(
                        f"{self.name}: each of {ranks.ep_size} expert-parallel ranks holds {mine} of {layout.experts} experts"
                    )
                under = family.expert.format(expert=ranks.ep * mine + int(found["j"]))
                return self.projection(found["fc"], under, family.expert_names, layout.moe_ffn, "weight")
        raise self.unknown()

    def projection(self, which: str, under: str, names: Sequence[str], width: int, kind: str) -> Iterator[Part]:
        """linear_fc1 holds [gate; up] of the rank, linear_fc2 a slice of the columns."""
        gate, up, down = (f"{under}.{name}.{kind}" for name in names)
        hidden = self.layout.hidden
        if which == "2":
            return self.columns(down, hidden, width) if kind == "weight" else self.whole(down, (hidden,))
        rows = self.cut(width)
        blocks = [(name, width, self.tp * rows, rows) for name in ((gate, up) if self.family.gated else (up,))]
        return self.stacked(blocks, 0, rows * len(blocks), () if kind == "bias" else (hidden,))

    def qkv(self, kind: str) -> Iterator[Part]:
        layout = self.layout
        per_group, dim = layout.heads // layout.groups * layout.head_dim, layout.head_dim
        q, k, v = (f"self_attn.{name}_proj.{kind}" for name in "qkv")
        heads, keys = layout.heads * dim, layout.groups * dim
        rows = self.cut(layout.qkv_rows)
        first, last = self.tp * rows // (per_group + 2 * dim), -(-(self.tp + 1) * rows // (per_group + 2 * dim))
        blocks = [
            block
            for group in range(first, last)
            for block in ((q, heads, group * per_group, per_group), (k, keys, group * dim, dim), (v, keys, group * dim, dim))
        ]
        low = self.tp * rows - first * (per_group + 2 * dim)
        return self.stacked(blocks, low, low + rows, () if kind == "bias" else (layout.hidden,))

    def vocabulary(self, name: str) -> Iterator[Part]:
        """Rows of the rank, as many as its shape says; the padding at the end is nobody's."""
        size, rows = self.layout.vocab_size, self.shape[0] if self.shape else 0
        if rows * self.ranks.tp_size < size:
            raise ConfigError(f"{self.name}: {self.ranks.tp_size} x {rows} rows are fewer than the vocabulary of {size}")
        held = min(max(size - self.tp * rows, 0), rows)
        self.check((rows, self.layout.hidden))
        if held:
            yield self.part(
                name, (size, self.layout.hidden), (self.tp * rows, 0), (slice(0, held),), (held, self.layout.hidden)
            )

    def fused(self, which: str, mine: int) -> Iterator[Part]:
        """The legacy grouped MLP: [experts, in, out] in the memory of one matrix, so that every projection lies transposed."""
        layout, family = self.layout, self.family
        hidden, width, share = layout.hidden, layout.moe_ffn, self.cut(layout.moe_ffn)
        fold = 2 if family.gated else 1
        gate, up, down = family.expert_names
        at = self.tp * share
        self.check((hidden, mine * fold * share) if which == "weight1" else (mine * share, hidden))
        for j in range(mine):
            under = family.expert.format(expert=self.ranks.ep * mine + j)
            if which == "weight2":
                yield self.part(
                    f"{under}.{down}.weight",
                    (hidden, width),
                    (0, at),
                    (j,),
                    (hidden, share),
                    view=(mine, share, hidden),
                    transposed=True,
                )
                continue
            for block, name in enumerate((gate, up) if family.gated else (up,)):
                index = (j, slice(None), slice(block * share, (block + 1) * share))
                yield self.part(
                    f"{under}.{name}.weight",
                    (width, hidden),
                    (at, 0),
                    index,
                    (share, hidden),
                    view=(mine, hidden, fold * share),
                    transposed=True,
                )

    def columns(self, name: str, rows: int, columns: int) -> Iterator[Part]:
        share = self.cut(columns)
        self.check((rows, share))
        yield self.part(name, (rows, columns), (0, self.tp * share), (slice(0, rows),), (rows, share))

    def whole(self, name: str, shape: Shape) -> Iterator[Part]:
        self.check(shape)
        yield self.part(name, shape, (0,) * len(shape), (slice(0, shape[0]),), shape, replicated=True)

    def stacked(self, blocks: Sequence[tuple[str, int, int, int]], low: int, high: int, inner: Shape) -> Iterator[Part]:
        """Rows [low, high) of blocks (name, rows of the tensor, first row, rows) that follow one another."""
        self.check((high - low, *inner))
        at = 0
        for name, total, first, rows in blocks:
            begin, end = max(at, low), min(at + rows, high)
            if begin < end:
                start = (first + begin - at, *(0 for _ in inner))
                yield self.part(name, (total, *inner), start, (slice(begin - low, end - low),), (end - begin, *inner))
            at += rows

    def part(self, name: str, shape: Shape, start: Shape, index: tuple[Any, ...], size: Shape, **more: Any) -> Part:
        named = name if name.startswith(("model.", "lm_head.")) else self.prefix + name
        return Part(named, shape, start, more.pop("view", self.shape), index, size, expert=self.expert, **more)

    @property
    def tp(self) -> int:
        return self.ranks.etp if self.expert else self.ranks.tp

    def cut(self, size: int) -> int:
        """The share of one tensor-parallel rank."""
        ways = self.ranks.etp_size if self.expert else self.ranks.tp_size
        if size % ways:
            raise ConfigError(f"{self.name}: {size} does not divide over {ways} tensor-parallel ranks")
        return size // ways

    def check(self, expected: Shape) -> None:
        if self.shape != expected:
            raise ConfigError(
                f"{self.name}: local shape {self.shape}, and {expected} by the configuration of this {self.layout.family_name} "
                f"({self.layout}, {self.ranks}); give the config.json of the model that is trained"
            )

    def unknown(self) -> ConfigError:
        return ConfigError(
            f"parameter {self.name} of shape {self.shape} has no counterpart in the {self.layout.family_name} family, so the published "
            "model would lack it; name it in leave_out (--mx-leave-out) if engines are not to have it"
        )
