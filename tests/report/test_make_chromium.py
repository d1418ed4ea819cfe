"""`make test` brings its own browser: it is installed where there is none, and where that cannot be a person is told what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = shutil.which("make")


@pytest.fixture
def make_chromium(tmp_path):
    """`make chromium` on a machine that has only these commands, each a script."""

    def make(uid=0, **commands):
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in ("find", "env", "rm"):
            (tools / name).symlink_to(shutil.which(name))
        for name, script in {"id": f"echo {uid}", **commands}.items():
            (tools / name.replace("_", "-")).write_text(f"#!/bin/sh\n{script}\n")
            (tools / name.replace("_", "-")).chmod(0o755)
        environment = {"PATH": str(tools), "SAID": str(tmp_path / "said")}
        done = subprocess.run(
            [MAKE, "-C", str(ROOT), "chromium", "SHELL=/bin/sh"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        said = tmp_path / "said"
        return done.returncode, said.read_text().splitlines() if said.exists() else [], done.stdout + done.stderr

    return make


APT = 'echo "$*" >> "$SAID"'


@pytest.mark.parametrize("name", ["chromium", "chromium_browser", "google_chrome"])
def test_a_browser_that_is_there_is_taken(make_chromium, name):
    code, said, _ = make_chromium(**{name: "true"}, apt_get=APT)
    assert (code, said) == (0, [])


@pytest.mark.parametrize(
    ("uid", "others"), [(0, {}), (1000, {"sudo": 'echo sudo >> "$SAID"; exec "$@"'})], ids=["root", "a user"]
)
def test_one_that_is_missing_is_installed(make_chromium, uid, others):
    code, said, text = make_chromium(uid, apt_get=APT, **others)
    assert code == 0, text
    assert [line for line in said if line != "sudo"][-1].endswith(" chromium")
    assert ("sudo" in said) == (uid != 0)


@pytest.mark.parametrize("commands", [{}, {"apt_get": "exit 100"}], ids=["no apt-get", "apt-get fails"])
def test_where_it_cannot_be_installed_it_is_said_what_to_do(make_chromium, commands):
    code, _, text = make_chromium(**commands)
    assert code != 0
    assert "install it, so that chromium, chromium-browser or google-chrome is on the PATH" in text
