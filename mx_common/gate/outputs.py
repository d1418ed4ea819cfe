"""A verdict in the forms that other programs read: JSON, JUnit XML, annotations of a GitHub job.

Invariant: what comes out of a record is escaped for the form it is written in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from mx_common.gate.rules import Finding, Outcome

__all__ = ["BROKEN", "RULES", "WORDS", "as_json", "github", "junit"]

RULES = {
    "impossible": "no transfer above its ceiling",
    "slow": "no transfer below its floor",
    "straggler": "no rank far behind its like",
    "drift": "the run does not slow down",
    "record": "every record is whole and known",
    "unmeasured": "every transfer was measured",
    "floor": "every transfer was held against a floor",
    "missing": "all expected ranks, steps and paths are there",
    "empty": "there is a transfer to judge",
}
# the same, said of a run that broke it `n` times
BROKEN = {
    "impossible": "Above the ceiling: {n}.",
    "slow": "Below the floor: {n}.",
    "straggler": "Ranks far behind their like: {n}.",
    "drift": "The run slows down.",
    "record": "Records that cannot be read: {n}.",
    "unmeasured": "Not measured: {n}.",
    "floor": "No floor was in force.",
    "missing": "Expected and not there: {n}.",
    "empty": "Nothing was judged.",
}
WORDS = {0: "pass", 1: "regression", 2: "no evidence"}
_SHOWN = 50


def as_json(outcome: Outcome) -> dict[str, Any]:
    """For `--json`: verdict, exit code, transfers by verdict, findings worst first."""
    findings = [asdict(finding) for finding in outcome.findings]
    head = {"verdict": WORDS[outcome.code], "code": outcome.code, "transfers": outcome.counts}
    return {**head, "dropped_as_warmup": outcome.dropped, "findings": findings}


def junit(outcome: Outcome) -> str:
    """One test case a rule: a failure for a regression, an error for missing evidence."""
    suite = ElementTree.Element("testsuite", name="mx gate", tests=str(len(RULES)))
    failures = errors = 0
    for rule, promise in RULES.items():
        case = ElementTree.SubElement(suite, "testcase", classname="mx gate", name=f"{rule}: {promise}")
        found = [finding for finding in outcome.findings if finding.rule == rule]
        if found:
            regression = found[0].kind == "regression"
            failures, errors = failures + regression, errors + (not regression)
            told = ElementTree.SubElement(case, "failure" if regression else "error", message=_clean(found[0].text))
            told.text = "\n".join(_clean(line(finding)) for finding in found[:_SHOWN])
    suite.set("failures", str(failures))
    suite.set("errors", str(errors))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def github(outcome: Outcome) -> Iterator[str]:
    """Workflow commands, one a finding."""
    for finding in outcome.findings[:_SHOWN]:
        place = f"file={_property(finding.file)},line={max(finding.line, 1)}," if finding.file else ""
        yield f"::error {place}title={_property(f'mx gate: {finding.rule}')}::{_data(finding.text)}"


def line(finding: Finding) -> str:
    """A finding with its place."""
    return f"{finding.where}: {finding.text}" if finding.where else finding.text


def _clean(text: str) -> str:
    """XML 1.0 has no way to say most control characters."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
