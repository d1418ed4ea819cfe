"""What `mx simulate` promises: figures for people and programs, a verdict for a policy under test, and one line for what is wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mx_common.cli import main
from mx_common.simulate import Scenario, simulate
from tests.cli.conftest import MX

QUICK = ("--sources", "8", "--trials", "5")


def test_policies_stand_side_by_side(mx):
    done = mx("simulate", "--policy", "balanced, Load_Aware", "--idle", "1", "--rest", "0.5", *QUICK)
    assert (done.code, done.err) == (0, "")
    words, headings, *rows = done.out.splitlines()
    assert words == "8 sources (1 at load 0, 7 at load 0.5), 32 targets, 5 trials, seed 0"
    assert headings.split() == ["balanced", "load_aware"]
    assert [row.split("  ")[0] for row in rows] == [
        "most picked source over mean: p50",
        "most picked source over mean: p99",
        "time of a load: mean",
        "time of a load: p99",
        "moved by a leave",
        "moved by a join",
    ]


def test_json_holds_the_scenario_and_the_figures_of_the_library(mx):
    arguments = ("--sources", "4", "--targets", "6", "--rest", "0.9", "--trials", "3", "--seed", "7", "--attempts", "2")
    document = json.loads(mx("simulate", "--policy", "balanced", "--json", *arguments).out)
    scenario = Scenario((0.9,) * 4, 6, trials=3, seed=7, attempts=2, leaving=1)
    assert document["scenario"]["loads"] == [0.9] * 4
    assert document["policies"] == json.loads(json.dumps({"balanced": simulate(scenario, "balanced").document()}))


def test_the_same_seed_gives_the_same_output_for_random_too(mx):
    first, again = (mx("simulate", "--policy", "random", "--json", *QUICK).out for _ in range(2))
    assert first == again


def test_settings_of_the_shell_are_in_force(mx):
    done = mx("simulate", "--json", *QUICK, MX_P2P_SOURCE_SELECTOR="load_aware", MX_P2P_MAX_SOURCES="2")
    document = json.loads(done.out)
    assert (list(document["policies"]), document["scenario"]["attempts"]) == (["load_aware"], 2)
    # without its load, load_aware orders by hash alone
    fleet = ("--policy", "load_aware,rendezvous_hash", "--idle", "1", "--rest", "0.9", *QUICK, "--json")
    weightless = json.loads(mx("simulate", *fleet, MX_P2P_LOAD_WEIGHT="0").out)["policies"]
    assert weightless["load_aware"] == weightless["rendezvous_hash"]


def test_a_topology_shows_how_near_the_picks_are(mx):
    done = mx("simulate", "--policy", "topology_aware,random", "--topology", "2x2x2", *QUICK)
    rows = {row.split("  ")[0]: row.split()[-2:] for row in done.out.splitlines()[2:]}
    assert rows["narrowest shared: host"][0] == "100.00%"
    assert {*(f"narrowest shared: {level}" for level in ("rack", "zone", "none")), "tried another domain"} <= set(rows)


def test_what_mx_sources_prints_can_be_piped_in(mx, environment, directory, register):
    for number, load in enumerate((0.1, 0.9, None)):
        register(directory.address, f"worker-{number}", load=load, topology={"zone": "a", "rack": f"r{number}"})
    listed = mx("sources", "--server", directory.address, "--json").out
    command = [MX, "simulate", "--policy", "balanced", "--loads", "-", "--trials", "2", "--json"]
    done = subprocess.run(command, input=listed, env=environment, capture_output=True, text=True, check=False, timeout=60)
    scenario = json.loads(done.stdout)["scenario"]
    assert scenario["loads"] == [0.1, 0.9, None]
    assert scenario["hosts"] == [{"zone": "a", "rack": f"r{number}"} for number in range(3)]
    assert scenario["levels"][:2] == ["region", "zone"]


def test_a_plot_is_written_beside_the_figures(mx, tmp_path):
    done = mx("simulate", "--policy", "balanced,random", "--plot", str(tmp_path / "fleet.html"), *QUICK)
    assert done.code == 0
    assert "balanced" in (tmp_path / "fleet.html").read_text("utf-8")


def test_without_plotly_the_error_names_the_extra_before_any_work(mx, blocked, tmp_path):
    plot = tmp_path / "fleet.html"
    done = mx("simulate", "--policy", "balanced", "--plot", str(plot), *QUICK, PYTHONPATH=blocked("plotly"))
    assert (done.code, done.out, plot.exists()) == (1, "", False)
    assert "pip install 'mx-adapters[report]'" in done.err
    assert len(done.err.splitlines()) == 1
    assert mx("simulate", "--policy", "balanced", *QUICK, PYTHONPATH=blocked("plotly")).code == 0


def test_a_policy_that_fails_a_row_of_the_acceptance_list_fails_the_job(mx):
    done = mx("simulate", "--policy", "balanced,random", "--acceptance", "--trials", "10", COLUMNS="200")
    assert done.code == 1
    rows = [row.split() for row in done.out.splitlines()[1:]]
    assert [(row[0], row[-1]) for row in rows[:6]] == [("balanced", "pass")] * 6
    assert {row[-1] for row in rows[6:]} == {"pass", "FAIL"}


def test_acceptance_passes_for_balanced_alone_and_as_json(mx):
    done = mx("simulate", "--policy", "balanced", "--acceptance", "--trials", "10", "--json")
    document = json.loads(done.out)
    assert (done.code, document["passed"], len(document["rows"])) == (0, True, 6)
    assert set(document["rows"][0]) == {"policy", "promise", "measured", "limit", "passed"}


@pytest.fixture
def third_party(tmp_path) -> str:
    """A PYTHONPATH with a distribution whose entry points are policies."""
    (tmp_path / "third_party.py").write_text(
        "class Same:\n    def order(self, candidates, target): return list(candidates)\n"
        "class Broken:\n    def order(self, candidates, target): raise KeyError('rack')\n"
        "class Talking(Same):\n    def order(self, *asked):\n        print('choosing', flush=True)\n        return super().order(*asked)\n"
    )
    info: Path = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mx_common.selectors]\n" + "".join(f"{name.lower()} = third_party:{name}\n" for name in ("Same", "Broken", "Talking"))
    )
    return str(tmp_path)


def test_a_third_partys_policy_is_simulated_and_one_that_fails_is_said(mx, third_party):
    done = mx("simulate", "--policy", "same", "--json", *QUICK, PYTHONPATH=third_party)
    assert json.loads(done.out)["policies"]["same"]["peak_p50"] == 8.0
    done = mx("simulate", "--policy", "broken", *QUICK, PYTHONPATH=third_party)
    assert (done.code, done.out) == (1, "")
    assert done.err == "mx: source policy 'broken' failed (KeyError('rack')): a load would use random in its place\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "balanced,fastest"), "'fastest'; known: random, rendezvous_hash, load_aware, topology_aware, balanced"),
        (("--policy", ""), "known: random"),
        (("--idle", "1"), "--rest"),
        (("--idle", "9", "--rest", "0.5", "--sources", "8"), "--idle 9 of 8"),
        (("--rest", "1.5"), "--rest"),
        (("--sources", "0"), "--sources"),
        (("--sources", "4", "--leaving", "4"), "at least one has to stay"),
        (("--topology", "2x4"), "such as 2x4x4"),
        (("--topology", "0x1x1"), "no host"),
        (("--topology", "9999x9999x9999"), "at most 100000"),
        (("--topology", "99x99x99", "--targets", "2", "--trials", "1"), "at most 100000"),
        (("--sources", "1000000000000"), "--sources"),
        (("--targets", "1000000000000"), "--targets"),
        (("--trials", "1000000000000"), "--trials"),
        (("--acceptance", "--trials", "1000000000000"), "--trials"),
        (("--sources", "40000", "--trials", "1000"), "at most 500 trials"),
        (("--loads", "nowhere.json"), "nowhere.json"),
        (("--loads", "-"), "not JSON"),
        (("--loads", "-", "--sources", "4"), "leave out --sources"),
        (("--plot", "/no/such/folder/fleet.html"), "no folder /no/such/folder"),
        (("--acceptance", "--sources", "8"), "--acceptance has fleets of its own"),
    ],
)
def test_wrong_usage_is_64_and_says_what_is_right(monkeypatch, capsys, arguments, says):
    # in this process: a table of processes would take a minute
    monkeypatch.setattr(sys, "argv", ["mx", "simulate", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (64, "")
    assert says in " ".join(shown.err.split())


def test_loads_from_a_standard_input_that_is_closed_are_wrong_usage(environment):
    closed = ["sh", "-c", 'exec "$0" simulate --loads - <&-', MX]
    done = subprocess.run(closed, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (64, "")
    assert "standard input is closed" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_unknown_policy_of_the_environment_is_wrong_usage_as_well(mx):
    done = mx("simulate", *QUICK, MX_P2P_SOURCE_SELECTOR="fastest")
    assert (done.code, done.out) == (64, "")
    assert "'fastest'; known: random" in done.err


def test_ctrl_c_ends_a_long_simulation(start_mx, third_party):
    running = start_mx("simulate", "--policy", "talking", "--trials", "100000", PYTHONPATH=third_party)
    running.wait_for("choosing")
    assert running.end() == 130


def test_help_teaches_what_the_figures_mean_and_what_takes_long(mx):
    out = " ".join(mx("simulate", "--help").out.split())
    words = ("mx simulate --policy mine --acceptance", "time of a load", "equally", "takes seconds", "--seed")
    assert all(word in out for word in words)
