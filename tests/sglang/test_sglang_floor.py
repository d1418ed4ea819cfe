"""The floor of refits with SGLang receivers: the same function and the same record as with any other engine."""

from __future__ import annotations

import json
import sys

import pytest

from tests.megatron.cases import case
from tests.support.process import Process
from tests.support.refit_engines import MODEL, model_of
from tests.support.refit_hosts import LIMIT, floor_between, ok_in_the_end, two_hosts
from tests.support.sglang_options import PYTHON

__all__ = ["two_hosts"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ADDRESS, PATHS = "10.214.0.2:18001", ("reshard", "staged")


def test_one_slow_link_gives_one_slow_record_of_one_schema_on_both_paths(two_hosts, tmp_path):
    there, here, limit = two_hosts
    sizes = {"hidden": 512, "heads": 8, "groups": 4, "head_dim": 64, "ffn": 1024}
    described = case("llama", 1, layers=4, **sizes)["hf"]
    model, _ = model_of(described, tmp_path)
    started = []

    def start(host, python, module, *spec, **variables):
        env = {
            "MX_SERVER_ADDRESS": ADDRESS,
            "MX_RUNTIME_DIR": str(tmp_path / "run"),
            "MX_RECORDS_FILE": str(tmp_path / "records-{pid}.jsonl"),
            "MX_FLOOR_MIN_BYTES": "0",
            "UCX_TLS": "tcp",
            **variables,
        }
        command = ["ip", "netns", "exec", host, python, "-u", "-W", "ignore", "-m", module, *spec]
        started.append(Process(*command, env=env, interpreter=False, group=True))
        return started[-1]

    def engine(**variables):
        spec = json.dumps({"model": str(model), "load_format": "dummy"})
        made = start(here, PYTHON, "tests.support.sglang_engine", spec, **variables)
        made.expect("tokens", 300)
        return made

    def both_paths(version):
        """Records of the version by path, after the engine has installed it on each."""
        trainer.tell("step")
        trainer.expect("published", 120)
        for path in PATHS:
            serving.tell("refit " + json.dumps({"model_name": MODEL, "version": version, "path": path}))
            assert serving.expect("refitted", 120) == f"{version} {version}"
        judged = [record for record in records(tmp_path) if record["version"] == version and "verdict" in record]
        found = {record["path"]: record for record in judged}
        assert sorted(found) == sorted(PATHS)
        return found

    def rates(version):
        return [record["wire_bytes"] * 8e-9 / record["wire_s"] for record in both_paths(version).values()]

    try:
        start(there, sys.executable, "tests.support.refit_directory", ADDRESS).expect("serving")
        trainer = start(there, sys.executable, "tests.support.fsdp_steps", json.dumps({"config": described, "model": MODEL}))
        serving = engine()
        both_paths(1)  # connects
        free = rates(2)
        limit(LIMIT)
        limited = rates(3)
        limit("")
        serving.end()

        serving = engine(MX_RESHARD_MIN_GBPS=str(floor_between(limited, free)))
        both_paths(4)
        limit(LIMIT)
        assert [record["verdict"] for record in both_paths(5).values()] == ["slow", "slow"]
        slow = [
            record for record in records(tmp_path) if record["schema"] == "refit-slow-throughput-v1" and record["version"] == 5
        ]
        assert sorted(record["path"] for record in slow) == sorted(PATHS)
        assert len({tuple(sorted(record)) for record in slow}) == 1, "one schema"
        assert {(record["engine"], record["framework"], record["version"]) for record in slow} == {("sglang", "fsdp", 5)}
        assert len({record["wire_bytes"] for record in slow}) == 1
        limit("")
        ok_in_the_end(
            lambda version: {path: record["verdict"] for path, record in both_paths(version).items()}, after=5, paths=PATHS
        )
    finally:
        for process in reversed(started):
            process.end()


def records(folder):
    return [json.loads(line) for path in folder.glob("records-*") for line in path.read_text().splitlines()]
