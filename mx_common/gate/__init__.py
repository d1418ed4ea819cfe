"""Turns records into a verdict that fails a job: for a regression, and for evidence that is not there.

    evidence = read(["logs/", "-"])
    outcome = judge(evidence, Wanted(ranks=frozenset(range(8)), paths=frozenset({"reshard"})), Limits())
    outcome.code            # 0 pass, 1 regression, 2 no evidence; 1 wins over 2

Invariant: green means that transfers were measured against a floor, as many as were expected, and none of them was a regression.
"""

from mx_common.gate.evidence import Evidence, Transfer, Trouble, read
from mx_common.gate.rules import Finding, Limits, Outcome, Wanted, judge

__all__ = ["Evidence", "Finding", "Limits", "Outcome", "Transfer", "Trouble", "Wanted", "judge", "read"]
