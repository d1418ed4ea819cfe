"""What a policy does to a fleet, before a fleet has to show it.

    scenario = Scenario(loads=(0.0,) + (0.5,) * 31, targets=128)      # one source is idle, 31 are half busy
    figures = simulate(scenario, "balanced")
    figures.peak_p99                    # picks of the most picked source over the mean, in the worst of 100 trials
    [row.promise for row in accept("balanced") if not row.passed]

The policy is the one that a load would use, third-party ones included: only the fleet is made up. Invariant: figures are a function of
the scenario, the name of the policy and its settings; two policies are shown the same fleets. A policy that draws from a generator of
its own is the exception, unless it is `random`, which is given one.
"""

from mx_common.simulate.acceptance import Judged, accept
from mx_common.simulate.figures import Figures
from mx_common.simulate.run import simulate
from mx_common.simulate.scenario import BUSY_LOAD, Scenario, grid, parse_snapshot

__all__ = ["BUSY_LOAD", "Figures", "Judged", "Scenario", "accept", "grid", "parse_snapshot", "simulate"]
