"""Records in Redis, so that any number of directory servers can serve the same sources and none of them keeps state.

    store = RedisStore("redis://10.0.0.9:6379/0", stale_seconds=90, remove_seconds=600)
    DirectoryServer("0.0.0.0:8001", store).start()

One hash a worker, which Redis itself expires, and one sorted set of the workers by when they were last heard of. Silence and
`updated_at` are measured by Redis' clock alone, the only one that all servers share. Invariant: each change is one atomic
script, so two servers that hear the same worker at once leave a record that one of them wrote whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mx_common import envs
from mx_common.directory.records import STALE, Heartbeat, Query, Record, select
from mx_common.directory.redis_activities import RedisActivities
from mx_common.directory.store import check_ages
from mx_common.errors import ConfigError, DirectoryUnavailable

__all__ = ["RedisStore"]

T = TypeVar("T")

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

# KEYS: the worker's hash, the set of all; ARGV: ms until removal, then field, value, ...
_PUT = f"""{_NOW}
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'updated_at', now, unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], now, KEYS[1])
return now
"""
_BEAT = f"""{_NOW}
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('ZREM', KEYS[2], KEYS[1])
  return 0
end
redis.call('HSET', KEYS[1], 'updated_at', now, unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], now, KEYS[1])
return 1
"""
# what a listing needs; the serialized identity and worker are only read for one worker at a time
_LISTED = ("facts", "beat", "updated_at")


class RedisStore:
    """A `Store` in the Redis at `url` (`redis://`, `rediss://` or `unix://`), below keys that start with `prefix`.

    Raises `ConfigError` for a malformed URL and dials nothing yet; every method raises `DirectoryUnavailable` when Redis does
    not answer within `timeout` seconds (half of `MX_RPC_TIMEOUT` unless given, so that a client still hears why).
    """

    blocking = True

    def __init__(
        self, url: str, *, stale_seconds: float, remove_seconds: float, prefix: str = "mx", timeout: float | None = None
    ) -> None:
        import redis

        check_ages(stale_seconds, remove_seconds)
        self._stale_ms = int(stale_seconds * 1000)
        self._remove_ms = int(remove_seconds * 1000)
        self._prefix = prefix
        self._all = f"{prefix}:sources"
        self._failed = redis.RedisError
        seconds = timeout or envs.RPC_TIMEOUT.get() / 2
        try:
            self._redis: Any = redis.Redis.from_url(url, socket_timeout=seconds, socket_connect_timeout=seconds)
        except ValueError as error:
            raise ConfigError(f"{url!a} is no address of a Redis: {error}; write redis://host:6379/0") from error
        where = self._redis.connection_pool.connection_kwargs
        self._where = where.get("path") or f"{where.get('host')}:{where.get('port')}"
        self._put = self._redis.register_script(_PUT)
        self._beat = self._redis.register_script(_BEAT)
        self.activities = RedisActivities(self._redis, prefix, self._run)

    def put(self, record: Record) -> Record:
        arguments = [self._remove_ms, "facts", _facts(record), "beat", _beat(record.status, record.source_load, None)]
        arguments += ["identity", record.identity, "worker", record.worker]
        now = self._run(lambda: self._put(keys=[self._key(*record.key), self._all], args=arguments))
        return replace(record, updated_at=int(now))

    def beat(self, mx_source_id: str, worker_id: str, heartbeat: Heartbeat) -> bool:
        arguments = [self._remove_ms, "beat", _beat(heartbeat.status, heartbeat.source_load, heartbeat.reads_in_flight)]
        return bool(self._run(lambda: self._beat(keys=[self._key(mx_source_id, worker_id), self._all], args=arguments)))

    def get(self, mx_source_id: str, worker_id: str) -> Record | None:
        key = self._key(mx_source_id, worker_id)
        now, values = self._run(lambda: (self.now_ms(), self._redis.hmget(key, *_LISTED, "identity", "worker")))
        return self._record(values, now)

    def list(self, query: Query) -> list[Record]:
        def read() -> tuple[int, Sequence[Any]]:
            keys = self._redis.zrange(self._all, 0, -1)
            pipeline = self._redis.pipeline(transaction=False)
            for key in keys:
                pipeline.hmget(key, *_LISTED)
            return self.now_ms(), pipeline.execute() if keys else []

        now, rows = self._run(read)
        records = (self._record(row, now) for row in rows)
        return select((record for record in records if record is not None), query)

    def sweep(self) -> None:
        # the hashes expire by themselves; their names in the set do not
        self._run(lambda: self._redis.zremrangebyscore(self._all, "-inf", self.now_ms() - self._remove_ms))

    def now_ms(self) -> int:
        seconds, micros = self._run(self._redis.time)
        return int(seconds) * 1000 + int(micros) // 1000

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _key(self, mx_source_id: str, worker_id: str) -> str:
        # with the length no two pairs of names make the same key
        return f"{self._prefix}:source:{len(mx_source_id)}:{mx_source_id}:{worker_id}"

    def _record(self, values: Sequence[bytes | None], now: int) -> Record | None:
        """A row of the fields in `_LISTED`, perhaps with identity and worker behind; None when Redis has expired it."""
        facts, beat, updated_at, *serialized = values
        if facts is None or beat is None or updated_at is None:
            return None
        status, source_load, reads_in_flight = json.loads(beat)
        identity, worker = serialized or (b"", b"")
        age = now - int(updated_at)
        return Record(
            **json.loads(facts),
            identity=identity or b"",
            worker=worker or b"",
            status=STALE if age >= self._stale_ms else status,
            updated_at=int(updated_at),
            source_load=source_load,
            reads_in_flight=reads_in_flight,
        )

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._failed as error:
            raise DirectoryUnavailable(
                f"the directory's Redis at {self._where} does not answer: {error}; check that it runs and that --store names it"
            ) from error


def _facts(record: Record) -> str:
    return json.dumps(
        {
            "mx_source_id": record.mx_source_id,
            "worker_id": record.worker_id,
            "model_name": record.model_name,
            "worker_rank": record.worker_rank,
            "accelerator": record.accelerator,
            "topology": dict(record.topology),
            "training_step": record.training_step,
            "layout_signature": record.layout_signature,
        }
    )


def _beat(status: int, source_load: float | None, reads_in_flight: int | None) -> str:
    return json.dumps([status, source_load, reads_in_flight])
