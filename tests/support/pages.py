"""What the documents say in code, held against what is there.

    problems = wrong_commands(Page(ROOT / "docs" / "gate.md"))

Each check is a function of a page to the list of what is wrong on it, so that a test can also show a page that is wrong.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from markdown_it import MarkdownIt

from mx_common import cli, envs, floor
from scripts import signatures

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = typer.main.get_command(cli.app).commands
UsageError = typer.BadParameter.__mro__[1]
# behind a prompt, a pipe or an assignment, up to a comment or the next command
COMMAND = re.compile(r"(?:^|[|;&(]\s*|\w=\S*\s+|- )mx ([a-z][a-z-]*)(?![\w.(])([^|;&#\n]*)", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
TARGET = re.compile(r"(?:^|[;&]\s*)make ([a-z][a-z-]*)", re.MULTILINE)
VARIABLE = re.compile(r"\bMX_[A-Z0-9_]*[A-Z0-9]\b")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?")
IMPORT = re.compile(r"from (mx_[a-z]+[\w.]*) import ([\w, …]+)")
DOTTED = re.compile(r"(?<![\w./-])mx_[a-z]+(?:\.\w+)+")

# names that look like variables and begin lines of output; names of entry-point groups; what an author is to fill in
MARKERS = {floor.MARKER, floor.SLOW_MARKER, floor.IMPOSSIBLE_MARKER, floor.INSTALLED_MARKER, "MX_DEMO", "MX_DEMO_REFIT"}
GROUPS = {"mx_common.selectors", "mx_common.patches"}
PLACEHOLDERS = {"requirements/ENGINE.txt"}


@dataclass(frozen=True)
class Page:
    """A document. `spans`: code within a line; `blocks`: (language, text) of code that stands by itself."""

    name: str
    text: str

    @classmethod
    def read(cls, file: Path) -> Page:
        return cls(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))

    @property
    def blocks(self) -> list[tuple[str, str]]:
        return [(token.info.strip(), token.content) for token in self._tokens() if token.type in ("fence", "code_block")]

    @property
    def spans(self) -> list[str]:
        lines = [child for token in self._tokens() for child in token.children or ()]
        return [child.content for child in lines if child.type == "code_inline"]

    @property
    def code(self) -> list[str]:
        return self.spans + [text for _, text in self.blocks]

    @property
    def links(self) -> list[str]:
        lines = [child for token in self._tokens() for child in token.children or ()]
        return [
            str(child.attrs.get("href") or child.attrs.get("src")) for child in lines if child.type in ("link_open", "image")
        ]

    @property
    def anchors(self) -> set[str]:
        """Of its headings, as the repository's host makes them."""
        tokens = self._tokens()
        headings = [text for token, text in itertools.pairwise(tokens) if token.type == "heading_open"]
        texts = ["".join(child.content for child in heading.children or ()) for heading in headings]
        return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}

    def _tokens(self):
        return MarkdownIt("commonmark").enable("table").parse(self.text)


def pages() -> list[Page]:
    """Every document of the repository, and the jobs that documents lead to."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples" / "ci").glob("*.yml"))]
    return [Page.read(file) if file.suffix == ".md" else _job(file) for file in files]


def _job(file: Path) -> Page:
    # a command that is folded over several lines is one
    text = re.sub(r"\n\s+(?=--)", " ", file.read_text("utf-8"))
    lines = [line.strip().removeprefix("- run:").strip() for line in text.splitlines()]
    return Page(file.relative_to(ROOT).as_posix(), "```\n" + "\n".join(lines).replace(">-\n", "") + "\n```\n")


def commands(page: Page) -> Iterator[tuple[str, str]]:
    """(command, the rest of its line) of every `mx` in the page's code."""
    for code in page.code:
        for match in COMMAND.finditer(code):
            yield match[1], match[2].strip()


def wrong_commands(page: Page) -> list[str]:
    """Commands that `mx` does not have or would not take; of one that stands alone only the name counts."""
    wrong = []
    for name, rest in commands(page):
        if name not in COMMANDS:
            wrong.append(f"mx {name}: there is {', '.join(sorted(COMMANDS))}")
        elif rest:
            try:
                COMMANDS[name].make_context(name, shlex.split(rest))
            except UsageError as error:
                wrong.append(f"mx {name} {rest}: {error.format_message()}")
    return wrong


def wrong_options(page: Page) -> list[str]:
    """Options that the page of a command names in a sentence and the command does not have."""
    command = COMMANDS.get(Path(page.name).stem)
    if command is None:
        return []
    there = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    return sorted({option for span in page.spans for option in OPTION.findall(span)} - there)


def wrong_targets(page: Page) -> list[str]:
    """Targets that the Makefile does not have."""
    there = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    return sorted({target for code in page.code for target in TARGET.findall(code)} - there)


def wrong_variables(page: Page) -> list[str]:
    """Variables that `mx_common.envs` does not have."""
    return sorted(set(VARIABLE.findall(page.text)) - set(envs.TABLE) - MARKERS)


def wrong_paths(page: Page) -> list[str]:
    """Files and folders of this repository that are not there. Below a name that the repository does not have, a path is not ours."""
    named = {span for span in page.spans if PATH.fullmatch(span)} - PLACEHOLDERS
    return sorted(path for path in named if (ROOT / path.split("/")[0]).is_dir() and not (ROOT / path).exists())


def wrong_links(page: Page) -> list[str]:
    """Links inside the repository that lead nowhere where it is hosted."""
    wrong = []
    for link in page.links:
        path, _, anchor = link.partition("#")
        file = (ROOT / page.name).parent / path if path else ROOT / page.name
        if ":" in path:
            continue
        if not file.exists() or (anchor and anchor not in (page if not path else Page.read(file.resolve())).anchors):
            wrong.append(link)
    return wrong


def wrong_names(page: Page) -> list[str]:
    """Modules of ours that are not there, and names that they do not have; in sentences and in imports."""
    named = {dotted for span in page.spans for dotted in DOTTED.findall(span)} - GROUPS
    for code in page.code:
        for name, imported in IMPORT.findall(code):
            named |= {f"{name}.{part}" for part in re.findall(r"[A-Za-z_]\w*", imported)}
    return sorted(name for name in named if not _is_there(name))


def _is_there(dotted: str) -> bool:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = signatures.module(".".join(parts[:count]))
            if parts[count:]:
                found.find(parts[count])
        except LookupError:
            continue
        return True
    return False
