"""Turns of a program's ranks: its own lines, its long waits, its own state of the interpreter."""

import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nnmpi.base.errors import CommError
from nnmpi.comm.simulated.scheduler import (
    PACKAGE_FOLDER,
    Scheduler,
    SimulatedRank,
    describe_at,
)

LIBRARY_FOLDERS = PACKAGE_FOLDER, sysconfig.get_path("stdlib")  # not a program's own lines
LOOKS = 4  # at the running rank, until it is named


class ProgramScheduler(Scheduler):
    """A scheduler for programs that nnmpi did not write.

    Args:
        size, seed: see `Scheduler`; computing takes no time.
        turn: called with the rank's number on its thread, when it gets the turn.
        say: called with a sentence when a rank computes for `stall_s` without a call.
        stall_s: seconds. Ranks that poll for so long are a deadlock.
        patience_s: seconds that ranks poll, at least, until they are a deadlock: a program's loop
            may end by the computer's clock.
    """

    # this folder stands for mpi4py in a program's lines
    hidden = (*Scheduler.hidden, str(Path(__file__).parent))

    def __init__(
        self,
        size: int,
        seed: int,
        turn: Callable[[int], object],
        say: Callable[[str], object],
        stall_s: float,
        patience_s: float,
    ) -> None:
        super().__init__(size, seed, 0.0)
        self._turn, self._say = turn, say
        self._stall_s, self._patience_s = stall_s, patience_s
        self._fruitless_since_s = 0.0

    def on_turn(self, number: int) -> None:
        """Call `turn`."""
        self._turn(number)

    def begin_call(self, rank: SimulatedRank) -> None:
        """Begin a call.

        Raises:
            CommError: on a thread of a rank of which another waits in a call.
        """
        if self._running is not rank and not rank.ended and self.failure is None:
            error = CommError(
                f"rank {rank.number} calls MPI on {threading.current_thread().name} while another"
                f" of its threads waits in a call{describe_at(rank.lines)}\n    let one thread"
                f" call, as MPI.THREAD_FUNNELED says{describe_at(self.find_lines())}"
            )
            self.failure = rank.number, error
            raise error
        super().begin_call(rank)

    def is_stuck(self) -> bool:
        """Return whether ranks have polled in vain for long enough by the computer's clock."""
        now_s = time.monotonic()
        if self._fruitless == 1:
            self._fruitless_since_s = now_s
        limit_s = self._patience_s if super().is_stuck() else self._stall_s
        return now_s - self._fruitless_since_s >= limit_s

    def _watch(self, threads: Mapping[str, threading.Thread]) -> None:
        """Return when all ranks have ended; name one that computes for too long.

        Raises:
            TimeoutError: for one that computes on, for that long, after another's failure.
        """
        before: tuple[object, ...] = ()
        stalls = 0
        while not self._over.wait(self._stall_s / LOOKS):
            rank = self._running
            now = self.turns, rank, rank and rank.calls
            stalls = stalls + 1 if now == before else 0
            before = now
            if rank is None or stalls < LOOKS:
                continue
            if self.failure is not None:
                rank.held = True
                raise TimeoutError
            if stalls == LOOKS:
                frame = sys._current_frames().get(threads[f"rank {rank.number}"].ident or 0)
                others = [
                    f"  rank {item.number} waits for {item.waits_for}{describe_at(item.lines)}"
                    for item in self.ranks
                    if item._awaits is not None
                ]
                head = f"rank {rank.number} has made no call for {self._stall_s:.0f} s"
                at = describe_at(self.find_lines(frame, LIBRARY_FOLDERS)[-1:])
                self._say("\n".join([f"{head}{at}", *others]))
