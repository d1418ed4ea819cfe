"""Host memory that may still be taken, on a machine and in containers of either kind: trees of files as the kernel shows them."""

from __future__ import annotations

import pytest
import torch

from mx_common import _free_memory
from mx_common._free_memory import free_memory
from mx_common.refit._landing import _room_for_shadow
from mx_common.refit.engine import RefitJob

GIB = 1 << 30
NO_LIMIT_OF_V1 = 9223372036854771712
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.fixture
def machine(tmp_path):
    """Makes a machine with 64 GiB available, whose process is in the groups of `own` (the lines of /proc/self/cgroup)."""

    def made(own, groups):
        for path, text in {
            "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n",
            "proc/self/cgroup": own,
        }.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        for group, files in groups.items():
            (tmp_path / group).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / group / name).write_text(f"{text}\n")
        return tmp_path

    return made


def v2(limit, used, inactive=0):
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 7\ninactive_file {inactive}\nactive_file 9"}


def v1(limit, used, inactive=0):
    stat = f"inactive_file 1\nactive_file 9\ntotal_inactive_file {inactive}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


CASES = {
    "no group at all": ("", {}, 64 * GIB),
    "v2, no limit": ("0::/a/b", {f"{V2}/a/b": v2("max", GIB), f"{V2}/a": v2("max", GIB)}, 64 * GIB),
    "v2, the own group": ("0::/a/b", {f"{V2}/a/b": v2(4 * GIB, GIB), f"{V2}/a": v2(8 * GIB, GIB)}, 3 * GIB),
    "v2, a group around it": ("0::/a/b", {f"{V2}/a/b": v2(4 * GIB, GIB), f"{V2}/a": v2(8 * GIB, 6 * GIB)}, 2 * GIB),
    "v2, a group with a name of its own": ("0::/", {V2: v2(4 * GIB, GIB)}, 3 * GIB),
    "v2, a cache that can be dropped": ("0::/a", {f"{V2}/a": v2(4 * GIB, 3 * GIB, 2 * GIB)}, 3 * GIB),
    "v2, no statistics": ("0::/a", {f"{V2}/a": {"memory.max": 4 * GIB, "memory.current": GIB}}, 3 * GIB),
    "v2, above its limit": ("0::/a", {f"{V2}/a": v2(GIB, 2 * GIB)}, 0),
    "v2, a limit above what the machine has": ("0::/a", {f"{V2}/a": v2(512 * GIB, GIB)}, 64 * GIB),
    "v2, a group that is not shown here": ("0::/../b", {f"{V2}/b": v2(GIB, 0), V2: v2(4 * GIB, GIB)}, 3 * GIB),
    "v1, no limit": ("4:memory:/a", {f"{V1}/a": v1(NO_LIMIT_OF_V1, GIB)}, 64 * GIB),
    "v1, the own group": ("3:cpu,memory:/a\n1:name=systemd:/", {f"{V1}/a": v1(4 * GIB, 2 * GIB, GIB)}, 3 * GIB),
    "v1, mounted as the container sees it": ("4:memory:/docker/f00", {V1: v1(4 * GIB, GIB)}, 3 * GIB),
    "both kinds": ("4:memory:/a\n0::/b", {f"{V1}/a": v1(4 * GIB, GIB), f"{V2}/b": {"cgroup.procs": 1}}, 3 * GIB),
    "what nobody can read": ("gibberish\n\n0::/a", {f"{V2}/a": v2("lots", GIB)}, 64 * GIB),
}


@pytest.mark.parametrize("case", CASES)
def test_the_least_room_of_the_machine_and_of_every_group_around_a_process_counts(case, machine):
    own, groups, expected = CASES[case]
    assert free_memory(machine(own, groups)) == expected


def test_this_machine_has_some():
    assert free_memory() > 0


def test_a_shadow_is_not_taken_of_memory_that_only_the_machine_has(machine, monkeypatch):
    job, cpu = RefitJob("m", "w", shadow="auto"), torch.device("cpu")
    monkeypatch.setattr(_free_memory, "_ROOT", machine("0::/a", {f"{V2}/a": v2(8 * GIB, 4 * GIB)}))
    assert _room_for_shadow(job, GIB, cpu)
    assert not _room_for_shadow(job, 3 * GIB, cpu), "half of the container's 4 GiB"
