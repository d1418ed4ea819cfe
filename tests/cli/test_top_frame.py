"""What `mx top` draws of an answer, in the room there is."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from mx_common.cli._columns import Column, widths
from mx_common.cli._top_frame import Snapshot, frame, shares, what
from mx_common.cli.sources import SourceRow
from mx_common.directory import Activity, VersionInfo
from mx_common.directory.activities import MAX_BYTES, MAX_GBPS
from mx_common.directory.versions import State
from scripts import draw_top

GB = 10**9
SOURCE = SourceRow("org/model", 0, "READY", 0.25, {"rack": "r1"}, 4.0, 7, "cuda", "source-1", "id")
LOAD = Activity(
    "l", "target-1", "org/model", "load", "node-1", 0, 1, "vllm", None, "", ("source-1",), "wire", GB, 4 * GB, 8.0, 3.0
)
REFIT = replace(
    LOAD, activity_id="r", worker_id="engine-1", path="reshard", version=7, version_id="v7", sources=("rank0", "rank1")
)
VERSION = VersionInfo("v7", "org/model", 7, "run-a", State.READY, ("rank0", "rank1"), (), 3, 1, "", 0, 90.0)


def drawn(snapshot, width=200, room=None, bars=False):
    """The lines of a frame."""
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(frame(snapshot, width, room, bars=bars))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def rows(snapshot, heading, **how):
    """The cells of the part whose first heading this is, by row."""
    lines = drawn(snapshot, **how)
    first = next(number for number, line in enumerate(lines) if line.split()[:1] == [heading])
    part = lines[first : lines.index("", first) if "" in lines[first:] else None]
    return [re.split(r"\s{2,}", line.strip()) for line in part]


def test_a_load_is_drawn_with_who_reads_from_whom_how_far_how_fast_and_how_long_it_takes():
    headings, load = rows(Snapshot((), (LOAD,), ()), "reader")
    assert headings == ["reader", "rank", "host", "model", "what", "from", "stage", "done", "of", "Gbit/s", "left"]
    assert load == ["target-1", "0/1", "node-1", "org/model", "load", "source-1", "wire", "25 %", "4.0 GB", "8.0", "3 s"]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"version": None, "stage": "wait", "bytes_total": 0, "bytes_done": 0, "sources": (), "gbps": 0.0}, "refit  wait  0.0"),
        ({}, "refit to 7  rank0 +1  wire  25 %  4.0 GB  8.0  3 s"),
        ({"bytes_done": 4 * GB, "stage": "verify", "gbps": 0.0}, "refit to 7  rank0 +1  verify  100 %  4.0 GB  0.0"),
        ({"gbps": 0.036}, "refit to 7  rank0 +1  wire  25 %  4.0 GB  0.04  11 min"),
        ({"bytes_done": 4 * GB - 1}, "refit to 7  rank0 +1  wire  99 %  4.0 GB  8.0  0 s"),
        (
            {"bytes_total": 2_000_000, "bytes_done": 1_000_000, "sources": ("rank3",)},
            "refit to 7  rank3  wire  50 %  2 MB  8.0  0 s",
        ),
    ],
)
def test_a_refit_is_drawn_with_what_is_known_of_it(change, shown):
    _, refit = rows(Snapshot((), (replace(REFIT, **change),), ()), "reader")
    assert "  ".join(refit[4:]) == shown


def test_readers_and_rate_of_a_source_are_those_of_the_loads_that_name_it():
    other = replace(LOAD, activity_id="l2", gbps=2.5)
    elsewhere = replace(LOAD, activity_id="l3", sources=("source-2",))
    slot_of_that_name = replace(REFIT, sources=("source-1",))
    headings, source = rows(Snapshot((SOURCE,), (LOAD, other, elsewhere, slot_of_that_name), ()), "source")
    assert headings == ["source", "rank", "model", "status", "load", "readers", "Gbit/s", "heard", "place"]
    assert source == ["source-1", "0", "org/model", "READY", "0.25", "2", "10.5", "4 s", "rack=r1"]


def test_the_rate_of_a_version_is_that_of_the_refits_to_it_and_its_readers_are_its_leases():
    others = (replace(REFIT, activity_id="r2", gbps=0.5), replace(REFIT, activity_id="r3", version_id="v6"), LOAD)
    headings, version = rows(Snapshot((), (REFIT, *others), (VERSION,)), "version")
    assert headings == ["version", "of model", "run", "state", "shards", "readers", "Gbit/s", "age"]
    assert version == ["7", "org/model", "run-a", "READY", "2/2", "3", "8.5", "2 min"]


def test_a_version_that_is_not_whole_says_which_rank_it_waits_for():
    staging = replace(VERSION, state=State.STAGING, missing=("rank1",))
    headings, version = rows(Snapshot((), (), (staging,)), "version")
    assert headings[-1] == "waits for"
    assert version[3:] == ["STAGING", "1/2", "3", "2 min", "rank1"]


def test_a_directory_that_does_not_tell_who_reads_is_said_to_and_readers_are_those_of_the_last_heartbeat():
    snapshot = Snapshot((SOURCE,), None, None)
    assert drawn(snapshot)[0] == "who reads, and how far, is not known: this directory is a ModelExpress server"
    assert rows(snapshot, "source")[1] == ["source-1", "0", "org/model", "READY", "0.25", "7", "4 s", "rack=r1"]
    assert what(snapshot) == "1 source"


def test_a_snapshot_in_a_few_words():
    assert what(Snapshot((SOURCE,), (LOAD, REFIT, replace(REFIT, activity_id="r2")), ()), "org/model") == (
        "1 source, 1 load, 2 refits, 24.0 Gbit/s of org/model"
    )


def test_nothing_is_drawn_of_nothing():
    assert frame(Snapshot(), 80) is None


def test_of_hundreds_of_sources_the_busiest_are_shown_and_the_others_counted():
    sources = [replace(SOURCE, worker_id=f"w{n}", source_load=n / 1000) for n in range(300)]
    sources += [
        replace(SOURCE, worker_id="gone", status="STALE", source_load=1.0),
        replace(SOURCE, worker_id="read", source_load=0.0),
    ]
    lines = drawn(Snapshot(tuple(sources), (replace(LOAD, sources=("read",)),), ()), width=80, room=15)
    assert len(lines) == 15
    assert [line.split()[0] for line in lines[5:-1]] == ["read", "w299", "w298", "w297", "w296", "w295", "w294", "w293", "w292"]
    assert lines[-1] == "and 293 more sources, less busy"


def test_of_many_loads_those_that_go_on_for_longest_are_shown():
    loads = [replace(LOAD, activity_id=f"l{n}", worker_id=f"w{n}", seconds=float(n)) for n in range(50)]
    lines = drawn(Snapshot((), tuple(loads), ()), room=6)
    assert [line.split()[0] for line in lines[2:5]] == ["w49", "w48", "w47"]
    assert lines[5] == "and 47 more loads or refits, begun later"


def test_80_columns_hold_what_matters_most():
    long = replace(
        REFIT, model_name="organisation/a-model-with-a-name-longer-than-any-column-may-be-405B", worker_id="0123456789abcdef"
    )
    headings, refit = rows(Snapshot((), (long,), ()), "reader", width=80)
    assert headings == ["reader", "model", "what", "from", "stage", "done", "Gbit/s", "left"]
    assert refit[0] == "01234567"
    assert refit[1].startswith("organisation/a-")
    assert refit[1].endswith("…")


def test_progress_is_drawn_on_a_terminal():
    halves = [line for line in drawn(Snapshot((), (LOAD,), ()), bars=True) if "━" in line]
    assert len(halves) == 1
    assert halves[0].count("━") < 12 == drawn(Snapshot((), (replace(LOAD, bytes_done=4 * GB),), ()), bars=True)[2].count("━")


def test_names_are_shown_as_they_are_and_break_nothing():
    strange = replace(LOAD, worker_id="[red]", host="\x1b[2J\n", model_name=":smile:")
    text = "\n".join(drawn(Snapshot((), (strange,), ())))
    assert "[red]" in text
    assert "\\x1b[2J\\n" in text
    assert ":smile:" in text
    assert "\x1b" not in text


def test_an_ended_source_comes_after_those_that_serve_and_says_so():
    ended = replace(SOURCE, worker_id="dead", ended=True, source_load=1.0)
    assert [row[0] for row in rows(Snapshot((ended, SOURCE), (), ()), "source")[1:]] == ["source-1", "dead"]
    assert "READY (ended)" in rows(Snapshot((ended,), (), ()), "source")[1]


@pytest.mark.parametrize("width", [12, 20, 30, 40, 50, 60, 80])
def test_in_any_width_a_figure_is_whole_or_left_out_with_its_column(width):
    # names short enough that nothing has to be cut where it may be
    source = replace(SOURCE, model="m", topology={}, status="STALE", source_load=None)
    load = replace(LOAD, model_name="m", host="n")
    staging = replace(VERSION, model_name="m", run="r", state=State.STAGING, missing=("rank1",))
    lines = drawn(Snapshot((source,), (load, replace(REFIT, host="n")), (staging,)), width)
    assert not [line for line in lines if "…" in line or len(line) > width]


def test_40_columns_hold_what_is_asked_first():
    snapshot = Snapshot((SOURCE,), (LOAD,), (VERSION,))
    assert rows(snapshot, "source", width=40)[:2] == [
        ["source", "status", "load", "readers", "Gbit/s"],
        ["source-1", "READY", "0.25", "1", "8.0"],
    ]
    assert rows(snapshot, "reader", width=40)[0] == ["reader", "what", "stage", "done", "Gbit/s"]
    assert rows(snapshot, "version", width=40)[0] == ["version", "state", "readers", "Gbit/s"]


def test_more_than_all_is_all_and_a_rate_of_next_to_nothing_tells_no_time():
    odd = replace(LOAD, bytes_done=12 * GB, gbps=1e-300)
    assert rows(Snapshot((), (odd,), ()), "reader")[1][-3:] == ["100 %", "4.0 GB", "0.00"]
    assert rows(Snapshot((), (replace(odd, bytes_done=0),), ()), "reader")[1][-3:] == ["0 %", "4.0 GB", "0.00"]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=3), st.integers(-5, 200))
def test_parts_share_the_lines_they_have(needs, room):
    granted = shares(needs, room)
    lines = sum(rows if rows == need else rows + 1 for rows, need in zip(granted, needs, strict=True))
    assert all(0 <= rows <= need for rows, need in zip(granted, needs, strict=True))
    assert lines <= max(room, len(needs))  # one without a line says how many it leaves out all the same
    if sum(needs) <= room:
        assert granted == needs


columns = st.lists(
    st.builds(
        lambda width, least, spare: Column("x" * width, [Text("y")], least, spare),
        st.integers(1, 30),
        st.integers(0, 20),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)


@given(columns, st.integers(1, 200))
def test_columns_fit_by_leaving_the_spare_ones_out_first(made, width):
    chosen = widths(made, width)
    indispensable = [at for at, column in enumerate(made) if not column.spare]
    assert set(indispensable) <= set(chosen)
    assert all(made[at].narrowest <= wide <= made[at].natural for at, wide in chosen.items())
    taken = sum(chosen.values()) + 2 * (len(chosen) - 1)
    assert taken <= width or (sorted(chosen) == indispensable and all(chosen[at] == made[at].narrowest for at in chosen))
    left_out = [column.spare for at, column in enumerate(made) if at not in chosen]
    assert not left_out or min(left_out) >= max((made[at].spare for at in chosen), default=0)


names = st.text(max_size=40)
snapshots = st.builds(
    Snapshot,
    st.lists(st.builds(replace, st.just(SOURCE), worker_id=names, model=names, source_load=st.none() | st.floats(0, 1))).map(
        tuple
    ),
    st.none()
    | st.lists(
        st.builds(
            replace,
            st.sampled_from([LOAD, REFIT]),
            host=names,
            stage=names,
            bytes_done=st.integers(0, MAX_BYTES),
            bytes_total=st.integers(0, MAX_BYTES),
            gbps=st.floats(0, MAX_GBPS),
        )
    ).map(tuple),
    st.none() | st.lists(st.builds(replace, st.just(VERSION), run=names, number=st.integers(-1, 1 << 63))).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(snapshots, st.integers(1, 60), st.booleans())
def test_whatever_is_answered_is_drawn_within_its_lines(snapshot, room, bars):
    assert frame(snapshot, 80, room, bars=bars) is None or len(drawn(snapshot, 80, room, bars)) <= room


def test_the_picture_in_the_documentation_is_what_the_command_draws_now():
    assert draw_top.PICTURE.read_text("utf-8") == draw_top.render(), f"run: {draw_top.COMMAND}"
    assert not re.search(r"url\((?!#)", draw_top.render()), "it asks the network for nothing"
