"""How an engine's wishes become rounds of reads: where each box lands, and what is done with it then.

    layout = reshard_layout(capture, facts, engine, job)        # exact slices, into a shadow of the parameters
    layout = staged_layout(facts, engine, job)                  # full tensors, through an area of bounded size
    for one in layout.rounds: plan with one.pieces; read; verify; one.landed()
    layout.install()

Invariant: unless `writes_live` is set, nothing that serves is written before `install`. Areas take at most half of the staging bound
here; the other half is for row blocks that are pulled whole (see mx_common.refit._read).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mx_common._free_memory import free_memory
from mx_common.errors import ConfigError, CoverageError
from mx_common.load.tensors import some_names
from mx_common.refit._memory import ALIGNMENT, Memory, carved, end_after, end_of
from mx_common.refit.capture import Capture, CapturedPiece
from mx_common.refit.engine import RefitEngine, RefitJob, TensorFacts
from mx_common.refit.pieces import Piece, Pieces

if TYPE_CHECKING:
    import torch

__all__ = ["Layout", "Round", "reshard_layout", "staged_layout"]

# How loaders say that they do not know a tensor, or not in this shape. Others may only be at a loss with tensors that hold no values.
_REJECTIONS = tuple(f"the loader raised {kind}:" for kind in ("KeyError", "ValueError", "AssertionError"))


@dataclass(frozen=True)
class Round:
    """Boxes that land together. `tensors`: what they land in and what is gone after `landed`, by the name that a report gives them;
    `landed`: to be called when all bytes are verified, and before the next round may reuse the memory."""

    pieces: Pieces
    tensors: Mapping[str, torch.Tensor]
    landed: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Layout:
    """All rounds of a version of this layout. `install` writes the live parameters, unless the rounds do (`writes_live`): by their reads
    (`reads_live`), or when they have landed. `minimum_bytes`: what the rank's layout needs of what is published. `filled`: what is whole
    after the last round. `derived`: live tensors that no checkpoint
    tensor fills (not known when only a part is wanted); `unused`: checkpoint tensors the engine ignores."""

    rounds: tuple[Round, ...]
    memory: Memory
    install: Callable[[], None]
    writes_live: bool
    minimum_bytes: int
    reads_live: bool = False
    filled: Mapping[str, torch.Tensor] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def staged_layout(capture: Capture, facts: TensorFacts, engine: RefitEngine, job: RefitJob, device: torch.device) -> Layout:
    """Every tensor in full, as many at a time as the area holds. Raises ConfigError for a tensor larger than the area, CoverageError when
    the engine's loader would leave part of a parameter unwritten."""
    half = _half_filled(capture, facts, engine, job)
    memory, bound = Memory(device), job.staging_bytes // 2
    batches = list(_batches([(name, shape, dtype) for name, (shape, dtype) in facts.items()], bound))
    area = memory.area(
        max((end_of(_nbytes(shape, dtype) for _, shape, dtype in batch) for batch in batches), default=ALIGNMENT)
    )
    landings = [dict(zip([n for n, _, _ in b], carved(area, [(s, d) for _, s, d in b]), strict=True)) for b in batches]
    at_once = len(landings) <= 1

    def loading(tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        return lambda: engine.load(tensors.items())

    rounds = tuple(
        Round(
            Pieces.of([_dense(name, (0,) * tensor.dim(), tensor) for name, tensor in landing.items()], memory.mem),
            landing,
            (lambda: None) if at_once else loading(landing),
        )
        for landing in landings
    )
    install = loading(landings[0]) if at_once and landings else lambda: None
    return Layout(
        rounds,
        memory,
        install,
        not at_once,
        capture.minimum_bytes(facts),
        derived=_derived(capture, half, job),
        unused=tuple(capture.unused),
    )


def reshard_layout(capture: Capture, facts: TensorFacts, engine: RefitEngine, job: RefitJob, device: torch.device) -> Layout:
    """Exact boxes into a shadow of the parameters, or into the parameters themselves where there is no room for one.

    Raises CoverageError when the engine's loader leaves part of a parameter unwritten."""
    live, half = engine.parameters(), _half_filled(capture, facts, engine, job)
    touched = sorted({piece.param for piece in capture.pieces})
    memory, bound, where = Memory(device), job.staging_bytes // 2, device.index or 0
    shadowed = _room_for_shadow(job, sum(live[name].nbytes for name in touched), device)
    written_to = {name: live[name] for name in touched}
    target = memory.like(written_to) if shadowed else {name: memory.adopt(tensor) for name, tensor in written_to.items()}
    written = dict.fromkeys(touched, 0)  # no two pieces write the same byte
    for piece in capture.pieces:
        written[piece.param] += math.prod(piece.size) * piece.dst_dtype.itemsize
    # what no piece writes stays as it serves, whoever writes it meanwhile: the rest in a partial refit, padding, what the loader computes
    parts = [piece for piece in capture.pieces if written[piece.param] < live[piece.param].nbytes]
    if shadowed:
        for name in {piece.param for piece in parts}:
            target[name].copy_(live[name])  # so that nobody takes what is undefined for a version's NaN
    whole = {name: facts[name] for name in capture.whole}
    kept = carved(memory.area(end_of(_nbytes(*fact) for fact in whole.values())), list(whole.values()))
    held = dict(zip(whole, kept, strict=True))

    same = [piece for piece in capture.pieces if piece.src_dtype == piece.dst_dtype]
    casts = [piece for piece in capture.pieces if piece.src_dtype != piece.dst_dtype]
    first = [
        Piece(p.tensor, p.start, p.size, target[p.param].data_ptr() + p.offset, p.stride, p.src_dtype.itemsize, where)
        for p in same
    ]
    first += [_dense(name, (0,) * len(facts[name][0]), tensor) for name, tensor in held.items()]
    rounds = [Round(Pieces.of(first, memory.mem), held)] if first else []
    casts = [part for piece in casts for part in _by_rows(piece, bound)]
    batches = list(_batches([(piece, piece.size, piece.src_dtype) for piece in casts], bound))
    area = (
        memory.area(max((end_of(_nbytes(s, d) for _, s, d in batch) for batch in batches), default=ALIGNMENT))
        if batches
        else None
    )
    for batch in batches:
        assert area is not None
        landings = carved(area, [(size, dtype) for _, size, dtype in batch])
        rows = [_dense(p.tensor, p.start, t) for (p, _, _), t in zip(batch, landings, strict=True)]
        rounds.append(Round(Pieces.of(rows, memory.mem), {}, _casting([p for p, _, _ in batch], landings, target)))

    def install() -> None:
        if shadowed:
            now = engine.parameters()
            for name in target.keys() - {piece.param for piece in parts}:
                now[name].copy_(target[name])
            for piece in parts:
                _view(now[piece.param], piece).copy_(_view(target[piece.param], piece))
        if held:
            engine.load(held.items())

    return Layout(
        tuple(rounds),
        memory,
        install,
        not shadowed,
        capture.minimum_bytes(facts),
        reads_live=not shadowed,
        filled=target,
        derived=_derived(capture, half, job),
        unused=tuple(capture.unused),
    )


def _by_rows(piece: CapturedPiece, bound: int) -> Iterator[CapturedPiece]:
    """The piece in parts of at most `bound` bytes where whole rows allow it."""
    if not piece.size or _nbytes(piece.size, piece.src_dtype) <= bound:
        yield piece
        return
    rows = max(1, bound // (_nbytes(piece.size, piece.src_dtype) // piece.size[0]))
    for row in range(0, piece.size[0], rows):
        yield replace(
            piece,
            start=(piece.start[0] + row, *piece.start[1:]),
            size=(min(rows, piece.size[0] - row), *piece.size[1:]),
            offset=piece.offset + row * piece.stride[0],
        )


def _casting(pieces: Sequence, landings: Sequence[torch.Tensor], target: Mapping[str, torch.Tensor]) -> Callable[[], None]:  # type: ignore[type-arg]
    def cast() -> None:
        for piece, landing in zip(pieces, landings, strict=True):
            _view(target[piece.param], piece).copy_(landing)

    return cast


def _view(into: torch.Tensor, piece: CapturedPiece) -> torch.Tensor:
    """The part of a parameter that a piece writes, in the shape of its box."""
    step = into.element_size()
    return into.as_strided(piece.size, [n // step for n in piece.stride], into.storage_offset() + piece.offset // step)


def _half_filled(capture: Capture, facts: TensorFacts, engine: RefitEngine, job: RefitJob) -> list[str]:
    """Parameters that the loader fills in part. Raises CoverageError where a whole version must fill them, when it leaves out one that the
    engine does not make itself, and when it fills nothing."""
    live = engine.parameters()
    if not capture.pieces and not capture.whole:
        raise CoverageError(
            f"{job.model_name}: the engine's loader uses none of the {len(facts)} tensors that the trainer publishes for it "
            f"({', '.join(list(facts)[:3])}, ...); its parameters are {', '.join(list(live)[:3])}, ...: publish checkpoint names"
        )
    rejected = [name for name in capture.failed if capture.reasons[name].startswith(_REJECTIONS)]
    if rejected:
        raise CoverageError(
            f"{job.model_name}: the engine's loader does not take {', '.join(rejected[:5])} ({capture.reasons[rejected[0]]}); publish "
            "under the names of its checkpoint, or leave out what it does not know"
        )
    half = sorted(name for name, missing in capture.uncovered.items() if name in live and 0 < missing < live[name].nbytes)
    # a loader that raised may write what looks unwritten: those tensors go whole
    if half and job.wanted is None and not capture.failed:
        raise CoverageError(
            f"{job.model_name}: the trainer's tensors fill only part of {', '.join(half[:5])}; it must publish every tensor that the "
            "engine's loader reads"
        )
    left = sorted(capture.uncovered.keys() - set(half) - set(engine.derived()))
    if left and job.wanted is None and not capture.failed:
        raise CoverageError(
            f"{job.model_name}: the trainer publishes nothing for {some_names(left)}, which would go on serving the old values among new "
            "ones; it must publish every tensor that the engine's loader reads, or the engine must ask for a part: with `only` (['*']: all "
            "that is published) the rest stays as it serves"
        )
    return half


def _derived(capture: Capture, half: Sequence[str], job: RefitJob) -> tuple[str, ...]:
    """What no published tensor fills; of a part nothing is known of the rest."""
    return () if job.wanted is not None else tuple(sorted(capture.uncovered.keys() - set(half)))


def _dense(name: str, start: tuple[int, ...], tensor: torch.Tensor) -> Piece:
    """The box of `name` at `start` that a dense tensor takes whole."""
    step = tensor.element_size()
    strides = tuple(n * step for n in tensor.stride())
    return Piece(name, start, tuple(tensor.shape), tensor.data_ptr(), strides, step, tensor.device.index or 0)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * int(dtype.itemsize)


def _batches(items: Sequence, bound: int) -> Iterator[list]:  # type: ignore[type-arg]
    """Runs of (what, shape, dtype) that fit an area of `bound` bytes, in the order given."""
    batch: list = []  # type: ignore[type-arg]
    used = 0
    for what, shape, dtype in items:
        nbytes = _nbytes(shape, dtype)
        if nbytes > bound:
            raise ConfigError(
                f"{getattr(what, 'tensor', what)} needs {nbytes} bytes of staging and may take {bound} (half of MX_STAGING_BYTES); "
                f"raise MX_STAGING_BYTES to {2 * nbytes} or more"
            )
        if batch and end_after(used, nbytes) > bound:
            yield batch
            batch, used = [], 0
        batch.append((what, shape, dtype))
        used = end_after(used, nbytes)
    if batch:
        yield batch


def _room_for_shadow(job: RefitJob, nbytes: int, device: torch.device) -> bool:
    if job.shadow != "auto":
        return job.shadow == "always"
    import torch

    if device.type == "cuda":
        return nbytes < int(torch.cuda.mem_get_info(device)[0]) // 2
    return nbytes < free_memory() // 2
