"""`--mx-publish` and what goes with it, for Megatron-LM's `extra_args_provider`.

    pretrain(..., extra_args_provider=add_mx_arguments)
    python pretrain_gpt.py ... --mx-publish --mx-hf-config path/to/config.json --mx-model-name org/model

Invariant: without `--mx-publish` nothing is published, whatever else is given.
"""

from __future__ import annotations

import argparse
from typing import Any

from mx_common.errors import ConfigError

__all__ = ["add_mx_arguments", "options_of"]


def add_mx_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the group `mx`; returns the parser, as Megatron-LM expects."""
    group = parser.add_argument_group(title="mx", description="publish the weights to inference engines while training")
    group.add_argument("--mx-publish", action="store_true", help="publish each version of the weights")
    group.add_argument("--mx-hf-config", default="", help="config.json of the Hugging Face model, or its folder")
    group.add_argument("--mx-model-name", default="", help="name that engines ask for; default: MX_MODEL_NAME")
    group.add_argument(
        "--mx-server", default="", help="directory, host:port; default: MX_SERVER_ADDRESS, else one on this machine"
    )
    group.add_argument("--mx-publish-every", type=_steps, default=1, metavar="STEPS", help="steps between two versions")
    group.add_argument(
        "--mx-publish-mode",
        choices=("in_place", "snapshot"),
        default="",
        help="engines read the weights where they lie and the optimizer waits for them, or read a copy; default: MX_PUBLISH_MODE",
    )
    group.add_argument(
        "--mx-publish-replicas", action="store_true", help="every data-parallel rank publishes, which spreads readers"
    )
    group.add_argument(
        "--mx-leave-out",
        nargs="*",
        default=[],
        metavar="PATTERN",
        help="parameters that engines are not to have, such as 'mtp.*'",
    )
    return parser


def options_of(args: argparse.Namespace) -> tuple[str, int, dict[str, Any]] | None:
    """(Hugging Face configuration, steps between versions, keywords of `MegatronPublisher.create`); None without `--mx-publish`. Raises
    ConfigError when the arguments were not added, and for `--mx-publish` without `--mx-hf-config`."""
    if not hasattr(args, "mx_publish"):
        raise ConfigError("--mx-publish is not among the arguments; pass extra_args_provider=add_mx_arguments")
    if not args.mx_publish:
        return None
    if not args.mx_hf_config:
        raise ConfigError("--mx-publish needs --mx-hf-config, the config.json of the Hugging Face model that engines serve")
    keywords = {
        "model_name": args.mx_model_name,
        "server": args.mx_server,
        "mode": args.mx_publish_mode,
        "replicas": args.mx_publish_replicas,
        "leave_out": tuple(args.mx_leave_out),
    }
    return args.mx_hf_config, args.mx_publish_every, keywords


def _steps(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} steps between two versions; give 1 or more")
    return value
