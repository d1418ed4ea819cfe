"""Hugging Face's Trainer: one argument publishes every version of the weights.

    from mx_fsdp.hf_callback import MxPublishCallback

    Trainer(model, args, ..., callbacks=[MxPublishCallback("org/model")])

With accelerate's FSDP, `fsdp_version: 2`. The version is Trainer's `global_step`. Invariant: the weights that are published under a step
are those after it, and no optimizer step overwrites them while a reader may still be reading, within `MX_PUBLISH_WAIT_SECONDS`.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mx_common.errors import ConfigError
from mx_fsdp.publish import MxPublish

__all__ = ["MxPublishCallback"]


class MxPublishCallback(TrainerCallback):
    """Arguments are those of `MxPublish` but the model, which Trainer hands over when training begins. Raises ConfigError."""

    def __init__(self, model_name: str, **options: Any) -> None:
        if not model_name:
            raise ConfigError("MxPublishCallback needs a model_name, the one that receivers ask for")
        self._model_name, self._options = model_name, options
        self._mx: MxPublish | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """The model is wrapped and placed by now."""
        self._close()  # a training that failed has not said its end
        self._mx = MxPublish(model, self._model_name, **self._options)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The last moment before the weights are overwritten."""
        if self._mx is not None:
            self._mx.before_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The optimizer has stepped."""
        if self._mx is not None:
            self._mx.publish(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Readers of the last version finish, then it is withdrawn: its memory is about to go."""
        self._close()

    def _close(self) -> None:
        mx, self._mx = self._mx, None
        if mx is not None:
            mx.close()
