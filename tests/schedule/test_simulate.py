"""Simulated times against sums that are done by hand, and costs from measurements."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.base.errors import ScheduleError, UsageError
from nnmpi.comm.machine import Link, Machine
from nnmpi.schedule.lower import add_transfers
from nnmpi.schedule.schedule import COMPUTE, Kind
from nnmpi.schedule.schedules import make
from nnmpi.schedule.simulate import ScheduleRun, even_costs, measured_costs, simulate_schedule
from tests.schedule.every import lowered, schedules


def spans(simulation):
    return {str(span.instruction): (span.begin_s, span.end_s) for span in simulation.spans}


def test_two_stages_two_microbatches_by_hand():
    """Forwards 2 and 3, backwards 4 and 5, an activation 1, a gradient 0.5.

    rank 0   0F0 0-2   0F1 2-4                        0B0 11.5-15.5            0B1 19.5-23.5
    rank 1                      1F0 3-6   1B0 6-11    1F1 11-14     1B1 14-19
    """
    costs = {
        Kind.F: (2.0, 3.0),
        Kind.B: (4.0, 5.0),
        Kind.SEND_ACT: (1.0, 1.0),
        Kind.SEND_GRAD: (0.5, 0.5),
    }
    simulation = simulate_schedule(lowered("1f1b", 2, 2), costs)
    result = spans(simulation)
    assert result["0F1"] == (2.0, 4.0)
    assert result["0SEND_ACT1"] == (4.0, 5.0)
    assert result["1F0"] == (3.0, 6.0)
    assert result["1RECV_ACT1"] == (11.0, 11.0)  # it has long been there
    assert result["0RECV_GRAD0"] == (4.0, 11.5)
    assert result["1B1"] == (14.0, 19.0)
    assert result["0B1"] == (19.5, 23.5)
    assert simulation.makespan_s == 23.5
    assert simulation.busy_s == (12.0, 16.0)
    assert simulation.bubble == pytest.approx(1 - 28 / 47)


def test_a_send_that_waits_holds_its_rank():
    def found(name, microbatches, costs, rendezvous=True):
        run = ScheduleRun(lowered(name, 2, microbatches), costs, rendezvous)
        return {str(span.instruction): (span.begin_s, span.end_s) for span in run.spans}

    even = {Kind.F: (1.0, 1.0), Kind.B: (2.0, 2.0), Kind.SEND_ACT: (1.0, 1.0)}
    eager, held = (found("gpipe", 2, even, rendezvous) for rendezvous in (False, True))
    assert eager["0F1"] == (1.0, 2.0) and held["0F1"] == (2.0, 3.0)
    assert held["0SEND_ACT1"] == (3.0, 4.0) and held["1F0"] == (2.0, 3.0)
    slow = found("inference", 3, {Kind.F: (1.0, 5.0), Kind.SEND_ACT: (1.0, 1.0)})
    assert slow["1F0"] == (2.0, 7.0)
    assert slow["0SEND_ACT1"] == (7.0, 8.0)  # it has waited since 3.0
    assert slow["0F2"] == (8.0, 9.0)


@settings(max_examples=40)
@given(schedules, st.sampled_from([0.0, 0.25, 3.0]))
def test_what_holds_of_every_simulation(chosen, message_s):
    (name, virtual), (ranks, microbatches) = chosen
    schedule = lowered(name, ranks, microbatches, virtual)
    simulation = simulate_schedule(schedule, even_costs(schedule.stages, message_s=message_s))
    result = {span.instruction: span for span in simulation.spans}
    assert (
        len(result)
        == len(simulation.spans)
        == sum(len(list(schedule.instructions(r))) for r in range(ranks))
    )
    for rank in range(ranks):
        work = [s for s in simulation.spans if s.rank == rank and s.instruction.kind in COMPUTE]
        assert all(before.end_s <= after.begin_s for before, after in pairwise(work))
        assert simulation.busy_s[rank] <= simulation.makespan_s + 1e-9
    for item, span in result.items():
        if item.kind is Kind.F and schedule.is_cut(item.stage - 1):
            assert (
                span.begin_s >= result[Kind.F.at(item.stage - 1, item.microbatch)].end_s + message_s
            )
    assert 0 <= simulation.bubble < 1


# ---- costs ----


@settings(max_examples=30)
@given(schedules)
def test_what_was_simulated_is_measured_and_simulated_again(
    chosen,
):
    """The spans of a run are all that the report needs: simulated from them, the run is the
    same.
    """
    (name, virtual), (ranks, microbatches) = chosen
    schedule = lowered(name, ranks, microbatches, virtual)
    stages = schedule.stages
    times = {
        kind: [1.0 + 0.25 * ((7 * s + i) % 5) for s in range(stages)] for i, kind in enumerate(Kind)
    }
    first = simulate_schedule(schedule, times)
    samples = [(s.instruction, s.end_s - s.begin_s) for s in first.spans]
    again = simulate_schedule(schedule, measured_costs(stages, samples))
    assert again.makespan_s == pytest.approx(first.makespan_s)
    assert again.busy_s == pytest.approx(first.busy_s)


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(UsageError, match="costs are of 3 stages, but gpipe has 2"):
        simulate_schedule(lowered("gpipe", 2, 2), even_costs(3))
    unfused = add_transfers(make("1f1b", 2, 2))
    assert simulate_schedule(unfused, even_costs(2)).makespan_s == 9
    with pytest.raises(
        ScheduleError, match="rank 0 waits for ever in its instruction 6; check the schedule first"
    ):
        simulate_schedule(
            replace(unfused, programs=(unfused.programs[0], unfused.programs[1][:-1])),
            even_costs(2),
        )


def test_the_messages_of_two_pipelines_share_a_link():
    """Of the second one the activation waits for 10 bytes; its gradient is then alone."""
    schedule, costs = lowered("naive", 2, 1), even_costs(2)
    times = [
        simulate_schedule(
            schedule, costs, Machine(Link.line(1.0, 1.0), nodes=nodes), lambda _: (10,)
        ).makespan_s
        for nodes in ((0, 1), (0, 1, 0, 1), (0, 1, 2, 3))
    ]
    assert times == [28, 38, 28]
