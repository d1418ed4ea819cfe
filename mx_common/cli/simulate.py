"""`mx simulate`: what policies would do to a fleet, in figures and as a picture.

Invariant: the policies are those of a load; the same options and seed give the same figures.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress

from mx_common import envs
from mx_common._plotly import need_plotly
from mx_common.cli._output import cell, line, make_console, make_table, print_json, show
from mx_common.cli._policy import policy_option
from mx_common.errors import ConfigError
from mx_common.simulate import Figures, Judged, Scenario, accept, grid, parse_snapshot, simulate
from mx_common.simulate.acceptance import SCENARIOS
from mx_common.simulate.plot import write_page
from mx_common.simulate.scenario import LEVELS, MAX_SOURCES, MAX_TARGETS, MAX_TRIALS, Place
from mx_common.topology import levels

__all__ = ["command"]

_TRIALS, _SOURCES, _EACH = 300, 32, 4
_PLOT = typer.Option(None, "--plot", help="Write a page with the figures as plots to this file (extra: report).")


def command(
    policy: str = typer.Option(None, help="Policies, separated by commas. [default: MX_P2P_SOURCE_SELECTOR]"),
    sources: int = typer.Option(None, min=1, max=MAX_SOURCES, help="Number of sources. [default: 32]"),
    targets: int = typer.Option(
        None, min=1, max=MAX_TARGETS, help="Number of targets that choose at once. [default: 4 for each source]"
    ),
    idle: int = typer.Option(None, min=0, help="So many sources have load 0; needs --rest. [default: all]"),
    rest: float = typer.Option(None, min=0, max=1, help="Load of the other sources."),
    loads: str = typer.Option(
        None, help="Real loads and places instead: a file with what `mx sources --json` prints, or a JSON list; - for a pipe."
    ),
    noise: float = typer.Option(None, min=0, max=1, help="Standard deviation of published loads. [default: 0]"),
    fresh: float = typer.Option(
        None, min=0, max=1, help="Share of targets that see who reads already; the others share one snapshot. [default: 0]"
    ),
    topology: str = typer.Option(None, help="Zones x racks in each x hosts in each: 2x4x4. [default: none]"),
    leaving: int = typer.Option(None, min=0, help="Sources that leave, and join again. [default: 1]"),
    attempts: int = typer.Option(None, min=1, help="Sources that a target tries. [default: MX_P2P_MAX_SOURCES]"),
    trials: int = typer.Option(_TRIALS, min=1, max=MAX_TRIALS, help="Number of fleets that are drawn."),
    seed: int = typer.Option(0, min=0, help="Another seed draws other fleets."),
    acceptance: bool = typer.Option(False, "--acceptance", help="Run the acceptance list instead; exit 1 when a policy fails."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    plot: Path = _PLOT,
) -> None:
    """Show what policies do to a fleet: who is picked how often, how near, and what moves when a source leaves or joins.

    \b
    Examples:
      mx simulate --policy balanced,load_aware,random --idle 1 --rest 0.5
      mx simulate --policy balanced --sources 64 --topology 2x4x8 --fresh 0.5 --plot fleet.html
      mx sources --model org/model --json | mx simulate --policy balanced --loads -
      mx simulate --policy mine --acceptance

    \b
    most picked source over mean  picks of the most picked source over the mean of all sources;
                                  a pick is the first choice of a target
    time of a load                1 where every source has the same number of readers; all start
                                  together, and a source shares its bandwidth equally among them.
                                  What requests take from a source is left out
    picks on busy sources         on those with a load of 0.8 or more
    narrowest shared              targets by the narrowest level they share with the source picked
    tried another domain          targets with an attempt outside the narrowest domain of the
                                  first, of those that could have one
    moved by a leave              targets that change their source though it stays
    moved by a join               targets that change their source

    The policies are the ones that a load uses, with the settings of this shell. One of yours is found by its entry point and learns the
    place of its target from mx_common.topology.local_topology(). Time grows with trials x targets x sources: 300 x 128 x 32 takes
    seconds for each policy, 300 x 4000 x 1000 an hour. --leaving 0 halves it.

    Exit 1 when --acceptance and a policy fails a row, or when a policy cannot be run.
    """
    chosen = _policies(policy)
    fleet = (sources, targets, idle, rest, loads, noise, fresh, topology, leaving, attempts, plot)
    if acceptance:
        if any(value is not None for value in fleet):
            raise typer.BadParameter(
                "--acceptance has fleets of its own: give only --policy, --trials, --seed and --json with it"
            )
        _accept(chosen, seed, trials, as_json)
        return
    try:
        known, hosts, names = _snapshot(loads, sources, idle, rest, topology)
        scenario = Scenario(
            known,
            targets or _EACH * len(known),
            trials=trials,
            seed=seed,
            noise=noise or 0.0,
            fresh=fresh or 0.0,
            max_readers=envs.MAX_READERS.get(),
            hosts=hosts,
            levels=names,
            leaving=min(1, len(known) - 1) if leaving is None else leaving,
            attempts=attempts or envs.MAX_SOURCES.get(),
        )
        if plot is not None and not plot.absolute().parent.is_dir():
            raise ConfigError(f"--plot {plot}: there is no folder {plot.absolute().parent}")
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error)) from error
    if plot is not None:
        need_plotly("a plot")  # before the work, not after it
    with _progress(len(chosen) * trials) as on_trial:
        results = {name: simulate(scenario, name, on_trial) for name in chosen}
    if plot is not None:
        try:
            write_page(plot, _words(scenario), results)
        except OSError as error:
            raise typer.BadParameter(f"--plot: {error}") from error
    if as_json:
        print_json({"scenario": asdict(scenario), "policies": {name: figures.document() for name, figures in results.items()}})
    else:
        _print(make_console(), scenario, results)


def _policies(text: str | None) -> list[str]:
    """Names without repetition, in their order."""
    named = (envs.SOURCE_SELECTOR.get() if text is None else text).split(",")
    return list(dict.fromkeys(name for one in named if (name := policy_option(one))))


def _snapshot(
    loads: str | None, sources: int | None, idle: int | None, rest: float | None, topology: str | None
) -> tuple[tuple[float | None, ...], tuple[Place, ...], tuple[str, ...]]:
    """Loads, places and levels. Raises ConfigError for options that do not go together, OSError for a file."""
    hosts = () if topology is None else _grid(topology)
    if loads is not None:
        if (sources, idle, rest) != (None, None, None):
            raise ConfigError("--loads gives the sources and their loads: leave out --sources, --idle and --rest")
        known, places = parse_snapshot(_piped() if loads == "-" else Path(loads).read_text("utf-8"))
        return (known, hosts, LEVELS) if hosts else (known, places, levels())
    count = sources or _SOURCES
    if idle is not None and rest is None:
        raise ConfigError("--idle says how many sources are idle: give the load of the others with --rest")
    if (idle or 0) > count:
        raise ConfigError(f"--idle {idle} of {count} sources: give at most as many as there are")
    free = (0 if rest is not None else count) if idle is None else idle
    return (0.0,) * free + (rest or 0.0,) * (count - free), hosts, LEVELS


def _piped() -> str:
    """All that standard input holds. Raises ConfigError where there is none."""
    if sys.stdin is None:
        raise ConfigError("--loads -: standard input is closed: pipe in what `mx sources --json` prints, or name a file")
    return sys.stdin.read()


def _grid(text: str) -> tuple[Place, ...]:
    match = re.fullmatch(r"\s*(\d{1,4})\s*x\s*(\d{1,4})\s*x\s*(\d{1,4})\s*", text)
    if match is None:
        raise ConfigError(f"--topology {text!a}: give zones x racks x hosts, such as 2x4x4")
    return grid(int(match[1]), int(match[2]), int(match[3]))


@contextmanager
def _progress(trials: int) -> Iterator[Callable[[], None]]:
    """Calls that move a bar on a terminal, on stderr; nothing is drawn elsewhere."""
    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=trials)
        yield lambda: progress.advance(task)


def _accept(policies: list[str], seed: int, trials: int, as_json: bool) -> None:
    with _progress(len(policies) * trials * SCENARIOS) as on_trial:
        judged = {name: accept(name, seed=seed, trials=trials, on_trial=on_trial) for name in policies}
    passed = all(row.passed for rows in judged.values() for row in rows)
    if as_json:
        rows = [{"policy": name, **asdict(row), "passed": row.passed} for name, rows in judged.items() for row in rows]
        print_json({"trials": trials, "seed": seed, "passed": passed, "rows": rows})
    else:
        _print_judged(make_console(), judged)
    if not passed:
        raise typer.Exit(1)


def _print_judged(console: Console, judged: dict[str, list[Judged]]) -> None:
    table = make_table(console, "policy", "promise", "measured", "limit", "", whole=("policy", "measured", "limit", ""))
    for name, rows in judged.items():
        for row in rows:
            verdict = cell("pass", "green") if row.passed else cell("FAIL", "red")
            table.add_row(cell(name), cell(row.promise), cell(f"{row.measured:.4g}"), cell(f"{row.limit:.4g}"), verdict)
    show(console, table)


def _print(console: Console, scenario: Scenario, results: dict[str, Figures]) -> None:
    line(console, _words(scenario))
    table = make_table(console, "", *results, whole=tuple(results))
    for rows in zip(*(figures.named() for figures in results.values()), strict=True):
        if any(row.value is not None for row in rows):
            table.add_row(cell(rows[0].name), *(cell(_number(row.value, row.share)) for row in rows))
    show(console, table)


def _words(scenario: Scenario) -> str:
    """The scenario in one line."""
    kinds = Counter(scenario.loads)
    if len(kinds) <= 3:
        load = ", ".join(f"{count} at load {'unknown' if value is None else f'{value:g}'}" for value, count in kinds.items())
    else:
        load = f"{len(kinds)} loads"
    parts = [f"{scenario.sources} sources ({load})", f"{scenario.targets} targets"]
    if any(scenario.hosts):
        parts.append(f"{len(set(scenario.hosts))} places")
    parts += [f"noise {scenario.noise:g}"] if scenario.noise else []
    parts += [f"{scenario.fresh:.0%} of targets see a fresh snapshot"] if scenario.fresh else []
    return ", ".join([*parts, f"{scenario.trials} trials, seed {scenario.seed}"])


def _number(value: float | None, share: bool) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if share else f"{value:.2f}"
