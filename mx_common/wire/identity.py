"""`mx_common.identity.Identity` as it travels, and back.

    request = p2p.PublishMetadataRequest(identity=identity_to_proto(identity))

Invariant: the two have the same field names, so a field that one of them lacks fails here at once and is never dropped.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mx_common.identity import Identity
from mx_common.wire import p2p

__all__ = ["identity_from_proto", "identity_to_proto"]


def identity_to_proto(identity: Identity) -> p2p.SourceIdentity:
    """The message for `identity`."""
    values: dict[str, Any] = {field.name: getattr(identity, field.name) for field in fields(identity)}
    return p2p.SourceIdentity(**values)


def identity_from_proto(message: p2p.SourceIdentity) -> Identity:
    """The identity in `message`, with enum values this pack does not know kept as numbers."""
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    values["extra_parameters"] = dict(message.extra_parameters)
    return Identity(**values)
