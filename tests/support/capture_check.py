"""Runs a loader for real and as captured, and compares what either leaves."""

from __future__ import annotations

import torch

from mx_common.refit.capture import capture


class Model(torch.nn.Module):
    """Parameters by name, and a loader: a function of (parameters, name, weight)."""

    def __init__(self, load, buffers=(), **shapes):
        super().__init__()
        self.load = load
        for name, (shape, dtype) in shapes.items():
            tensor = torch.zeros(shape, dtype=dtype)
            if name in buffers:
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights):
        for name, weight in weights:
            self.load(dict(self.named_parameters(remove_duplicate=False)), name, weight)

    def tensors(self):
        return {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}


def f32(*shape):
    return (shape, torch.float32)


def facts_of(weights):
    return {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}


def random_weights(facts):
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in facts.items()}


def on_meta(tensors):
    """The same names on meta; what shared memory still does."""
    storages, made = {}, {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        base = storages.setdefault(
            storage._cdata, torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        )
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        made[name] = empty.set_(base, tensor.storage_offset(), tensor.shape, tensor.stride())
    return made


def perform(captured, weights, tensors):
    """Write the pieces in the reverse of their order, as any order must do."""
    for piece in reversed(captured.pieces):
        param = tensors[piece.param].data
        step = param.element_size()
        where = [n // step for n in piece.stride]
        into = param.as_strided(piece.size, where, param.storage_offset() + piece.offset // step)
        source = weights[piece.tensor][tuple(slice(at, at + n) for at, n in zip(piece.start, piece.size, strict=True))]
        assert (source.dtype, param.dtype) == (piece.src_dtype, piece.dst_dtype)
        into.copy_(source)


def check(make, facts):
    """Capture on meta; pieces, then the whole tensors through the loader, leave what the loader alone leaves. Returns the capture."""
    weights = random_weights(facts)
    twin, model, expected = make(), make(), make()
    stand_ins = on_meta(twin.tensors())
    for module in twin.modules():
        for name in list(module._parameters):
            module._parameters[name] = torch.nn.Parameter(stand_ins[name], requires_grad=False)
        module._buffers.update({name: stand_ins[name] for name in module._buffers})
    captured = capture(twin.load_weights, twin.tensors(), facts)
    with torch.no_grad():
        perform(captured, weights, model.tensors())
        model.load_weights([(name, weights[name]) for name in captured.whole])
        expected.load_weights(weights.items())
    for name, tensor in expected.tensors().items():
        assert torch.equal(model.tensors()[name], tensor), name
    return captured
