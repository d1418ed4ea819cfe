"""verl's own registry and base class, two actor ranks and two rollout workers in one process: `python verl_child.py` prints one JSON line.

What the publisher is told is kept where the publisher would stand, and what is received comes from there. The calls are those that verl's
CheckpointEngineManager makes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

import mx_common.refit
from mx_common.errors import ConfigError

ACTORS, ROLLOUTS = 2, 2
published = {}  # (model, version) -> slot -> what was held, while it is published
calls = []
closed = []


class Recorder:
    """Stands where the publisher stands."""

    def __init__(self, model_name, slot, expected_slots, *, run="", server="", mode="", log=None):
        self.model_name, self.slot, self.slots = model_name, slot, tuple(expected_slots)
        calls.append(["open", slot, list(expected_slots), mode, server])

    def publish(self, version, held):
        published.setdefault((self.model_name, version), {})[self.slot] = list(held)
        calls.append(["publish", self.slot, version])

    def before_update(self):
        calls.append(["before_update", self.slot])
        return True

    def close(self):
        calls.append(["close", self.slot])


def receive_full(model_name, server, version):
    """Stands where the receiver stands: full tensors of a version, each valid until the next is asked for."""
    buffer = None
    try:
        for held in (h for slot in published[model_name, version].values() for h in slot):
            buffer = held.tensor.clone()
            yield held.name, buffer
            buffer.zero_()
    finally:
        closed.append(version)


def weights(step):
    torch.manual_seed(step)
    return {f"w{i}": torch.randn(rows, 4) for i, rows in enumerate((64, 8, 8, 32, 1))}


async def as_async(items):
    for item in items:
        yield item


def topology(actors, rollouts):
    """What CheckpointEngineManager.build_process_group does, without its remote calls."""
    metadata = [engine.prepare() for engine in (*actors, *rollouts)]
    for engines, arguments in zip(
        (actors, rollouts),
        CheckpointEngineRegistry.get("mx").build_topology(len(actors), len(rollouts), metadata),
        strict=True,
    ):
        assert all(len(values) == len(engines) for values in arguments.values())
        for at, engine in enumerate(engines):
            engine.init_process_group(**{name: values[at] for name, values in arguments.items()})


async def update(actors, rollouts, step, given, global_steps, stop_after=None):
    topology(actors, rollouts)
    for engine in actors:
        await engine.send_weights(given(weights(step).items()), global_steps=global_steps)
    same = []
    for engine in rollouts:
        got = {}
        received = engine.receive_weights(global_steps=global_steps)
        async for name, tensor in received:
            got[name] = tensor.clone()
            if len(got) == stop_after:
                break
        await received.aclose()
        wanted = weights(step)
        same.append(
            all(torch.equal(wanted[n], t) for n, t in got.items()) and (bool(stop_after) or got.keys() == wanted.keys())
        )
    for engine in (*actors, *rollouts):
        engine.finalize()
    return same


async def main():
    stand_in = types.ModuleType("mx_common.refit.publisher")
    stand_in.Publisher = Recorder
    sys.modules[stand_in.__name__] = stand_in
    mx_common.refit.receive_full = receive_full
    import_external_libs("mx_fsdp.verl_engine")
    assert issubclass(CheckpointEngineRegistry.get("mx"), CheckpointEngine)
    options = {"bucket_size": 1 << 20, "server": "10.0.0.1:1"}
    actors = [CheckpointEngineRegistry.new("mx", is_master=rank == 0, **options) for rank in range(ACTORS)]
    rollouts = [CheckpointEngineRegistry.new("mx", **options) for _ in range(ROLLOUTS)]
    out = {"same": []}
    out["same"].append(await update(actors, rollouts, 1, iter, 10))
    kept = [sorted(engine._shares) for engine in actors]
    addresses = [[t.data_ptr() for t in engine._shares.values()] for engine in actors]
    out["same"].append(await update(actors, rollouts, 2, as_async, 11))
    out["addresses_stay"] = addresses == [[t.data_ptr() for t in engine._shares.values()] for engine in actors]
    out["same"].append(await update(actors, rollouts, 3, iter, None))
    out["same"].append(await update(actors, rollouts, 4, iter, 13, stop_after=2))
    out["kept"], out["shares"] = kept, [sum(t.nbytes for t in engine._shares.values()) for engine in actors]
    out["models"], out["versions"] = len({model for model, _ in published}), [version for _, version in published]
    out["calls"], out["closed"] = calls[:], closed
    try:
        await rollouts[0].send_weights(iter(()), global_steps=1)
    except ConfigError as error:
        out["refused"] = str(error)
    for engine in (*actors, *rollouts):
        engine.close()
    out["closes"] = [call for call in calls if call[0] == "close"]
    print("result " + json.dumps(out), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
