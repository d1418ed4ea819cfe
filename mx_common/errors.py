"""Every error this pack raises on purpose, in one tree.

Catch `MxError` to catch them all; catch a branch to react to a kind:

    MxError
    ├── ConfigError                 a setting that cannot work: fix it and start again (also a ValueError)
    │   └── UnsupportedVersion      an engine or library outside the range that was really run
    ├── DirectoryError              the directory or a worker's control service
    │   ├── DirectoryUnavailable    nobody answered in time; trying later may help
    │   └── DirectoryRefused        it answered, and the answer is no
    ├── TransferError               bytes did not arrive
    │   ├── TransportUnavailable    the transport cannot be used on this machine
    │   ├── SourceLost              the source vanished, or is not the one that was asked for
    │   └── TransferTimeout         no progress, or too little, before the deadline
    ├── VerificationError           bytes arrived and may not be used
    │   ├── ManifestMismatch        names, dtypes, sizes or layouts differ
    │   ├── CoverageError           some byte of the destination is not covered by a read
    │   ├── DigestMismatch          content differs from what the source published
    │   └── ImpossibleThroughput    measured above the ceiling: the payload did not move
    ├── LoadFailed                  no source and no storage gave the weights; lists what was tried
    └── RefitFailed                 a version was not installed; says whether the old one still serves
        └── WeightsBroken           the engine's weights are mixed: it must not serve until a whole version is installed

Messages say who, where, how long, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CoverageError",
    "DigestMismatch",
    "DirectoryError",
    "DirectoryRefused",
    "DirectoryUnavailable",
    "ImpossibleThroughput",
    "LoadFailed",
    "ManifestMismatch",
    "MxError",
    "RefitFailed",
    "SourceLost",
    "TransferError",
    "TransferTimeout",
    "TransportUnavailable",
    "UnsupportedVersion",
    "VerificationError",
    "WeightsBroken",
]


class MxError(Exception):
    """Root of the tree."""


class ConfigError(MxError, ValueError):
    """A setting that cannot work, with the values that can."""


class UnsupportedVersion(ConfigError):
    """An engine or library outside the supported range; the message gives the range."""


class DirectoryError(MxError):
    """A call to a directory or a worker's control service did not give what was asked."""


class DirectoryUnavailable(DirectoryError):
    """Nobody answered before the deadline."""


class DirectoryRefused(DirectoryError):
    """The server answered and refused; repeating the call will not help."""


class TransferError(MxError):
    """Bytes did not arrive."""


class TransportUnavailable(TransferError):
    """The transport cannot be used here (package missing, backend without hardware)."""


class SourceLost(TransferError):
    """The source is gone, or another process answers in its place."""


class TransferTimeout(TransferError):
    """A transfer made no progress, or not enough, before its deadline."""


class VerificationError(MxError):
    """Bytes arrived and may not be used."""


class ManifestMismatch(VerificationError):
    """Source and target do not hold the same tensors."""


class CoverageError(VerificationError):
    """Some byte of the destination is not covered by any read."""


class DigestMismatch(VerificationError):
    """Content differs from what the source published."""


class ImpossibleThroughput(VerificationError):
    """A rate above the ceiling: the measured bytes cannot have moved."""


class LoadFailed(MxError):
    """No source and no storage gave the weights. The message lists what was tried, in order."""


class RefitFailed(MxError):
    """A version was not installed. The message says why, and which version serves now."""


class WeightsBroken(RefitFailed):
    """Writing a version failed half-way: the engine must not serve until a whole one is installed."""
