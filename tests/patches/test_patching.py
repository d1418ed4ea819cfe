"""When a patch is applied, and what is left behind; with small real patches, found through real entry points."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from mx_common import patching
from mx_common.errors import ConfigError

PATCH_FILES = sorted(Path(__file__).parents[2].joinpath("patches", "mx_patches").glob("[a-z]*.py"))


@dataclass
class SmallPatch:
    """A patch of a package that every environment of this pack has."""

    name: str = "small"
    module: str = "packaging"
    versions: str = ">=1"
    reason: str = "shows what a patch is"
    upstream: str = "packaging.version"
    why_not: str = ""
    missing: str = ""
    asked: list = field(default_factory=list)

    def obstacle(self):
        self.asked.append(self.module)
        if self.missing:
            __import__(self.missing)
        return self.why_not

    def apply(self, listener):
        raise AssertionError("would() must not apply")


@pytest.fixture(autouse=True)
def _own_corner(monkeypatch, tmp_path):
    monkeypatch.setenv("MX_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("MX_DISABLE_PATCHES", raising=False)


def test_a_version_in_range_whose_precondition_holds_would_be_patched():
    outcome = patching.would(SmallPatch())
    assert (outcome.state, outcome.why) == ("applied", "shows what a patch is")


def test_a_version_outside_the_range_is_skipped_with_both_and_the_precondition_is_not_even_asked():
    patch = SmallPatch(versions=">=1,<2")
    outcome = patching.would(patch)
    assert outcome.state == "skipped"
    assert outcome.why == f"packaging {metadata.version('packaging')} is outside >=1,<2"
    assert patch.asked == []


def test_a_distribution_under_another_name_than_its_module_is_found():
    outcome = patching.would(SmallPatch(module="google"))
    assert outcome.state == "applied"
    assert patching.would(SmallPatch(module="grpc", versions=">=9999")).why.startswith("grpc 1.")


def test_a_framework_that_is_not_installed_is_skipped():
    assert patching.would(SmallPatch(module="no_such_framework")).why == "no_such_framework is not installed"


def test_a_framework_that_lost_what_the_patch_looks_at_is_skipped_not_an_error():
    outcome = patching.would(SmallPatch(missing="packaging.no_such_part"))
    assert outcome.state == "skipped"
    assert "no_such_part" in outcome.why


@pytest.mark.parametrize(("text", "state"), [("1", "disabled"), ("true", "disabled"), ("0", "applied"), ("", "applied")])
def test_patches_can_be_switched_off(monkeypatch, text, state):
    monkeypatch.setenv("MX_DISABLE_PATCHES", text)
    assert patching.would(SmallPatch()).state == state


def test_a_switch_that_is_no_flag_stops_instead_of_being_guessed(monkeypatch):
    monkeypatch.setenv("MX_DISABLE_PATCHES", "maybe")
    with pytest.raises(ConfigError, match="MX_DISABLE_PATCHES='maybe'"):
        patching.would(SmallPatch())


# A distribution with two patches: one that counts how often it was applied, one whose precondition does not hold.
THIRD_PARTY = """
class Counting:
    name, module, versions, reason, upstream = "counting", "packaging", ">=1", "counts", "packaging.version"
    applied = 0
    listeners = []
    def obstacle(self): return ""
    def apply(self, listener):
        type(self).applied = 1
        self.listeners.append(listener)
class Hindered(Counting):
    name = "hindered"
    def obstacle(self): return "packaging has no hook"
COUNTING, HINDERED = Counting(), Hindered()
"""


@pytest.fixture
def third_party(tmp_path):
    """Run `code` in a process where that distribution is installed; returns what it printed, as JSON."""
    site = tmp_path / "site"
    (site / "small-1.0.dist-info").mkdir(parents=True)
    (site / "small_patches.py").write_text(THIRD_PARTY)
    (site / "small-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
    (site / "small-1.0.dist-info" / "entry_points.txt").write_text(
        "[mx_common.patches]\ncounting = small_patches:COUNTING\nhindered = small_patches:HINDERED\nabsent = no_such_module:PATCH\n"
    )

    def run(code, **variables):
        prelude = "import json, logging, sys\nfrom mx_common import patching\nlog = logging.getLogger('t')\n"
        done = subprocess.run(
            [sys.executable, "-c", prelude + code],
            env={**os.environ, "PYTHONPATH": str(site), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(done.stdout), done.stderr

    return run


def test_a_patch_is_found_by_name_and_a_broken_one_beside_it_does_not_matter(third_party):
    code = "o = patching.apply('counting', log); import small_patches; print(json.dumps([o.state, small_patches.Counting.applied]))"
    assert third_party(code)[0] == ["applied", 1]


def test_a_patch_that_is_skipped_changes_nothing_and_warns_once(third_party):
    code = (
        "s = [patching.apply('hindered', log).state for _ in range(3)]; import small_patches\n"
        "print(json.dumps([s, small_patches.Hindered.applied]))"
    )
    facts, said = third_party(code)
    assert facts == [["skipped"] * 3, 0]
    assert said.splitlines() == ["patch hindered skipped: packaging has no hook"]


def test_nothing_is_applied_while_patches_are_switched_off(third_party):
    code = "o = patching.apply('counting', log); import small_patches; print(json.dumps([o.state, small_patches.Counting.applied]))"
    facts, said = third_party(code, MX_DISABLE_PATCHES="1")
    assert facts == ["disabled", 0]
    assert said == ""


def test_a_name_that_nobody_provides_is_an_error_that_lists_the_known_ones(third_party):
    code = "try:\n    patching.apply('no-such', log)\nexcept patching.ConfigError as error:\n    print(json.dumps(str(error)))"
    message = third_party(code)[0]
    assert "no patch is named 'no-such'" in message
    assert all(name in message for name in ("counting", "hindered", "vllm-keep-weights"))


def test_another_process_sees_what_a_live_process_applied_and_forgets_it_with_the_process(third_party):
    code = (
        "import os, subprocess\n"
        "patching.apply('counting', log); patching.apply('hindered', log)\n"
        "look = 'from mx_common import patching; print([(p, o.name, o.state) for p, o in patching.applied_on_this_host()])'\n"
        "seen = subprocess.run([sys.executable, '-c', look], capture_output=True, text=True, check=True).stdout\n"
        "print(json.dumps([os.getpid(), seen]))"
    )
    (pid, seen), _ = third_party(code)
    assert f"({pid}, 'counting', 'applied'), ({pid}, 'hindered', 'skipped')" in seen
    assert list(patching.applied_on_this_host()) == []


def test_a_note_whose_pid_belongs_to_a_later_process_is_not_believed(tmp_path):
    import socket

    folder = tmp_path / "run" / "patches"
    folder.mkdir(parents=True)
    outcomes = [{"name": "n", "state": "applied", "why": ""}]
    note = {"host": socket.gethostname(), "started": "1", "outcomes": outcomes}
    (folder / str(os.getpid())).write_text(json.dumps(note))
    (folder / "garbage").write_text("{")
    assert list(patching.applied_on_this_host()) == []


@pytest.mark.parametrize("file", PATCH_FILES, ids=lambda file: file.stem)
def test_every_patch_has_its_version_range_reason_and_upstream_reference(file):
    patch = __import__(f"mx_patches.{file.stem}", fromlist=["PATCH"]).PATCH
    ranges = list(SpecifierSet(patch.versions))
    assert {"<"} <= {specifier.operator for specifier in ranges}, "a patch is for versions it was run with: give an upper bound"
    assert len(patch.reason.split()) >= 3
    assert patch.upstream.startswith(f"{patch.module}.")
    text = file.read_text("utf-8")
    assert re.search(r"^Upstream: \S+\.py", text, re.MULTILINE)
    assert "Invariant: " in text


def test_every_patch_file_is_an_entry_point_under_its_own_name():
    points = {point.name: point.module for point in metadata.entry_points(group=patching.GROUP)}
    assert {name.replace("-", "_"): name for name in points}.keys() >= {file.stem for file in PATCH_FILES}
    assert all(patch.name == name for name, patch in patching.known().items())
