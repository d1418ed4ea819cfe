"""The calls of a directory's ActivityService, with deadlines.

    with ActivityClient("10.0.0.5:8001") as client:
        for activity in client.activities("org/model") or ():
            print(activity.worker_id, activity.bytes_done, activity.bytes_total)

Invariant: no call outlives its timeout (`MX_RPC_TIMEOUT` unless given), and none is made twice.
"""

from __future__ import annotations

import contextlib
from typing import Any

import grpc

from mx_common import envs
from mx_common.directory._call import Caller
from mx_common.directory._channel import open_channel
from mx_common.directory._version_lease import status_of
from mx_common.directory.activities import Activity
from mx_common.directory.address import Address
from mx_common.errors import ConfigError, DirectoryRefused
from mx_common.wire import activity as wire
from mx_common.wire.rpc import ACTIVITY_SERVICE, unary_calls

__all__ = ["ActivityClient"]


class ActivityClient:
    """Calls one directory at `address` (`host:port`). Every call raises `DirectoryUnavailable` when nobody answers in `timeout` seconds and
    `DirectoryRefused` when the answer is no; it gives None when the server is a ModelExpress one, which has no such calls."""

    def __init__(self, address: str, *, timeout: float | None = None) -> None:
        parsed = Address.parse(address, what="directory address")
        self._timeout = timeout or envs.RPC_TIMEOUT.get()
        self._channel = open_channel(parsed)
        self._caller = Caller(
            unary_calls(self._channel, ACTIVITY_SERVICE),
            peer=f"directory {parsed}",
            advice="check that it runs there, and that the address (MX_SERVER_ADDRESS or the setting `server`) is right",
        )

    def report(self, activity: Activity) -> float | None:
        """Say how far it is. Returns the seconds until the next report is wanted."""
        response = self._call("ReportActivity", wire.ReportActivityRequest(activity=activity.to_proto()))
        return None if response is None else response.pause_seconds

    def end(self, activity: Activity) -> None:
        """Say that it is over."""
        self._call("ReportActivity", wire.ReportActivityRequest(activity=activity.to_proto(), ended=True))

    def activities(self, model_name: str | None = None) -> list[Activity] | None:
        """Those of a model, or all; what another release reported and means nothing here is left out."""
        response = self._call("ListActivities", wire.ListActivitiesRequest(model_name=model_name or ""))
        if response is None:
            return None
        found = []
        for message in response.activities:
            with contextlib.suppress(ConfigError):
                found.append(Activity.from_proto(message))
        return found

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> ActivityClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, request: object) -> Any:
        try:
            return self._caller.call(name, request, timeout=self._timeout, retry=False)
        except DirectoryRefused as error:
            if status_of(error) == grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise
