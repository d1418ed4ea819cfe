"""verl's own registry and base class, two actor ranks and two rollout workers in one process: `python verl_child.py DIRECTORY` prints one
JSON line.

Actors publish to that directory and rollout workers read over NIXL; the order of calls is written down as they are made. The calls are
those that verl's CheckpointEngineManager makes.
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

import mx_common.refit.publisher
from mx_common.directory.refit_client import RefitClient
from mx_common.errors import ConfigError

ACTORS, ROLLOUTS = 2, 2
calls = []


class Publisher(mx_common.refit.publisher.Publisher):
    """The real one; says what it was told."""

    def __init__(self, model_name, slot, expected_slots, **options):
        calls.append(["open", slot, list(expected_slots), options["mode"], options["server"]])
        super().__init__(model_name, slot, expected_slots, **options)

    def publish(self, version, held):
        calls.append(["publish", self.slot, version])
        return super().publish(version, held)

    def before_update(self):
        calls.append(["before_update", self.slot, super().before_update()])
        return calls[-1][-1]

    def close(self):
        calls.append(["close", self.slot])
        super().close()


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


async def main(server):
    mx_common.refit.publisher.Publisher = Publisher
    import_external_libs("mx_fsdp.verl_engine")
    assert issubclass(CheckpointEngineRegistry.get("mx"), CheckpointEngine)
    options = {"bucket_size": 1 << 20, "server": server}
    actors = [CheckpointEngineRegistry.new("mx", is_master=rank == 0, **options) for rank in range(ACTORS)]
    rollouts = [CheckpointEngineRegistry.new("mx", **options) for _ in range(ROLLOUTS)]
    out = {"same": [], "listed": []}
    client = RefitClient(server)

    async def updated(*arguments, **more):
        out["same"].append(await update(actors, rollouts, *arguments, **more))
        out["listed"].append([(v.model_name, v.number, v.state, v.open_leases) for v in client.versions()])

    await updated(1, iter, 10)
    out["kept"] = [sorted(engine._shares) for engine in actors]
    out["shares"] = [sum(t.nbytes for t in engine._shares.values()) for engine in actors]
    addresses = [[t.data_ptr() for t in engine._shares.values()] for engine in actors]
    await updated(2, as_async, 11, stop_after=2)
    out["addresses_stay"] = addresses == [[t.data_ptr() for t in engine._shares.values()] for engine in actors]
    await updated(3, iter, None)
    await updated(4, iter, 13)
    out["calls"] = calls[:]
    try:
        await rollouts[0].send_weights(iter(()), global_steps=1)
    except ConfigError as error:
        out["refused"] = str(error)
    for engine in (*actors, *rollouts):
        engine.close()
    out["closes"] = [call for call in calls if call[0] == "close"]
    out["left"] = len(client.versions())
    print("result " + json.dumps(out), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
