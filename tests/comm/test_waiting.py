"""A rank that waits for a late one leaves the core alone, and has the sum when it comes."""

import time

import pytest

from nnmpi import clock
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.world import LONGEST_S, mpi_world


@pytest.mark.mpi
def test_sums_are_those_of_the_group(group: Group) -> None:
    sums = group.sum_floats([group.rank, 0.5], asleep=True)
    assert group.gather(sums) == [[group.size * (group.size - 1) / 2, group.size / 2]] * group.size


@pytest.mark.mpi(min_size=2)
def test_waiting_takes_next_to_no_processor_time(group: Group) -> None:
    late_s = 0.5
    group.barrier()
    began = time.process_time()
    if group.is_root:
        time.sleep(late_s)
    group.sum_floats([1.0], asleep=True)
    used = group.gather(time.process_time() - began)
    assert max(used) < 0.5 * late_s, used


def test_looks_become_rarer() -> None:
    """A tenth of a second is at most a hundred looks and the few that come before the pauses are full."""
    looks, end = [], time.perf_counter() + 0.1

    def finished() -> bool:
        looks.append(time.perf_counter())
        return looks[-1] > end

    mpi_world().wait_until(finished)
    assert 1 < len(looks) < 0.1 / LONGEST_S + 10


def test_what_is_finished_is_not_waited_for() -> None:
    began = time.perf_counter()
    for _ in range(100):
        mpi_world().wait_until(lambda: True)
    assert time.perf_counter() - began < 0.1


def test_a_wait_ends_at_its_time() -> None:
    began_s = clock.now()
    assert not mpi_world().wait_until(lambda: False, began_s + 0.05)
    assert 0.05 <= clock.now() - began_s < 5
    assert mpi_world().wait_until(lambda: True, began_s)  # what is ready is not late
