"""Which vLLM versions this adapter was really run with.

Invariant: refused outside the range when the load format is used, never when vLLM merely has the plugin installed.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from mx_common.errors import UnsupportedVersion

__all__ = ["SUPPORTED", "check_version"]

SUPPORTED = ">=0.32,<0.33"


def check_version(version: str) -> None:
    """Raises UnsupportedVersion with the supported range."""
    if not SpecifierSet(SUPPORTED, prereleases=True).contains(version):
        raise UnsupportedVersion(
            f"mx-adapters was run with vLLM {SUPPORTED}, this is vLLM {version}. Install a version in the range, or start without "
            "--load-format mx"
        )
