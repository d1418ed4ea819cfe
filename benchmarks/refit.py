"""A whole refit, from "publish" to an engine that serves the new weights, against the two ways without this pack.

    python -m benchmarks.refit [--repeat 5] [--json]

One FSDP2 trainer (2 ranks, gloo) and one vLLM engine, SmolLM2-135M in bfloat16, the same run: `reshard` and `staged` through this pack with
digests, each taking turns with `files` (gather on rank 0, save safetensors, vLLM's `reload_weights`) and `broadcast` (gather on rank 0, one
gloo broadcast a tensor to the engine, its own loader). Each ends with one generated token. Medians of all but the first round, in which
plans are made and memory is registered; `plan_share` is what planning and registration take of later rounds, on the engine and on the
slower rank of the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from examples.first_light import checkpoint

MODEL = "benchmark/refit"
CACHE = Path(".cache/models")


def trainer(folder: str, port: int, broadcast_port: int) -> None:
    """One rank: answers each line `publish N`, `save N` or `broadcast N` with `done`."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    from mx_fsdp import MxPublish

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    group = _engine_group(broadcast_port, 0) if rank == 0 else None
    named = dict(model.named_parameters())
    registering: list[float] = []
    with MxPublish(model, MODEL) as publish:
        print("ready", flush=True)
        for line in sys.stdin:
            what, number = line.split()
            publish.before_step()
            with torch.no_grad():
                for parameter in named.values():
                    parameter.mul_(1.001)
            dist.barrier()
            print("changed", flush=True)
            sys.stdin.readline()
            if what == "publish":
                published = publish.publish(int(number))
                assert published is not None
                registering.append(published.seconds["register"])
            elif what == "save":
                state = {name: p.full_tensor() for name, p in named.items()}
                if rank == 0:
                    save_file(state, os.path.join(folder, "model.safetensors"))
            else:
                for parameter in named.values():
                    full = parameter.full_tensor()
                    if group is not None:
                        group.broadcast([full.detach()], _root()).wait()
            print("done", flush=True)
    Path(folder, f"registering-{rank}.json").write_text(json.dumps(registering))


def _engine_group(port: int, rank: int) -> Any:
    """A gloo group of trainer rank 0 and the engine, beside the groups that both have already."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=120))
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=120))


def _root() -> Any:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            model=str(folder),
            load_format="mx",
            dtype="bfloat16",
            enforce_eager=True,
            compilation_config={"mode": 0, "custom_ops": ["none"]},
            kv_cache_memory_bytes=64 << 20,
            max_num_seqs=2,
            max_model_len=128,
            distributed_executor_backend="uni",
            weight_transfer_config={"backend": "mx"},
        )
        self._one = SamplingParams(temperature=0, max_tokens=1)

    def token(self) -> None:
        """One generated token."""
        self.llm.generate(["The capital of France is"], self._one, use_tqdm=False)

    def model(self) -> Any:
        """The live module."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.get_model()


def measure(repeat: int) -> dict[str, Any]:
    """Seconds of each way, and ratios."""
    import torch

    from mx_common.directory import DirectoryServer
    from mx_vllm.drive import refit

    with tempfile.TemporaryDirectory() as scratch, DirectoryServer("127.0.0.1:0") as server:
        records = Path(scratch) / "records.jsonl"
        os.environ |= {"MX_SERVER_ADDRESS": server.address, "MX_RUNTIME_DIR": scratch, "MX_RECORDS_FILE": str(records)}
        folder = Path(scratch) / "model"
        shutil.copytree(checkpoint.full(CACHE), folder)
        ports = [_free_port() for _ in range(2)]
        command = [sys.executable, "-m", "benchmarks.refit", "--trainer", str(folder), *map(str, ports)]
        ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        try:
            engine = Engine(folder)
            group = _engine_group(ports[1], 1)
            for rank in ranks:
                _expect(rank, "ready")
            model = engine.model()
            facts = {name: (p.shape, p.dtype) for name, p in _checkpoint_facts(folder).items()}

            def receive() -> None:
                stream = []
                for name, (shape, dtype) in facts.items():
                    tensor = torch.empty(shape, dtype=dtype)
                    group.broadcast([tensor], _root()).wait()
                    stream.append((name, tensor))
                model.load_weights(stream)

            ways: dict[str, tuple[str, Callable[[int], object]]] = {
                "reshard": ("publish", lambda n: refit(engine.llm, MODEL, n, path="reshard")),
                "staged": ("publish", lambda n: refit(engine.llm, MODEL, n, path="staged")),
                "files": ("save", lambda n: engine.llm.collective_rpc("reload_weights")),
                "broadcast": ("broadcast", lambda n: receive()),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            order = [way for path in ("reshard", "staged") for way in (path, "files", "broadcast") * (repeat + 1)]
            for number, way in enumerate(order, start=1):
                what, take = ways[way]
                for rank in ranks:
                    _tell(rank, f"{what} {number}")
                for rank in ranks:
                    _expect(rank, "changed")
                start = time.perf_counter()
                for rank in ranks:
                    _tell(rank, "go")
                if what != "broadcast":  # a broadcast needs both ends at once
                    for rank in ranks:
                        _expect(rank, "done")
                take(number)
                engine.token()
                times[way].append(time.perf_counter() - start)
                if what == "broadcast":
                    for rank in ranks:
                        _expect(rank, "done")
        finally:
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.close()
                rank.wait(30)
        registering = [json.loads((folder / f"registering-{rank}.json").read_text()) for rank in range(2)]
        lines = [json.loads(line) for path in Path(scratch).glob("records*") for line in path.read_text().splitlines()]
    seconds = {way: statistics.median(taken[1:]) for way, taken in times.items()}
    return {
        "seconds": {way: round(value, 3) for way, value in seconds.items()},
        "first_round_seconds": {way: round(taken[0], 3) for way, taken in times.items()},
        "files_over": {path: round(seconds["files"] / seconds[path], 2) for path in ("reshard", "staged")},
        "broadcast_over": {path: round(seconds["broadcast"] / seconds[path], 2) for path in ("reshard", "staged")},
        **{
            path: _of_records(
                [line for line in lines if line["path"] == path and "verdict" in line][1:],
                [max(pair) for pair in zip(*registering, strict=True)][first : first + repeat],
                seconds[path],
            )
            for path, first in (("reshard", 1), ("staged", repeat + 2))
        },
    }


def _of_records(lines: list[dict[str, Any]], registering: list[float], seconds: float) -> dict[str, Any]:
    """Of the later rounds of a path: their records, and seconds in which the trainer registered memory."""
    plan = statistics.median(line["stages_s"]["plan"] for line in lines) + statistics.median(registering)
    return {
        "plan_share": round(plan / seconds, 4),
        "wire_over_minimum": round(lines[-1]["wire_bytes"] / lines[-1]["minimum_bytes"], 4),
        "stages_s": {stage: round(taken, 3) for stage, taken in lines[-1]["stages_s"].items()},
    }


def _checkpoint_facts(folder: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return dict(model.named_parameters())


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _expect(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()).strip() != word:
        assert line, "a trainer rank ended"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainer", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trainer:
        folder, port, broadcast_port = given.trainer
        trainer(folder, int(port), int(broadcast_port))
        return
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    print(json.dumps(measure(given.repeat), indent=None if given.json else 2))


if __name__ == "__main__":
    main()
