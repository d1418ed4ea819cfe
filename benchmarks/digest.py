"""Speed of a tensor's digest on one core, against other passes over the same memory.

    python -m benchmarks.digest [--bytes 1073741824] [--json]

XXH3 (CPU only) and an int64 matrix-vector product (wraps, so that two top-bit flips cancel) are what the digest competes with. The digest's
second figure is the float32 way that devices without int8 matrix units take, run here on the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import xxhash

from mx_common.load import digest


def measure(nbytes: int, repeat: int = 5) -> dict[str, float]:
    """Best of `repeat`, GB/s on one thread, and ratios to XXH3."""
    torch.set_num_threads(1)
    words = torch.empty(nbytes // 8, dtype=torch.int64).random_()
    weights = torch.empty(1 << 16, dtype=torch.int64).random_() | 1
    rows = words.view(torch.int8).view(-1, digest.ROW)

    def float32() -> None:
        matrix = digest._weights("cpu", "float32")
        for start in range(0, rows.shape[0] // 8, 8192):
            torch.mm(rows[start : start + 8192].to(torch.float32), matrix).to(torch.int32)

    def rate(action: Callable[[], object], size: int = nbytes) -> float:
        best = min(_timed(action) for _ in range(repeat))
        return round(size / best / 1e9, 2)

    result = {
        "digest_gb_s": rate(lambda: digest.tensor_digest(words)),
        "digest_float32_gb_s": rate(float32, nbytes // 8),
        "int64_mv_gb_s": rate(lambda: torch.mv(words.view(-1, 1 << 16), weights)),
        "xxh3_gb_s": rate(lambda: xxhash.xxh3_64_intdigest(words.numpy())),
    }
    result["digest_over_int64_mv"] = round(result["digest_gb_s"] / result["int64_mv_gb_s"], 2)
    return result


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    print(json.dumps(measure(given.bytes)))


if __name__ == "__main__":
    main()
