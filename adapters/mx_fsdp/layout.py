"""From a module under FSDP2 to the boxes this rank holds, under the names of the Hugging Face checkpoint.

    fully_shard(model, mesh=mesh)
    held = held_tensors(model)          # [Held("model.embed_tokens.weight", shape=(251, 64), start=(126, 0), tensor=local), ...]

Who publishes what: of a tensor sharded over a mesh, every rank its own part, and of equal replicas (HSDP) only the first group unless
`replicas` asks for all, whose equal boxes receivers then spread their reads over. What is not sharded (ignored parameters, buffers that
belong to the checkpoint) is published by rank 0. dtype is what lies in memory: fp32 masters stay fp32 under a bf16 policy.

Invariant: a held tensor is the memory that the optimizer updates, never the gathered copy that forward and backward use, so it may be
taken at any time between two optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mx_common.errors import ConfigError
from mx_common.refit.held import Held
from mx_fsdp.boxes import LocalLayout, local_layout
from mx_fsdp.experts import stored_apart

if TYPE_CHECKING:
    import torch

__all__ = ["held_tensors"]

# what wrappers put between a module and the one it wraps
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_WHOLE = "module"  # what DistributedDataParallel and its like put in front of everything

_Slot = tuple[int, str]  # identity of a module, and the name a parameter has in it


def held_tensors(
    model: torch.nn.Module,
    rename: Callable[[str], str | None] | None = None,
    *,
    rank: int | None = None,
    replicas: bool = False,
) -> list[Held]:
    """What this rank publishes of `model`, in the order of its modules; tied parameters once. Not a collective.

    `rename`: from the module's name to the checkpoint's, or None for a tensor that is not published; unless given, names are those of
    transformers' own `save_pretrained`, and fused experts go out one by one. `rank`: rank 0 publishes what is not sharded; that of the
    default process group unless given. `replicas`: every replica group publishes, not only the first. Raises ConfigError for FSDP1, meta
    tensors, quantised or otherwise wrapped local tensors, parts that are not dense in memory and two tensors under one name; each message
    gives the tensor and the way out.
    """
    import torch

    rank = _default_rank() if rank is None else rank
    held: list[Held] = []
    taken: dict[str, str] = {}
    with torch.no_grad():
        for own_name, tensor in _named(model):
            name = own_name if rename is None else rename(own_name)
            if name is None:
                continue
            if name in taken:
                raise ConfigError(f"{taken[name]} and {own_name} are both called {name} in the checkpoint; rename one of them")
            taken[name] = own_name
            held.extend(_parts(name, tensor, rank, replicas))
        if rename is None:
            apart = stored_apart(model)
            held = [part for whole in held for part in apart(whole)]
    return held


def _parts(name: str, tensor: torch.Tensor, rank: int, replicas: bool) -> Iterator[Held]:
    """This rank's part of one tensor: none, one box, or several."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        if rank == 0 and tensor.numel():
            yield Held(name, tuple(tensor.shape), (0,) * tensor.dim(), _memory(name, tensor))
        return
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return
    layout = local_layout(tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tensor.placements)
    if not layout.boxes or (layout.replica and not replicas):
        return
    local = _memory(name, tensor.to_local())
    _check_layout(name, tensor, local, layout)
    for box in layout.boxes:
        part = local
        for dim, (offset, size) in enumerate(zip(box.offset, box.size, strict=True)):
            part = part.narrow(dim, offset, size)
        yield Held(name, tuple(tensor.shape), box.start, part)


def _check_layout(name: str, tensor: Any, local: torch.Tensor, layout: LocalLayout) -> None:
    if tuple(local.shape) != layout.size:
        raise ConfigError(
            f"{name}: placements {tensor.placements} over a mesh of {tuple(tensor.device_mesh.shape)} give a part of {layout.size}, but "
            f"{tuple(local.shape)} lies here; hand-made DTensors must be cut as torch.chunk cuts"
        )
    if any(box.size[1:] != layout.size[1:] for box in layout.boxes):
        raise ConfigError(
            f"{name}: placements {tensor.placements} interleave ranges of a dim other than 0, which are not dense in memory; apply FSDP "
            "along dim 0 (shard_placement_fn)"
        )


def _memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor whose memory is published."""
    import torch

    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        raise ConfigError(
            f"{name} is a {type(tensor).__name__}, whose bytes are not those of the checkpoint; publish before it is quantised, or leave "
            "it out with rename"
        )
    if tensor.is_meta:
        raise ConfigError(f"{name} has no memory yet (meta device); publish after the model is initialised")
    return tensor


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters in the state the optimizer sees, and the buffers of the checkpoint: each tensor once, under its checkpoint name."""
    sharded = _sharded_parameters(model)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    tied: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        at = f"{prefix}." if prefix else ""
        # transformers says which of two names of one tensor its checkpoints leave out
        tied.update(at + name for name in getattr(module, "all_tied_weights_keys", None) or ())
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is not None:
                tensor = sharded.get((id(module), name), tensor)
                names.setdefault(id(tensor), []).append(at + name)
                tensors[id(tensor)] = tensor
    clean = _without_wrappers(name for found in names.values() for name in found)
    left_out = set(_without_wrappers(tied).values())
    for key, found in names.items():
        candidates = [clean[name] for name in found]
        yield next((name for name in candidates if name not in left_out), candidates[0]), tensors[key]


def _without_wrappers(names: Any) -> dict[str, str]:
    """Name -> the same without what wrappers added: inner wrappers anywhere, and a leading `module` where every name has it."""
    parts = {name: [part for part in name.split(".") if part not in _WRAPPERS] for name in names}
    while parts and all(len(of) > 1 and of[0] == _WHOLE for of in parts.values()):
        parts = {name: of[1:] for name, of in parts.items()}
    return {name: ".".join(of) for name, of in parts.items()}


def _sharded_parameters(model: torch.nn.Module) -> dict[_Slot, torch.Tensor]:
    """Where FSDP2 has put a gathered copy in a parameter's place (and where it has not): the shard, which the optimizer updates.

    Asking FSDP2 to reshard would free memory that a backward still needs, so nothing is asked of it and its own record is read.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    shards: dict[_Slot, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ConfigError(
                f"{name or 'the model'} is under FSDP1, which flattens parameters; use fully_shard (fsdp_version: 2 in accelerate and HF)"
            )
        if not isinstance(module, FSDPModule):
            continue
        try:
            state: Any = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                groups = state._fsdp_param_groups
            else:  # until torch 2.12
                groups = [group for group in (state._fsdp_param_group,) if group is not None]
            for param in (param for group in groups for param in group.fsdp_params):
                info = param._module_info
                for owner, own_name in (
                    (info.module, info.param_name),
                    *zip(info.shared_modules, info.shared_param_names, strict=True),
                ):
                    shards[id(owner), own_name] = param.sharded_param
        except AttributeError as error:
            raise ConfigError(
                f"FSDP2 of torch {torch.__version__} keeps its shards elsewhere ({error}); use a torch this was run with, 2.13"
            ) from error
    return shards


def _default_rank() -> int:
    from torch import distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
