"""Which engine versions an adapter takes, and what is known of the adapters that are installed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mx_common.engines import Engine, adapters
from mx_common.errors import UnsupportedVersion
from mx_common.speaking import speak_through

ENGINE = Engine("Toy", ("toy-engine", "toy-engine-cpu"), ">=0.32,<0.33", "start without --load-format mx")


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1rc1"])
def test_the_versions_of_the_range_are_taken(version: str) -> None:
    assert ENGINE.supports(version)
    ENGINE.check(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "0.33.0rc1", "1.0.0", "dev", ""])
def test_another_version_is_refused_with_the_range_and_what_to_do_instead(version: str) -> None:
    with pytest.raises(UnsupportedVersion) as raised:
        ENGINE.check(version)
    assert f"run with Toy >=0.32,<0.33, this is Toy {version}" in str(raised.value)
    assert "start without --load-format mx" in str(raised.value)


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_an_engine_is_found_under_each_of_its_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ENGINE.installed() == ""
    distribution(tmp_path, "toy-engine-cpu", "0.32.4")
    assert ENGINE.installed() == "0.32.4"


def test_adapters_that_are_announced_are_listed_and_a_broken_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_adapter.py").write_text(
        "from mx_common.engines import Engine\nENGINE = Engine('Toy', ('toy-engine',), '>=1', 'do without')\n"
    )
    points = "[mx_common.engines]\ntoy = toy_adapter:ENGINE\nbroken = no_such_adapter:ENGINE\n"
    distribution(tmp_path, "toy-adapters", "1.0", points)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = dict(adapters())
    assert found["toy"] == Engine("Toy", ("toy-engine",), ">=1", "do without")
    assert "no_such_adapter" in str(found["broken"])


def test_the_packs_loggers_speak_through_the_engines_and_do_so_once() -> None:
    theirs = logging.getLogger("toy-engine")
    theirs.setLevel(logging.DEBUG)
    theirs.propagate = False
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    theirs.addHandler(handler)
    ours = [logging.getLogger(name) for name in ("mx_common", "mx_patches")]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in ours]
    root = list(logging.root.handlers)
    try:
        speak_through("toy-engine")
        speak_through("toy-engine")
        logging.getLogger("mx_common.load").debug("one line")
        assert said == ["one line"]
        assert logging.root.handlers == root
    finally:
        for logger, level, propagate, handlers in before:
            logger.level, logger.propagate, logger.handlers = level, propagate, handlers
        theirs.removeHandler(handler)
