"""What a module offers, as Markdown: signatures and docstrings, read from its source.

    markdown = of_module("mx_common.selection")                     # all that its __all__ names
    markdown = of_module("mx_common.refit", ["Held", "Publisher"])

Invariant: nothing is imported, so the page of an adapter builds where its engine is not installed. A name that is re-exported is shown as
it is written where it is defined.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Module", "module", "of_module"]

ROOT = Path(__file__).resolve().parent.parent
PLACES = (ROOT, ROOT / "adapters", ROOT / "patches")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A module's source. `defined`: its top-level statements by the name they bind; `imported`: names from elsewhere, as (module, name)."""

    name: str
    lines: list[str]
    doc: str
    defined: dict[str, ast.stmt]
    imported: dict[str, tuple[str, str]]

    @property
    def public(self) -> list[str]:
        """What `__all__` lists; none without one."""
        node = self.defined.get("__all__")
        return list(ast.literal_eval(node.value)) if isinstance(node, ast.Assign) else []

    def find(self, name: str) -> tuple[Module, ast.stmt]:
        """Where `name` is defined, through imports. Raises LookupError."""
        if name in self.defined:
            return self, self.defined[name]
        if name in self.imported:
            place, original = self.imported[name]
            return module(place).find(original)
        raise LookupError(f"{self.name} has no {name}")


@cache
def module(name: str) -> Module:
    """The module called `name`. Raises LookupError when this tree has none."""
    stem = Path(*name.split("."))
    files = [file for place in PLACES for file in (place / stem / "__init__.py", place / f"{stem}.py") if file.is_file()]
    if not files:
        raise LookupError(f"there is no module {name} in {', '.join(str(place.relative_to(ROOT.parent)) for place in PLACES)}")
    text = files[0].read_text("utf-8")
    tree = ast.parse(text)
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        else:
            defined |= dict.fromkeys(_bound(node), node)
    return Module(name, text.splitlines(), ast.get_docstring(tree) or "", defined, imported)


def of_module(name: str, names: Sequence[str] = ()) -> str:
    """Markdown of `names`, or of all that is public, one heading of level 3 each. Raises LookupError for what is not public."""
    source = module(name)
    unknown = sorted(set(names) - set(source.public))
    if unknown or not source.public:
        raise LookupError(
            f"{name} offers {', '.join(source.public) or 'nothing'}; not {', '.join(unknown) or 'even an __all__'}"
        )
    parts = []
    for public in names or source.public:
        place, node = source.find(public)
        parts += [f"### `{public}`", *filter(None, _shown(place, node))]
    return "\n\n".join(parts) + "\n"


def _shown(place: Module, node: ast.stmt) -> Iterator[str]:
    if isinstance(node, _Function):
        yield _code(_header(place, node))
        yield ast.get_docstring(node) or ""
    elif isinstance(node, ast.ClassDef):
        yield from _class(place, node)
    else:
        yield _code(_slice(place, node.lineno, node.end_lineno or node.lineno))


def _class(place: Module, node: ast.ClassDef) -> Iterator[str]:
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and not _private(item.target)]
    methods = [item for item in node.body if isinstance(item, _Function)]
    made = [item for item in methods if item.name == "__init__"]
    body = [_slice(place, item.lineno, item.end_lineno or item.lineno) for item in fields] + [
        _header(place, item) for item in made
    ]
    header = _header(place, node) + (":" if body else "")
    yield _code("\n".join([header, *(textwrap.indent(part, "    ") for part in body)]))
    yield ast.get_docstring(node) or ""
    yield from (ast.get_docstring(item) or "" for item in made)
    for item in methods:
        if not item.name.startswith("_"):
            yield _code(_header(place, item))
            yield ast.get_docstring(item) or ""


def _header(place: Module, node: _Function | ast.ClassDef) -> str:
    """Decorators and signature, as they are written."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = max(node.lineno, node.body[0].lineno - 1)
    return _slice(place, first, last).rstrip().removesuffix(" ...").removesuffix(":")


def _slice(place: Module, first: int, last: int) -> str:
    return textwrap.dedent("\n".join(place.lines[first - 1 : last]))


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, _Function | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _private(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.startswith("_")
