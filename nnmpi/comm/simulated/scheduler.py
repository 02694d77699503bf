"""Whose turn it is among simulated ranks, and how late it is for each of them.

Every rank is a thread, and one of them has the turn: all others wait at their gates. It changes
only inside calls that communicate, so between them a rank computes undisturbed. What can happen
next stands in an agenda:

    agenda    rank 2 goes on  |  a message reaches rank 0  |  rank 1 goes on  | ...
    rank 0    computes, waits for a message ..............   goes on
    rank 1    computes, sends, looks for a message (its turn may end here)

In what order, depends on what computing costs:

    nothing, or what is given    by time: whoever's clock is earliest goes on, and the seed decides
                                 where times are equal. All seconds are then exact, and the same for
                                 the same seed.
    its measured time            as the seed draws it: the clocks follow, but who goes first does
                                 not depend on them, as a measured second is never the same twice,
                                 and the order must be.

When the agenda is empty and somebody still waits, nobody can ever continue. That is a deadlock, and
is reported at once.

Sources: conservative simulation of parallel programs, as in SimGrid's SMPI (Clauss et al., 2011);
one seed for every choice, as in FoundationDB's simulation (Zhou et al., SIGMOD 2021).
"""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from math import inf
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, TypeAlias

from nnmpi.errors import CommError

# What can go wrong among simulated ranks, on purpose: ranks that die, stop or are slow, and
# messages that are late.
#
#     kill    rank 2 ---- call 57 x                       as by kill -9: no line of its program runs any more
#             others ---------------- x                   the launcher ends them a little later, whatever they do
#     stop    rank 2 ---- call 57 .....................   it never goes on
#             others ------------- wait for it            until nobody can go on any more
#
# Both end the simulation with an error that names the rank, its call and its line, and what the
# others waited for. Where a rank is slow or a message late, the order of all that happens is
# another one; the results must not be.

LATE = 50.0  # how many usual delays a late message takes
LATE_S = 1e-3  # the same on clocks, where all seconds are exact


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a simulation.

    Attributes:
        kill, stop: in which of its calls a rank is killed, or stops, by rank; calls count from 1.
        slow: how many times as long a rank lets others go first, by rank.
        late: the share of messages that are late.
    """

    kill: Mapping[int, int] = field(default_factory=dict)
    stop: Mapping[int, int] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)
    late: float = 0.0

    def delay(self, rank: int | None, random: Random) -> float:
        """Return the delay factor of a rank's turn, or with None of a message."""
        if rank is not None:
            return self.slow.get(rank, 1.0) - 1.0
        return LATE if self.late and random.random() < self.late else 0.0


# what a look for messages costs a rank that computes in no time: else it could look for ever
LOOK_S = 1e-7
FRUITLESS_LOOKS = 20_000  # by one rank when nothing else can happen
INTERRUPTED_S = 2.0  # for the ranks to end in, once the program was broken off from outside
LAUNCHER_TURNS = 8  # of each rank, at most, before the launcher has ended all after one was killed
SPREAD = 4  # the seed may put somebody behind so many turns of each rank
OWN_FOLDER = str(Path(__file__).parent)
PACKAGE_FOLDER = str(Path(__file__).parents[2])

Lines: TypeAlias = tuple[tuple[str, int], ...]
"""Places in source files, (file, line): where a call was made, innermost first."""


def _closed_gate() -> threading.Lock:
    """Return a lock that another thread releases: the cheapest way of Python to let one thread go
    on.
    """
    gate = threading.Lock()
    gate.acquire()
    return gate


class Abandoned(BaseException):
    """Raised on ranks that stop because another failed; only the scheduler catches it."""


@dataclass(eq=False)
class SimulatedRank:
    """One rank's thread and clock.

    Attributes:
        number: of this rank among all.
        clock_s: how late it is here.
        waits_for: what it waits for, or has waited for last, as text.
        lines: where.
        ended: whether its program is over.
        news: a number that changes when one of its requests becomes complete, and when it has
            waited for one: then looking once more may find something.
        calls: how many calls it has made.
        world: as this rank sees it, with the step of training in which it is.
    """

    number: int
    clock_s: float = 0.0
    waits_for: str = ""
    lines: Lines = ()
    ended: bool = False
    news: int = 0
    calls: int = 0
    world: Any = None
    _awaits: set[Any] | None = None
    _blames: Callable[[], Sequence[int]] = tuple
    _cpu_s: float = 0.0
    _looks: int = 0
    _gate: threading.Lock = field(default_factory=_closed_gate)


class Scheduler:
    """Lets ranks take turns.

    Args:
        size: how many ranks.
        seed: of everything that is drawn.
        cpu_factor: seconds of a rank's clock for each second of processor time that its thread
            computed; with 0 computing takes no time, and the order is that of the clocks.
        faults: what goes wrong.

    Attributes:
        ranks: by number.
        seed: this one.
        random: for what else is to be drawn.
        by_time: whether the order is that of the clocks; may be set to False before the ranks run.
        turns: how many times the turn has changed.
        on_turn: called on a rank's thread, with its number, when it has the turn.
        failure: the rank that failed first, and its exception; None while all is well.
        fallen: what became of ranks that were killed or have stopped, as text.
    """

    def __init__(
        self, size: int, seed: int, cpu_factor: float, faults: Faults | None = None
    ) -> None:
        self.ranks = [SimulatedRank(number) for number in range(size)]
        self.seed, self.random = seed, Random(seed)
        self.by_time = cpu_factor == 0
        self.turns = 0
        self.on_turn: Callable[[int], object] = str
        self.failure: tuple[int, BaseException] | None = None
        self.fallen: dict[int, str] = {}
        self._faults, self._last_turn = faults, inf
        self._factor = cpu_factor
        self._agenda: list[tuple[float, float, int, SimulatedRank | Callable[[], None]]] = []
        self._planned = 0
        self._over = threading.Event()

    # ---- the agenda ----

    def plan(self, at_s: float, what: SimulatedRank | Callable[[], None]) -> None:
        """Let a rank continue, or something happen, at a time (or when the seed says)."""
        self._planned += 1
        draw = self.random.random()
        if self._faults is not None:
            put_off = self._faults.delay(
                what.number if isinstance(what, SimulatedRank) else None, self.random
            )
            at_s, draw = at_s + put_off * LATE_S, draw + put_off
        key = (
            (at_s, draw) if self.by_time else (self._planned + draw * SPREAD * len(self.ranks), 0.0)
        )
        heapq.heappush(self._agenda, (*key, self._planned, what))

    def enter(self, rank: SimulatedRank) -> None:
        """Begin a call: what the rank computed since its last one is put on its clock.

        Raises:
            Abandoned: when another rank has failed.
        """
        if self.failure is not None:
            raise Abandoned
        rank.calls += 1
        if self._faults is not None:
            if rank.calls == self._faults.kill.get(rank.number):
                self.fall(rank, "was killed")
            if rank.calls == self._faults.stop.get(rank.number):
                self.fall(rank, "has stopped", alone=True)
        self._charge(rank)
        if self.by_time and self._agenda and self._agenda[0][0] < rank.clock_s:
            self.give_way(rank)

    def fall(self, rank: SimulatedRank, words: str, alone: bool = False) -> None:
        """Let a rank, this thread's, never continue.

        Args:
            words: what has become of it.
            alone: whether the launcher does not notice.

        Raises:
            Abandoned: at the end of all.
        """
        self.fallen[rank.number] = (
            f"rank {rank.number} {words} in its call {rank.calls}{_at(find_lines())}"
        )
        if not alone:
            self._last_turn = self.turns + self.random.randrange(LAUNCHER_TURNS * len(self.ranks))
        self._pass_on(rank)
        raise Abandoned

    def leave(self, rank: SimulatedRank) -> None:
        """End a call; the time since it began is not the rank's."""
        if self._factor:
            rank._cpu_s = time.thread_time()

    def give_way(self, rank: SimulatedRank) -> None:
        """Let others continue whose turn it is, before this rank does."""
        if self._agenda:
            self.plan(rank.clock_s, rank)
            self._pass_on(rank)

    def look_in_vain(self, rank: SimulatedRank) -> None:
        """Count a look of a rank for something that is not there yet.

        Raises:
            CommError: when it looks again and again, and nothing can ever happen.
        """
        rank.clock_s += LOOK_S if self.by_time else 0.0
        rank._looks = 0 if self._agenda else rank._looks + 1
        if rank._looks > (FRUITLESS_LOOKS if not self.fallen else len(self.ranks)):
            rank.waits_for, rank.lines = "a loop that looks for messages", find_lines()
            raise self._deadlock()

    def block(
        self,
        rank: SimulatedRank,
        awaits: set[Any],
        waits_for: str,
        lines: Lines,
        blames: Callable[[], Sequence[int]],
        until_s: float = inf,
    ) -> None:
        """Return when all of some requests have become complete, or at a time limit.

        Args:
            rank: this thread's.
            awaits: the requests; the next one of its own, whichever that is, where there are none.
            waits_for: what it waits for, as text.
            lines: where.
            blames: returns the ranks for which it waits, for the report of a deadlock.
            until_s: when it continues even so.
        """
        rank.waits_for, rank.lines, rank._awaits, rank._blames = waits_for, lines, awaits, blames
        if until_s < inf:
            self.plan(until_s, partial(self._end_wait, rank, awaits, until_s))
        self._pass_on(rank)

    def tell(self, rank: SimulatedRank, request: Any, at_s: float) -> None:
        """Notify a rank that a request is complete; it continues if it waited for that."""
        rank.news += 1
        rank._looks = 0
        if rank._awaits is None:
            return
        rank._awaits.discard(request)
        if not rank._awaits:
            self._end_wait(rank, rank._awaits, at_s)

    def _end_wait(self, rank: SimulatedRank, awaits: set[Any], at_s: float) -> None:
        """Let a rank continue, if it still waits for these requests."""
        if rank._awaits is awaits:
            rank.clock_s = max(rank.clock_s, at_s)
            rank._awaits = None
            self.plan(rank.clock_s, rank)

    # ---- clocks ----

    def now(self, rank: SimulatedRank) -> float:
        """Return how late it is for a rank, this thread's."""
        self._charge(rank)
        return rank.clock_s

    def sleep(self, rank: SimulatedRank, seconds: float) -> None:
        """Let time pass for a rank, this thread's."""
        self.enter(rank)
        rank.clock_s += max(0.0, seconds)
        self.give_way(rank)
        self.leave(rank)

    def _charge(self, rank: SimulatedRank) -> None:
        if self._factor:
            now_s = time.thread_time()
            rank.clock_s += (now_s - rank._cpu_s) * self._factor
            rank._cpu_s = now_s

    # ---- turns ----

    def run(self, program: Callable[[int], None]) -> None:
        """Call `program(number)` on a thread for each rank; return when all have ended.

        Afterwards `failure` says whether one failed.
        """
        threads = [
            threading.Thread(
                target=self._live, args=(rank, program), name=f"rank {rank.number}", daemon=True
            )
            for rank in self.ranks
        ]
        for rank, thread in zip(self.ranks, threads, strict=True):
            self.plan(0.0, rank)
            thread.start()
        self._hand_over(None)
        try:
            self._over.wait()
        except BaseException as error:
            # Ctrl-C, or a test's time limit, reaches the thread that waits here
            self.failure = self.failure or (-1, error)
            # a rank that waits for what never comes is left behind, and all after it
            self._over.wait(INTERRUPTED_S)
            return
        for thread in threads:
            thread.join()

    def _live(self, rank: SimulatedRank, program: Callable[[int], None]) -> None:
        rank._gate.acquire()
        try:
            if self.failure is None:
                self.on_turn(rank.number)
                self.leave(rank)
                program(rank.number)
                self._charge(rank)
        except Abandoned:
            pass
        except BaseException as error:
            if self.failure is None:
                self.failure = (rank.number, error)
        rank.ended = True
        self._hand_over(None)

    def _pass_on(self, rank: SimulatedRank) -> None:
        """Let whoever is next continue, and return when it is this rank's turn again."""
        if self._hand_over(rank):
            return
        rank._gate.acquire()
        self.on_turn(rank.number)
        if self.failure is not None:
            raise Abandoned

    def _hand_over(self, own: SimulatedRank | None) -> bool:
        """Do what stands in the agenda up to the next rank; return whether that is `own`, whose
        turn it is already.
        """
        while self.failure is None and self._agenda:
            if self.turns >= self._last_turn:
                self.failure = (-1, self._deadlock())
                break
            what = heapq.heappop(self._agenda)[-1]
            if not isinstance(what, SimulatedRank):
                try:
                    what()
                except Exception as error:  # a mistake of some rank, found when all had come
                    self.failure = (own.number if own is not None else -1, error)
                continue
            if what is own:
                return True
            self.turns += 1
            what._gate.release()
            return False
        left = [rank for rank in self.ranks if not rank.ended]
        if not left:
            self._over.set()
            return False
        if self.failure is None:
            self.failure = (-1, self._deadlock())
        if own is not None:
            raise Abandoned
        left[0]._gate.release()  # one after the other, as each hands over when it has ended
        return False

    def _deadlock(self) -> CommError:
        waiting = [rank for rank in self.ranks if not rank.ended and rank.number not in self.fallen]
        lines = [
            f"  rank {item.number} waits for {item.waits_for}, {_since(item)}{_at(item.lines)}"
            for item in waiting
        ]
        if self.fallen:
            return CommError(
                "\n".join(["; ".join(self.fallen.values()) + "; the job is ended", *lines])
            )
        ended = [rank.number for rank in self.ranks if rank.ended]
        if ended:
            lines.append(f"  ended: {', '.join(f'rank {number}' for number in ended)}")
        cycle = _find_cycle({rank.number: list(rank._blames()) for rank in waiting})
        circle = " -> ".join(f"rank {number}" for number in cycle)
        head = "deadlock: no rank can go on" + (
            f"; {circle} wait for one another in a circle" if cycle else ""
        )
        return CommError("\n".join([head, *lines]))


def _since(rank: SimulatedRank) -> str:
    step = getattr(rank.world, "step", None)
    return (
        f"since {rank.clock_s:.6g} s, in its call"
        f" {rank.calls}{'' if step is None else f' and step {step}'}"
    )


def _at(lines: Lines) -> str:
    return "".join(f"\n      at {file}:{line}" for file, line in lines)


def describe_lines(lines: Lines) -> str:
    """Return places in the source as text, on one line."""
    return " from ".join(f"{file}:{line}" for file, line in lines) or "an unknown line"


def find_lines() -> Lines:
    """Return the call's place in the program: nnmpi's line next to it, and its caller's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _lies_in(OWN_FOLDER, frame.f_code.co_filename):
        frame = frame.f_back
    within = frame
    while frame is not None and _lies_in(PACKAGE_FOLDER, frame.f_code.co_filename):
        frame = frame.f_back
    places = [within, frame] if within is not frame else [frame]
    return tuple(
        (place.f_code.co_filename, place.f_lineno) for place in places if place is not None
    )


@cache  # each message asks, for every call around it
def _lies_in(folder: str, file: str) -> bool:
    return file.startswith(folder)


def _find_cycle(blamed: dict[int, list[int]]) -> list[int]:
    """Return ranks of which each waits for the next, the first of them again at the end; [] where
    there are none.
    """
    try:
        TopologicalSorter(blamed).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # there each is waited for by the next
    return []
