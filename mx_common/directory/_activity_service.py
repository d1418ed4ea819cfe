"""The calls of our ActivityService over a `Store`.

    handler = service_handler(ACTIVITY_SERVICE, ActivityService(store))

Invariant: what is refused says what to send instead; nothing that is reported here changes what the directory says of sources.
"""

from __future__ import annotations

from typing import Any

from mx_common.directory._requests import on_store, refuse
from mx_common.directory.activities import Activity
from mx_common.directory.store import Store
from mx_common.errors import ConfigError
from mx_common.wire import activity as wire

__all__ = ["ActivityService"]


class ActivityService:
    """Coroutines named after the calls of ActivityService, for a `grpc.aio` server."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def ReportActivity(self, request: wire.ReportActivityRequest, context: Any) -> wire.ReportActivityResponse:
        try:
            Activity.from_proto(request.activity)
        except ConfigError as error:
            await refuse(context, "ReportActivity", error)
        activities, activity = self._store.activities, request.activity
        if request.ended:
            await on_store(self._store, context, lambda: activities.end(activity.activity_id))
            return wire.ReportActivityResponse()
        pause = await on_store(self._store, context, lambda: activities.report(activity))
        return wire.ReportActivityResponse(pause_seconds=pause)

    async def ListActivities(self, request: wire.ListActivitiesRequest, context: Any) -> wire.ListActivitiesResponse:
        found = await on_store(self._store, context, self._store.activities.all)
        wanted = (one for one in found if request.model_name in ("", one.model_name))
        return wire.ListActivitiesResponse(activities=wanted)
