"""Promises about the documents: what they name is there, and their site builds without a warning and without the network."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from mx_common._policies import BUILT_IN
from mx_common.load import Settings
from mx_megatron import add_mx_arguments
from scripts import signatures
from tests.support import pages as said
from tests.support.pages import ROOT, Page

PAGES = said.pages()
CHECKS = [
    said.wrong_commands,
    said.wrong_options,
    said.wrong_targets,
    said.wrong_variables,
    said.wrong_paths,
    said.wrong_links,
    said.wrong_names,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("wrong_"))
def test_documents_name_only_what_is_there(check):
    assert {page.name: wrong for page in PAGES if (wrong := check(page))} == {}


def test_the_documents_are_looked_at():
    names = {page.name for page in PAGES}
    assert {"README.md", "docs/vllm.md", "examples/ci/github-actions.yml"} <= names
    found = [command for page in PAGES for command in said.commands(page)]
    assert {"server", "sources", "explain", "doctor", "gate", "report", "envs"} <= {name for name, _ in found}
    assert ("gate", "- --junit gate.xml --html gate.html") in found
    assert sum("--expect-steps 100" in rest for _, rest in found) == 3


@pytest.mark.parametrize(
    ("check", "text", "wrong"),
    [
        (said.wrong_commands, "`mx gait run.log`", "mx gait: there is"),
        (said.wrong_commands, "```\nkubectl logs x | mx gate - --expect-rank 8\n```", "No such option: --expect-rank"),
        (said.wrong_commands, "    MX_RPC_TIMEOUT=1 mx explain org/model --rank one    # why", "one"),
        (said.wrong_commands, "| a |\n|---|\n| `mx explain --json` |", "MODEL"),
        (said.wrong_options, "`--max-slow-shares 0.1`", "--max-slow-shares"),
        (said.wrong_targets, "    make dem   # sets up", "dem"),
        (said.wrong_variables, "Set MX_RPC_TIMEOUTS.", "MX_RPC_TIMEOUTS"),
        (said.wrong_paths, "`tests/support/fleets.py`", "tests/support/fleets.py"),
        (said.wrong_links, "[a](recordings.md)", "recordings.md"),
        (said.wrong_links, "[a](records.md#no-such-heading)", "records.md#no-such-heading"),
        (said.wrong_links, "# Rules\n\n[a](#rule)", "#rule"),
        (said.wrong_links, "![a](images/none.png)", "images/none.png"),
        (said.wrong_names, "`mx_common.refit.Publishers`", "mx_common.refit.Publishers"),
        (said.wrong_names, "`mx_common.reffit`", "mx_common.reffit"),
        (said.wrong_names, "    from mx_vllm.drive import refit, refit_servers", "mx_vllm.drive.refit_servers"),
    ],
)
def test_what_is_not_there_is_found(check, text, wrong):
    (found,) = check(Page("docs/gate.md", text))
    assert wrong.lower() in found.lower()


@pytest.mark.parametrize(
    "text",
    [
        "`mx = MxPublish(model)`, `mx.publish(step)`",
        "`mx gate`",
        "    mx server        # on one host; with --store redis://… on several",
        "```\nkubectl logs -l app=rollout --prefix | mx gate - --junit gate.xml\n```",
        "# Why *not*?\n\n[a](#why-not) [b](python.md#mx_commonselection) [c](../examples/ci/gitlab-ci.yml) [d](https://host/path)",
        "`org/model`, `training/callbacks.py`, `--warmup 2`, `MX_RPC_TIMEOUT`, `mx_megatron`, `from mx_megatron import …`",
    ],
)
def test_what_is_there_or_not_ours_passes(text):
    assert [check(Page("docs/gate.md", text)) for check in CHECKS] == [[]] * len(CHECKS)


def generated(*arguments):
    script = [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check", *arguments]
    return subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)


def test_generated_pages_are_up_to_date():
    done = generated()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("stale", "old", "new"), [("configuration.md", "# Config", "# Old config"), ("metrics.md", "| counter |", "| gauge |")]
)
def test_a_generated_page_that_is_out_of_date_is_found(tmp_path, stale, old, new):
    for name in ("configuration.md", "metrics.md"):
        text = (ROOT / "docs" / name).read_text("utf-8")
        (tmp_path / name).write_text(text.replace(old, new) if name == stale else text)
    done = generated("--docs", str(tmp_path))
    assert done.returncode == 1
    assert f"{stale} is out of date; run: python scripts/generate_docs.py" in done.stderr


def rows(page, heading):
    """The names in the first cells of a page's table, whose first heading is `heading`."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [line.split("`")[1].split()[0] for line in table[1].splitlines()]


def test_pages_list_every_setting_of_a_loader_every_flag_of_megatron_and_every_policy():
    assert rows("vllm.md", "key") == [field.name for field in dataclasses.fields(Settings)]
    parser = add_mx_arguments(argparse.ArgumentParser(add_help=False))
    assert rows("trainers.md", "flag") == [action.option_strings[0] for action in parser._actions]
    assert rows("selection.md", "policy") == list(BUILT_IN)


def test_the_page_of_the_architecture_has_every_room():
    named = {
        part for span in Page.read(ROOT / "docs" / "architecture.md").spans for part in (span, span.removeprefix("mx_common."))
    }
    rooms = {file.stem for file in (ROOT / "mx_common").iterdir() if file.suffix == ".py" or (file / "__init__.py").is_file()}
    assert {room for room in rooms if not room.startswith("_")} - named == set()


@pytest.mark.parametrize("schema", sorted((ROOT / "docs" / "schemas").glob("*.json")), ids=lambda file: file.stem)
def test_the_page_of_records_explains_every_field_of_a_schema(schema):
    explained = set(Page.read(ROOT / "docs" / "records.md").spans)
    assert set(json.loads(schema.read_text("utf-8"))["properties"]) <= explained


def test_every_module_that_users_may_lean_on_has_its_signatures_on_a_page():
    shown = {match[1] for page in PAGES for match in re.finditer(r"^<!-- signatures: (\S+)", page.text, re.MULTILINE)}
    assert {f"mx_common.{name}" for name in signatures.module("mx_common").public} <= shown
    assert {"mx_fsdp", "mx_megatron", "mx_vllm.drive", "mx_sglang.drive"} <= shown


def test_signatures_are_those_of_the_code_where_it_is_defined():
    text = signatures.of_module("mx_common.selection", ["register_selector", "Target"])
    assert (
        "### `register_selector`\n\n```python\ndef register_selector(name: str, factory: Callable[[], Ordering]) -> None\n```"
        in text
    )
    assert "class Target:\n    model_name: str\n    worker_id: str\n    worker_rank: int\n```" in text  # of another module
    assert "Make `factory()` the policy `name`; a later registration" in text


@pytest.mark.parametrize(
    ("module", "names", "message"),
    [
        ("mx_common.selection", ["register_selectors"], "mx_common.selection offers Candidate, .*; not register_selectors"),
        ("mx_common.load.chain", [], "there is no module mx_common.load.chain"),
        ("mx_common._once", ["_said"], "mx_common._once offers warn_once; not _said"),
    ],
)
def test_a_name_that_a_module_does_not_offer_has_no_signature(module, names, message):
    with pytest.raises(LookupError, match=message):
        signatures.of_module(module, names)


def test_signatures_import_nothing_of_what_they_show():
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from scripts import signatures
signatures.of_module("mx_vllm.drive"); signatures.of_module("mx_fsdp"); signatures.of_module("mx_common.refit")
assert not {{"mx_vllm", "mx_fsdp", "mx_common", "torch", "vllm"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-S", "-c", code], timeout=60, check=True)


def build(tree, site):
    """As `make lint` does."""
    options = ["-q", "-W", "-n", "-E", "-a", "-c", "docs", "-d", f"{site}.doctrees"]
    command = [sys.executable, "-m", "sphinx", "-b", "html", *options, ".", str(site)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, out)
    assert (done.returncode, done.stderr) == (0, "")
    return out


class Links(HTMLParser):
    """What a page links to and what it loads by itself, and the places in it that can be linked to."""

    def __init__(self, file):
        super().__init__()
        self.links, self.loads, self.places = [], [], {""}
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.places.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("next", "prev", "search", "index"):
            self.loads.append(values["href"])
        elif values.get("src"):
            self.loads.append(values["src"])


def outside(address):
    return address.startswith("//") or re.match(r"[a-z]+:(?!image/)", address) is not None


def test_the_site_takes_nothing_from_the_network(site):
    loaded = {(file.name, address) for file in site.rglob("*.html") for address in Links(file).loads}
    assert len(loaded) > 50
    assert {found for found in loaded if outside(found[1])} == set()
    sheets = [
        address
        for file in site.rglob("*.css")
        for address in re.findall(r"(?:url\(|@import )['\"]?([^'\")]+)", file.read_text("utf-8"))
    ]
    assert [address for address in sheets if outside(address)] == []


def test_every_link_of_the_site_leads_somewhere(site):
    files = {file: Links(file) for file in site.rglob("*.html")}
    broken = []
    for file, page in files.items():
        for address in filter(lambda address: not outside(address), page.links + page.loads):
            path, _, place = address.partition("#")
            target = (file.parent / unquote(path.partition("?")[0])).resolve() if path else file
            if not target.exists() or (target in files and unquote(place) not in files[target].places):
                broken.append(f"{file.name}: {address}")
    assert broken == []
    assert (site / "index.html").is_file()


def test_the_site_shows_signatures_and_the_pages_it_was_built_from(site):
    text = re.sub("<[^>]+>", "", (site / "docs" / "python.html").read_text("utf-8"))
    assert "def register_selector(name: str" in text
    assert "class MxPublish" in text
    start = (site / "index.html").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="docs/{page.stem}.html"' in start


def test_a_page_that_is_not_in_the_navigation_and_links_that_lead_nowhere_fail_the_build(tmp_path):
    tree = tmp_path / "tree"
    for name in ("docs", "scripts", "examples/ci", "examples/grafana", "examples/prometheus"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("mx_common", "adapters"):
        (tree / name).symlink_to(ROOT / name)
    (tree / "benchmarks").mkdir()
    for name in ("README.md", "LICENSE", "benchmarks/RESULTS.md"):
        shutil.copyfile(ROOT / name, tree / name)
    forgotten = "# Forgotten\n\n[a](../examples/none.yml) [b](vllm.md#none) [c](#nowhere) [d](../examples/ci)\n"
    (tree / "docs" / "forgotten.md").write_text(forgotten)
    done = build(tree, tmp_path / "site")
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert len(told) == 5
    for fault in (
        "isn't included in any toctree",
        "'../examples/none.yml'",
        "'docs/vllm': 'none'",
        "'nowhere'",
        "'../examples/ci'",
    ):
        assert any("docs/forgotten.md" in line and fault in line for line in told), told
