"""What is said of ranks that do not go on: who is missing, in what the others wait, and when it is
over.
"""

import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from nnmpi.base import clock
from nnmpi.base.lines import PACKAGE
from nnmpi.comm.mpi import mpi_world as mpi_world_module
from nnmpi.comm.mpi import watchdog
from nnmpi.comm.mpi.mpi_world import LONGEST_S, mpi_world
from nnmpi.comm.mpi.shutdown import AT_END
from nnmpi.comm.mpi.watchdog import RankStatus, describe, find_line, is_over

WAITS = "a barrier of 4 ranks, called at mine.py:3 in run"


def test_a_rank_that_has_ended_is_named_and_what_it_should_have_called():
    waits = "an all-gather of 2 ranks, the call of save at mine.py:6, which all ranks must make"
    statuses = {0: RankStatus(12.0, 12.0, waits, None), 1: RankStatus(11.0, 11.0, AT_END, None)}
    assert describe(statuses, {}, set()) == f"rank 1 has ended; rank 0 waits in {waits}"


def test_who_is_missing_comes_first():
    waiting = RankStatus(12.0, 12.0, WAITS, 7)
    busy = RankStatus(0.0, 3.0, "at mine.py:9 in load", 6)
    assert describe({0: waiting, 1: busy, 3: waiting}, {2: 8.0}, {4}) == (
        "rank 2 has not been heard of for 8 s; rank 4 has never been heard of; "
        f"rank 1 is at mine.py:9 in load (step 6); ranks 0, 3 wait in {WAITS} (step 7)"
    )


def test_where_all_wait_nobody_is_missing():
    words = describe(
        {0: RankStatus(9, 9, "an all-reduce", 2), 1: RankStatus(9, 9, "a broadcast", 2)}, {}, set()
    )
    assert words.startswith(
        "all ranks wait for one another; if none continues, they are not in the same collective"
    )


@pytest.mark.parametrize(
    "waited_s, others, silent, limit_s, over",
    [
        (9, [], {}, 10, False),
        (11, [], {}, 10, True),  # all wait
        (11, [RankStatus(0.1, 0.1, WAITS, None)], {}, 10, False),  # it has just come
        (11, [RankStatus(0, 11, "asleep", None)], {}, 10, True),
        (11, [RankStatus(0, 1, "computing", None)], {}, 10, False),  # it may come
        (101, [RankStatus(0, 1, "computing", None)], {}, 10, True),  # but not for ever
        (11, [RankStatus(0, 1, "computing", None)], {5: 11.0}, 10, True),
        (1e6, [], {5: 1e6}, 0, False),
    ],
)
def test_when_it_is_over(waited_s, others, silent, limit_s, over):
    statuses = dict(enumerate([RankStatus(waited_s, waited_s, WAITS, 1), *others]))
    assert is_over(statuses, silent, limit_s) == over


def test_the_place_of_a_thread_is_the_users_line_and_its_call():
    room, library = str(Path(watchdog.__file__).parent), watchdog.LIBRARY
    wait = f'  File "{library}/threading.py", line 5 in wait'
    poll = f'  File "{room}/window.py", line 3 in poll'
    save = f'  File "{PACKAGE}/train/checkpoint.py", line 4 in save'
    mine = [f'  File "/home/me/mine.py", line {number} in run' for number in (6, 9)]

    def place(*lines):
        other = f"Thread 0x{7:016x} (most recent call first):", save, ""
        local = f"Current thread 0x{9:016x} (most recent call first):"
        return find_line("\n".join([*other, local, *lines]), 9)

    assert place(wait, poll, save, *mine) == "the call of save at mine.py:6"
    assert place(wait, *mine) == "mine.py:6 in run"  # it waits by itself
    launcher = f'  File "{Path(sys.executable).parent}/nnmpi", line 8 in <module>'
    assert place(wait, poll, save, launcher) == "checkpoint.py:4 in save"
    assert place(wait) == "threading.py:5 in wait"  # there is nothing else
    assert place() == "an unknown line"


def test_a_call_of_the_world_says_for_what_it_waits_while_it_does():
    """Also if it is left by an error: what comes after it does not wait."""
    seen = []

    def call():
        seen.append(world.waiting)
        raise KeyboardInterrupt

    world = SimpleNamespace(operations=deque(), waiting=None, has_ended=False)
    with pytest.raises(KeyboardInterrupt):
        mpi_world_module._named(world, 3, "a barrier", call)()
    assert [words for _, words in seen] == ["a barrier of 3 ranks"] and world.waiting is None


def test_a_wait_lasts_from_whatever_line_it_looks():
    """A server polls while it waits, and each status finds it at another line."""
    lines = iter("ab")
    rank = SimpleNamespace(
        _world=SimpleNamespace(waiting=(0.0, "messages"), waiter=None, step=1),
        _line=lambda: next(lines),
        _mark=None,
        _moved_s=0.0,
        _worked_s=0.0,
    )
    first, second = (watchdog.Watchdog.status(rank) for _ in range(2))
    assert second.still_s > first.still_s == 0


# A rank that waits for a late one leaves the core alone, and has the sum when it comes.


@pytest.mark.mpi(min_size=2)
def test_waiting_takes_next_to_no_processor_time(group):
    late_s = 0.5
    group.barrier()
    began = time.process_time()
    if group.is_root:
        time.sleep(late_s)
    group.sum_floats([1.0], asleep=True)
    used = group.gather(time.process_time() - began)
    assert max(used) < 0.5 * late_s, used


def test_looks_become_rarer():
    """A tenth of a second is at most a hundred looks and the few that come before the pauses are
    full.
    """
    looks, end = [], time.perf_counter() + 0.1

    def finished():
        looks.append(time.perf_counter())
        return looks[-1] > end

    mpi_world().wait_until(finished)
    assert 1 < len(looks) < 0.1 / LONGEST_S + 10


def test_a_wait_ends_at_its_time():
    began_s = clock.now()
    assert not mpi_world().wait_until(lambda: False, began_s + 0.05)
    assert 0.05 <= clock.now() - began_s < 5
    assert mpi_world().wait_until(lambda: True, began_s)  # what is ready is not late
