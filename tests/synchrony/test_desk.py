"""Clocks, dealer and desk, by hand; what they do together under any speeds is in tests/parallel/test_server.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.errors import CommError
from nnmpi.synchrony.clocks import Clocks
from nnmpi.synchrony.dealer import Dealer, Unit
from nnmpi.synchrony.desk import Desk, Grant


def drain(dealer: Dealer) -> list[Unit]:
    """Return all that is left."""
    units = []
    while (unit := dealer.deal()) is not None:
        units.append(unit)
    return units


def goes(worker: int, batch: int, part: int) -> Grant:
    """Return the grant of a unit."""
    return Grant(worker, Unit(batch, part), over=False)


def over(*workers: int) -> list[Grant]:
    """Return what workers are told at the end."""
    return [Grant(worker, None, over=True) for worker in workers]


def test_clocks() -> None:
    """The lead is over the slowest, and with no bound nobody waits."""
    clocks = Clocks(3)
    for worker in (0, 0, 0, 2):
        clocks.done(worker)
    assert (clocks.steps, clocks.slowest) == ([3, 0, 1], 0)
    assert [clocks.lead(worker) for worker in range(3)] == [3, 0, 1]
    assert [clocks.may_start(worker, 1) for worker in range(3)] == [False, True, True]
    assert clocks.may_start(0, 3)
    assert clocks.may_start(0, None)


def test_who_fell_far_behind_without_a_bound_need_not_catch_up() -> None:
    """Leads that a run with the bound may have had stay as they are."""
    for bound, expected in ((None, [9, 2, 7]), (3, [9, 5, 7]), (0, [9, 9, 9])):
        clocks = Clocks(3)
        clocks.steps[:] = [9, 2, 7]
        clocks.meet(bound)
        assert clocks.steps == expected
        clocks.meet(bound)
        assert clocks.steps == expected


def test_in_step_after_a_time_without_a_bound() -> None:
    """Everybody has a part of every batch from the first one on, though one had done more."""
    desk = Desk(2)
    desk.open(0, 2, None)
    desk.release()
    for worker in (0, 0, 0, 1):
        desk.arrive(worker)
        desk.release()
    desk.open(2, 4, 0)
    assert desk.release() == [goes(0, 2, 0), goes(1, 2, 1)]
    desk.arrive(0)
    assert desk.release() == []
    desk.arrive(1)
    assert desk.release() == [goes(0, 3, 0), goes(1, 3, 1)]


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 4))
def test_a_dealer_deals_every_unit_once(first: int, count: int, parts: int) -> None:
    """In order, then nothing."""
    dealer = Dealer(first, first + count, parts)
    units = drain(dealer)
    assert units == [Unit(batch, part) for batch in range(first, first + count) for part in range(parts)]
    assert (dealer.dealt, dealer.exhausted, dealer.undealt) == (len(units), True, 0)


@given(st.integers(0, 12), st.integers(1, 4), st.booleans())
def test_a_closed_dealer_ends_with_a_whole_batch_or_at_once(begun: int, parts: int, at_once: bool) -> None:
    """`stop` counts whole batches either way, and what is left of one is counted."""
    dealer = Dealer(2, 5, parts)
    units = [unit for unit in (dealer.deal() for _ in range(begun)) if unit is not None]
    dealer.close(at_once)
    dealer.close(at_once)
    rest = drain(dealer)
    if at_once:
        assert rest == []
        assert dealer.stop == 2 + len(units) // parts
        assert dealer.undealt == -len(units) % parts
    else:
        assert len(units + rest) == parts * (dealer.stop - 2)
        assert len(rest) < parts
        assert dealer.undealt == 0


def test_a_dealer_skips_the_rest_of_a_batch() -> None:
    """Of one that was begun; otherwise there is nothing to skip."""
    dealer = Dealer(0, 2, 3)
    dealer.skip()
    assert dealer.deal() == Unit(0, 0)
    dealer.skip()
    dealer.skip()
    assert dealer.undealt == 2
    assert drain(dealer) == [Unit(1, part) for part in range(3)]


def test_a_desk_with_a_bound_of_0() -> None:
    """All at once, in the order of workers, whatever the order of arrival."""
    desk = Desk(2)
    desk.open(0, 2, 0)
    assert desk.release() == [goes(0, 0, 0), goes(1, 0, 1)]
    assert desk.arrive(1)
    assert (desk.release(), desk.update_due) == ([], False)
    assert desk.arrive(0)
    assert (desk.release(), desk.update_due) == ([goes(0, 1, 0), goes(1, 1, 1)], True)
    desk.arrive(0)
    desk.arrive(1)
    assert not desk.over
    assert (desk.release(), desk.update_due, desk.over) == (over(0, 1), True, True)
    assert (desk.release(), desk.update_due) == ([], False)
    assert (desk.arrived, desk.batches_done, desk.longest_lead) == (4, 2, 0)


def test_clocks_go_on_and_counts_begin_anew_in_the_next_segment() -> None:
    """So that a lead is over the whole run."""
    desk = Desk(2)
    desk.open(0, 2, None)
    desk.release()
    for _ in range(2):
        desk.arrive(0)
        desk.release()
    desk.arrive(0)
    desk.arrive(1)
    assert desk.release() == over(0, 1)
    assert (desk.clocks.steps, desk.longest_lead, desk.arrived) == ([3, 1], 2, 4)
    desk.open(2, 3, 1)
    assert desk.release() == [goes(1, 2, 0)]
    assert (desk.longest_lead, desk.arrived) == (0, 0)


def test_who_gets_nothing_waits_for_the_end() -> None:
    """Nobody is told that it is over while somebody still computes."""
    desk = Desk(3)
    desk.open(0, 1, None)
    desk.release()
    desk.arrive(2)
    assert desk.release() == []
    desk.arrive(0)
    assert desk.release() == []
    desk.arrive(1)
    assert desk.release() == over(0, 1, 2)


@pytest.mark.parametrize("bound", [None, 1])
def test_the_last_gradients_make_updates_as_on_a_desk_that_does_not_deal(bound: int | None) -> None:
    """Each of its own where somebody may go on, though nothing is left to be dealt; one update is due only once."""
    desk, other = Desk(3), Desk(3, deals=False)
    for each in (desk, other):
        each.open(0, 1, bound)
        each.release()
    due = []
    for worker in (2, 0, 1):
        for each in (desk, other):
            each.arrive(worker)
            each.release()
            due.append(each.update_due)
    assert due == [True] * 6
    assert desk.over
    desk.open(1, 2, bound)
    desk.release()
    desk.arrive(0)
    assert (desk.release(), desk.update_due) == ([], True)
    assert (desk.release(), desk.update_due) == ([], False)


def test_a_desk_that_does_not_deal_learns_the_end() -> None:
    """Before that it lets go on whoever may; then it is over for those who wait, whatever their lead."""
    desk = Desk(2, deals=False)
    desk.open(0, 2, 0)
    assert desk.release() == [Grant(0, None, over=False), Grant(1, None, over=False)]
    desk.close()
    desk.close(at_once=True)
    assert not desk.over
    desk.arrive(0)
    assert desk.release() == []
    desk.end(1)
    assert desk.release() == over(0)
    assert desk.over
    assert (desk.undealt, desk.batches_done) == (0, 0)


def test_a_gradient_too_many_is_found() -> None:
    """On a desk that was told how many there are."""
    desk = Desk(2, deals=False)
    desk.open(0, 1, 0)
    desk.release()
    desk.end(1)
    desk.arrive(0)
    desk.arrive(1)
    with pytest.raises(CommError, match="2 gradients came in a segment of 1"):
        desk.release()


def test_a_gradient_of_a_waiting_worker_is_found() -> None:
    """It was not let go on."""
    desk = Desk(2)
    desk.open(0, 1, 0)
    with pytest.raises(CommError, match="worker 1, which still waits for the reply"):
        desk.arrive(1)


def test_backup_workers() -> None:
    """Three workers, one of them spare: the late one is dropped, and goes on with the batch that is under way."""
    desk = Desk(3, backup=1)
    desk.open(0, 3, 0)
    assert desk.release() == [goes(0, 0, 0), goes(1, 0, 1), goes(2, 0, 2)]
    assert desk.arrive(2)
    assert (desk.release(), desk.update_due) == ([], False)
    assert desk.arrive(0)
    assert (desk.release(), desk.update_due) == ([goes(0, 1, 0), goes(2, 1, 1)], True)
    assert not desk.arrive(1)  # of batch 0
    assert (desk.release(), desk.update_due) == ([goes(1, 1, 2)], False)
    assert desk.arrive(1)
    assert desk.release() == []
    assert desk.arrive(0)
    assert not desk.arrive(2)  # of batch 1, before the round was ended, but third
    assert (desk.release(), desk.update_due) == ([goes(0, 2, 0), goes(1, 2, 1), goes(2, 2, 2)], True)
    assert desk.clocks.steps == [2, 2, 2]
    assert (desk.dropped, desk.undealt, desk.longest_lead) == (2, 0, 0)


def test_backup_workers_leave_parts_undealt() -> None:
    """When a worker is so late that a round ends before it asks for its part; at the end it is waited for."""
    desk = Desk(3, backup=1)
    desk.open(0, 2, 0)
    desk.release()
    desk.arrive(0)
    desk.arrive(1)
    assert desk.release() == [goes(0, 1, 0), goes(1, 1, 1)]
    desk.arrive(0)
    desk.arrive(1)
    assert (desk.release(), desk.update_due) == ([], True)
    assert not desk.arrive(2)
    assert (desk.release(), desk.update_due) == (over(0, 1, 2), True)
    assert (desk.dropped, desk.undealt, desk.arrived, desk.batches_done) == (1, 1, 5, 2)


def test_a_round_that_was_broken_off_is_forgotten() -> None:
    """The gradient that it had makes an update at the end; the next segment begins anew, with other batches."""
    desk = Desk(3, backup=1)
    desk.open(0, 2, 0)
    desk.release()
    desk.arrive(1)
    desk.close(at_once=True)
    desk.arrive(0)
    desk.arrive(2)
    assert (desk.release(), desk.update_due) == (over(0, 1, 2), True)
    desk.open(0, 2, 0)
    desk.release()
    desk.arrive(1)
    desk.close(at_once=True)
    assert (desk.release(), desk.update_due) == ([], False)
    desk.open(5, 6, 0)
    assert desk.release() == [goes(0, 5, 0), goes(1, 5, 1), goes(2, 5, 2)]
    assert desk.arrive(0)
