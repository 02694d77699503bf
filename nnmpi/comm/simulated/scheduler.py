"""The scheduler of simulated ranks: their turns, and their clocks.

Every rank is a thread, and one of them has the turn; all others wait at their gates. The turn
changes only inside communicating calls, so between them a rank computes undisturbed. An agenda
holds the next events:

    agenda    rank 2 continues  |  a message reaches rank 0  |  rank 1 continues  | ...
    rank 0    computes, waits for a message .................   continues
    rank 1    computes, sends, polls for a message (its turn may end here)

The order of the agenda depends on the cost of computing:

    zero, or a given time    by time: the rank with the earliest clock continues, and the seed
                             breaks ties. All seconds are exact, and equal for equal seeds.
    its measured time        drawn from the seed. The clocks advance, but do not decide the order:
                             a measured second is never the same twice, and the order must be.

An empty agenda with ranks still waiting is a deadlock, and is reported at once.

Threads, and not coroutines: a rank's program communicates deep inside ordinary functions, which
would all have to become coroutines. Sources: conservative simulation of parallel programs, as in
SimGrid's SMPI (Clauss et al., 2011); one seed for every choice, as in FoundationDB's simulation
(Zhou et al., SIGMOD 2021).
"""

from __future__ import annotations

import heapq
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from graphlib import CycleError, TopologicalSorter
from math import inf
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, TypeAlias

from nnmpi.backend.memory import leaving_out_others
from nnmpi.base.command import leave_fork
from nnmpi.base.errors import CommError, UsageError, name_ranks

# Injected faults: ranks that die, stop or are slow, and messages that are late.
#
#     kill    rank 2 ---- call 57 x                       as by kill -9: its program runs no further
#             others ---------------- x                   the launcher ends them a little later
#     stop    rank 2 ---- call 57 .....................   it never continues
#             others ------------- wait for it            until no rank can continue
#
# Both end the simulation with an error that names the rank, its call and its line, and the waits of
# the others. Slow ranks and late messages change the order of events; they must not change results.

LATE = 50.0  # a late message's delay in usual delays
LATE_S = 1e-3  # seconds of a usual delay when all seconds are exact


@dataclass(frozen=True)
class Faults:
    """Faults to inject into a simulation.

    Attributes:
        kill, stop: by rank, the number of the call in which it is killed or stops; from 1.
        slow: by rank, the factor of the time between its turns.
        late: the share of late messages.
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


# The seconds of a poll for messages when computing takes none. With 0, a rank that polls would keep
# the earliest clock and the turn for ever.
POLL_S = 1e-7
# Polls until a deadlock is reported, while all ranks poll or wait, and no message is under way.
# Each takes longer than the one before, minutes in all: a loop with a time limit comes to it.
FRUITLESS_POLLS = 20_000
LONGER = 1.0007
MOST_RANKS = 10_000  # threads of one process
SWALLOWED = 10  # calls of a rank that goes on after another's failure, until it is held for ever
INTERRUPTED_S = 2.0  # for the ranks to end after an interrupt from outside
LAUNCHER_TURNS = 8  # turns of each rank, at most, between a kill and the launcher's end of the job
SPREAD = 4  # the seed may postpone an event by this many turns of each rank
OWN_FOLDER = str(Path(__file__).parent)
PACKAGE_FOLDER = f"{Path(__file__).parents[2]}/"

Lines: TypeAlias = tuple[tuple[str, int], ...]
"""(file, line) of a call in the source, innermost first."""


def _closed_gate() -> threading.Lock:
    """Return a lock for another thread to release: Python's cheapest way to wake one thread."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Abandoned(BaseException):
    """Raised on all other ranks after a failure; only the scheduler catches it."""


@dataclass(eq=False)
class SimulatedRank:
    """One rank's thread and clock.

    Attributes:
        number: of this rank among all.
        clock_s: its simulated time.
        waits_for: its present or last wait, as text.
        lines: the source lines of that wait.
        ended: whether its program has ended.
        completions: a counter of completed and awaited requests; when it has changed, another poll
            may succeed.
        calls: number of calls so far.
        world: its view of the world, with its step of training.
        held: whether its thread stays in a call for ever.
    """

    number: int
    clock_s: float = 0.0
    waits_for: str = ""
    lines: Lines = ()
    ended: bool = False
    completions: int = 0
    calls: int = 0
    world: Any = None
    held: bool = False
    _abandoned: int = 0
    _awaits: set[Any] | None = None
    _blames: Callable[[], Sequence[int]] = tuple
    _cpu_s: float = 0.0
    _polls: int = 0
    _since_s: float = 0.0
    _gate: threading.Lock = field(default_factory=_closed_gate)


class Scheduler:
    """Runs the threads of ranks one at a time.

    Args:
        size: number of ranks.
        seed: of all random choices.
        cpu_factor: seconds of a rank's clock per processor second of its thread; with 0 computing
            takes no time, and events come in the order of the clocks.
        faults: the faults to inject.

    Attributes:
        ranks: by number.
        seed: as given.
        random: the source of all random choices.
        by_time: whether events come in the order of the clocks; may be set to False before the
            ranks run.
        turns: number of changes of the turn.
        failure: the rank that failed first (-1 for none in particular), and its exception; None
            without a failure.
        halted: descriptions of the killed and stopped ranks, by number.
        hidden: folders whose lines stand in no message: what carries the messages.
    """

    hidden: tuple[str, ...] = (OWN_FOLDER,)

    def __init__(
        self, size: int, seed: int, cpu_factor: float, faults: Faults | None = None
    ) -> None:
        if size > MOST_RANKS:
            raise UsageError(
                f"{size} ranks are threads of one process, which has {MOST_RANKS} at most; give"
                " fewer ranks"
            )
        self.ranks = [SimulatedRank(number) for number in range(size)]
        self.seed, self.random, self._process = seed, Random(seed), os.getpid()
        self.by_time = cpu_factor == 0
        self.turns = 0
        self.failure: tuple[int, BaseException] | None = None
        self.halted: dict[int, str] = {}
        self._faults, self._last_turn = faults, inf
        self._factor = cpu_factor
        # (position, draw, number, whether something may happen then, event)
        self._agenda: list[tuple[float, float, int, bool, SimulatedRank | Callable[[], None]]] = []
        self._planned, self._coming = 0, 0
        self._fruitless = 0
        self._running: SimulatedRank | None = None
        self._over = threading.Event()

    # ---- the agenda ----

    def plan(self, at_s: float, event: SimulatedRank | Callable[[], None]) -> None:
        """Enter a rank's turn or an event into the agenda, for a time or a drawn position."""
        self._planned += 1
        draw = self.random.random()
        if self._faults is not None:
            delay = self._faults.delay(
                event.number if isinstance(event, SimulatedRank) else None, self.random
            )
            at_s, draw = at_s + delay * LATE_S, draw + delay
        key = (
            (at_s, draw) if self.by_time else (self._planned + draw * SPREAD * len(self.ranks), 0.0)
        )
        live = not (isinstance(event, SimulatedRank) and event._polls)
        self._coming += live
        heapq.heappush(self._agenda, (*key, self._planned, live, event))

    def begin_call(self, rank: SimulatedRank) -> None:
        """Begin a call: charge the computation since the last one to the rank's clock.

        Raises:
            Abandoned: when another rank has failed.
        """
        if self.failure is not None:
            self._abandon(rank)
        rank.calls += 1
        if self._faults is not None:
            if rank.calls == self._faults.kill.get(rank.number):
                self.halt(rank, "was killed")
            if rank.calls == self._faults.stop.get(rank.number):
                self.halt(rank, "has stopped", alone=True)
        self._charge(rank)
        if self.by_time and self._agenda and self._agenda[0][0] < rank.clock_s:
            self.yield_turn(rank)

    def _abandon(self, rank: SimulatedRank) -> None:
        """End this thread's rank after another's failure.

        A program that catches everything would go on for ever, so its thread is held in the end.

        Raises:
            Abandoned: always.
        """
        rank._abandoned += 1
        if rank._abandoned > SWALLOWED:
            rank.held = rank.ended = True
            self._hand_over(None)
            _closed_gate().acquire()
        raise Abandoned

    def halt(self, rank: SimulatedRank, fate: str, alone: bool = False) -> None:
        """Halt this thread's rank for ever.

        Args:
            rank: this thread's.
            fate: for the report, such as "was killed".
            alone: whether the launcher does not notice.

        Raises:
            Abandoned: at the end of the simulation.
        """
        self.halted[rank.number] = (
            f"rank {rank.number} {fate} in its call {rank.calls}{describe_at(self.find_lines())}"
        )
        if not alone:
            self._last_turn = self.turns + self.random.randrange(LAUNCHER_TURNS * len(self.ranks))
        self._pass_on(rank)
        raise Abandoned

    def end_call(self, rank: SimulatedRank) -> None:
        """End a call: its processor time is the simulation's and not charged."""
        if self._factor:
            rank._cpu_s = time.thread_time()

    def yield_turn(self, rank: SimulatedRank) -> None:
        """Run the events that come before this rank's clock, or before its drawn position."""
        if self._agenda:
            self.plan(rank.clock_s, rank)
            self._pass_on(rank)

    def note_progress(self, rank: SimulatedRank) -> None:
        """Note that a rank does more than poll."""
        rank._polls = self._fruitless = 0

    def count_fruitless_poll(
        self, rank: SimulatedRank, waits_for: str, blames: Callable[[], Sequence[int]]
    ) -> None:
        """Count a poll of this thread's rank that found nothing.

        Args:
            rank, waits_for, blames: see `block`.

        Raises:
            CommError: when all ranks poll or wait for so long that nobody can end it.
        """
        rank._since_s = rank._since_s if rank._polls else rank.clock_s
        rank._polls += 1
        self._fruitless = 0 if self._coming else self._fruitless + 1
        if self.by_time or self._fruitless:
            rank.clock_s += POLL_S * LONGER ** min(self._fruitless, FRUITLESS_POLLS)
        if not self._fruitless:
            return
        rank.waits_for, rank.lines, rank._blames = (
            f"{waits_for}, polling",
            self.find_lines(),
            blames,
        )
        if self.is_stuck():
            raise self._deadlock()

    def is_stuck(self) -> bool:
        """Return whether ranks that poll for what cannot come are a deadlock by now."""
        return self._fruitless > (len(self.ranks) ** 2 if self.halted else FRUITLESS_POLLS)

    def on_turn(self, number: int) -> None:
        """Do nothing; called on a rank's thread when it gets the turn."""

    def block(
        self,
        rank: SimulatedRank,
        awaits: set[Any],
        waits_for: str,
        lines: Lines,
        blames: Callable[[], Sequence[int]],
        until_s: float = inf,
    ) -> None:
        """Block until all of some requests are complete, or until a time limit.

        Args:
            rank: this thread's.
            awaits: the requests; an empty set means the rank's next request to complete.
            waits_for: the wait as text.
            lines: its source lines.
            blames: returns the awaited ranks, for the report of a deadlock.
            until_s: the limit, in simulated seconds.
        """
        rank.waits_for, rank.lines, rank._awaits, rank._blames = waits_for, lines, awaits, blames
        rank._since_s = rank.clock_s
        if until_s < inf:
            self.plan(until_s, partial(self._end_wait, rank, awaits, until_s))
        self._pass_on(rank)

    def notify(self, rank: SimulatedRank, request: Any, at_s: float) -> None:
        """Count a completed request; plan its rank's turn if the rank waited for no other."""
        rank.completions += 1
        self.note_progress(rank)
        if rank._awaits is None:
            return
        rank._awaits.discard(request)
        if not rank._awaits:
            self._end_wait(rank, rank._awaits, at_s)

    def _end_wait(self, rank: SimulatedRank, awaits: set[Any], at_s: float) -> None:
        """Plan a rank's turn, if it still waits for these requests."""
        if rank._awaits is awaits:
            rank.clock_s = max(rank.clock_s, at_s)
            rank._awaits = None
            self.plan(rank.clock_s, rank)

    # ---- clocks ----

    def now(self, rank: SimulatedRank) -> float:
        """Return the clock of this thread's rank."""
        self._charge(rank)
        return rank.clock_s

    def sleep(self, rank: SimulatedRank, seconds: float) -> None:
        """Advance the clock of this thread's rank."""
        self.begin_call(rank)
        rank.clock_s += max(0.0, seconds)
        self.yield_turn(rank)
        self.end_call(rank)

    def _charge(self, rank: SimulatedRank) -> None:
        if self._factor:
            now_s = time.thread_time()
            rank.clock_s += (now_s - rank._cpu_s) * self._factor
            rank._cpu_s = now_s

    # ---- turns ----

    def run(self, program: Callable[[int], None]) -> None:
        """Call `program(number)` on a thread for each rank; return when all have ended.

        Afterwards `failure` has the first failure.
        """
        threads = [
            threading.Thread(
                target=self._live, args=(rank, program), name=f"rank {rank.number}", daemon=True
            )
            for rank in self.ranks
        ]
        for rank, thread in zip(self.ranks, threads, strict=True):
            self.plan(0.0, rank)
            try:
                thread.start()
            except RuntimeError:  # the system's limit
                rank.ended = rank.held = True
                self.failure = self.failure or (
                    -1,
                    UsageError(
                        f"this machine has no thread for rank {rank.number} of {len(self.ranks)};"
                        " give fewer ranks"
                    ),
                )
        self._hand_over(None)
        try:
            self._watch({thread.name: thread for thread in threads})
        except BaseException as error:
            # Ctrl-C, or a test's time limit, reaches the thread that waits here
            self.failure = self.failure or (-1, error)
            # do not join the threads: one may be stuck in the program's own code
            self._over.wait(INTERRUPTED_S)
            return
        for rank, thread in zip(self.ranks, threads, strict=True):
            if not rank.held:
                thread.join()

    def _watch(self, threads: Mapping[str, threading.Thread]) -> None:
        """Return when all ranks, threads with these names, have ended."""
        self._over.wait()

    def _live(self, rank: SimulatedRank, program: Callable[[int], None]) -> None:
        rank._gate.acquire()
        try:
            if self.failure is None:
                self.on_turn(rank.number)
                self.end_call(rank)
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
        """Pass the turn to the next rank, and return when it is this rank's turn again.

        Raises:
            CommError: when all ranks have ended, as for a wait in a function given to `atexit`.
        """
        with leaving_out_others():
            if self._hand_over(rank):
                return
            if self._over.is_set():
                raise CommError(
                    f"rank {rank.number} waits for others when all have ended"
                    f"{describe_at(self.find_lines())}"
                )
            rank._gate.acquire()
        self.on_turn(rank.number)
        if self.failure is not None:
            self._abandon(rank)

    def _hand_over(self, local: SimulatedRank | None) -> bool:
        """Run the agenda's events up to the next rank's turn, and wake that rank.

        Return True, without waking, if it is `local`, which runs this. A fork of a rank ends here:
        it has none of the other threads, and would wait for ever.
        """
        if os.getpid() != self._process:
            leave_fork(local is not None)
        while self.failure is None and self._agenda:
            if self.turns >= self._last_turn:
                self.failure = (-1, self._deadlock())
                break
            *_, live, event = heapq.heappop(self._agenda)
            self._coming -= live
            if not isinstance(event, SimulatedRank):
                try:
                    event()
                except Exception as error:  # a program's mistake, found by the last rank to arrive
                    self.failure = (local.number if local is not None else -1, error)
                continue
            if event is local:
                return True
            self.turns += 1
            self._running = event
            event._gate.release()
            return False
        left = [rank for rank in self.ranks if not rank.ended]
        if not left:
            self._over.set()
            return False
        if self.failure is None:
            self.failure = (-1, self._deadlock())
        if local is not None:
            raise Abandoned
        left[0]._gate.release()  # one at a time: each hands over to the next when it has ended
        return False

    def find_lines(
        self,
        frame: FrameType | None = None,
        library: str | tuple[str, ...] = PACKAGE_FOLDER,
    ) -> Lines:
        """Return the lines of a call, by default the present one: a library's, and the program's
        that called it.
        """
        hidden = self.hidden
        found: Lines = ()
        frame = frame or sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            inside, is_hidden = file.startswith(library), file.startswith(hidden)
            if not (is_hidden or (inside and found)):
                # Python searches a table for the number: for two frames, not for all
                found = *found, (file, frame.f_lineno)
            if not (inside or is_hidden):
                break
            frame = frame.f_back
        return found

    def _deadlock(self) -> CommError:
        waiting = [rank for rank in self.ranks if not rank.ended and rank.number not in self.halted]
        lines = [
            f"  rank {item.number} waits for {item.waits_for}, {_since(item)}"
            f"{describe_at(item.lines)}"
            for item in waiting
        ]
        if self.halted:
            return CommError(
                "\n".join(["; ".join(self.halted.values()) + "; the job is ended", *lines])
            )
        ended = [rank.number for rank in self.ranks if rank.ended]
        if ended:
            lines.append(f"  ended: {name_ranks(ended)}")
        cycle = _find_cycle({rank.number: list(rank._blames()) for rank in waiting})
        circle = " -> ".join(f"rank {number}" for number in cycle)
        head = "deadlock: no rank can continue" + (
            f"; {circle} wait for one another in a circle" if cycle else ""
        )
        return CommError("\n".join([head, *lines]))


def _since(rank: SimulatedRank) -> str:
    step = getattr(rank.world, "step", None)
    return f"since {rank._since_s:.6g} s{'' if step is None else f', in step {step}'}"


def describe_at(lines: Lines) -> str:
    """Return source lines as the lines of a report."""
    return "".join(f"\n      at {file}:{line}" for file, line in lines)


def describe_lines(lines: Lines) -> str:
    """Return source lines as text on one line."""
    return " from ".join(f"{file}:{line}" for file, line in lines) or "an unknown line"


def _find_cycle(blamed: dict[int, list[int]]) -> list[int]:
    """Return a circle of ranks that wait for the next, its first rank again at the end; or []."""
    try:
        TopologicalSorter(blamed).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # in it each rank is awaited by the next
    return []
