"""What a policy must do before a fleet may use it: the list that `balanced` was accepted by.

    for row in accept("mine"): print(row.passed, row.promise, row.measured, row.limit)

All targets share one snapshot. Invariant: a limit depends on the number of trials only where sampling does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mx_common.simulate.figures import Figures
from mx_common.simulate.run import simulate
from mx_common.simulate.scenario import Scenario

__all__ = ["SCENARIOS", "Judged", "accept"]

SCENARIOS = 4
_EACH = 4  # targets for each source
_SIGMAS = 3


@dataclass(frozen=True)
class Judged:
    """One row of the list: what was measured, and the most that is accepted."""

    promise: str
    measured: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.limit


def accept(policy: str, *, seed: int = 0, trials: int = 300, on_trial: Callable[[], None] | None = None) -> list[Judged]:
    """Run the list for the policy of this name; `on_trial` is called `SCENARIOS` x `trials` times. Raises ConfigError as `simulate`."""

    def run(loads: tuple[float, ...], leaving: int = 0) -> Figures:
        scenario = Scenario(loads, _EACH * len(loads), trials=trials, seed=seed, leaving=leaving)
        return simulate(scenario, policy, on_trial)

    small, large = run((0.0,) * 8, leaving=1), run((0.0,) * 32)
    busy, one_idle = run((0.9,) * 4 + (0.0,) * 12), run((0.0,) + (0.5,) * 31)
    return [
        Judged("8 idle sources: p99 of max/mean picks", small.peak_p99, 3.0),
        Judged("32 idle sources: p99 of max/mean picks", large.peak_p99, 3.5),
        Judged("4 of 16 sources at load 0.9: share of picks on them", _known(busy.busy_share), 0.01),
        Judged("1 idle source, 31 at load 0.5: mean of max/mean picks", one_idle.peak_mean, 4.0),
        Judged("1 of 8 sources leaves: share of other targets that move", _known(small.moved_on_leave), 0.0),
        Judged("1 source joins 7: share of targets that move", _known(small.moved_on_join), _one_in(8, trials)),
    ]


def _one_in(sources: int, trials: int) -> float:
    """The share of the one that joined, and three standard deviations of its mean over the trials."""
    share = 1 / sources
    return share + _SIGMAS * math.sqrt(share * (1 - share) / (trials * _EACH * sources))


def _known(share: float | None) -> float:
    """A share of targets, of which these scenarios always have some: when every pick is on the source that leaves, nobody else moves."""
    return 0.0 if share is None else share
