"""SGLang: `--load-format mx`, and versions of a trainer into a running server.

A replica started with it reads its weights out of another replica's memory where one is READY, from storage otherwise, and then serves
others. Installed, it registers itself through SGLang's plugin entry point:

    python -m sglang.launch_server --model-path MODEL --load-format mx
    ... --model-loader-extra-config '{"server": "10.0.0.7:8001", "selector": "balanced"}'
    sglang.Engine(model_path=MODEL, load_format="mx")
    mx_sglang.drive.refit_server(URL, "org/model")                      # then a trainer's versions

Without the plugin, or when it cannot be registered, SGLang itself refuses the load format. Invariant: with any other load format the pack
changes nothing in SGLang.
"""

from __future__ import annotations

import multiprocessing
import sys

from mx_common.engines import Engine

__all__ = ["ENGINE", "LOAD_FORMAT", "register"]

ENGINE = Engine("SGLang", ("sglang",), ">=0.5.23,<0.5.24", "start without --load-format mx")
LOAD_FORMAT = "mx"

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_WRITERS = "sglang.srt.managers.load_snapshot"


def register() -> None:
    """Entry point `sglang.srt.plugins`: offer the load format. Called in every process of SGLang, before arguments are parsed."""
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from mx_sglang import hooks

    if LOAD_FORMAT in LOAD_FORMAT_CHOICES:
        return
    register_hook = HookRegistry.register
    register_hook("sglang.srt.configs.load_config.LoadConfig._verify_load_format", hooks.name_loader, HookType.AROUND)
    register_hook("sglang.srt.managers.scheduler.Scheduler.run_event_loop", hooks.warmed_up, HookType.BEFORE)
    for writer in ("ShmLoadSnapshotWriter", "ZmqLoadSnapshotWriter"):
        register_hook(f"{_WRITERS}.{writer}.write", hooks.observe, HookType.BEFORE)
    register_hook(f"{_MANAGER}.update_weights_from_disk", hooks.refit, HookType.AROUND)
    register_hook("sglang.srt.model_executor.model_runner.ModelRunner.forward", hooks.check, HookType.BEFORE)
    for way in ("update_weights_from_disk", "update_weights_from_ipc", "update_weights_from_tensor", "begin_weight_update"):
        register_hook(f"{_UPDATER}.{way}", hooks.withdraw_first, HookType.BEFORE)
    register_hook(f"{_UPDATER}.load_weights_from_distributed", hooks.withdraw_first, HookType.BEFORE)
    for module, name, hook, kind in (
        ("entrypoints.http_server", "_wait_and_warmup", hooks.server_up, HookType.AFTER),
        ("entrypoints.engine", "Engine._ensure_event_loop", hooks.engine_up, HookType.AFTER),
        ("managers.tokenizer_manager", "TokenizerManager._update_model_path_info", hooks.keep_name, HookType.AROUND),
    ):  # a front end that is somebody's child has imported them; the hook alone would import a web server into every worker
        if multiprocessing.parent_process() is None or f"sglang.srt.{module}" in sys.modules:
            register_hook(f"sglang.srt.{module}.{name}", hook, kind)
    add_load_format_choices([LOAD_FORMAT])
