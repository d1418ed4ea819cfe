"""Builds message classes in a descriptor pool that nobody else sees.

Protobuf's default pool holds one definition of a name in a process, and the package `modelexpress` defines the same names
there. This pack's definitions carry extension fields, so they would clash, in one import order or the other. A pool of our
own has no other user.

    namespace = file_namespace("p2p.proto")
    namespace["SourceIdentity"](model_name="m")

Invariant: nothing of ours ever enters the default pool.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from mx_common.wire._generated.descriptors import FILE_DESCRIPTOR_SET

__all__ = ["POOL", "add_files", "file_namespace", "message_class"]


def add_files(pool: descriptor_pool.DescriptorPool) -> None:
    """Put the definitions of every protocol file into `pool`."""
    for file in descriptor_pb2.FileDescriptorSet.FromString(FILE_DESCRIPTOR_SET).file:
        pool.AddSerializedFile(file.SerializeToString())


POOL = descriptor_pool.DescriptorPool()
add_files(POOL)


def message_class(descriptor: Any) -> Any:
    """The class of a message descriptor; the same object every time."""
    return message_factory.GetMessageClass(descriptor)


def file_namespace(name: str) -> dict[str, Any]:
    """What a module for one `.proto` file offers: DESCRIPTOR, its messages, its enums and their values."""
    file = POOL.FindFileByName(name)
    namespace: dict[str, Any] = {"DESCRIPTOR": file}
    for message in file.message_types_by_name.values():
        namespace[message.name] = message_class(message)
    for enum in file.enum_types_by_name.values():
        namespace[enum.name] = enum_type_wrapper.EnumTypeWrapper(enum)
        namespace.update({value.name: value.number for value in enum.values})
    return namespace
