"""Publishing without touching the training loop: a callback for Megatron-Bridge, and a wrapper of Megatron-LM's `train_step`.

    pretrain(config, forward_step, callbacks=[MxPublishCallback("path/to/config.json", model_name="org/model")])      # Megatron-Bridge

    from megatron.training import training                                                                          # Megatron-LM
    training.train_step = publishing(training.train_step, get_args)    # does nothing unless --mx-publish is given

The version is the number of steps taken: 0, or the step of the checkpoint, is published before the first of them. Invariant: weights that
did not change (skipped steps) are not published again, and no optimizer step begins while a version is read (it waits
`MX_PUBLISH_WAIT_SECONDS` at most).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mx_common.errors import ConfigError
from mx_megatron.arguments import options_of
from mx_megatron.publisher import MegatronPublisher

__all__ = ["MxPublishCallback", "publishing"]


class _Cadence:
    """One run: made at its start, then told of every step."""

    def __init__(self, make: Callable[[Any], MegatronPublisher], every: int) -> None:
        if every < 1:
            raise ConfigError(f"publish every {every} steps: give a whole number >= 1")
        self._make, self._every = make, every
        self.publisher: MegatronPublisher | None = None
        self._changed = False
        self._undo: Callable[[], None] = _nothing

    def start(self, model: Any, optimizer: Any, step: int) -> None:
        self.publisher = self._make(model)
        if optimizer is not None:
            self._undo = self.publisher.guard(optimizer)
        self.publisher.publish(step)

    def stepped(self, step: int, skipped: bool) -> None:
        self._changed = self._changed or not skipped
        if self.publisher is not None and self._changed and step % self._every == 0:
            self.publisher.publish(step)
            self._changed = False

    def stop(self) -> None:
        self._undo()
        self._undo = _nothing
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = None


class MxPublishCallback:
    """For `callbacks=[...]` of Megatron-Bridge, which calls the events that are here. The arguments are those of
    `MegatronPublisher.create`; `every`: steps between two versions. Raises ConfigError when training starts if the model cannot be
    published."""

    def __init__(
        self,
        hf_config: Mapping[str, Any] | str | Path,
        *,
        model_name: str = "",
        every: int = 1,
        server: str = "",
        mode: str = "",
        replicas: bool = False,
        leave_out: Sequence[str] = (),
        make: Callable[..., MegatronPublisher] = MegatronPublisher.create,
    ) -> None:
        options = {
            "model_name": model_name,
            "server": server,
            "mode": mode,
            "replicas": replicas,
            "leave_out": tuple(leave_out),
        }
        self._cadence = _Cadence(lambda model: make(model, hf_config, **options), every)

    @property
    def publisher(self) -> MegatronPublisher | None:
        """While training runs."""
        return self._cadence.publisher

    def on_train_start(self, context: Any) -> None:
        self._cadence.start(context.model, context.optimizer, int(context.state.train_state.step))

    def on_train_step_start(self, context: Any) -> None:
        """Without an optimizer to guard, readers have to be done before the step begins."""
        if context.optimizer is None and self.publisher is not None:
            self.publisher.before_update()

    def on_train_step_end(self, context: Any) -> None:
        # Megatron-Bridge counts the step after its callbacks have run
        self._cadence.stepped(int(context.state.train_state.step) + 1, bool(context.skipped_iter))

    def on_train_end(self, context: Any) -> None:
        self._cadence.stop()


def publishing(
    train_step: Callable[..., Any],
    arguments: Callable[[], Any],
    *,
    make: Callable[..., MegatronPublisher] = MegatronPublisher.create,
) -> Callable[..., Any]:
    """`train_step` of Megatron-LM, which publishes after its steps when `--mx-publish` is among the parsed `arguments()`; the attribute
    `close` of what is returned ends publishing."""
    cadence: list[_Cadence] = []

    @functools.wraps(train_step)
    def step_and_publish(forward_step: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
        args = arguments()
        options = options_of(args)
        if options is None:
            return train_step(forward_step, data, model, optimizer, *rest, **named)
        taken = int(args.curr_iteration)
        if not cadence:
            hf_config, every, keywords = options
            cadence.append(_Cadence(lambda chunks: make(chunks, hf_config, **keywords), every))
            cadence[0].start(model, optimizer, taken)
        result = train_step(forward_step, data, model, optimizer, *rest, **named)
        cadence[0].stepped(taken + 1, bool(result[1]))  # (losses, whether the step was skipped, ...)
        return result

    def close() -> None:
        while cadence:
            cadence.pop().stop()

    step_and_publish.close = close  # type: ignore[attr-defined]
    return step_and_publish


def _nothing() -> None:
    """There is nothing to undo."""
