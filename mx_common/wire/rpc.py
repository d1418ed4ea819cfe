"""Client calls and server handlers made from a service's descriptor, so that no stub code is generated.

    calls = unary_calls(channel, p2p.DESCRIPTOR.services_by_name["P2pService"])
    calls["ListSources"](p2p.ListSourcesRequest(), timeout=5)

    server.add_generic_rpc_handlers((service_handler(service, implementation),))     # grpc.server and grpc.aio.server

Every method of the protocol files takes one message and gives one.
Invariant: a method that the implementation does not have is answered with UNIMPLEMENTED, as an older peer would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from mx_common.wire import activity, p2p, refit, refit_ext
from mx_common.wire._pool import message_class

__all__ = [
    "ACTIVITY_SERVICE",
    "P2P_SERVICE",
    "REFIT_SERVICE",
    "REFIT_WORKER_SERVICE",
    "VERSION_SERVICE",
    "WORKER_SERVICE",
    "service_handler",
    "unary_calls",
]

P2P_SERVICE: ServiceDescriptor = p2p.DESCRIPTOR.services_by_name["P2pService"]
WORKER_SERVICE: ServiceDescriptor = p2p.DESCRIPTOR.services_by_name["WorkerService"]
REFIT_SERVICE: ServiceDescriptor = refit.DESCRIPTOR.services_by_name["RefitService"]
REFIT_WORKER_SERVICE: ServiceDescriptor = refit.DESCRIPTOR.services_by_name["RefitWorkerService"]
VERSION_SERVICE: ServiceDescriptor = refit_ext.DESCRIPTOR.services_by_name["VersionService"]
ACTIVITY_SERVICE: ServiceDescriptor = activity.DESCRIPTOR.services_by_name["ActivityService"]


def unary_calls(channel: Any, service: ServiceDescriptor) -> Mapping[str, Callable[..., Any]]:
    """Every call of `service` on a `grpc.Channel` or a `grpc.aio.Channel`, by method name."""
    return {
        method.name: channel.unary_unary(
            f"/{service.full_name}/{method.name}",
            request_serializer=message_class(method.input_type).SerializeToString,
            response_deserializer=message_class(method.output_type).FromString,
        )
        for method in service.methods
    }


def service_handler(service: ServiceDescriptor, implementation: object) -> Any:
    """A generic handler that serves `service` with the methods of `implementation` that bear its methods' names.

    The methods take `(request, context)`; coroutine functions for `grpc.aio`, plain functions for `grpc.server`.
    """
    handlers = {}
    for method in service.methods:
        behaviour = getattr(implementation, method.name, None)
        if behaviour is not None:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                behaviour,
                request_deserializer=message_class(method.input_type).FromString,
                response_serializer=message_class(method.output_type).SerializeToString,
            )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)
