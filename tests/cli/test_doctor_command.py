"""What `mx doctor` promises. vLLM is hidden where its patches are not the matter: importing it takes many seconds."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mx_common.cli._checks import Check, engines, metrics_page, nics
from mx_common.errors import ConfigError
from tests.support.process import Process
from tests.support.scrape import scrape


@pytest.fixture
def examine(mx, blocked):
    """The findings of one run by name, and its exit code."""

    def run(*arguments, hidden=("vllm",), **variables):
        done = mx("doctor", "--json", *arguments, PYTHONPATH=blocked(*hidden), **variables)
        document = json.loads(done.out)
        assert document["healthy"] == (done.code == 0)
        assert all(check["fix"] for check in document["checks"] if check["state"] != "ok")
        found = {}
        for check in document["checks"]:
            found.setdefault(check["name"], []).append(check)
        return done.code, found

    return run


def test_a_machine_in_order_passes_with_versions_backends_nics_clocks_and_patches(examine, directory, register):
    register(directory.address, "w")
    code, found = examine(MX_SERVER_ADDRESS=directory.address)
    assert code == 0
    versions = found["versions"][0]["detail"]
    assert all(f"{name} " in versions for name in ("Python", "mx-adapters", "grpcio", "protobuf", "nixl", "torch"))
    assert "is within the supported range" in found["vLLM"][0]["detail"]
    assert found["NIXL"][0]["detail"].startswith("backend UCX starts")
    assert "1 MiB read between two agents over ucx" in found["transport"][0]["detail"]
    assert "UCX (DRAM, VRAM)" in found["NIXL plugins"][0]["detail"]
    assert found["NICs"]
    assert f"{directory.address} answers in" in found["directory"][0]["detail"]
    assert "1 READY" in found["directory"][0]["detail"]
    assert found["clocks"][0]["state"] == "ok"
    assert "No module named 'vllm'" in found["patch vllm-keep-weights"][0]["detail"]
    assert found["processes"]


def test_a_directory_whose_clock_is_an_hour_off_is_a_warning_with_the_difference(examine, serve):
    code, found = examine(MX_SERVER_ADDRESS=serve(ahead=3600).address)
    (clocks,) = found["clocks"]
    assert clocks["state"] == "warn"
    assert "s behind the directory" in clocks["detail"]
    assert 3590 < float(clocks["detail"].split()[3]) < 3610
    assert "NTP" in clocks["fix"]
    assert code == 0


def test_a_configured_directory_that_is_down_fails_with_the_fix(examine, free_port):
    code, found = examine(MX_SERVER_ADDRESS=f"127.0.0.1:{free_port}", MX_RPC_TIMEOUT="1")
    (check,) = found["directory"]
    assert (code, check["state"]) == (1, "fail")
    assert check["fix"] == f"start `mx server` on 127.0.0.1:{free_port}, or correct MX_SERVER_ADDRESS"


def test_an_embedded_directory_that_nobody_hosts_is_no_fault_but_a_stranger_on_its_port_is(examine, free_port):
    code, found = examine(MX_EMBEDDED_ADDRESS=f"127.0.0.1:{free_port}", MX_RPC_TIMEOUT="1")
    assert code == 0
    assert "the first replica will" in found["directory"][0]["detail"]
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        code, found = examine(MX_EMBEDDED_ADDRESS=address, MX_RPC_TIMEOUT="1")
    assert code == 1
    assert f"another program has {address}" in found["directory"][0]["detail"]
    assert "MX_EMBEDDED_ADDRESS" in found["directory"][0]["fix"]


def test_without_nixl_it_fails_and_says_what_to_install(examine):
    code, found = examine(hidden=("vllm", "nixl"))
    (check,) = found["NIXL"]
    assert (code, check["state"]) == (1, "fail")
    assert "No module named 'nixl'" in check["detail"]
    assert "pip install 'mx-adapters[nixl]'" in check["fix"]


def test_a_backend_that_does_not_exist_fails_with_the_variable_that_names_it(examine):
    code, found = examine(MX_NIXL_BACKEND="BOGUS")
    assert code == 1
    assert "BOGUS" in found["NIXL"][0]["detail"]
    assert "MX_NIXL_BACKEND" in found["NIXL"][0]["fix"]


def test_a_nixl_that_hangs_is_ended_and_named_and_leaves_no_process(examine, tmp_path, environment):
    fake = tmp_path / "fake"
    (fake / "nixl").mkdir(parents=True)
    (fake / "nixl" / "__init__.py").write_text("")
    (fake / "nixl" / "_api.py").write_text(
        "import os, time\nopen(os.environ['HUNG'], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    done = subprocess.run(
        [Path(sys.executable).parent / "mx", "doctor", "--json", "--patience", "5"],
        env={**environment, "PYTHONPATH": str(fake), "HUNG": str(tmp_path / "pid"), "MX_DISABLE_PATCHES": "1"},
        capture_output=True,
        timeout=300,  # of the 600 that the import hangs
        check=False,
    )
    (check,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "NIXL"]
    assert (done.returncode, check["state"]) == (1, "fail")
    assert check["detail"] == "importing NIXL took more than 5 s and was ended"
    assert check["fix"]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_a_nixl_that_crashes_is_named_with_its_signal(examine, tmp_path, mx):
    (tmp_path / "fake" / "nixl").mkdir(parents=True)
    (tmp_path / "fake" / "nixl" / "__init__.py").write_text("")
    (tmp_path / "fake" / "nixl" / "_api.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    done = mx("doctor", PYTHONPATH=str(tmp_path / "fake"), MX_DISABLE_PATCHES="1", COLUMNS="150")
    assert done.code == 1
    assert "importing NIXL ended with signal SIGSEGV" in done.out
    assert "1 failed, 2 warned" in done.out  # the switched-off patches are the warnings


def test_bad_settings_fail_or_warn_by_what_they_decide_and_name_their_fix(examine):
    code, found = examine(
        MX_TRANSFER_TIMEOUT="soon",
        MX_P2P_LOAD_WEIGHT="nan",
        MX_TRANSFER_TIMEOUTS="5",
        MX_MODEL_NAME=os.fsdecode(b"m\xff"),
        MX_P2P_TOPOLOGY="rack r1",
        MX_P2P_SOURCE_SELECTOR="fastest",
    )
    assert code == 1
    states = {check["detail"].split("=")[0].split(" ")[0]: check["state"] for check in found["settings"]}
    assert states == {
        "MX_TRANSFER_TIMEOUT": "fail",
        "MX_P2P_LOAD_WEIGHT": "warn",
        "MX_MODEL_NAME": "warn",
        "MX_TRANSFER_TIMEOUTS": "warn",
    }
    (misspelt,) = [check for check in found["settings"] if "TIMEOUTS" in check["detail"]]
    assert misspelt["fix"] == "did you mean MX_TRANSFER_TIMEOUT?"
    assert found["policy"][0]["detail"] == "random"
    said = " ".join(check["detail"] for check in found["selection"])
    assert "'fastest' is unknown" in said
    assert "MX_P2P_TOPOLOGY='rack r1' cannot be used" in said


@pytest.mark.parametrize(("taken", "warned"), [("8k", True), ("256k", False)])
def test_sending_larger_pieces_over_tcp_than_readers_take_is_warned_of(examine, taken, warned):
    _, found = examine(UCX_TCP_TX_SEG_SIZE="256k", UCX_TCP_RX_SEG_SIZE=taken)
    said = [check["detail"] for check in found["settings"] if check["state"] == "warn"]
    assert any("corrupts tcp readers" in detail for detail in said) is warned


def installed(site, name, version, entry_points=""):
    """A distribution of nothing but its metadata, in a folder on the path."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_an_engine_outside_the_supported_range_fails_with_the_range(blocked, mx):
    site = Path(blocked("vllm"))
    installed(site, "vllm", "0.99.0")
    done = mx("doctor", "--json", PYTHONPATH=str(site))
    (check,) = [c for c in json.loads(done.out)["checks"] if c["name"] == "vLLM"]
    assert (done.code, check["state"]) == (1, "fail")
    assert check["detail"] == "0.99.0 is outside the supported range >=0.32,<0.33"
    assert "pip install 'vllm>=0.32,<0.33'" in check["fix"]
    patches = [c["detail"] for c in json.loads(done.out)["checks"] if c["name"].startswith("patch ")]
    assert patches
    assert all("vllm 0.99.0 is outside" in detail for detail in patches)


TOYS = """[mx_common.engines]
absent = toy_adapters:ABSENT
present = toy_adapters:PRESENT
other = toy_adapters:OTHER
broken = toy_adapters:NOTHING
"""


def test_every_adapters_engine_is_listed_as_absent_supported_or_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    installed(tmp_path, "toy-present", "1.5")
    installed(tmp_path, "toy-other-cpu", "2.0")
    installed(tmp_path, "toy-adapters", "1", TOYS)
    (tmp_path / "toy_adapters.py").write_text(
        "from mx_common.engines import Engine\n"
        "ABSENT = Engine('Absent', ('toy-absent',), '>=1,<2', 'do without')\n"
        "PRESENT = Engine('Present', ('toy-present',), '>=1,<2', 'do without')\n"
        "OTHER = Engine('Other', ('toy-other', 'toy-other-cpu'), '>=1,<2', 'do without')\n"
    )
    found = {check.name: check for check in engines()}
    assert (found["Absent"].state, found["Absent"].detail) == ("ok", "not installed; supported: >=1,<2")
    assert (found["Present"].state, found["Present"].detail) == ("ok", "1.5 is within the supported range >=1,<2")
    assert (found["Other"].state, found["Other"].detail) == ("fail", "2.0 is outside the supported range >=1,<2")
    assert found["Other"].fix == "pip install 'toy-other>=1,<2'; until then the pack is refused: do without"
    assert found["engine broken"].state == "warn"
    assert "NOTHING" in found["engine broken"].detail


def test_a_runtime_directory_that_cannot_be_written_fails(examine, tmp_path):
    (tmp_path / "file").write_text("")
    code, found = examine(MX_RUNTIME_DIR=str(tmp_path / "file"))
    assert code == 1
    assert "MX_RUNTIME_DIR" in found["host-local files"][0]["fix"]


def test_a_piped_report_fits_80_columns(mx, blocked):
    out = mx("doctor", PYTHONPATH=blocked("vllm")).out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-1] == "nothing is wrong"


def test_rdma_ports_are_reported_with_their_state_and_rate(tmp_path):
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    up, down, *_ = nics(tmp_path)
    assert (up.state, up.detail) == ("ok", "mlx5_0:1 400 Gb/sec (4X NDR)")
    assert (down.state, down.detail) == ("warn", "mlx5_1:1 is 1: DOWN")


def test_a_finding_that_is_not_ok_cannot_be_made_without_a_fix():
    with pytest.raises(ConfigError, match="give a fix"):
        Check("x", "fail", "broken")


def test_the_metrics_page_is_off_or_answers_or_is_somebody_elses(monkeypatch, free_port, tmp_path):
    def found():
        (check,) = metrics_page()
        return check

    monkeypatch.delenv("MX_METRICS_PORT", raising=False)
    assert found().detail == "off; MX_METRICS_PORT turns them on"
    variables = {"MX_METRICS_PORT": str(free_port), "MX_RUNTIME_DIR": str(tmp_path / "run")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert found().detail.startswith(f"nobody serves 127.0.0.1:{free_port} yet")
    process = Process("-m", "tests.support.metrics_child", 0, env=variables)
    try:
        scrape(free_port)
        assert found().detail == f"http://127.0.0.1:{free_port}/metrics answers for the processes of this host"
    finally:
        process.end()
    with http.server.HTTPServer(("127.0.0.1", free_port), http.server.BaseHTTPRequestHandler) as stranger:
        threading.Thread(target=stranger.handle_request, daemon=True).start()
        check = found()
    assert (check.state, "another program has it" in check.detail) == ("warn", True)
    assert "MX_METRICS_PORT" in check.fix
