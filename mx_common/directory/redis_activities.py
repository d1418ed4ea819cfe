"""Loads and refits that are under way, in the Redis that holds a directory's sources: every server of it shows the same ones.

    RedisStore("redis://10.0.0.9:6379/0", ...).activities.report(activity.to_proto())

One key an activity, which Redis itself expires, and one sorted set of them by when they expire, by Redis' clock. Invariant: as
`mx_common.directory.activities` promises, for all servers together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mx_common.directory.activities import LIVES, MAX_ACTIVITIES, REPORT_SECONDS, REPORTS_PER_SECOND
from mx_common.wire import activity as wire

__all__ = ["RedisActivities"]

T = TypeVar("T")

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

# KEYS: the activity, the set of all; ARGV: the activity, least ms between reports, reports a second, lives, most activities.
# Answers the ms until the next report.
_REPORT = f"""{_NOW}
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local count = redis.call('ZCARD', KEYS[2])
local pause = math.max(tonumber(ARGV[2]), math.floor(1000 * count / ARGV[3]))
if count < tonumber(ARGV[5]) or redis.call('ZSCORE', KEYS[2], KEYS[1]) then
  local keep = pause * ARGV[4]
  redis.call('SET', KEYS[1], ARGV[1], 'PX', keep)
  redis.call('ZADD', KEYS[2], now + keep, KEYS[1])
  redis.call('PEXPIRE', KEYS[2], 2 * keep)
end
return pause
"""
_ALL = f"""{_NOW}
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now), '+inf')
"""


class RedisActivities:
    """Below keys that start with `prefix`. `run` makes a call of the client, and gives its failures their names."""

    def __init__(self, client: Any, prefix: str, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._redis, self._prefix, self._run = client, prefix, run
        self._all = f"{prefix}:activities"
        self._report = client.register_script(_REPORT)
        self._list = client.register_script(_ALL)

    def report(self, activity: wire.Activity) -> float:
        limits = [int(REPORT_SECONDS * 1000), REPORTS_PER_SECOND, LIVES, MAX_ACTIVITIES]
        arguments = [activity.SerializeToString(), *limits]
        return int(self._run(lambda: self._report(keys=[self._key(activity.activity_id), self._all], args=arguments))) / 1000

    def end(self, activity_id: str) -> None:
        def forget() -> None:
            key = self._key(activity_id)
            self._redis.pipeline().delete(key).zrem(self._all, key).execute()

        self._run(forget)

    def all(self) -> list[wire.Activity]:
        def read() -> list[bytes | None]:
            keys = self._list(keys=[self._all])
            return list(self._redis.mget(keys)) if keys else []

        return [wire.Activity.FromString(value) for value in self._run(read) if value is not None]

    def _key(self, activity_id: str) -> str:
        return f"{self._prefix}:activity:{activity_id}"
