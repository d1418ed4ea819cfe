"""Refit: an FSDP2 and a Megatron trainer take optimizer steps, and running vLLM servers take over each version while they answer.

    python -m examples.refit          # or: make demo-refit

Everything is real: models, optimizers, servers, NIXL. The last line is `MX_DEMO_REFIT {json}`; the exit code is not 0 when a claim in it
is untrue.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.first_light import checkpoint
from examples.first_light.replica import Replica, free_port
from examples.first_light.waiting import Waiting, keep_records, say
from examples.refit.lesson import LEARNT, LESSON, QUESTION
from examples.refit.megatron_trainer import SIZES
from examples.refit.trainer import Trainer
from mx_common.directory import DirectoryServer
from mx_vllm.drive import refit_server
from tests.megatron.cases import case

CACHE = Path(".cache/models")
VERSIONS = 3
START_SECONDS = 240.0
TRANSFER = ["--weight-transfer-config", '{"backend": "mx"}']


@dataclass
class Scenario:
    """One trainer and the server that follows it. `ask` gives the server's answer; `module` is the trainer's. `story`: what to look for;
    `lesson`: what the last answer has in it."""

    name: str
    module: str
    model: Path
    path: str
    flags: list[str]
    story: str
    lesson: str = ""
    prompt: list[int] = field(default_factory=list)

    def ask(self, replica: Replica) -> str:
        if not self.prompt:
            return replica.ask(QUESTION)
        body = {"model": "demo", "prompt": self.prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        request = urllib.request.Request(
            f"{replica.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["text"])


def main() -> int:
    started = time.monotonic()
    smollm = checkpoint.full(CACHE)
    with tempfile.TemporaryDirectory(prefix="mx-demo-refit-") as scratch, DirectoryServer(f"127.0.0.1:{free_port()}") as server:
        folder = Path(scratch)
        scenarios = [
            Scenario(
                "fsdp",
                "examples.refit.fsdp_trainer",
                smollm,
                "staged",
                ["--load-format", "mx"],
                f"two FSDP2 ranks teach SmolLM2 one sentence, {LESSON!r}; full tensors, through vLLM's loader (staged)",
                LEARNT,
            ),
            Scenario(
                "megatron",
                "examples.refit.megatron_trainer",
                small_llama(folder / "small", smollm),
                "reshard",
                ["--load-format", "dummy"],
                "two Megatron ranks (TP2) train a small model from random weights: its answers are noise, other noise with each "
                "version; exact slices, into the live layout (reshard)",
                prompt=[5, 17, 99, 3, 42, 7, 61, 80],
            ),
        ]
        try:
            facts = {scenario.name: run(scenario, server.address, folder) for scenario in scenarios}
            keep_records(folder, "demo-refit")
        except RuntimeError as error:
            print(f"the demo failed: {error}", file=sys.stderr)
            return 1
    wrong = [f"{name}: {claim}" for name, fact in facts.items() for claim in untrue(fact)]
    say(f"done in {time.monotonic() - started:.0f} s" + (f"; NOT TRUE: {', '.join(wrong)}" if wrong else ""))
    print("MX_DEMO_REFIT " + json.dumps(facts), flush=True)
    return 1 if wrong else 0


def run(scenario: Scenario, directory: str, scratch: Path) -> dict[str, Any]:
    """One server, one trainer, `VERSIONS` versions."""
    records = scratch / f"records-{scenario.name}.jsonl"
    environment = {
        "MX_SERVER_ADDRESS": directory,
        "MX_RUNTIME_DIR": str(scratch / "run"),
        "MX_RECORDS_FILE": str(records),
        "MX_FLOOR_MIN_BYTES": "0",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    name = f"demo/{scenario.name}"
    versions = []
    with Replica(f"server-{scenario.name}", scenario.model, environment, scratch, [*scenario.flags, *TRANSFER]) as replica:
        say(f"{scenario.name}: {scenario.story}")
        say(f"{scenario.name}: {replica.command}")
        with Waiting(f"{replica.name} starts (its log: {replica.log})"):
            replica.wait_healthy(START_SECONDS)
        answers = [scenario.ask(replica)]
        say(f"{scenario.name}: before any version: {answers[0]!r}")
        with (
            Trainer(scenario.module, 2, [str(scenario.model), name], environment, scratch) as trainer,
            Asking(scenario, replica) as asking,
        ):
            for version in range(1, VERSIONS + 1):
                with Waiting(f"{scenario.name}: the trainer starts") if version == 1 else contextlib.nullcontext():
                    published = trainer.step()
                started = time.perf_counter()
                refit_server(replica.url, name, version, path=scenario.path, server=directory)
                published["refit_s"] = round(time.perf_counter() - started, 3)
                published |= measured(records, replica, version)
                answers.append(scenario.ask(replica))
                versions.append(published)
                say(
                    f"{scenario.name} version {version}: loss {published['loss']}, {published['wire_bytes'] / 1e6:.1f} MB, "
                    f"{published['transport']}, {published['verdict']}; publish {published['publish_s']:.3f} s, "
                    + ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in published["stages_s"].items())
                )
                print(f"   answer: {answers[-1]!r}", flush=True)
            reported = served_version(replica)
    return {
        "path": scenario.path,
        "lesson": scenario.lesson,
        "versions": versions,
        "answers": answers,
        "reported_version": reported,
        "answered_meanwhile": asking.answered,
        "failed_meanwhile": asking.failed,
    }


def measured(records: Path, replica: Replica, version: int) -> dict[str, Any]:
    """What the records of this version say: of its transfer, and of its stages when it serves."""
    lines = [json.loads(line) for path in records.parent.glob(f"{records.stem}*") for line in path.read_text().splitlines()]
    of = {line["schema"]: line for line in lines if line["version"] == version}
    if not {"refit-throughput-v1", "refit-installed-v1"} <= of.keys():
        raise RuntimeError(f"expected two records of version {version}, found {sorted(of)}; {replica.log}:\n{replica.tail()}")
    kept = ("framework", "wire_bytes", "minimum_bytes", "implied_gbps", "transport", "verdict", "verified")
    return {**{key: of["refit-throughput-v1"][key] for key in kept}, "stages_s": of["refit-installed-v1"]["stages_s"]}


def served_version(replica: Replica) -> str:
    with urllib.request.urlopen(f"{replica.url}/weight_info", timeout=30) as answer:
        return str(json.load(answer)["weight_version"])


class Asking:
    """Goes on asking the server while versions arrive; counts answers and failures."""

    def __init__(self, scenario: Scenario, replica: Replica) -> None:
        self.answered = self.failed = 0
        self._scenario, self._replica, self._stop = scenario, replica, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(130)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            try:
                self._scenario.ask(self._replica)
                self.answered += 1
            except (OSError, KeyError, ValueError):
                self.failed += 1


def small_llama(folder: Path, tokenizer: Path) -> Path:
    """Configuration of the Megatron trainer's model with a tokenizer beside it; no weights."""
    folder.mkdir(parents=True)
    for path in tokenizer.glob("*token*"):
        shutil.copy(path, folder / path.name)
    described = case("llama", 1, layers=2, **SIZES)["hf"] | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def untrue(fact: dict[str, Any]) -> list[str]:
    """Claims of the demo that a scenario's facts do not bear out."""
    claims = {
        "every version was verified": all(version["verified"] for version in fact["versions"]),
        "every transfer was measured and plausible": all(version["verdict"] == "ok" for version in fact["versions"]),
        "the whole model moved": all(version["wire_bytes"] >= version["minimum_bytes"] > 0 for version in fact["versions"]),
        "the answers change from the first version to the last": fact["answers"][1] != fact["answers"][-1],
        "the last answer is what was taught": fact["lesson"] in fact["answers"][-1],
        "the server reports the version it serves": fact["reported_version"] == str(VERSIONS),
        "the server kept answering": fact["answered_meanwhile"] > 0 and fact["failed_meanwhile"] == 0,
    }
    return [claim for claim, holds in claims.items() if not holds]


if __name__ == "__main__":
    sys.exit(main())
