"""Peak memory of a target while it loads, over the size of its model.

    python -m benchmarks.target_memory [--bytes 1073741824] [--json]

A process of its own imports everything, notes its resident memory, then allocates and loads a model with verification on. The peak is the
kernel's high-water mark. The bound is 1.1 x the model + 200 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks._fleet import job, log, source

TENSORS = 300


def measure(nbytes: int) -> dict[str, float | bool]:
    """Bytes of the model and of the peak above the process before the load."""
    with source(TENSORS, nbytes // TENSORS) as (address, _):
        command = [sys.executable, "-m", "benchmarks.target_memory", "--child", address, "--bytes", str(nbytes), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child(address: str, nbytes: int) -> dict[str, float | bool]:
    import torch

    from mx_common.load import load
    from mx_common.load.digest import tensor_digest
    from mx_common.transport import open_transport

    class Engine:
        def build(self) -> dict[str, torch.Tensor]:
            return {f"t{n}": torch.empty(nbytes // TENSORS, dtype=torch.uint8) for n in range(TENSORS)}

        def discard(self) -> None:
            raise NotImplementedError

        def load_from_storage(self) -> dict[str, torch.Tensor]:
            raise NotImplementedError

    open_transport("warm").close()
    tensor_digest(torch.zeros(1 << 20, dtype=torch.uint8))
    before = _memory("VmRSS")
    loaded = load(job("target", address, verify=True), Engine(), log)
    assert loaded.pulled is not None
    assert loaded.pulled.verified
    size = sum(tensor.nbytes for tensor in loaded.tensors.values())
    peak = _memory("VmHWM") - before
    assert loaded.transport is not None
    loaded.transport.close()
    return {
        "model_bytes": size,
        "peak_bytes": peak,
        "peak_over_model": round(peak / size, 3),
        "within_bound": peak <= 1.1 * size + 200e6,
    }


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(json.dumps(child(given.child, given.bytes) if given.child else measure(given.bytes)))


if __name__ == "__main__":
    main()
