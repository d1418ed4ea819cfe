"""The load of an engine reaches the workers of its host, and only while its writer lives."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx_common.errors import ConfigError
from mx_common.source_load import EngineLoad, ServingLoad

WRITER = """
import sys, time
from mx_common.source_load import ServingLoad
ServingLoad("engine", int(sys.argv[1])).publish(float(sys.argv[2]), ready=sys.argv[3] == "ready")
print("published", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run" / "serving"


@pytest.fixture
def writers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(10)


def start(writers: list[subprocess.Popen[str]], index: int, load: float, ready: str = "ready") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(index), str(load), ready]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    writers.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "published\n"
    return process


def test_what_another_process_publishes_is_read_until_it_is_killed(
    writers: list[subprocess.Popen[str]], directory: Path
) -> None:
    writer = start(writers, 0, 0.4)
    reading = ServingLoad("engine", 0).read()
    assert reading is not None
    assert (reading.load, reading.ready) == (0.4, True)
    assert EngineLoad(ServingLoad("engine", 0)).read() == 0.4
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    assert ServingLoad("engine", 0).read() is None
    assert list(directory.iterdir()) == []


def test_of_two_writers_of_one_engine_the_busier_counts(writers: list[subprocess.Popen[str]]) -> None:
    start(writers, 0, 0.2)
    start(writers, 0, 0.7, "starting")
    reading = ServingLoad("engine", 0).read()
    assert reading is not None
    assert (reading.load, reading.ready) == (0.7, True)


def test_engines_and_instances_do_not_mix() -> None:
    channels = [
        ServingLoad("a/b", 0),
        ServingLoad("a/b", 1),
        ServingLoad("a_b", 0),
        ServingLoad("../a*b", 0),
        ServingLoad("é" * 300, 0),
    ]
    for i, channel in enumerate(channels):
        assert channel.publish(i / 10, ready=True)
    assert [reading.load for channel in channels if (reading := channel.read())] == [0.0, 0.1, 0.2, 0.3, 0.4]


def test_a_later_value_replaces_the_earlier_and_closing_takes_it_away(directory: Path) -> None:
    channel = ServingLoad("engine")
    assert channel.read() is None
    channel.publish(0.2, ready=False)
    channel.publish(7.0, ready=True)
    reading = channel.read()
    assert reading is not None
    assert (reading.load, reading.ready) == (1.0, True)
    channel.close()
    channel.close()
    assert channel.read() is None
    assert list(directory.iterdir()) == []


def test_threads_of_one_writer_do_not_get_in_each_others_way(directory: Path) -> None:
    channel = ServingLoad("engine")
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.extend([channel.publish(0.5, ready=True) for _ in range(50)])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [True] * 200
    assert len(list(directory.iterdir())) == 1


def test_a_load_that_is_not_finite_is_not_published() -> None:
    channel = ServingLoad("engine")
    assert not channel.publish(float("nan"), ready=True)
    assert channel.read() is None


def rewrite(directory: Path, **changes: object) -> None:
    """Change what this process published."""
    (path,) = directory.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_entry_older_than_the_bound_is_no_reading_by_the_monotonic_clock(directory: Path) -> None:
    channel = ServingLoad("engine")
    channel.publish(0.4, ready=True)
    (path,) = directory.glob("*.json")
    os.utime(path, (0, 0))  # what the wall clock says does not matter
    assert channel.read() is not None
    assert channel.read(max_age=0.0) is None
    rewrite(directory, at=json.loads(path.read_text())["at"] - 61)
    assert channel.read() is None


@pytest.mark.parametrize("changes", [{"boot": "another"}, {"started": "1"}, {"pid": 2**22 + 1}])
def test_an_entry_of_another_boot_or_of_the_pids_earlier_owner_is_no_reading_and_removed(
    directory: Path, changes: dict[str, object]
) -> None:
    channel = ServingLoad("engine")
    channel.publish(0.4, ready=True)
    rewrite(directory, **changes)
    assert channel.read() is None
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x"}', "null"])
def test_an_entry_that_makes_no_sense_is_no_reading(directory: Path, text: str) -> None:
    channel = ServingLoad("engine")
    channel.publish(0.4, ready=True)
    (path,) = directory.glob("*.json")
    path.write_text(text)
    assert channel.read() is None


@pytest.mark.parametrize("changes", [{"load": 1.5}, {"load": float("nan")}, {"at": 1e12}, {"load": "busy"}])
def test_an_entry_with_a_value_out_of_range_is_no_reading(directory: Path, changes: dict[str, object]) -> None:
    channel = ServingLoad("engine")
    channel.publish(0.4, ready=True)
    rewrite(directory, **changes)
    assert channel.read() is None


def test_the_directory_is_for_this_user_alone(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    ServingLoad("engine").publish(0.4, ready=True)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_that_is_a_link_is_refused_with_one_warning(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    directory.parent.mkdir()
    directory.symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        assert not ServingLoad("engine").publish(0.4, ready=True)
    assert ServingLoad("engine").read() is None
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert caplog.text.count("is not published") == 1
    assert "MX_RUNTIME_DIR" in caplog.text


def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    directory.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(directory, 12345, -1)
        refused = not ServingLoad("engine").publish(0.4, ready=True)
    else:  # only root can give a directory away; root's own directory then is another user's
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MX_RUNTIME_DIR", "/proc/1")
            refused = not ServingLoad("engine").publish(0.4, ready=True)
    assert refused


@pytest.mark.parametrize(("instance", "index"), [("", 0), (None, 0), ("engine", -1), ("engine", "0"), ("engine", True)])
def test_a_key_that_names_no_engine_is_refused(instance: object, index: object) -> None:
    with pytest.raises(ConfigError, match="ServingLoad"):
        ServingLoad(instance, index)  # type: ignore[arg-type]
