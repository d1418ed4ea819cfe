"""The parts of `mx doctor` that load foreign code, run in a process of their own: a plugin may hang, crash or print.

    python -m mx_common.cli._probe_child nixl|patches

Writes JSON lines on the stdout it was given: `{"step": ...}` before each step, so that the parent knows what hung, then one object a
finding. Invariant: whatever the foreign code prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from mx_common import envs, patching
from mx_common.errors import MxError, TransferError
from mx_common.transport import Reads, Regions, open_transport

__all__: list[str] = []

Tell = Callable[[dict[str, object]], None]

SELF_TEST_BYTES = 1 << 20
SELF_TEST_SECONDS = 20.0


def probe_nixl(tell: Tell) -> None:
    """Import, the configured backend, a read between two agents of this process, then every plugin."""
    tell({"step": "importing NIXL"})
    from nixl import _api as api

    tell({"step": f"starting backend {envs.NIXL_BACKEND.get()}"})
    try:
        open_transport("mx-doctor-probe").close()
        tell({"backend": envs.NIXL_BACKEND.get()})
        tell({"step": "reading 1 MiB between two agents"})
        tell({"moved_over": read_between_two_agents()})
    except MxError as error:
        tell({"transport_error": str(error)})
    agent = api.nixl_agent("mx-doctor-plugins", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    for plugin in sorted(agent.get_plugin_list()):
        tell({"step": f"loading NIXL plugin {plugin}"})
        try:
            parameters = agent.agent.getPluginParams(plugin)[0]
            agent.create_backend(plugin, parameters)
            kinds = sorted(str(kind).removesuffix("_SEG") for kind in agent.get_backend_mem_types(plugin))
        except Exception as error:  # NIXL's exceptions have no common base: whatever it is, the plugin cannot be used here
            tell({"plugin": plugin, "error": str(error) or type(error).__name__})
        else:
            tell({"plugin": plugin, "kinds": kinds})


def read_between_two_agents() -> str:
    """Read 1 MiB through the configured backend; the transport it took. Raises TransferError when bytes are missing or differ."""
    here = np.zeros(SELF_TEST_BYTES, np.uint8)
    there = np.resize(np.arange(251, dtype=np.uint8), SELF_TEST_BYTES)

    def one(value: int) -> npt.NDArray[np.uint64]:
        return np.array([value], np.uint64)

    source, target = open_transport("mx-doctor-source"), open_transport("mx-doctor-target")
    try:
        for transport, array in ((source, there), (target, here)):
            transport.register(Regions(one(array.ctypes.data), one(array.nbytes), one(0), "DRAM"))
        source.serve(lambda: True)
        peer = target.connect(source.metadata())
        reads = Reads(one(there.ctypes.data), one(here.ctypes.data), one(here.nbytes), one(0), one(0))
        result = target.read(peer, reads, timeout=SELF_TEST_SECONDS, stall_timeout=SELF_TEST_SECONDS)
    finally:
        target.close()
        source.close()
    if not np.array_equal(here, there):
        raise TransferError(
            "a read between two agents of one process brought other bytes than were sent; do not use this machine"
        )
    return result.transport


def probe_patches(tell: Tell) -> None:
    """What each installed patch would do here; its preconditions may import a whole engine."""
    for name, patch in sorted(patching.known().items()):
        tell({"step": f"checking patch {name}"})
        tell({"patch": name, "for": f"{patch.module} {patch.versions}", **asdict(patching.would(patch))})


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(finding: dict[str, object]) -> None:
        out.write(json.dumps(finding) + "\n")
        out.flush()

    {"nixl": probe_nixl, "patches": probe_patches}[sys.argv[1]](tell)


if __name__ == "__main__":
    main()
