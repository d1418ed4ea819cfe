"""What `mx gate` and `mx report` have in common: inputs, what is expected of them, the verdict.

    evidence, outcome = judged(inputs, Rules(expect_ranks, expect_steps, expect_paths, max_slow_share, warmup, allow_unmeasured))

Invariant: the same arguments, the same verdict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from mx_common.errors import ConfigError
from mx_common.gate import Evidence, Limits, Outcome, Wanted, judge, read

__all__ = [
    "ALLOW_UNMEASURED",
    "EXPECT_PATHS",
    "EXPECT_RANKS",
    "EXPECT_STEPS",
    "INPUTS",
    "MAX_SLOW_SHARE",
    "WARMUP",
    "Rules",
    "judged",
]

INPUTS = typer.Argument(..., metavar="INPUT...", help="Log files, folders of them, gzip, files of records, - for a pipe.")
EXPECT_RANKS = typer.Option(None, help="Ranks that each step of each path must have: 8 (0 to 7), or 0,2,4-7.")
EXPECT_STEPS = typer.Option(None, help="Steps that each path must have: 100 (so many), or 1-100.")
EXPECT_PATHS = typer.Option(None, help="Paths that must be there: load,reshard,staged.")
MAX_SLOW_SHARE = typer.Option(0.0, help="Share of measured transfers that may be slow.")
WARMUP = typer.Option(0, help="First steps of each path that are not judged by speed.")
ALLOW_UNMEASURED = typer.Option(False, help="Transfers below MX_FLOOR_MIN_BYTES are no missing evidence.")
_MOST = 1 << 20


@dataclass(frozen=True)
class Rules:
    """As they were given on the command line."""

    expect_ranks: str | None
    expect_steps: str | None
    expect_paths: str | None
    max_slow_share: float
    warmup: int
    allow_unmeasured: bool

    def wanted(self) -> Wanted:
        """Raises ConfigError for what is no number."""
        steps = _numbers(self.expect_steps, "--expect-steps")
        count = int(self.expect_steps) if self.expect_steps is not None and self.expect_steps.strip().isdecimal() else None
        names = None if self.expect_paths is None else self.expect_paths.split(",")
        return Wanted(
            ranks=_ranks(self.expect_ranks),
            steps=steps if count is None else None,
            step_count=count,
            paths=None if names is None else frozenset(name.strip() for name in names if name.strip()),
        )


def judged(inputs: Sequence[str], rules: Rules) -> tuple[Evidence, Outcome]:
    """Raises ConfigError for rules that mean nothing and for an input that cannot be read."""
    wanted, limits = rules.wanted(), Limits(rules.max_slow_share, rules.warmup, rules.allow_unmeasured)
    evidence = read(inputs)
    return evidence, judge(evidence, wanted, limits)


def _ranks(text: str | None) -> frozenset[int] | None:
    if text is not None and text.strip().isdecimal():
        return frozenset(range(min(int(text), _MOST)))
    return _numbers(text, "--expect-ranks")


def _numbers(text: str | None, option: str) -> frozenset[int] | None:
    """`0,2,4-7` as numbers. Raises ConfigError."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None or not (first := int(match[1])) <= (last := int(match[2] or match[1])) <= _MOST:
            raise ConfigError(f"{option} {text!r}: write a number, or numbers and ranges such as 0,2,4-7")
        found.update(range(first, last + 1))
    return frozenset(found)
