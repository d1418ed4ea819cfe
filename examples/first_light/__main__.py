"""First light: a second server, without a weight file on its disk, starts by reading the first one's memory.

    python -m examples.first_light                      # or: make demo
    python -m examples.first_light --engine sglang      # or: make demo ENGINE=sglang

Everything is real: the model, both servers, NIXL. The last line is `MX_DEMO {json}`; the exit code is not 0 when a claim in it is untrue.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.first_light import checkpoint
from examples.first_light.engines import ENGINES, SLOTS, VLLM, Engine
from examples.first_light.replica import Replica, free_port
from examples.first_light.waiting import Waiting, keep_records, say
from mx_common.directory.client import DirectoryClient
from mx_common.wire import p2p

CACHE = Path(".cache/models")
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
HEARTBEAT_SECONDS = 1.0
START_SECONDS = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.first_light", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--engine", choices=ENGINES, default=VLLM.name, help="the server; this Python must have it (default: %(default)s)"
    )
    engine = ENGINES[parser.parse_args().engine]
    started = time.monotonic()
    with_weights, without = checkpoint.full(CACHE), checkpoint.without_weights(CACHE)
    with tempfile.TemporaryDirectory(prefix="mx-demo-") as scratch:
        demo = Demo(Path(scratch), engine)
        try:
            facts = demo.run(with_weights, without)
            keep_records(Path(scratch), "demo")
        except RuntimeError as error:
            print(f"the demo failed: {error}", file=sys.stderr)
            return 1
    wrong = untrue(facts)
    say(f"done in {time.monotonic() - started:.0f} s" + (f"; NOT TRUE: {', '.join(wrong)}" if wrong else ""))
    print("MX_DEMO " + json.dumps(facts), flush=True)
    return 1 if wrong else 0


class Demo:
    """One run: two replicas on this machine, an embedded directory, records and logs in `scratch`."""

    def __init__(self, scratch: Path, engine: Engine) -> None:
        self.scratch, self.engine = scratch, engine
        self.directory = f"127.0.0.1:{free_port()}"
        self.environment = {
            "MX_EMBEDDED_ADDRESS": self.directory,
            "MX_MODEL_NAME": MODEL,
            "MX_P2P_SOURCE_SELECTOR": "balanced",
            "MX_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS),
            "MX_RUNTIME_DIR": str(scratch / "run"),
            "MX_RECORDS_FILE": str(scratch / "records.jsonl"),
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
        }

    def run(self, with_weights: Path, without: Path) -> dict[str, Any]:
        with self._replica("replica-1", with_weights) as first:
            worker_1 = self._wait_ready(first, set())
            origin, storage_seconds = first.load_line()
            say(f"replica-1 is READY as worker {worker_1}; weights from {origin} in {storage_seconds:.2f} s")
            say(f"replica-2 starts from {without}: {', '.join(sorted(p.name for p in without.iterdir()))}")
            with self._replica("replica-2", without) as second:
                worker_2 = self._wait_ready(second, {worker_1})
                origin, peer_seconds = second.load_line()
                say(f"replica-2 is READY as worker {worker_2}; weights from {origin} in {peer_seconds:.2f} s")
                answers = [replica.ask(QUESTION) for replica in (first, second)]
                say(f"{QUESTION}\n   replica-1: {answers[0]}\n   replica-2: {answers[1]}")
                record = self._record()
                say("the record of the transfer:")
                print(json.dumps(record, indent=2))
                self._mx("sources")
                third_takes = self._busy_replica_is_avoided(first, worker_1)
        return {
            "engine": self.engine.name,
            "answers_equal": answers[0] == answers[1] != "",
            "answer": answers[1],
            "target_had_weight_files": bool(checkpoint.weight_files(without)),
            "wire_bytes": record["wire_bytes"],
            "wire_s": record["wire_s"],
            "implied_gbps": record["implied_gbps"],
            "verdict": record["verdict"],
            "verified": record["verified"],
            "transport": record["transport"],
            "policy": record["policy"],
            "source_worker_id": record["source_worker_id"],
            "fallback": record["fallback"],
            "storage_load_s": storage_seconds,
            "peer_load_s": peer_seconds,
            "replica_1_worker_id": worker_1,
            "replica_2_worker_id": worker_2,
            "third_target_takes": third_takes,
        }

    @contextmanager
    def _replica(self, name: str, model: Path) -> Iterator[Replica]:
        replica = Replica(name, model, self.environment, self.scratch, engine=self.engine)
        say(f"{name}: {replica.command}")
        with replica:
            yield replica

    def _wait_ready(self, replica: Replica, others: set[str]) -> str:
        with Waiting(f"{replica.name} starts (its log: {replica.log})"):
            replica.wait_healthy(START_SECONDS)
            return self._until(lambda: next(iter(self._ready() - others), None), f"{replica.name} is not listed as READY")

    def _ready(self) -> set[str]:
        with DirectoryClient(self.directory) as client:
            listing = client.list_sources(model_name=MODEL, status=p2p.SOURCE_STATUS_READY)
        return {ref.worker_id for ref in listing.instances}

    def _busy_replica_is_avoided(self, first: Replica, worker_1: str) -> str:
        say(f"replica-1 gets {2 * SLOTS} long requests for its {SLOTS} slots; which source would a third target take?")
        story = "Tell me a long story about a lighthouse keeper and the sea."
        with first.busy([f"{story} Part {n}." for n in range(2 * SLOTS)], 400):
            self._until(lambda: (self._load_of(worker_1) or 0) >= 0.9, "replica-1 never published that it is busy")
            self._mx("explain", MODEL)
            answer = json.loads(self._mx("explain", MODEL, "--json", show=False))
        return next(row["worker_id"] for group in answer["groups"] for row in group["candidates"] if row["place"] == 1)

    def _load_of(self, worker_id: str) -> float | None:
        with DirectoryClient(self.directory) as client:
            refs = [ref for ref in client.list_sources(model_name=MODEL).instances if ref.worker_id == worker_id]
        return refs[0].source_load if refs and refs[0].HasField("source_load") else None

    def _record(self) -> dict[str, Any]:
        lines = [line for path in self.scratch.glob("records*") for line in path.read_text().splitlines()]
        records = [record for record in map(json.loads, lines) if record["path"] == "load" and not record.get("fallback")]
        if len(records) != 1:
            raise RuntimeError(f"expected the record of one transfer, found {len(records)} in {self.scratch}/records*")
        return dict(records[0])

    def _mx(self, *arguments: str, show: bool = True) -> str:
        command = [str(Path(sys.executable).parent / "mx"), *arguments]
        if show:
            say(f"$ mx {' '.join(arguments)}")
        environment = {**self.environment, "COLUMNS": "150", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"mx {' '.join(arguments)} ended with {done.returncode}: {done.stderr or done.stdout}")
        if show:
            print(done.stdout, flush=True)
        return done.stdout

    @staticmethod
    def _until(question: Callable[[], Any], otherwise: str, seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answer = question()
            if answer:
                return answer
            time.sleep(0.3)
        raise RuntimeError(f"{otherwise} after {seconds:.0f} s")


def untrue(facts: dict[str, Any]) -> list[str]:
    """Claims of the demo that its facts do not bear out."""
    claims = {
        "both replicas give the same answer": facts["answers_equal"],
        "the target had no weight files": not facts["target_had_weight_files"],
        "the weights came from replica-1": facts["source_worker_id"] == facts["replica_1_worker_id"],
        "the whole model moved": facts["wire_bytes"] > 269_000_000,
        "every tensor was verified": facts["verified"],
        "no fallback": not facts["fallback"],
        "the policy is balanced": facts["policy"] == "balanced",
        "the transfer was measured": facts["verdict"] == "ok",
        "a third target is turned to replica-2": facts["third_target_takes"] == facts["replica_2_worker_id"],
    }
    return [claim for claim, holds in claims.items() if not holds]


if __name__ == "__main__":
    sys.exit(main())
