"""Clocks, queue and controller, by hand.

What they do together under any speeds is in tests/parallel/server/test_parameter_server.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.errors import CommError
from nnmpi.synchrony.consistency import ConsistencyController, Grant, Task, WorkerClocks, WorkQueue


def drain(queue: WorkQueue) -> list[Task]:
    """Return all that is left."""
    tasks = []
    while (task := queue.assign()) is not None:
        tasks.append(task)
    return tasks


def goes(worker: int, batch: int, part: int) -> Grant:
    """Return the grant of a task."""
    return Grant(worker, Task(batch, part), over=False)


def over(*workers: int) -> list[Grant]:
    """Return what workers are told at the end."""
    return [Grant(worker, None, over=True) for worker in workers]


def test_clocks() -> None:
    """The lead is over the slowest, and with no bound nobody waits."""
    clocks = WorkerClocks(3)
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
        clocks = WorkerClocks(3)
        clocks.steps[:] = [9, 2, 7]
        clocks.limit_lag(bound)
        assert clocks.steps == expected
        clocks.limit_lag(bound)
        assert clocks.steps == expected


def test_in_step_after_a_time_without_a_bound() -> None:
    """Everybody has a part of every batch from the first one on, though one had done more."""
    controller = ConsistencyController(2)
    controller.open(0, 2, None)
    controller.release()
    for worker in (0, 0, 0, 1):
        controller.arrive(worker)
        controller.release()
    controller.open(2, 4, 0)
    assert controller.release() == [goes(0, 2, 0), goes(1, 2, 1)]
    controller.arrive(0)
    assert controller.release() == []
    controller.arrive(1)
    assert controller.release() == [goes(0, 3, 0), goes(1, 3, 1)]


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 4))
def test_a_work_queue_assigns_every_task_once(first: int, count: int, parts: int) -> None:
    """In order, then nothing."""
    queue = WorkQueue(first, first + count, parts)
    tasks = drain(queue)
    assert tasks == [Task(batch, part) for batch in range(first, first + count) for part in range(parts)]
    assert (queue.assigned, queue.exhausted, queue.unassigned) == (len(tasks), True, 0)


@given(st.integers(0, 12), st.integers(1, 4), st.booleans())
def test_a_closed_queue_ends_with_a_whole_batch_or_at_once(begun: int, parts: int, at_once: bool) -> None:
    """`stop` counts whole batches either way, and what is left of one is counted."""
    queue = WorkQueue(2, 5, parts)
    tasks = [task for task in (queue.assign() for _ in range(begun)) if task is not None]
    queue.close(at_once)
    queue.close(at_once)
    rest = drain(queue)
    if at_once:
        assert rest == []
        assert queue.stop == 2 + len(tasks) // parts
        assert queue.unassigned == -len(tasks) % parts
    else:
        assert len(tasks + rest) == parts * (queue.stop - 2)
        assert len(rest) < parts
        assert queue.unassigned == 0


def test_a_queue_skips_the_rest_of_a_batch() -> None:
    """Of one that was begun; otherwise there is nothing to skip."""
    queue = WorkQueue(0, 2, 3)
    queue.skip()
    assert queue.assign() == Task(0, 0)
    queue.skip()
    queue.skip()
    assert queue.unassigned == 2
    assert drain(queue) == [Task(1, part) for part in range(3)]


def test_a_controller_with_a_bound_of_0() -> None:
    """All at once, in the order of workers, whatever the order of arrival."""
    controller = ConsistencyController(2)
    controller.open(0, 2, 0)
    assert controller.release() == [goes(0, 0, 0), goes(1, 0, 1)]
    assert controller.arrive(1)
    assert (controller.release(), controller.update_due) == ([], False)
    assert controller.arrive(0)
    assert (controller.release(), controller.update_due) == ([goes(0, 1, 0), goes(1, 1, 1)], True)
    controller.arrive(0)
    controller.arrive(1)
    assert not controller.over
    assert (controller.release(), controller.update_due, controller.over) == (over(0, 1), True, True)
    assert (controller.release(), controller.update_due) == ([], False)
    assert (controller.arrived, controller.batches_done, controller.longest_lead) == (4, 2, 0)


def test_clocks_go_on_and_counts_begin_anew_in_the_next_segment() -> None:
    """So that a lead is over the whole run."""
    controller = ConsistencyController(2)
    controller.open(0, 2, None)
    controller.release()
    for _ in range(2):
        controller.arrive(0)
        controller.release()
    controller.arrive(0)
    controller.arrive(1)
    assert controller.release() == over(0, 1)
    assert (controller.clocks.steps, controller.longest_lead, controller.arrived) == ([3, 1], 2, 4)
    controller.open(2, 3, 1)
    assert controller.release() == [goes(1, 2, 0)]
    assert (controller.longest_lead, controller.arrived) == (0, 0)


def test_who_gets_nothing_waits_for_the_end() -> None:
    """Nobody is told that it is over while somebody still computes."""
    controller = ConsistencyController(3)
    controller.open(0, 1, None)
    controller.release()
    controller.arrive(2)
    assert controller.release() == []
    controller.arrive(0)
    assert controller.release() == []
    controller.arrive(1)
    assert controller.release() == over(0, 1, 2)


@pytest.mark.parametrize("bound", [None, 1])
def test_the_last_gradients_make_updates_as_where_another_server_assigns(bound: int | None) -> None:
    """Each of its own where somebody may go on, though nothing is left to be assigned; one update is due only once."""
    controller, other = ConsistencyController(3), ConsistencyController(3, assigns=False)
    for each in (controller, other):
        each.open(0, 1, bound)
        each.release()
    due = []
    for worker in (2, 0, 1):
        for each in (controller, other):
            each.arrive(worker)
            each.release()
            due.append(each.update_due)
    assert due == [True] * 6
    assert controller.over
    controller.open(1, 2, bound)
    controller.release()
    controller.arrive(0)
    assert (controller.release(), controller.update_due) == ([], True)
    assert (controller.release(), controller.update_due) == ([], False)


def test_a_controller_without_a_queue_learns_the_end() -> None:
    """Before that it lets go on whoever may; then it is over for those who wait, whatever their lead."""
    controller = ConsistencyController(2, assigns=False)
    controller.open(0, 2, 0)
    assert controller.release() == [Grant(0, None, over=False), Grant(1, None, over=False)]
    controller.close()
    controller.close(at_once=True)
    assert not controller.over
    controller.arrive(0)
    assert controller.release() == []
    controller.end(1)
    assert controller.release() == over(0)
    assert controller.over
    assert (controller.unassigned, controller.batches_done) == (0, 0)


def test_a_gradient_too_many_is_found() -> None:
    """On a controller that was told how many there are."""
    controller = ConsistencyController(2, assigns=False)
    controller.open(0, 1, 0)
    controller.release()
    controller.end(1)
    controller.arrive(0)
    controller.arrive(1)
    with pytest.raises(CommError, match="2 gradients came in a segment of 1"):
        controller.release()


def test_a_gradient_of_a_waiting_worker_is_found() -> None:
    """It was not let go on."""
    controller = ConsistencyController(2)
    controller.open(0, 1, 0)
    with pytest.raises(CommError, match="worker 1, which still waits for the reply"):
        controller.arrive(1)


def test_backup_workers() -> None:
    """Three workers, one of them spare: the late one is dropped, and goes on with the batch that is under way."""
    controller = ConsistencyController(3, backup=1)
    controller.open(0, 3, 0)
    assert controller.release() == [goes(0, 0, 0), goes(1, 0, 1), goes(2, 0, 2)]
    assert controller.arrive(2)
    assert (controller.release(), controller.update_due) == ([], False)
    assert controller.arrive(0)
    assert (controller.release(), controller.update_due) == ([goes(0, 1, 0), goes(2, 1, 1)], True)
    assert not controller.arrive(1)  # of batch 0
    assert (controller.release(), controller.update_due) == ([goes(1, 1, 2)], False)
    assert controller.arrive(1)
    assert controller.release() == []
    assert controller.arrive(0)
    assert not controller.arrive(2)  # of batch 1, before the round was ended, but third
    assert (controller.release(), controller.update_due) == ([goes(0, 2, 0), goes(1, 2, 1), goes(2, 2, 2)], True)
    assert controller.clocks.steps == [2, 2, 2]
    assert (controller.dropped, controller.unassigned, controller.longest_lead) == (2, 0, 0)


def test_backup_workers_leave_parts_unassigned() -> None:
    """When a worker is so late that a round ends before it asks for its part; at the end it is waited for."""
    controller = ConsistencyController(3, backup=1)
    controller.open(0, 2, 0)
    controller.release()
    controller.arrive(0)
    controller.arrive(1)
    assert controller.release() == [goes(0, 1, 0), goes(1, 1, 1)]
    controller.arrive(0)
    controller.arrive(1)
    assert (controller.release(), controller.update_due) == ([], True)
    assert not controller.arrive(2)
    assert (controller.release(), controller.update_due) == (over(0, 1, 2), True)
    assert (controller.dropped, controller.unassigned, controller.arrived, controller.batches_done) == (1, 1, 5, 2)


def test_a_round_that_was_broken_off_is_forgotten() -> None:
    """The gradient that it had makes an update at the end; the next segment begins anew, with other batches."""
    controller = ConsistencyController(3, backup=1)
    controller.open(0, 2, 0)
    controller.release()
    controller.arrive(1)
    controller.close(at_once=True)
    controller.arrive(0)
    controller.arrive(2)
    assert (controller.release(), controller.update_due) == (over(0, 1, 2), True)
    controller.open(0, 2, 0)
    controller.release()
    controller.arrive(1)
    controller.close(at_once=True)
    assert (controller.release(), controller.update_due) == ([], False)
    controller.open(5, 6, 0)
    assert controller.release() == [goes(0, 5, 0), goes(1, 5, 1), goes(2, 5, 2)]
    assert controller.arrive(0)
