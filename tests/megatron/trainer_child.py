"""Real Megatron training over gloo, publishing as it goes: forks the ranks of one run, each of which leaves what it published.

    python -m tests.megatron.trainer_child run.json folder

`via` in run.json: `loop` (MegatronPublisher in a loop), `bridge` (Megatron-Bridge's CallbackManager) or `megatron-lm` (a wrapped
train_step). In folder: `rank<r>.npz` with arrays `<version>/<name>`, and `rank<r>.json` with the order of events.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from tests.megatron.cases import case
from tests.megatron.megatron_child import PADDED_VOCABULARY, TOKENS, build, forked, generated, initialize, logits_of


class Recording:
    """Takes the place of the publisher of mx_common: remembers what it is given, and when."""

    def __init__(self, model_name, slot, expected, *, run, server, mode):
        self.events, self.arrays = [], {}
        self.events.append(["open", model_name, slot, list(expected), run, server, mode])

    def publish(self, version, held):
        self.events.append(["publish", version, sorted({h.tensor.data_ptr() for h in held})])
        self.arrays |= {f"{version}/{h.name}@{h.start}": h.tensor.numpy().copy() for h in held}
        return version

    def before_update(self):
        self.events.append(["before_update"])
        return True

    def close(self):
        self.events.append(["close"])


def case_of(run, world):
    """The model of a run: a small Llama unless it names another `family` or other `sizes`."""
    return case(run.get("family", "llama"), world, layers=2, tp=run["tp"], tied=run.get("tied", False), **run.get("sizes", {}))


class Trainer:
    """One rank: a model in Megatron's DDP with its distributed optimizer."""

    def __init__(self, run):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.case, overlap = case_of(run, run["world"]), run["overlap"]
        initialize(self.case)
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_param_gather=overlap, overlap_grad_reduce=overlap, bucket_size=None
        )
        self.chunks = [DistributedDataParallel(c.config, settings, c) for c in build(self.case)]
        config = OptimizerConfig(
            optimizer="adam", lr=1e-2, use_distributed_optimizer=True, params_dtype=torch.float32, clip_grad=0.0
        )
        config.overlap_param_gather = overlap
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        for chunk in self.chunks:
            chunk.train()

    def step(self, events=None, skip=False):
        """Forward, backward, and the optimizer's step; a skipped one stops before the last."""
        from megatron.core.distributed import finalize_model_grads

        (chunk,) = self.chunks
        tokens = torch.from_numpy(TOKENS)
        mask = torch.triu(torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool), diagonal=1)
        chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        finalize_model_grads(self.chunks)  # which sums what ranks that hold the same parameter found each for itself
        if events is not None:
            events.append(["backward"])
        if not skip:
            self.optimizer.step()
            if events is not None:
                events.append(["stepped"])
        return float(loss.detach())

    def parameters(self):
        return {name: p.detach().numpy().copy() for c in self.chunks for name, p in c.named_parameters()}


def train_rank(run, folder, rank):
    from mx_megatron import MegatronPublisher

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=run["world"])
    trainer, sinks, extra = Trainer(run), [], {}

    def opener(*arguments, **keywords):
        sinks.append(Recording(*arguments, **keywords))
        return sinks[-1]

    def make(model, hf_config, **keywords):
        return MegatronPublisher.create(model, hf_config, opener=opener, **{"replicas": run["replicas"], **keywords})

    VIA[run["via"]](run, trainer, make, sinks, extra)
    sink = sinks[0] if sinks else None
    facts = {"events": sink.events if sink else [], **extra}
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))
    np.savez(folder / f"rank{rank}.npz", **(sink.arrays if sink else {}))
    dist.barrier()


def loop(run, trainer, make, sinks, extra):
    publisher = make(trainer.chunks, trainer.case["hf"], model_name="toy")
    publisher.guard(trainer.optimizer)
    events = sinks[0].events if sinks else []
    losses, stale = [], []
    publisher.publish(0)
    for step in range(1, run["steps"] + 1):
        losses.append(trainer.step(events))
        before = trainer.parameters()
        publisher.publish(step)
        after = trainer.parameters()
        stale.append(sum(not np.array_equal(before[name], after[name]) for name in after))
    publisher.close()
    extra |= {"losses": losses, "stale": stale, "padded_vocabulary": PADDED_VOCABULARY}


def refused(run, trainer, make, sinks, extra):
    """One rank was given the configuration of another model."""
    wrong = dict(trainer.case["hf"], num_hidden_layers=3) if dist.get_rank() == 1 else trainer.case["hf"]
    try:
        make(trainer.chunks, wrong, model_name="toy")
    except ValueError as why:
        extra["error"] = f"{type(why).__name__}: {why}"


def served(run, trainer, make, sinks, extra):
    """Publishes for real, and says how Megatron goes on from `prompts`, if any; a step is taken when the test has seen the version before
    it."""
    from mx_megatron import MegatronPublisher

    folder, parent = Path(run["folder"]), os.getppid()
    publisher = MegatronPublisher.create(trainer.chunks, folder / "config.json", model_name=run["model"])
    publisher.guard(trainer.optimizer)
    for version in range(run["steps"] + 1):
        if version:
            trainer.step()
        publisher.publish(version)
        logits = logits_of(trainer.chunks, trainer.case)
        if dist.get_rank() == 0:
            np.save(folder / f"logits{version}.npy", logits)
            print("published", version, flush=True)
        if "prompts" in run:
            said = generated(trainer.chunks, trainer.case, run["prompts"], run["tokens"])
            if dist.get_rank() == 0:
                print("generates", json.dumps(said), flush=True)
        while not (folder / f"seen{version}").exists():
            if os.getppid() != parent:
                return  # the test is over
            time.sleep(0.02)
    publisher.close()


def bridge(run, trainer, make, sinks, extra):
    from mx_megatron import MxPublishCallback

    callbacks = bridge_callbacks()
    callback = MxPublishCallback(trainer.case["hf"], model_name="toy", every=2, replicas=True, make=make)
    manager = callbacks.normalize_callbacks([callback])
    state = SimpleNamespace(train_state=SimpleNamespace(step=run.get("first_step", 0)))

    def fire(event, **more):
        if callbacks.should_fire(manager, event):
            manager.fire(
                event,
                callbacks.CallbackContext(
                    state, trainer.chunks, manager.user_state, optimizer=trainer.optimizer, scheduler=None, **more
                ),
            )

    plain = trainer.optimizer.step
    fire("on_train_start")
    for step in range(run["steps"]):
        fire("on_train_step_start")
        skipped = step in run.get("skipped", [])
        loss = trainer.step(sinks[0].events, skip=skipped)
        fire("on_train_step_end", loss_dict={"loss": loss}, grad_norm=None, skipped_iter=skipped)
        state.train_state.step += 1
    fire("on_train_end")
    extra["undone"] = trainer.optimizer.step == plain


def bridge_callbacks():
    """Megatron-Bridge's own module; the package around it needs Transformer Engine."""
    spec = importlib.util.find_spec("megatron.bridge")
    file = Path(spec.submodule_search_locations[0]) / "training" / "callbacks.py"
    spec = importlib.util.spec_from_file_location("megatron_bridge_callbacks", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def megatron_lm(run, trainer, make, sinks, extra):
    import argparse

    from mx_megatron import add_mx_arguments, publishing

    config = Path(run["folder"]) / "config.json"
    line = ["--mx-publish", "--mx-hf-config", str(config), "--mx-model-name", "toy", "--mx-publish-mode", "snapshot"]
    args = add_mx_arguments(argparse.ArgumentParser()).parse_args([*line, "--mx-publish-replicas"] if run["flag"] else [])

    def train_step(forward_step, data, model, optimizer, scheduler, config, forward_backward=None):
        return {"loss": trainer.step()}, 0, False, False, 0, None, None

    step = publishing(train_step, lambda: args, make=make)
    extra["losses"] = []
    for args.curr_iteration in range(run["steps"]):
        losses, *_ = step(None, None, trainer.chunks, trainer.optimizer, None, trainer.chunks[0].config, forward_backward=None)
        extra["losses"].append(losses["loss"])
    step.close()


VIA = {"loop": loop, "refused": refused, "served": served, "bridge": bridge, "megatron-lm": megatron_lm}


def main(run_file, folder):
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    run = json.loads(Path(run_file).read_text())
    for number, one in enumerate(run):
        here = Path(folder) / str(number)
        here.mkdir(parents=True)
        one["folder"] = str(here)
        (here / "config.json").write_text(json.dumps(case_of(one, 1)["hf"]))
        print(
            "done" if forked(lambda rank, one=one, here=here: train_rank(one, here, rank), one["world"], here) else "failed",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
