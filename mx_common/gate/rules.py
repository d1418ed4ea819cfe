"""The rules of the gate: what makes a run a regression, and what makes it no evidence.

    outcome = judge(evidence, Wanted(), Limits(max_slow_share=0.01))
    outcome.code, outcome.findings          # worst first

A static floor misses two things: a rank that is slow among its like, and a run that slows down. Both are judged by medians and means of the
run itself. Invariant: a function of its arguments; every rule that fails the run says so in a finding.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mx_common.errors import ConfigError
from mx_common.gate.evidence import STEPLESS, Evidence, Transfer
from mx_common.load.tensors import some_names

__all__ = ["Finding", "Limits", "Outcome", "Wanted", "judge"]

PASS, REGRESSION, NO_EVIDENCE = 0, 1, 2
COHORT_SHARE, STRAGGLER_STEPS, DRIFT = 0.5, 0.5, 1.2
_NAMED = 8


@dataclass(frozen=True)
class Wanted:
    """Evidence that has to be there: paths; of each model on them (on every path, when none is named) steps, or so many of them, and
    ranks in each step. None: whatever there is. Raises ConfigError for evidence that asks for nothing."""

    ranks: frozenset[int] | None = None
    steps: frozenset[int] | None = None
    step_count: int | None = None
    paths: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "step_count", "paths"):
            value = getattr(self, name)
            if value is not None and not value:
                raise ConfigError(
                    f"expected {name}: nothing is expected, so nothing could be missing; leave it out, or name what has to be there"
                )


@dataclass(frozen=True)
class Limits:
    """`max_slow_share`: of measured transfers, that may be slow. `warmup`: first steps of each path that are not judged by speed.
    `allow_unmeasured`: transfers below the size bound are no missing evidence."""

    max_slow_share: float = 0.0
    warmup: int = 0
    allow_unmeasured: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_slow_share <= 1:
            raise ConfigError(f"max_slow_share={self.max_slow_share}: give a share from 0 to 1")
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup}: give a number of steps from 0")


@dataclass(frozen=True)
class Finding:
    """`rule`: impossible, slow, straggler, drift (regressions), record, floor, unmeasured, missing, empty (no evidence)."""

    rule: str
    kind: Literal["regression", "no evidence"]
    text: str
    file: str = ""
    line: int = 0

    @property
    def where(self) -> str:
        """File and line, or "" for a finding about the whole run."""
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True)
class Outcome:
    """`counts`: transfers by verdict. `dropped`: transfers of warm-up steps."""

    findings: tuple[Finding, ...]
    counts: dict[str, int] = field(default_factory=dict)
    dropped: int = 0

    @property
    def code(self) -> int:
        """0 pass, 1 regression, 2 no evidence; 1 wins."""
        kinds = {finding.kind for finding in self.findings}
        return REGRESSION if "regression" in kinds else NO_EVIDENCE if kinds else PASS


def judge(evidence: Evidence, wanted: Wanted, limits: Limits) -> Outcome:
    """The verdict on a run."""
    transfers = evidence.transfers
    warm = _warm_up(transfers, limits.warmup)
    judged = [row for row in transfers if (row.path, row.model, row.step) not in warm]
    findings = [
        *_impossible(transfers),
        *_slow(judged, limits.max_slow_share),
        *_stragglers(judged),
        *_drift(judged),
        *(Finding("record", "no evidence", trouble.what, trouble.file, trouble.line) for trouble in evidence.troubles),
        *_unmeasured(transfers, limits.allow_unmeasured),
        *_unarmed(transfers, limits.allow_unmeasured),
        *_missing(transfers, wanted),
    ]
    if not transfers:
        findings.append(Finding("empty", "no evidence", "no record of a transfer was found"))
    elif all(row.verdict == "unmeasured" for row in transfers) and limits.allow_unmeasured:
        findings.append(Finding("empty", "no evidence", "no transfer was measured"))
    for path, model in sorted({(row.path, row.model) for row in transfers} - {(row.path, row.model) for row in judged}):
        text = f"{path} of {model or 'the model'}: every step was dropped as warm-up ({limits.warmup})"
        findings.append(Finding("empty", "no evidence", text))
    counts: dict[str, int] = defaultdict(int)
    for row in transfers:
        counts[row.verdict] += 1
    return Outcome(tuple(findings), dict(counts), len(transfers) - len(judged))


def _warm_up(transfers: Iterable[Transfer], steps: int) -> set[tuple[str, str, int | None]]:
    of_run: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in transfers if steps else ():
        if row.step is not None:
            of_run[row.path, row.model].add(row.step)
    return {(path, model, step) for (path, model), found in of_run.items() for step in sorted(found)[:steps]}


def _impossible(transfers: Iterable[Transfer]) -> Iterator[Finding]:
    for row in transfers:
        if row.verdict == "impossible":
            text = f"{row.name}: {_rate(row)} is above the ceiling of {row.ceiling:g} Gbit/s, so the payload did not move"
            yield Finding("impossible", "regression", text, row.file, row.line)


def _slow(transfers: Sequence[Transfer], share: float) -> Iterator[Finding]:
    measured = [row for row in transfers if row.verdict in ("ok", "slow")]
    slow = sorted((row for row in measured if row.verdict == "slow"), key=lambda row: row.gbps or 0.0)
    if len(slow) <= share * len(measured):
        return
    for row in slow:
        text = f"{row.name}: {_rate(row)} is below the floor of {row.floor or 0:g} Gbit/s"
        yield Finding("slow", "regression", text, row.file, row.line)


def _stragglers(transfers: Iterable[Transfer]) -> Iterator[Finding]:
    """A rank under half its cohort's median in half of its steps. A cohort: one path, model and step."""
    cohorts: dict[tuple[str, str, int | None], list[Transfer]] = defaultdict(list)
    for row in transfers:
        if row.gbps is not None and row.rank is not None and row.verdict in ("ok", "slow"):
            cohorts[row.path, row.model, row.step].append(row)
    steps: dict[tuple[str, str, int, str], list[tuple[Transfer, float]]] = defaultdict(list)
    for rows in cohorts.values():
        if len({(row.rank, row.host) for row in rows}) < 2:
            continue
        median = statistics.median(row.gbps or 0.0 for row in rows)
        for row in rows:
            steps[row.path, row.model, row.rank or 0, row.host].append((row, median))
    for (path, _, rank, host), rows_of in steps.items():
        late = [(row, median) for row, median in rows_of if (row.gbps or 0.0) < COHORT_SHARE * median]
        if late and len(late) >= STRAGGLER_STEPS * len(rows_of):
            row, median = min(late, key=lambda pair: (pair[0].gbps or 0.0) / pair[1])
            text = (
                f"{path} rank {rank} on {host}: under half its cohort's median rate in {len(late)} of {len(rows_of)} steps "
                f"(worst in step {row.step}: {_rate(row)} against {median:.1f})"
            )
            yield Finding("straggler", "regression", text, row.file, row.line)


def _drift(transfers: Iterable[Transfer]) -> Iterator[Finding]:
    """The last third of the steps against the first third."""
    runs: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in transfers:
        if row.step is not None and row.seconds is not None and row.verdict in ("ok", "slow"):
            runs[row.path, row.model][row.step].append(row.seconds)
    for (path, model), steps in runs.items():
        means = [statistics.fmean(steps[step]) for step in sorted(steps)]
        third = len(means) // 3
        if not third:
            continue
        first, last = statistics.fmean(means[:third]), statistics.fmean(means[-third:])
        if 0 < first < last / DRIFT:
            text = f"{path} of {model or 'the model'}: the last third of {len(means)} steps took {last / first:.2f} x the first third"
            yield Finding("drift", "regression", f"{text} ({last:.3f} s against {first:.3f} s)")


def _accepted(row: Transfer, allowed: bool) -> bool:
    return allowed and row.reason == "below_min_bytes"


def _unmeasured(transfers: Iterable[Transfer], allowed: bool) -> Iterator[Finding]:
    for row in transfers:
        if row.verdict == "unmeasured" and not _accepted(row, allowed):
            yield Finding(
                "unmeasured", "no evidence", f"{row.name}: unmeasured, {row.reason or 'no reason given'}", row.file, row.line
            )


def _unarmed(transfers: Iterable[Transfer], allowed: bool) -> Iterator[Finding]:
    bare = [row for row in transfers if not row.armed and (row.verdict != "unmeasured" or _accepted(row, allowed))]
    if bare:
        first = bare[0]
        text = f"{len(bare)} transfers were held against no floor: set MX_RESHARD_MIN_GBPS where they run"
        yield Finding("floor", "no evidence", text, first.file, first.line)


def _missing(transfers: Sequence[Transfer], wanted: Wanted) -> Iterator[Finding]:
    """Of each model of each path that is wanted (of all paths, when none is named). Loads belong to no step."""
    for path in sorted((wanted.paths or frozenset()) - {row.path for row in transfers}):
        yield Finding("missing", "no evidence", f"no transfer on path {path}")
    runs: dict[tuple[str, str], dict[int | None, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in transfers:
        if wanted.paths is None or row.path in wanted.paths:
            runs[row.path, row.model][row.step] |= set() if row.rank is None else {row.rank}
    models = Counter(path for path, _ in runs)
    for (path, model), ranks in sorted(runs.items()):
        name = f"{path} of {model or 'no model'}" if models[path] > 1 else path
        found = ranks.keys() - {None}
        if path != STEPLESS and wanted.step_count is not None and len(found) < wanted.step_count:
            yield Finding("missing", "no evidence", f"{name}: {len(found)} steps, not {wanted.step_count}")
        if path != STEPLESS and (lacking := (wanted.steps or frozenset()) - found):
            yield Finding("missing", "no evidence", f"{name}: no transfer in {_listed('step', lacking)}")
        for step, present in sorted(ranks.items(), key=lambda item: (item[0] is not None, item[0] or 0)):
            if lacking := (wanted.ranks or frozenset()) - present:
                where = name if step is None else f"{name} step {step}"
                yield Finding("missing", "no evidence", f"{where}: no transfer of {_listed('rank', lacking)}")


def _listed(what: str, numbers: Iterable[int]) -> str:
    every = [str(number) for number in sorted(numbers)]
    return f"{what}{'s' if len(every) > 1 else ''} {some_names(every, _NAMED)}"


def _rate(row: Transfer) -> str:
    return "an unknown rate" if row.gbps is None else f"{row.gbps:.1f} Gbit/s"
