"""Promises about the tree itself: where the environment is read, what an import does, how large a file may be."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mx_common.engines import adapters

ROOT = Path(__file__).parents[1]
ROOMS = ("mx_common", "adapters", "patches")
ENVS = ROOT / "mx_common" / "envs.py"
MAX_LINES = 400
# reads of the process environment, in every spelling that Python has
ENVIRONMENT = re.compile(r"\bos\.environ\b|\bgetenvb?\b|\benvironb\b|\bputenv\b|from os import .*\benviron\b")


def modules():
    """The source files that people write."""
    return [f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py")) if "_generated" not in f.parts]


def dotted(file):
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "mx_common" else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_whole_tree_is_looked_at():
    names = {dotted(file) for file in modules()}
    assert {
        "mx_common.envs",
        "mx_common.cli",
        "mx_common.load.loader",
        "mx_vllm.loader",
        "mx_patches.vllm_keep_weights",
    } <= names


def test_only_envs_names_the_process_environment():
    found = [str(f.relative_to(ROOT)) for f in modules() if f != ENVS and ENVIRONMENT.search(f.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize("line", ["x = os.environ['A']", "os.getenv('A')", "from os import path, environ", "os.environb[b'A']"])
def test_a_second_reader_of_the_environment_would_be_found(line):
    assert ENVIRONMENT.search(line)


def test_no_module_is_longer_than_one_idea():
    files = modules() + [f for room in ("scripts", "examples", "benchmarks", "tests") for f in (ROOT / room).rglob("*.py")]
    long = {str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text("utf-8").splitlines())) > MAX_LINES}
    assert long == {}


def test_every_module_has_a_docstring():
    # an empty file marks a package and says nothing
    files = [f for f in modules() if f.read_text("utf-8").strip()]
    assert [str(f.relative_to(ROOT)) for f in files if not ast.get_docstring(ast.parse(f.read_text("utf-8")))] == []


def test_every_package_tells_type_checkers_that_it_is_typed():
    packages = [
        ROOT / "mx_common",
        *(f.parent for room in ("adapters", "patches") for f in (ROOT / room).glob("*/__init__.py")),
    ]
    assert len(packages) >= 3
    assert [str(package) for package in packages if not (package / "py.typed").is_file()] == []


def in_a_fresh_process(code, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MX_", "UCX_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **variables}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_every_module_of_mx_common_changes_neither_environment_nor_loggers_nor_signals():
    names = [dotted(file) for file in modules() if dotted(file).startswith("mx_common")]
    code = f"""
import importlib, json, logging, os, signal, sys, threading
import torch, typer, rich.live  # what libraries do at their own import is not ours
before = (dict(os.environ), list(logging.root.handlers), logging.root.level, signal.getsignal(signal.SIGTERM))
raising = logging.raiseExceptions
for name in {names!r}:
    importlib.import_module(name)
after = (dict(os.environ), list(logging.root.handlers), logging.root.level, signal.getsignal(signal.SIGTERM))
ours = [n for n, l in logging.root.manager.loggerDict.items() if n.startswith("mx") and getattr(l, "handlers", None)]
threads = [t.name for t in threading.enumerate() if t.name.startswith("mx")]
print(json.dumps([before == after, logging.raiseExceptions == raising, ours, threads, len({names!r})]))
"""
    same, raising, ours, threads, count = in_a_fresh_process(code)
    assert (same, raising, ours, threads) == (True, True, [], [])
    assert count > 40


CORE = (
    "envs",
    "errors",
    "engines",
    "speaking",
    "identity",
    "topology",
    "source_load",
    "selection",
    "floor",
    "metrics",
    "patching",
    "directory",
    "directory.client",
    "cli",
)


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_neither_torch_nor_an_engine_nor_nixl(name):
    code = f"""
import json, sys
import mx_common.{name}
heavy = {{"torch", "vllm", "sglang", "nixl", "nixl_cu12", "nixl_cu13", "redis", "transformers"}}
print(json.dumps(sorted(heavy & set(sys.modules))))
"""
    assert in_a_fresh_process(code) == []


ENGINE_GROUPS = {"vllm.stat_logger_plugins"}
GROUPS = {"console_scripts", "vllm.general_plugins", "sglang.srt.plugins", "mx_common.engines", "mx_common.patches"}


def test_every_entry_point_of_the_distribution_resolves():
    points = [point for point in metadata.distribution("mx-adapters").entry_points if point.group not in ENGINE_GROUPS]
    assert {point.group for point in points} == GROUPS
    for point in points:
        assert point.load() is not None


def test_the_entry_point_that_needs_the_engine_names_a_class_that_is_there():
    # resolved by its source: importing it would import all of vLLM
    (point,) = metadata.distribution("mx-adapters").entry_points.select(group="vllm.stat_logger_plugins")
    file = ROOT / "adapters" / Path(*point.module.split(".")).with_suffix(".py")
    assert point.attr in {node.name for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_range_of_an_engine_is_the_same_wherever_it_is_stated(name):
    engine = dict(adapters())[name]
    requirements = map(Requirement, metadata.requires("mx-adapters"))
    (extra,) = [r.specifier for r in requirements if r.name == name]
    assert str(extra) == ",".join(sorted(engine.supported.split(",")))
    for file in (ROOT / "patches").rglob(f"{name}_*.py"):
        assert importlib.import_module(dotted(file)).PATCH.versions == engine.supported


@pytest.mark.parametrize("name", ["mx_vllm", "mx_sglang"])
def test_the_adapter_of_an_engine_is_thin(name):
    files = sorted((ROOT / "adapters" / name).glob("*.py"))
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) < 500


@pytest.mark.parametrize("name", ["mx_vllm", "mx_sglang"])
def test_the_page_of_engines_states_the_range_of_an_adapter_and_what_was_run_is_pinned_and_within(name):
    engine = importlib.import_module(name).ENGINE
    page = (ROOT / "docs" / "engines.md").read_text("utf-8")
    (stated,) = re.findall(rf"^\| {engine.name} \| `([^`]+)` \| `adapters/{name}` \|", page, re.MULTILINE)
    assert stated == engine.supported
    ((run, file),) = re.findall(rf"^\| {engine.name} \| ([0-9.]+) \|.*\| `(requirements/[a-z-]+\.txt)` \|$", page, re.MULTILINE)
    pins = dict(re.findall(r"^([a-z-]+)==(\S+)$", (ROOT / file).read_text("utf-8"), re.MULTILINE))
    assert [pins[distribution] for distribution in engine.distributions if distribution in pins] == [run]
    assert engine.supports(run)
