"""What is said of ranks that do not go on: who is missing, in what the others wait, and when it is over."""

import gc
import sys
import threading
import time
from collections.abc import Callable

import pytest

from nnmpi import clock
from nnmpi.comm import stall
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.mpi_world import LONGEST_S, mpi_world
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.comm.stall import Place, RankStatus, describe, describe_loss, find_place, is_over, processor_seconds

WAITS = "a barrier of 4 ranks, called at mine.py:3 in run"


def test_who_is_missing_comes_first() -> None:
    waiting = RankStatus(12.0, 12.0, WAITS, 7)
    busy = RankStatus(0.0, 3.0, "at mine.py:9 in load", 6)
    assert describe({0: waiting, 1: busy, 3: waiting}, {2: 8.0}, [4]) == (
        "rank 2 has not been heard of for 8 s; of rank 4 nothing is known; rank 1 is at mine.py:9 in load (step 6); "
        f"ranks 0, 3 wait in {WAITS} (step 7)"
    )


def test_a_rank_that_has_died_is_told_with_its_last_place() -> None:
    last, own = RankStatus(0.0, 3.0, "at mine.py:9 in load", 6), RankStatus(12.0, 12.0, WAITS, 7)
    assert describe_loss(2, last, (0, own)) == (
        "rank 2 has gone, killed or by an exit of its own; it was last heard of at mine.py:9 in load (step 6); "
        f"rank 0 is in {WAITS} (step 7)"
    )


def test_where_all_wait_nobody_is_missing() -> None:
    words = describe({0: RankStatus(9, 9, "an all-reduce", 2), 1: RankStatus(9, 9, "a broadcast", 2)}, {}, [])
    assert words.startswith("all ranks wait for one another; if none goes on, they are not in the same collective")


@pytest.mark.parametrize(
    ("waited_s", "others", "silent", "limit_s", "over"),
    [
        (9, [], {}, 10, False),
        (11, [], {}, 10, True),  # all wait
        (11, [RankStatus(0, 11, "asleep", None)], {}, 10, True),
        (11, [RankStatus(0, 1, "computing", None)], {}, 10, False),  # it may come
        (101, [RankStatus(0, 1, "computing", None)], {}, 10, True),  # but not for ever
        (11, [RankStatus(0, 1, "computing", None)], {5: 11.0}, 10, True),
        (1e6, [], {5: 1e6}, 0, False),
    ],
)
def test_when_it_is_over(
    waited_s: float, others: list[RankStatus], silent: dict[int, float], limit_s: float, over: bool
) -> None:
    statuses = dict(enumerate([RankStatus(waited_s, waited_s, WAITS, 1), *others]))
    assert is_over(statuses, silent, limit_s) == over


def look(module: str, work: Callable[[], None], waiter: object = None) -> Place:
    """Return where a thread is that does some work in a module of this name, once it has begun."""
    begun = threading.Event()
    names = {"__name__": module, "begun": begun, "work": work}
    exec("def wait_until():\n    begun.set()\n    work()\n", names)
    thread = threading.Thread(target=names["wait_until"], daemon=True)  # type: ignore[arg-type]
    thread.start()
    begun.wait(10)
    time.sleep(0.02)
    assert thread.ident is not None
    return find_place(thread.ident, "a barrier of 2 ranks", waiter)


@pytest.mark.parametrize(("module", "waits"), [("nnmpi.comm.mpi.mpi_world", True), ("nnmpi.train.loop", False)])
def test_a_rank_waits_while_it_is_in_a_call_of_comm(module: str, waits: bool) -> None:
    place = look(module, lambda: time.sleep(30))
    assert place.waits == waits
    assert ("a barrier of 2 ranks" in place.words) == waits
    assert ("test_stall.py" in place.words) == (not waits)


def test_simulated_ranks_are_not_waited_for() -> None:
    """Their scheduler knows of every deadlock, and others may wait for this process: it works while its threads do."""
    found: list[Place] = []

    def rank(group: Group) -> None:
        if group.rank:
            began_s = time.process_time()
            found.append(find_place(thread.ident or 0, "a barrier of 2 ranks"))
            while time.process_time() < began_s + 1.1:
                pass
            found.append(find_place(thread.ident or 0, "a barrier of 2 ranks"))
        group.barrier()

    thread = threading.Thread(target=lambda: simulate(rank, 2), daemon=True)
    thread.start()
    thread.join(60)
    assert [each.waits for each in found] == [False, False] and found[0].mark != found[1].mark
    assert "test_stall.py" in found[0].words and found[0].words.endswith("which simulates ranks")


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="this system does not tell a thread's time")
def test_who_computes_at_one_place_is_told_from_who_sleeps() -> None:
    """Else a slow download, or one long product of matrices, would end the job."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(10_000))

    works, rests = (threading.Thread(target=target, daemon=True) for target in (compute, over.wait))
    works.start(), rests.start()
    before = [processor_seconds(each.ident or 0) for each in (works, rests)]
    worked, rested, until_s = 0.0, 0.0, time.monotonic() + 10
    while worked <= 1e-3 and time.monotonic() < until_s:  # others may have the processor
        time.sleep(0.2)
        worked, rested = (processor_seconds(t.ident or 0) - s for t, s in zip((works, rests), before, strict=True))
    over.set()
    assert rested < 1e-3 < worked


def test_a_waiter_that_is_still_being_made_is_passed_over() -> None:
    """A thread may be looked at between any two of its steps."""

    class Half:
        def waits_for(self) -> str:
            return self.partner  # type: ignore[attr-defined, no-any-return]

    class Whole:
        def waits_for(self) -> str:
            return "a message"

    assert look("nnmpi.comm.mpi.mpi_world", lambda: time.sleep(30), Half()).words == "a barrier of 2 ranks"
    assert look("nnmpi.comm.mpi.mpi_world", lambda: time.sleep(30), Whole()).words == "a message"


def test_nothing_is_collected_while_a_stack_is_looked_at() -> None:
    """A finalizer would let the other thread go on, whose frames Python 3.11 is about to tie to objects."""
    here, found = threading.get_ident(), []

    def note(phase: str, info: dict[str, int]) -> None:
        caller = sys._getframe(1).f_code
        if threading.get_ident() == here and caller.co_filename == stall.__file__:
            found.append(caller.co_name)

    def deep(calls: int) -> None:
        deep(calls - 1) if calls else time.sleep(0.1)

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        look("nnmpi.train.loop", lambda: deep(30))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert "_outward" not in found  # which makes the objects for frames
    assert gc.isenabled()


def test_what_is_polled_meanwhile_changes_nothing() -> None:
    """Another sample of the same wait, at another line, is no progress."""

    class Poller:
        def __init__(self) -> None:
            self.end_s = time.monotonic() + 0.3

        def __call__(self) -> None:
            while time.monotonic() < self.end_s:
                time.sleep(0.001)
                time.sleep(0.002)

    assert look("nnmpi.comm.mpi.mpi_world", Poller()).words == "a barrier of 2 ranks"


# A rank that waits for a late one leaves the core alone, and has the sum when it comes.


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


def test_a_place_is_found_while_another_thread_looks_at_all_objects() -> None:
    """A tuple that grew from a generator meanwhile was a SystemError, and the watchdog's end."""
    found: list[Place] = []
    main, interval = threading.get_ident(), sys.getswitchinterval()

    def look() -> None:
        end = time.perf_counter() + 1
        while time.perf_counter() < end:
            found.append(find_place(main, "x"))

    def deep(frames: int) -> None:
        if frames:
            deep(frames - 1)
            return
        looker.start()
        while looker.is_alive():
            gc.get_objects()

    looker = threading.Thread(target=look)
    sys.setswitchinterval(1e-6)
    try:
        deep(60)
    finally:
        sys.setswitchinterval(interval)
    assert found and not found[0].waits
