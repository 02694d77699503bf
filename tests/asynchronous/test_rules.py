"""Clocks, queue and controller by hand; the text of slow; settings of Sync; counts of stale
gradients.
"""

import json
from collections import Counter

import pytest

from nnmpi import Sync, simulate
from nnmpi.asynchronous.consistency import (
    RULES,
    ConsistencyController,
    Task,
    WorkerClocks,
    WorkQueue,
)
from nnmpi.asynchronous.worker import AVERAGES
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.comm.synchrony.sync import MODES, Bound
from nnmpi.compose.stats import Staleness
from tests.harness.refusals import usage_error


@pytest.mark.parametrize(
    "bound, limited, may",
    [
        (None, [9, 2, 7], [True, True, True]),
        (7, [9, 2, 7], [True, True, True]),
        (6, [9, 2, 7], [False, True, True]),
        (3, [9, 5, 7], [False, True, True]),
        (0, [9, 9, 9], [True, True, True]),
    ],
)
def test_who_may_start_and_how_far_behind_the_slow_may_be_at_a_meeting(bound, limited, may):
    clocks = WorkerClocks(3)
    clocks.steps[:] = [9, 2, 7]
    for _ in range(2):
        clocks.limit_lag(bound)
        assert clocks.steps == limited
    assert [clocks.may_start(worker, bound) for worker in range(3)] == may


@pytest.mark.parametrize("begun", range(8))
@pytest.mark.parametrize("at_once", [False, True])
def test_a_queue_assigns_in_order_and_ends_with_a_whole_batch_or_at_once(begun, at_once):
    queue = WorkQueue(2, 4, 3)
    tasks = [task for task in (queue.assign() for _ in range(begun)) if task]
    assert tasks == [Task(2 + number // 3, number % 3) for number in range(min(begun, 6))]
    queue.close(at_once)
    rest = [task for task in (queue.assign() for _ in range(9)) if task]
    assert len(rest) == (0 if at_once else -len(tasks) % 3)
    assert queue.stop == 2 + (len(tasks) + len(rest)) // 3
    assert queue.exhausted and queue.assigned == len(tasks + rest)


def test_a_controller_in_step_and_then_with_a_bound():
    controller = ConsistencyController(2)
    controller.open(0, 2, Bound(0))
    assert controller.release() == {0: Task(0, 0), 1: Task(0, 1)}
    controller.add_gradient(1)
    assert controller.release() == {}
    controller.add_gradient(0)
    assert controller.release() == {0: Task(1, 0), 1: Task(1, 1)}
    controller.add_gradient(0)
    controller.add_gradient(1)
    assert not controller.is_over
    assert controller.release() == {0: None, 1: None}
    assert (
        controller.is_over,
        controller.batches_done,
        controller.longest_lead,
        controller.arrived,
    ) == (True, 2, 0, 4)
    controller.open(2, 5, Bound(1))
    controller.release()
    for goes_on in (True, False):
        controller.add_gradient(0)
        assert list(controller.release()) == [0] * goes_on
    assert controller.longest_lead == 1
    controller.close()
    controller.add_gradient(1)
    # the bound lets both go on, but the batch has one part left
    assert controller.release() == {0: Task(3, 1)}
    controller.add_gradient(0)
    assert controller.release() == {0: None, 1: None}
    assert controller.batches_done == 2


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"sync": "fast"}, "it must be one of bsp, asp"),
        ({"sync": "ssp", "staleness": -1}, "staleness is -1; give a whole number"),
        ({"sync": "local", "local_steps": 0}, "local_steps is 0"),
        ({"sync": "local", "outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"sync": "asp", "staleness": 2}, "staleness is for sync ssp, not for asp"),
        ({"sync": "ssp", "local_steps": 2}, "local_steps is for sync local.*, not for ssp"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    usage_error(words, Sync, **settings)


def test_bounds_and_words_of_every_mode():
    assert [Sync(mode).bound for mode in ("asp", "ssp", "local")] == [None, Bound(4), None]
    bounds = [bound for mode in MODES if (bound := Sync(mode).bound) is not None]
    assert {bound.unit for bound in bounds} == RULES.keys()
    averages = {name for name, row in MODES.items() if row.combines == "averages"}
    assert averages == AVERAGES.keys()
    assert [Sync(mode).has_server for mode in ("bsp", "asp", "ssp", "gossip")] == [0, 1, 1, 0]
    assert "8 steps" in Sync("local").describe() and "4 steps" in Sync("ssp").describe()
    usage_error("no neighbours", lambda: Sync("gossip").check(1))


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("", [0.01, 0.01]),
        ("ms=20", [0.02, 0.02]),
        ("ms=5;rank=1,factor=3", [0.01, 0.03]),
        (" ms = 20 ; rank=1, factor=3; rank=0,factor=1.5", [0.03, 0.06]),
        ("probability=1,factor=3;rank=0,factor=2", [0.06, 0.03]),
    ],
)
def test_how_long_a_step_of_10_ms_lasts(text, seconds):
    slow = Slow.parse(text)
    assert [slow.seconds(0.01, rank, 5) for rank in range(2)] == pytest.approx(seconds)
    slow.check(2)
    assert bool(slow.describe()) == bool(text)


WRONG = (
    "fast ; rank=1 rank=1,factor=0.5 rank=-1,factor=2 rank=1.5,factor=2 probability=2,factor=2 ms=0"
    " ms=nan ms=x"
)
WRONG += (
    " ms=1;ms=2 rank=1,factor=2;rank=1,factor=3 ms=1,factor=2 rank=1,factor=inf rank=inf,factor=2"
)


@pytest.mark.parametrize("text", WRONG.split())
def test_a_text_that_makes_no_sense_is_refused(text):
    usage_error("slow: ", Slow.parse, text)


def test_a_rank_that_does_not_exist_cannot_be_slow():
    usage_error("rank 2", lambda: Slow.parse("rank=2,factor=3").check(2))


def test_chance_is_the_same_in_every_run_and_as_frequent_as_told():
    draws = [
        [slow.seconds(1.0, rank, step) for rank in range(4) for step in range(500)]
        for slow in (Slow.parse("probability=0.25,factor=3", seed) for seed in (7, 7, 8))
    ]
    assert draws[0] == draws[1] != draws[2]
    assert Counter(draws[0])[3.0] / len(draws[0]) == pytest.approx(0.25, abs=0.04)


def test_waiting_lasts_as_long_as_it_should_and_leaves_time_for_other_work():
    asked = []

    def main(group):
        slow = Slow.parse("ms=20;rank=1,factor=3")
        waited = [
            slow.wait(computed_s, rank, 0)
            for computed_s, rank in ((0.005, 0), (0.005, 1), (0.1, 0))
        ]
        return [*waited, slow.wait(0.005, 0, 0, asked.append)]

    assert simulate(main, 1, cpu_factor=0)[0] == pytest.approx([0.015, 0.055, 0.0, 0.0])
    assert asked == pytest.approx([0.015 + 0.055 + 0.015])


def test_counts_of_stale_gradients_add_up_and_survive_json():
    few, more = Staleness(1), Staleness(2)
    for worker, staleness in ((0, 3), (0, 0), (1, 3), (0, 0)):
        more.add(worker, staleness)
    few.add(0, 1)
    assert (more.total, *more.histograms) == ({0: 2, 3: 2}, {0: 2, 3: 1}, {3: 1})
    assert (more.mean(), more.largest()) == (1.5, 3)
    both = Staleness.from_json(json.loads(json.dumps(Staleness.sum([few, more]).to_json())))
    assert both.histograms == [{0: 2, 1: 1, 3: 1}, {3: 1}]
    assert both.to_json()["workers"][0]["mean"] == 1.0 == few.mean()
    assert Staleness.sum([]).mean() == 0
