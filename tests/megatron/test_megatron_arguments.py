"""The flags for Megatron-LM."""

from __future__ import annotations

import argparse

import pytest

from mx_common.errors import ConfigError
from mx_megatron import add_mx_arguments
from mx_megatron.arguments import options_of
from mx_megatron.callback import MxPublishCallback


def parsed(*line):
    return add_mx_arguments(argparse.ArgumentParser()).parse_args(line)


def test_the_parser_comes_back_as_megatron_lm_expects():
    parser = argparse.ArgumentParser()
    assert add_mx_arguments(parser) is parser


def test_nothing_is_published_without_the_flag():
    assert options_of(parsed("--mx-hf-config", "config.json", "--mx-model-name", "m")) is None


def test_every_flag_reaches_the_publisher():
    line = (
        "--mx-publish --mx-hf-config c.json --mx-model-name m --mx-server h:1 --mx-publish-every 5 --mx-publish-mode snapshot"
    )
    config, every, keywords = options_of(parsed(*line.split(), "--mx-publish-replicas", "--mx-leave-out", "mtp.*", "vision.*"))
    assert (config, every) == ("c.json", 5)
    assert keywords == {
        "model_name": "m",
        "server": "h:1",
        "mode": "snapshot",
        "replicas": True,
        "leave_out": ("mtp.*", "vision.*"),
    }


@pytest.mark.parametrize("line", ["--mx-publish-every 0", "--mx-publish-every x", "--mx-publish-mode both"])
def test_values_that_cannot_work_are_refused_by_the_parser(line, capsys):
    with pytest.raises(SystemExit):
        parsed(*line.split())
    assert line.split()[0] in capsys.readouterr().err


def test_publishing_without_a_configuration_says_which_flag_is_missing():
    with pytest.raises(ConfigError, match="--mx-hf-config"):
        options_of(parsed("--mx-publish"))


def test_arguments_that_were_never_added_are_asked_for():
    with pytest.raises(ConfigError, match="extra_args_provider=add_mx_arguments"):
        options_of(argparse.Namespace())


def test_a_callback_that_would_never_publish_is_refused():
    with pytest.raises(ConfigError, match="every 0 steps"):
        MxPublishCallback({}, every=0)
