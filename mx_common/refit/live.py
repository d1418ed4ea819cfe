"""What adapters need to know of a live PyTorch model: its tensors under every name, which of them are one, and that it must not serve.

    named(model)                      # parameters and buffers
    by_address(named(model))          # names of each tensor
    with on_meta(model) as expected:  # the loader writes nowhere, and a capture sees what it would have written
        model.load_weights(...)
    refuse(model, reason); readmit(model)

Invariant: `on_meta` leaves the model exactly as it was, whatever happens inside; `readmit` leaves it as it was before `refuse`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mx_common.errors import WeightsBroken

__all__ = [
    "Address",
    "address",
    "by_address",
    "kept",
    "named",
    "on_meta",
    "readmit",
    "refusal",
    "refuse",
    "same_layout",
    "serve",
    "served",
    "serving",
]

Address = tuple[Any, ...]


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under every name they have."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def serving(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """`named`, as plain tensors on the serving device; empty ones (packed away) left out."""
    live = {name: t.data for name, t in named(model).items()}
    return {name: t for name, t in live.items() if t.numel() and t.device.type == device.type}


def address(tensor: torch.Tensor) -> Address:
    """Equal for two tensors that are one."""
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def by_address(tensors: Mapping[str, torch.Tensor]) -> dict[Address, list[str]]:
    """The names of each."""
    found: dict[Address, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(address(tensor), []).append(name)
    return found


def same_layout(layer: nn.Module, recorded: Mapping[str, torch.Tensor]) -> bool:
    """Whether each recorded tensor is there, with that shape, dtype and strides. No proof that it serves: kernels permute within shapes."""
    live = {**layer._parameters, **layer._buffers}
    for name, expected in recorded.items():
        now = live.get(name)
        if now is None or (now.shape, now.dtype, now.stride()) != (expected.shape, expected.dtype, expected.stride()):
            return False
    return True


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]]:
    """(layer, its parameters, its buffers) of every layer, which has the same ones, and the same attributes, at the end."""
    before = [
        (layer, dict(vars(layer)), dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
        for layer in model.modules()
    ]
    try:
        yield [(layer, parameters, buffers) for layer, _, parameters, buffers, _ in before]
    finally:
        for layer, attributes, parameters, buffers, transient in before:
            for name in vars(layer).keys() - attributes.keys():
                del vars(layer)[name]
            vars(layer).update(attributes)
            for now, then in ((layer._parameters, parameters), (layer._buffers, buffers)):
                now.clear()
                now.update(then)
            layer._non_persistent_buffers_set.clear()
            layer._non_persistent_buffers_set.update(transient)


@contextlib.contextmanager
def on_meta(model: nn.Module, as_loaded: Callable[[nn.Module], None] | None = None) -> Iterator[dict[str, torch.Tensor]]:
    """The model's tensors as its loaders know them, on meta, in place of the live ones; what shares memory live does so too.

    `as_loaded` puts them into one layer, where an engine records what its loaders expect; what it leaves real is only read. Without it
    every parameter has a twin, and buffers stay: loaders that index by them read them."""
    with kept(model) as layers:
        twins: dict[Address, torch.Tensor] = {}
        for layer, parameters, buffers in layers:
            (as_loaded or _put_twins)(layer)
            for now, before in ((layer._parameters, parameters), (layer._buffers, buffers)):
                for name, tensor in now.items():
                    live = before.get(name)
                    if tensor is None or live is None or not live.numel():
                        continue
                    if tensor.is_meta and live.shape == tensor.shape:
                        now[name] = twins.setdefault(address(live), tensor)
        yield named(model)


def _put_twins(layer: nn.Module) -> None:
    for name, parameter in layer._parameters.items():
        if parameter is not None:
            layer._parameters[name] = _twin(parameter)


def _twin(parameter: nn.Parameter) -> Any:
    """Of its class and with its attributes, among which are the loaders; without memory."""
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    twin = torch.Tensor._make_subclass(type(parameter), empty, parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


@dataclass(frozen=True)
class _Refusal:
    """`replaced`: what the model had as attributes of its own, by name."""

    reason: str
    replaced: Mapping[str, Any]


# Of models whose weights are mixed; a receiver that is made again has to find them.
_refusals: weakref.WeakKeyDictionary[nn.Module, _Refusal] = weakref.WeakKeyDictionary()

# Attributes of the instance are found before the methods of its class, by `model(...)`, compiled or not, and by callers that pass no hooks.
# Graph replays skip a model's forward, but not its logits, where it has them.
_STEPS = ("forward", "_compiled_call_impl", "compute_logits")


def refusal(model: nn.Module) -> str:
    """Why `model` serves nothing, or ""."""
    found = _refusals.get(model)
    return "" if found is None else found.reason


def refuse(model: nn.Module, reason: str) -> None:
    """From now on every step fails with WeightsBroken. A second reason changes nothing."""
    if model in _refusals:
        return

    def stop(*_: Any, **__: Any) -> Any:
        raise WeightsBroken(reason)

    own = vars(model)
    names = [name for name in _STEPS if hasattr(model, name)]
    _refusals[model] = _Refusal(reason, {name: own[name] for name in names if name in own})
    own.update(dict.fromkeys(names, stop))


def readmit(model: nn.Module) -> None:
    """A whole version is in place: serve again."""
    found = _refusals.pop(model, None)
    if found is not None:
        for name in _STEPS:
            vars(model).pop(name, None)
        vars(model).update(found.replaced)


# Of models that were refitted; a receiver that is made again goes on from there.
_versions: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def served(model: nn.Module) -> int | None:
    """The version that was installed in `model` last, None before the first."""
    return _versions.get(model)


def serve(model: nn.Module, version: int) -> None:
    """A whole version is in place: it is what `model` serves."""
    _versions[model] = version
    readmit(model)
