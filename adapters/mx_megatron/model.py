"""What this rank of a Megatron model holds, as boxes of Hugging Face tensors that lie where the parameters lie.

    layout = layout_of("path/to/config.json", model[0])
    held = held_tensors(model, layout, ranks_now())        # `model`: one chunk, or the list that Megatron trains

Runs in the trainer. Addresses belong to the moment: Megatron's DDP moves every parameter into its flat buffers, so ask after wrapping, and
again at every version. Invariant: every parameter of every chunk is held, published by a replica, or left out by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx_common.errors import ConfigError
from mx_common.refit.held import Held
from mx_megatron.families import Layout
from mx_megatron.layout import Part, Ranks, parts_of, publishes, stripped

if TYPE_CHECKING:
    import torch

__all__ = ["Copies", "chunks_of", "held_tensors", "layout_of", "ranks_now"]

log = logging.getLogger(__name__)

# settings under which memory holds something else than the tensor of the Hugging Face model, and the value that is known
KNOWN_VALUES = (
    ("multi_latent_attention", False),
    ("attention_output_gate", False),
    ("heterogeneous_block_specs", False),
    ("layernorm_zero_centered_gamma", False),
    ("rotary_interleaved", False),
    ("moe_latent_size", None),
)
Chunks = Any


class Copies:
    """Memory of our own for parts whose bytes do not lie in a row, kept over versions so that their addresses stay."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def total_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def of(self, name: str, box: torch.Tensor) -> torch.Tensor:
        """A dense copy of `box` as it is now."""
        import torch

        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (box.shape, box.dtype, box.device):
            buffer = self._buffers[name] = torch.empty(box.shape, dtype=box.dtype, device=box.device)
        return buffer.copy_(box)


def layout_of(hf_config: Mapping[str, Any] | str | Path, model: Chunks) -> Layout:
    """The layout that `hf_config` (its content, the file, or the folder it lies in) describes. Raises ConfigError where it contradicts the
    configuration that Megatron trains with, naming both values."""
    layout = Layout.from_hf(_read(hf_config))
    config = chunks_of(model)[0].config
    said = {
        "num_layers": layout.layers,
        "hidden_size": layout.hidden,
        "num_attention_heads": layout.heads,
        "num_query_groups": layout.groups,
        "kv_channels": layout.head_dim,
        "gated_linear_unit": layout.family.gated,
        "num_moe_experts": layout.experts or None,
        **dict(KNOWN_VALUES),
    }
    missing = object()
    wrong = [
        f"{name} is {getattr(config, name)!r} in Megatron and {value!r} by the Hugging Face configuration"
        for name, value in said.items()
        if getattr(config, name, missing) not in (missing, value)
    ]
    if wrong:
        raise ConfigError(f"this model cannot be published as {layout.family_name}: {'; '.join(wrong)}")
    return layout


def ranks_now() -> Ranks:
    """Where this process stands, by megatron.core.parallel_state."""
    from megatron.core import parallel_state as state

    return Ranks(
        tp=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        ep=state.get_expert_model_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_rank(),
        etp_size=state.get_expert_tensor_parallel_world_size(),
        dp=state.get_data_parallel_rank(with_context_parallel=True),
        edp=state.get_expert_data_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
    )


def chunks_of(model: Chunks) -> list[Any]:
    """The model chunks of this rank: several under virtual pipeline parallelism."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def held_tensors(
    model: Chunks,
    layout: Layout,
    ranks: Ranks,
    *,
    replicas: bool = False,
    leave_out: Sequence[str] = (),
    copies: Copies | None = None,
) -> list[Held]:
    """The boxes this rank publishes, in the order of its parameters.

    What several ranks hold alike is held by the first of them, over tensor and over data parallelism; with `replicas` every rank publishes
    all it has, which spreads readers. `leave_out`: patterns (`mtp.*`) of Megatron names with global layer numbers. Parts with gaps in
    memory (the legacy grouped MLP, whose experts lie transposed) are copied into `copies`. Raises ConfigError for a parameter without a
    counterpart, a shape that is not the layout's, and memory that is not plain (quantised, sharded or offloaded parameters)."""
    copies = Copies() if copies is None else copies
    before = len(copies)
    held = []
    for name, parameter in _tensors(model, leave_out, ranks.pp_size == 1):
        local = _plain(name, parameter)
        for part in parts_of(name, tuple(local.shape), layout, ranks):
            if replicas or publishes(part, ranks):
                held.append(_held(part, local, copies))
    if len(copies) > before:
        log.info(
            "%d tensors (%.1f MB) lie transposed in the legacy grouped MLP and are published as copies; moe_use_legacy_grouped_gemm=False "
            "publishes them where they lie",
            len(copies) - before,
            copies.total_bytes / 1e6,
        )
    return held


def _held(part: Part, local: torch.Tensor, copies: Copies) -> Held:
    box = part.of(local)
    return Held(part.name, part.shape, part.start, copies.of(part.name, box) if part.transposed else box)


def _tensors(model: Chunks, leave_out: Sequence[str], whole_model: bool) -> Iterator[tuple[str, Any]]:
    """(name with global layer number, tensor) of all that a checkpoint of the chunks would hold."""
    unused = set(leave_out)
    for chunk in chunks_of(model):
        numbers = _layer_numbers(chunk)
        named = [*chunk.named_parameters(), *_persistent_buffers(chunk)]
        for raw, tensor in named:
            pieces = stripped(raw).split(".")
            if pieces[:2] == ["decoder", "layers"]:
                if pieces[2] not in numbers:
                    raise ConfigError(f"{raw}: its layer has no layer_number, so its place in the whole model is not known")
                pieces[2] = str(numbers[pieces[2]])
            name = ".".join(pieces)
            matched = [pattern for pattern in leave_out if fnmatchcase(name, pattern)]
            unused.difference_update(matched)
            if not matched:
                yield name, tensor
    if unused and whole_model:  # else another pipeline stage may hold it
        raise ConfigError(f"leave_out names {', '.join(sorted(unused))}, and no parameter is called so; check the spelling")


def _layer_numbers(chunk: Any) -> dict[str, int]:
    """From the place in this chunk's list of layers to the global index, which each layer knows (`layer_number`, from 1)."""
    numbers = {}
    for raw, module in chunk.named_modules():
        pieces = stripped(raw).split(".")
        if len(pieces) == 3 and pieces[:2] == ["decoder", "layers"] and hasattr(module, "layer_number"):
            numbers[pieces[2]] = int(module.layer_number) - 1
    return numbers


def _persistent_buffers(chunk: Any) -> Iterator[tuple[str, Any]]:
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _plain(name: str, parameter: Any) -> torch.Tensor:
    import torch

    if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
        raise ConfigError(
            f"{name} is a {type(parameter).__name__}, whose memory is not the plain tensor; publish plain bf16 or fp32"
        )
    local: torch.Tensor = parameter.detach()
    if local.untyped_storage().nbytes() < local.numel() * local.element_size():
        raise ConfigError(f"{name} has no memory just now (offloaded, or gathered only in use); publish when it is resident")
    if not local.is_contiguous():
        raise ConfigError(f"{name} has strides {tuple(local.stride())} for shape {tuple(local.shape)}; make it contiguous")
    return local


def _read(hf_config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(hf_config, Mapping):
        return hf_config
    path = Path(hf_config)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(
            f"no Hugging Face configuration at {path} ({why}); give config.json or its folder (--mx-hf-config)"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a configuration: a JSON object is expected")
    return content
