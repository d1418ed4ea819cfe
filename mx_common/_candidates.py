"""Candidates and targets as values, and the columns that the policies score: digests, unit hashes, shared depths.

Invariant: the digest of a pair is fixed by the fleet. Every worker of every release must compute the same one, or two of them
would spread the same targets over the same sources differently.
"""

from __future__ import annotations

import hashlib
import logging
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mx_common._frozen import FrozenMap
from mx_common._once import warn_once
from mx_common.errors import ConfigError
from mx_common.source_load import as_float

__all__ = ["Candidate", "Target", "depths", "digests", "identity_digest", "unit_hashes"]

log = logging.getLogger(__name__)

_DIGEST_BYTES = 8
_SEPARATORS = 2  # in the candidate's part of the digested text


@dataclass(frozen=True)
class Candidate:
    """One READY worker of the wanted identity, as the directory lists it.

    `topology` maps level to value, `source_load` is as published (None: not said), `updated_at` is its last heartbeat in ms
    by the directory's clock. A load that makes no sense is kept, and read as unknown; raises ConfigError for a value of the
    wrong type.
    """

    mx_source_id: str
    worker_id: str
    worker_rank: int
    model_name: str = ""
    accelerator: str = ""
    topology: Mapping[str, str] = field(default_factory=FrozenMap)
    source_load: float | None = None
    updated_at: int = 0

    def __post_init__(self) -> None:
        _check_text(self, "mx_source_id", "worker_id", "model_name", "accelerator")
        _check_whole(self, "worker_rank", "updated_at")
        if type(self.topology) is not FrozenMap:
            if not isinstance(self.topology, Mapping):
                raise ConfigError(f"Candidate.topology={self.topology!r}: give a mapping of level to value, {{}} when unknown")
            values = {str(level): str(value) for level, value in self.topology.items() if value is not None}
            object.__setattr__(self, "topology", FrozenMap(values))
        if self.source_load is not None and type(self.source_load) is not float:
            if not isinstance(self.source_load, numbers.Real):
                raise ConfigError(f"Candidate.source_load={self.source_load!r}: give a number from 0 to 1, None when unknown")
            object.__setattr__(self, "source_load", as_float(self.source_load))


@dataclass(frozen=True)
class Target:
    """The worker that wants the weights. Raises ConfigError for a value of the wrong type."""

    model_name: str
    worker_id: str
    worker_rank: int

    def __post_init__(self) -> None:
        _check_text(self, "model_name", "worker_id")
        _check_whole(self, "worker_rank")


def identity_digest(candidate: Candidate, target: Target) -> int:
    """The 64-bit number that stands for this pair in every hashing policy."""
    return int(digests((candidate,), target)[0])


def digests(candidates: Sequence[Candidate], target: Target) -> npt.NDArray[np.uint64]:
    """`identity_digest` of every candidate: BLAKE2b of the fields joined by `|`, 8 bytes, big-endian.

    A field that holds `|` makes two different pairs look alike. The format is the fleet's, so it is hashed as it is, and
    reported once.
    """
    # surrogatepass: a lone surrogate has no UTF-8 form, and such a field is hashed, not refused
    prefix = f"{target.model_name}|{target.worker_id}|{target.worker_rank}|".encode("utf-8", "surrogatepass")
    texts = [f"{c.mx_source_id}|{c.worker_id}|{c.worker_rank}".encode("utf-8", "surrogatepass") for c in candidates]
    if prefix.count(b"|") != 3 or b"".join(texts).count(b"|") != _SEPARATORS * len(texts):
        _report_separator(candidates, target)
    # all candidates share the target's part: it is hashed once
    start = hashlib.blake2b(prefix, digest_size=_DIGEST_BYTES)
    copy, found = start.copy, []
    for text in texts:
        state = copy()
        state.update(text)
        found.append(state.digest())
    return np.frombuffer(b"".join(found), ">u8").astype(np.uint64)


def unit_hashes(digest: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Digests as fractions of 2**64, in [0, 1]."""
    return digest.astype(np.float64) * 2.0**-64


def depths(candidates: Sequence[Candidate], local: Mapping[str, str], levels: Sequence[str]) -> npt.NDArray[np.int64]:
    """`shared_depth` of every candidate with `local`, level by level: most candidates part early."""
    topologies = [c.topology for c in candidates]
    found = np.full(len(topologies), -1, np.int64)
    together = list(range(len(topologies)))
    for index, level in enumerate(levels):
        mine = local.get(level)
        together = [i for i in together if topologies[i].get(level) == mine]
        if not together:
            break
        if mine is not None:
            found[together] = index
    return found


def _report_separator(candidates: Sequence[Candidate], target: Target) -> None:
    fields = [("Target", name, getattr(target, name)) for name in ("model_name", "worker_id")]
    fields += [("Candidate", name, getattr(c, name)) for c in candidates for name in ("mx_source_id", "worker_id")]
    for kind, name, value in fields:
        if "|" in value:
            warn_once(
                log,
                ("separator", kind, name),
                "%s.%s=%s holds '|', which also separates the fields of the digest: another pair may get the same one",
                kind,
                name,
                ascii(value),
            )


def _check_text(value: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(value, name), str):
            raise ConfigError(f"{type(value).__name__}.{name}={getattr(value, name)!r}: give text (str)")


def _check_whole(value: object, *names: str) -> None:
    for name in names:
        found = getattr(value, name)
        if isinstance(found, bool) or not isinstance(found, int):
            raise ConfigError(f"{type(value).__name__}.{name}={found!r}: give a whole number (int)")
