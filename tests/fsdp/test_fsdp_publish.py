"""The order of calls a training loop makes of the publisher, and what ranks agree on."""

from __future__ import annotations

import pytest
from torch import distributed, nn

from mx_common.errors import ConfigError, TransportUnavailable
from mx_fsdp import MxPublish


@pytest.mark.parametrize("world", [2, 4])
def test_due_steps_are_published_and_each_update_waits_for_readers_first(fsdp_runs, world):
    for facts in fsdp_runs[world].facts("loop"):
        calls = [(call[0], call[1]) if call[0] == "publish" else call[0] for call in facts["log"]]
        wait = "before_update"
        assert calls == ["open", ("publish", 0), wait, wait, ("publish", 2), wait, wait, ("publish", 4), "close"]
        assert facts["returned"][:-1] == [0, None, 2, None, 4]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_on_slots_and_on_the_name_of_this_start(fsdp_runs, world):
    opened = [facts["log"][0] for facts in fsdp_runs[world].facts("loop")]
    slots = tuple(f"rank{rank}" for rank in range(world))
    assert [call[2] for call in opened] == list(slots)
    assert {call[3] for call in opened} == {slots}
    assert len({call[4] for call in opened}) == 1
    assert {(call[1], *call[5:]) for call in opened} == {("tiny/llama", "10.0.0.1:1", "snapshot")}


def test_two_publishers_of_one_process_are_two_starts(fsdp_runs):
    facts = fsdp_runs[2].facts("loop")[0]
    assert facts["log"][0][4] != facts["few_log"][0][4]


def test_a_rank_that_holds_nothing_is_not_a_slot_and_publishes_nothing(fsdp_runs):
    facts = fsdp_runs[4].facts("loop")
    assert [fact["few_returned"] for fact in facts] == [1, 1, 1, None]
    assert facts[3]["few_log"] == []
    assert {fact["few_log"][0][3] for fact in facts[:3]} == {("rank0", "rank1", "rank2")}


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_cannot_publish_leaves_no_other_waiting_for_it(fsdp_runs, world):
    said = [facts["returned"][-1] for facts in fsdp_runs[world].facts("loop")]
    assert "both called same" in said[1]
    assert all(text == f"rank 1 cannot publish: {said[1]}" for rank, text in enumerate(said) if rank != 1)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [("", {}, "model_name"), ("m", {"every": 0}, "every=0"), ("m", {"mode": "copy"}, "in_place or snapshot")],
)
def test_settings_that_cannot_work_are_refused_when_they_are_given(name, options, says):
    with pytest.raises(ConfigError, match=says):
        MxPublish(None, name, **options)


def test_a_rank_whose_publisher_could_not_be_made_makes_it_again_without_asking_the_others(monkeypatch):
    """They agreed with it and go on: a second all-gather would wait for them for ever."""
    made, gathered = [], []

    class Second:
        """Of which the first cannot be made."""

        def __init__(self, model_name, slot, slots, *, run, **_):
            made.append((slot, slots, run))
            if len(made) == 1:
                raise TransportUnavailable("this rank has no link")

        def publish(self, version, held):
            return version

        def close(self):
            pass

    def all_gather_object(answers, mine, group=None):
        gathered.append(mine)
        answers[:] = [mine, (True, "another", "")]

    monkeypatch.setattr("mx_common.refit.publisher.Publisher", Second)
    for name, stand_in in {
        "is_initialized": lambda: True,
        "get_rank": lambda group=None: 0,
        "get_world_size": lambda group=None: 2,
        "all_gather_object": all_gather_object,
    }.items():
        monkeypatch.setattr(distributed, name, stand_in)
    mx = MxPublish(nn.Linear(4, 4), "tiny/linear")
    with pytest.raises(TransportUnavailable):
        mx.publish(1)
    assert mx.publish(2) == 2
    assert len(gathered) == 1
    assert made == [("rank0", ("rank0", "rank1"), gathered[0][1])] * 2
    mx.close()
    assert mx.publish(3) == 3
    assert len(gathered) == 2, "a start of its own, on every rank"
