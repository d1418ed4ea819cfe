"""What must be equal for weights to be interchangeable, and the id every worker of such a group is listed under.

    identity = Identity(model_name="HuggingFaceTB/SmolLM2-135M", backend_framework=1, dtype="bfloat16")
    mx_source_id(identity)      # 16 hex digits

Invariant: the id is a pure function of the identity, the same in every process, release and implementation of the protocol: a
change of a field, of its default or of the text that is hashed would split a fleet in two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from mx_common._frozen import FrozenMap
from mx_common.errors import ConfigError

__all__ = ["Identity", "mx_source_id"]

_UINT32 = 2**32

# Hashed only when they say something, so that a worker that does not know them shares its id with one that predates them.
_OPTIONAL = (
    "backend_framework_version",
    "torch_version",
    "cuda_version",
    "triton_version",
    "gpu_arch",
    "compile_config_digest",
)


@dataclass(frozen=True)
class Identity:
    """The fields of the wire's `SourceIdentity`, in its order. `mx_source_type` and `backend_framework` are enum numbers, the
    parallel sizes counts of ranks (0: not said), everything else text ("": not said). Raises ConfigError for another type."""

    mx_version: str = "0.7.0"
    mx_source_type: int = 0
    model_name: str = ""
    backend_framework: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 0
    dtype: str = ""
    quantization: str = ""
    extra_parameters: Mapping[str, str] = field(default_factory=FrozenMap)
    revision: str = ""
    backend_framework_version: str = ""
    torch_version: str = ""
    cuda_version: str = ""
    triton_version: str = ""
    gpu_arch: str = ""
    compile_config_digest: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "extra_parameters":
                self._freeze_extra(value)
            elif item.type == "int":
                if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _UINT32:
                    raise ConfigError(f"Identity.{item.name}={value!r}: give a whole number from 0 to {_UINT32 - 1}")
                object.__setattr__(self, item.name, int(value))
            elif not isinstance(value, str):
                raise ConfigError(f"Identity.{item.name}={value!r}: give text (str), or leave it out")

    def _freeze_extra(self, value: object) -> None:
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
            raise ConfigError(f"Identity.extra_parameters={value!r}: give a mapping of text to text")
        object.__setattr__(self, "extra_parameters", FrozenMap(value))


def mx_source_id(identity: Identity | Mapping[str, object]) -> str:
    """The id of an identity: the first 16 hex digits of SHA-256 over its canonical JSON.

    A plain mapping of field names is taken too; fields it lacks have their defaults. Raises ConfigError for an unknown field
    or a value of the wrong type.
    """
    if not isinstance(identity, Identity):
        identity = _from_mapping(identity)
    content: dict[str, object] = {}
    for item in fields(identity):
        value = getattr(identity, item.name)
        if item.name == "extra_parameters":
            content[item.name] = _lowered(value)
        elif item.name not in _OPTIONAL or value:
            content[item.name] = value.lower() if isinstance(value, str) else value
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _lowered(extra: Mapping[str, str]) -> dict[str, str]:
    """Keys and values in lower case; of keys that become equal, the one that sorted first before keeps its value."""
    lowered: dict[str, str] = {}
    for key in sorted(extra):
        lowered.setdefault(key.lower(), extra[key].lower())
    return lowered


def _from_mapping(values: Mapping[str, object]) -> Identity:
    known = [item.name for item in fields(Identity)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown identity field(s) {', '.join(unknown)}; known: {', '.join(known)}")
    return Identity(**values)  # type: ignore[arg-type]
