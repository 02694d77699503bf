"""Parameter servers under workers of any speeds: who does what, what comes out, and that it always ends."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.backend.array import Array
from nnmpi.errors import CommError
from nnmpi.parallel.server.parameter_server import Push
from nnmpi.synchrony.consistency import Task
from tests.parallel.server.simulated import OPTIMIZERS, Play, Problem

WORKERS = st.integers(2, 8)
SERVERS = st.integers(1, 4)
BOUNDS = st.none() | st.integers(0, 5)
SEEDS = st.integers(0, 10_000)
UNBOUNDED = 10**6

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def halving(batch: int) -> float:
    """Return a learning rate that is another one for each batch."""
    return 0.1 / 2**batch


def assert_equal(found: list[Array], expected: list[Array]) -> None:
    """Check that the weights are equal bit for bit."""
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def assert_close(found: list[Array], expected: list[Array]) -> None:
    """Check that the weights are equal up to the rounding of sums in another order."""
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-11)


def all_tasks(batches: range, parts: int) -> list[Task]:
    """Return the tasks in the order in which they are assigned."""
    return [Task(batch, part) for batch in batches for part in range(parts)]


@settings(max_examples=80)
@given(WORKERS, SERVERS, BOUNDS, SEEDS)
def test_every_task_is_assigned_once_and_used_once(workers: int, servers: int, bound: int | None, seed: int) -> None:
    """Whatever the speeds, over two segments: with plain SGD the weights have moved by the sum of all gradients."""
    problem = Problem()
    expected = problem.weights()
    play = Play(problem, workers, servers, seed=seed)
    play.segment(0, 2, bound)
    play.segment(2, 4, bound)
    assert sorted(task for _, task in play.tasks) == all_tasks(range(4), workers)
    assert [server.staleness.count() for server in play.servers] == [4 * workers] * servers
    assert [worker.told for worker in play.workers] == [2] * workers
    for grads in play.pushed.values():
        expected = [w - 0.1 * g for w, g in zip(expected, grads, strict=True)]
    assert_close(problem.weights(), expected)


@settings(max_examples=80)
@given(WORKERS, SERVERS, st.integers(0, 5), SEEDS)
def test_nobody_is_further_ahead_than_the_bound(workers: int, servers: int, bound: int, seed: int) -> None:
    """Seen from outside and by each server; the bound changes between segments."""
    play = Play(Problem(batches=6), workers, servers, seed=seed)
    play.segment(0, 3, bound)
    assert max(play.leads) <= bound
    play.segment(3, 6, bound + 1)
    assert max(play.leads) <= bound + 1
    assert all(server.controller.longest_lead <= bound + 1 for server in play.servers)


@pytest.mark.parametrize("bound", [1, 3, 5, None])
def test_the_lead_is_made_use_of(bound: int | None) -> None:
    """A fast worker runs ahead as far as it may, or a test of the bound would show nothing."""
    play = Play(Problem(batches=6), 3)
    play.speeds = [1, 10_000, 10_000]
    play.segment(0, 6, bound)
    longest = max(play.leads)
    assert longest == bound if bound is not None else longest > 5
    assert play.servers[0].controller.longest_lead == longest


@settings(max_examples=80)
@given(WORKERS, SERVERS, st.integers(0, 5), SEEDS)
def test_staleness_keeps_the_bound(workers: int, servers: int, bound: int, seed: int) -> None:
    """At most (2S + 1) (N - 1) updates between reading weights and changing them: one of the others' gradients each."""
    play = Play(Problem(), workers, servers, seed=seed)
    play.segment(0, 4, bound)
    for server in play.servers:
        assert server.staleness.largest() <= (2 * bound + 1) * (workers - 1)
        assert bound > 0 or server.staleness.histogram() == {0: 4 * workers}


def test_a_worker_too_far_ahead_is_refused() -> None:
    """The check that is on in every run can fail: here the clocks let a worker go on that they should not."""
    play = Play(Problem(), 2)
    play.speeds = [1, 100_000]
    play.servers[0].controller.clocks.may_start = lambda worker, bound: True  # type: ignore[method-assign]
    with pytest.raises(CommError, match="worker 1 would begin a step 3 steps ahead of the slowest, not 2"):
        play.segment(0, 4, 2)


@every_optimizer
@settings(max_examples=6)
@given(workers=st.sampled_from([2, 3, 5, 8]), servers=SERVERS, seed=SEEDS)
def test_a_bound_of_0_is_a_serial_run(name: str, workers: int, servers: int, seed: int) -> None:
    """The same weights bit for bit whatever the speeds, and those of whole batches, with 7 rows for 2 to 8 workers."""
    sequence = Problem(OPTIMIZERS[name], frozen=(1,), rate=halving).sequence()
    found = []
    for other in (seed, seed + 1):
        problem = Problem(OPTIMIZERS[name], frozen=(1,), rate=halving)
        before = problem.storage.spans[1].parameter.data.copy()
        play = Play(problem, workers, servers, seed=other)
        play.segment(0, 2, 0)
        play.segment(2, 4, 0)
        assert problem.optimizer.steps == 4
        assert [server.version for server in play.servers] == [4] * servers
        np.testing.assert_array_equal(problem.storage.spans[1].parameter.data, before)
        found.append(problem.weights())
    assert_equal(found[0], found[1])
    assert_close(found[0], sequence)


@every_optimizer
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("bound", [0, 2, None])
@pytest.mark.parametrize("frozen", [(), (0, 3)])
def test_one_worker_is_a_serial_run_bit_for_bit(
    name: str, servers: int, bound: int | None, frozen: tuple[int, ...]
) -> None:
    """Through any number of servers, with state and step count that begin where others stopped."""
    expected = Problem(OPTIMIZERS[name], frozen, rate=halving)
    expected.sequence()
    problem = Problem(OPTIMIZERS[name], frozen, rate=halving)
    problem.sequence(0, 1)
    play = Play(problem, 1, servers)
    play.segment(1, 4, bound)
    assert_equal(problem.weights(), expected.weights())
    assert problem.optimizer.steps == expected.optimizer.steps == 4
    for slot, arrays in problem.optimizer.slots().items():
        assert_equal(arrays, expected.optimizer.slots()[slot])


@settings(max_examples=30)
@given(WORKERS, SERVERS, SEEDS)
def test_a_bound_that_nobody_reaches_is_none(workers: int, servers: int, seed: int) -> None:
    """The same tasks to the same workers, and the same weights bit for bit."""
    problems = [Problem(OPTIMIZERS["momentum"]) for _ in range(2)]
    plays = [Play(problem, workers, servers, seed=seed) for problem in problems]
    for play, bound in zip(plays, (None, UNBOUNDED), strict=True):
        play.segment(0, 4, bound)
    assert plays[0].tasks == plays[1].tasks
    assert plays[0].staleness.to_json() == plays[1].staleness.to_json()
    assert_equal(problems[0].weights(), problems[1].weights())


@settings(max_examples=60)
@given(st.integers(1, 8), SERVERS, BOUNDS, SEEDS, st.integers(0, 11))
def test_a_signal_ends_with_whole_batches(
    workers: int, servers: int, bound: int | None, seed: int, moment: int
) -> None:
    """Everybody is told, every task of the batches that were begun is used, no other one is assigned."""
    play = Play(Problem(), workers, servers, seed=seed)
    pushes = iter(range(10**6))
    play.early = lambda worker, push: replace(push, signal=2 if next(pushes) == moment else 0)
    play.segment(0, 4, bound)
    controller = play.servers[0].controller
    assert sorted(task for _, task in play.tasks) == all_tasks(range(controller.batches_done), workers)
    assert [server.staleness.count() for server in play.servers] == [controller.batches_done * workers] * servers
    assert [worker.told for worker in play.workers] == [1] * workers
    assert controller.unassigned == 0
    assert len(play.tasks) > min(moment, 4 * workers - 1)
    if moment == 0 and bound == 0:
        assert controller.batches_done == 1


@settings(max_examples=60)
@given(st.integers(1, 8), SERVERS, BOUNDS, st.integers(0, 1), SEEDS, st.integers(0, 9))
def test_divergence_ends_at_once(
    workers: int, servers: int, bound: int | None, backup: int, seed: int, moment: int
) -> None:
    """Everybody is told, what was assigned has arrived, and the broken gradient touches nothing."""
    backup = backup if workers > 1 else 0
    play = Play(Problem(), workers, 1 if backup else servers, backup, seed=seed)
    pushes = iter(range(10**6))

    def early(worker: int, push: Push) -> Push:
        if next(pushes) != moment:
            return push
        for grad in play.pushed[push.task]:
            grad[...] = math.nan
        return replace(push, broken=True)

    play.early = early
    play.segment(0, 4, 0 if backup else bound)
    controller = play.servers[0].controller
    assert [worker.told for worker in play.workers] == [1] * workers
    assert controller.arrived == len(play.tasks)
    is_broken = len(play.pushed) > moment
    if not backup:
        assert [server.staleness.count() for server in play.servers] == [controller.arrived - is_broken] * len(
            play.servers
        )
        begun = math.ceil(len(play.tasks) / workers)
        assert controller.unassigned == begun * workers - len(play.tasks)
        assert controller.batches_done == len(play.tasks) // workers
    assert all(np.isfinite(data).all() for data in play.problem.storage.data)


def test_an_empty_segment_is_over_at_once() -> None:
    """Nobody gets anything to do, on no server."""
    play = Play(Problem(), 3, 2)
    before = play.problem.weights()
    play.segment(2, 2, 0)
    assert play.tasks == []
    assert [worker.told for worker in play.workers] == [1] * 3
    assert_equal(play.problem.weights(), before)


@settings(max_examples=60)
@given(WORKERS, st.integers(1, 7), SEEDS)
def test_backup_workers(workers: int, backup: int, seed: int) -> None:
    """Each update is the mean of the first gradients of a batch; every other part is dropped or was never assigned."""
    backup = min(backup, workers - 1)
    problem = Problem(rate=halving)
    play = Play(problem, workers, backup=backup, seed=seed)
    (server,) = play.servers
    controller, updates, taken = server.controller, [], []
    arrive, update = controller.arrive, server._update

    def noted(worker: int) -> bool:
        task = controller._tasks[worker]
        is_taken = arrive(worker)
        if is_taken:
            taken.append(task)
        return is_taken

    def counted(share: float, lr: float) -> None:
        updates.append((share, lr))
        update(share, lr)

    controller.arrive, server._update = noted, counted  # type: ignore[method-assign]
    expected = problem.weights()
    dropped = unassigned = arrived = 0
    for first in (0, 2):
        play.segment(first, first + 2, 0)
        dropped, unassigned, arrived = (
            dropped + controller.dropped,
            unassigned + controller.unassigned,
            arrived + controller.arrived,
        )
    for batch in range(4):
        chosen = [task for task in taken if task.batch == batch]
        assert len(chosen) == workers - backup
        rows = [len(problem.rows(task, workers)[0]) for task in chosen]
        if sum(rows):
            share = sum(rows) / problem.rows(chosen[0], workers)[1]
            assert updates.pop(0) == (pytest.approx(share), halving(batch))
            sums = [sum(parts) for parts in zip(*(play.pushed[task] for task in chosen), strict=True)]
            expected = [w - halving(batch) / share * g for w, g in zip(expected, sums, strict=True)]
    assert_close(problem.weights(), expected)
    assert not updates
    assert dropped + unassigned == 4 * backup
    assert arrived == len(play.tasks) == 4 * workers - unassigned == 4 * (workers - backup) + dropped
    assert len(set(play.tasks)) == len(play.tasks)
    assert server.staleness.histogram() == {0: 4 * (workers - backup)}
    assert controller.longest_lead == 0
    assert [worker.told for worker in play.workers] == [2] * workers


def test_backup_workers_with_a_signal_end_with_whole_batches() -> None:
    """The batch that was begun is finished by the first gradients."""
    for seed in range(10):
        play = Play(Problem(), 4, backup=1, seed=seed)
        play.early = lambda worker, push: replace(push, signal=2 if push.task.batch == 1 else 0)
        play.segment(0, 4, 0)
        assert play.servers[0].version == play.servers[0].controller.batches_done == 2
