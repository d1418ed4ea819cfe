"""Real Megatron training over gloo, publishing as it goes: forks the ranks of one run, each of which leaves what it published.

    python -m tests.megatron.trainer_child run.json folder

`via` in run.json: `loop` (MegatronPublisher in a loop), `bridge` (Megatron-Bridge's CallbackManager) or `megatron-lm` (a wrapped
train_step). The last two publish for real, to the directory `server`. In folder: `rank<r>.npz` with arrays `<version>/<name>`, and
`rank<r>.json` with the order of events.
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


def recorded(sinks):
    """From here on the publisher of mx_common also notes, in a Recording, what it is given."""
    import mx_common.refit.publisher as real

    class Publisher(real.Publisher):
        def __init__(self, *arguments, run, server, mode, **options):
            sinks.append(Recording(*arguments, run=run, server=server, mode=mode))
            super().__init__(*arguments, run=run, server=server, mode=mode, **options)

        def publish(self, version, held):
            sinks[0].publish(version, held)
            return super().publish(version, held)

        def before_update(self):
            sinks[0].before_update()
            return super().before_update()

        def close(self):
            sinks[0].close()
            super().close()

    real.Publisher = Publisher


class Shown:
    """After a publish: leaves Megatron's own logits, says how it goes on from `prompts`, if the run has any, and goes on when the test has
    seen the version."""

    def __init__(self, run, trainer, sinks=None):
        self.run, self.folder, self.trainer, self.sinks = run, Path(run["folder"]), trainer, sinks
        self.parent, self.last = os.getppid(), None

    def new_version(self):
        """Shows what was published since the last call, if anything was."""
        published = [event[1] for event in self.sinks[0].events if event[0] == "publish"] if self.sinks else []
        if published and published[-1] != self.last:
            self.last = published[-1]
            self.version(self.last)

    def version(self, version):
        logits = logits_of(self.trainer.chunks, self.trainer.case)
        if dist.get_rank() == 0:
            np.save(self.folder / f"logits{version}.npy", logits)
            print("published", version, flush=True)
        if "prompts" in self.run:
            said = generated(self.trainer.chunks, self.trainer.case, self.run["prompts"], self.run["tokens"])
            if dist.get_rank() == 0:
                print("generates", json.dumps(said), flush=True)
        while not (self.folder / f"seen{version}").exists():
            if os.getppid() != self.parent:
                raise SystemExit("the test is over")
            time.sleep(0.02)


def case_of(run, world):
    """The model of a run: a small Llama unless it names another `family` or other `sizes`."""
    return case(run.get("family", "llama"), world, layers=2, tp=run["tp"], tied=run.get("tied", False), **run.get("sizes", {}))


class Trainer:
    """One rank of any layout: a model in Megatron's DDP with its distributed optimizer, and Megatron's schedule for its step."""

    def __init__(self, case, overlap=False):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.case = case
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
            chunk.config.finalize_model_grads_func = finalize_model_grads
            # training with experts and tensor parallel ranks wants sequence parallel, which torch's norm is not made for
            chunk.train(not (case.get("experts") and case.get("tp", 1) > 1))

    def step(self, events=None, skip=False):
        """Forward, backward, and the optimizer's step; a skipped one stops before the last. The loss, on the last pipeline stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None if len(self.chunks) == 1 else [None] * len(self.chunks),
            model=self.chunks,
            num_microbatches=self.case["pp"] if self.case.get("vpp") else 1,  # as an interleaved schedule wants it
            seq_length=TOKENS.shape[1],
            micro_batch_size=len(TOKENS),
            forward_only=False,
        )
        if events is not None:
            events.append(["backward"])
        if not skip:
            self.optimizer.step()
            if events is not None:
                events.append(["stepped"])
        return losses[0]["loss"] if losses else None

    def parameters(self):
        return {name: p.detach().numpy().copy() for c in self.chunks for name, p in c.named_parameters()}


def forward_step(_, chunk):
    tokens = torch.from_numpy(TOKENS)
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    output = chunk(tokens, torch.arange(length).expand_as(tokens), mask, labels=tokens.roll(-1, 1))
    return output, lambda output: (output.mean(), {"loss": float(output.detach().mean())})


def train_rank(run, folder, rank):
    from mx_megatron import MegatronPublisher

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=run["world"])
    trainer, sinks, extra = Trainer(case_of(run, run["world"]), run["overlap"]), [], {}

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
    """Publishes for real; a step is taken when the test has seen the version before it."""
    from mx_megatron import MegatronPublisher

    shown = Shown(run, trainer)
    publisher = MegatronPublisher.create(trainer.chunks, shown.folder / "config.json", model_name=run["model"])
    publisher.guard(trainer.optimizer)
    for version in range(run["steps"] + 1):
        if version:
            trainer.step()
        publisher.publish(version)
        shown.version(version)
    publisher.close()


def bridge(run, trainer, make, sinks, extra):
    from mx_megatron import MxPublishCallback

    recorded(sinks)
    callbacks, shown = bridge_callbacks(), Shown(run, trainer, sinks)
    callback = MxPublishCallback(trainer.case["hf"], model_name=run["model"], every=2, replicas=True, server=run["server"])
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
    shown.new_version()
    for step in range(run["steps"]):
        fire("on_train_step_start")
        skipped = step in run.get("skipped", [])
        loss = trainer.step(sinks[0].events, skip=skipped)
        fire("on_train_step_end", loss_dict={"loss": loss}, grad_norm=None, skipped_iter=skipped)
        shown.new_version()
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

    recorded(sinks)
    shown = Shown(run, trainer, sinks)
    line = ["--mx-publish", "--mx-hf-config", str(shown.folder / "config.json"), "--mx-publish-mode", "snapshot"]
    line += ["--mx-model-name", run["model"], "--mx-server", run["server"], "--mx-publish-replicas"]
    args = add_mx_arguments(argparse.ArgumentParser()).parse_args(line if run["flag"] else [])

    def train_step(forward_step, data, model, optimizer, scheduler, config, forward_backward=None):
        shown.new_version()  # the one before the first step
        return {"loss": trainer.step()}, 0, False, False, 0, None, None

    step = publishing(train_step, lambda: args)
    extra["losses"] = []
    for args.curr_iteration in range(run["steps"]):
        losses, *_ = step(None, None, trainer.chunks, trainer.optimizer, None, trainer.chunks[0].config, forward_backward=None)
        extra["losses"].append(losses["loss"])
        shown.new_version()
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
