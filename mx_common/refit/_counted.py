"""What becomes of versions, on the metrics page.

    count_installed("reshard", 7, {"wait": 0.1, "wire": 2.5})
    count_failure("staged", error, broken=False)

Invariant: every version that was asked for is counted once.
"""

from __future__ import annotations

from collections.abc import Mapping

from mx_common import metrics

__all__ = ["count_failure", "count_installed"]


def count_installed(path: str, version: int, seconds: Mapping[str, float]) -> None:
    """`version` serves. `seconds`: by stage."""
    metrics.REFITS.add(path=path, outcome="installed")
    metrics.REFIT_SECONDS.observe(sum(seconds.values()), path=path)
    for stage, taken in seconds.items():
        metrics.REFIT_STAGES.add(taken, path=path, stage=stage)
    metrics.SERVING_VERSION.set(version)
    metrics.EVENT_AGE.set(None, event="weights_broken")


def count_failure(path: str, reason: BaseException, *, broken: bool) -> None:
    """A version was not installed. `broken`: the engine serves nothing now, else what it served before."""
    metrics.REFITS.add(path=path, outcome="broken" if broken else "failed")
    metrics.REFIT_FAILURES.add(reason=type(reason).__name__)
    metrics.EVENT_AGE.mark(event="weights_broken" if broken else "refit_failed")
