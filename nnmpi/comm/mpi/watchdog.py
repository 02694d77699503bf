"""A thread per rank that names the missing rank in a stall, and ends the job at a limit.

Every wait for other ranks says in `MpiWorld.waiting` what it waits for, and since when. Each rank's
thread sends that to ranks 0 and 1, over a communicator of its own; MPI was started for several
threads, so this works while the main thread is stuck in MPI.

    rank 2's thread   what the main thread waits for, or where it is   --- status --->   ranks 0 and 1
    warning_s after a wait began    rank 0 says who is missing, and where all others are; again when
                                    it has doubled
    limit_s                         rank 0 tells all ranks to end: each leaves a flight record, then
                                    the job is aborted
    rank 0 itself says nothing      rank 1 does its work; if it is silent, too, each rank ends by
                                    itself

A rank that is killed is the launcher's to name. An earlier version noticed its death by TCP, half a
second before Open MPI's launcher does; that took a server that any process of the network could
talk to.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from nnmpi.comm.mpi.shutdown import STALLED, abort, complain
from nnmpi.comm.world import WARNING_S
from nnmpi.command import printable
from nnmpi.errors import name_ranks

PERIOD_S = 0.5
LEAST_S = 1e-3  # of a wait that has just begun
RANKS_PER_S = 200  # that ranks 0 and 1 hear of in a second, at most
SILENT_S, SILENT_PERIODS = 3.0, 4  # whichever is longer, until a rank counts as silent
WORK_S = 5e-3  # of processor time in a period: more than this thread takes itself
# times the limit that a rank is given which computes, though nobody knows whether it will end
BUSY_FACTOR = 10
RECORD_S = 1.5  # for all ranks to write their flight records
STATUS, END = 1, 2  # tags
# of a message; of a place in it, whose letters JSON may write as six
MOST_BYTES, MOST_LETTERS = 1 << 14, 1000
COMM_FOLDER = str(Path(__file__).parents[1])
LIBRARY = os.path.dirname(os.__file__)
ENDED = "the job is ended: it has waited {}"


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself.

    Attributes:
        waits_s: seconds in its present wait for other ranks; 0 where it does not wait.
        still_s: seconds at one place without computing.
        place: what it waits for, or the line where it is.
        step: of training.
    """

    waits_s: float
    still_s: float
    place: str
    step: int | None


class Watchdog:
    """Watches over the ranks of MPI's world. Making one is collective.

    Attributes:
        warning_s: the missing ranks are named after a wait of this length; doubled by each warning.
        limit_s: the job is ended after a wait of this length; 0 for never.
        folder: of the run, for flight records; None for none.
    """

    def __init__(self, world: Any) -> None:
        self.warning_s, self.limit_s = WARNING_S, 0.0
        self.folder: Path | None = None
        self._world, self._comm = world, MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._period_s = max(PERIOD_S, self.size / RANKS_PER_S)
        self._silent_s = max(SILENT_S, SILENT_PERIODS * self._period_s)
        self._heard: dict[int, tuple[float, RankStatus]] = {}
        self._listens_s = time.monotonic()  # since when the ranks should have been heard of
        self._sent: dict[int, tuple[MPI.Request, bytes]] = {}
        self._came = bytearray(MOST_BYTES)
        self._post()
        self._mark: Hashable = None
        self._moved_s, self._worked_s = time.monotonic(), time.process_time()
        self._stack = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (open as long as the thread)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nnmpi-watchdog", daemon=True)
        # MPI calls this when a program finalizes it by itself: no call may come after that.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._stop(cancel=True))
        MPI.COMM_SELF.Set_attr(key, self)
        self._thread.start()

    def close(self) -> None:
        """End the thread and receive pending reports. Collective, when all ranks are done."""
        self._stop(cancel=False)
        self._comm.Barrier()
        self._is_ending()
        self._stop(cancel=True)
        self._comm.Free()

    def _stop(self, cancel: bool) -> None:
        self._closing.set()
        self._thread.join()
        if cancel and self._receive != MPI.REQUEST_NULL:
            self._receive.Cancel()
            self._receive.Wait()

    def _post(self) -> None:
        """Receive the next message. (A look by Iprobe alone moves nothing in MPICH, whose ranks
        then hear nothing.)
        """
        self._receive = self._comm.Irecv([self._came, MPI.BYTE], MPI.ANY_SOURCE, MPI.ANY_TAG)

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._closing.wait(self._period_s):
            now = time.monotonic()
            if now - looked_s > self._silent_s:
                # this process was stopped: nobody is missing for that
                self._heard.clear()
                self._listens_s, self._mark = now, None
            looked_s, status = now, self.status()
            self._heard[self.rank] = (now, status)
            self._tell(status)
            if self._is_ending():
                self._end("")
            self._judge(now, status)

    # ---- what this rank says ----

    def status(self) -> RankStatus:
        """Return what the main thread waits for, or where it is, and for how long."""
        now, waiting, waiter = time.monotonic(), self._world.waiting, self._world.waiter
        before_s, self._worked_s = self._worked_s, time.process_time()
        words = _ask(waiter) or (waiting[1] if waiting else "")
        place = (f"{words}, called at {self._line()}" if words else f"at {self._line()}")[
            :MOST_LETTERS
        ]
        mark = waiting and waiting[0], place, self._world.step
        if mark != self._mark or (not words and self._worked_s - before_s >= WORK_S):
            self._mark, self._moved_s = mark, now
        still_s = now - self._moved_s
        return RankStatus(max(still_s, LEAST_S) if words else 0.0, still_s, place, self._world.step)

    def _line(self) -> str:
        """Return the main thread's innermost line outside `nnmpi.comm` and Python's library.

        By faulthandler, which makes no objects: looking at another thread's frames from Python made
        3.11 overwrite memory when a collection began meanwhile.
        """
        self._stack.seek(0)
        self._stack.truncate()
        faulthandler.dump_traceback(self._stack, all_threads=True)
        self._stack.seek(0)
        return find_line(self._stack.read(), threading.main_thread().ident or 0)

    def _tell(self, status: RankStatus) -> None:
        message = json.dumps(asdict(status)).encode()
        for reader in {0, 1} - {self.rank}:
            if reader not in self._sent or self._sent[reader][0].Test():
                self._sent[reader] = self._comm.Isend([message, MPI.BYTE], reader, STATUS), message

    # ---- what it hears, and what follows ----

    def _is_ending(self) -> bool:
        """Take what has come; return whether another rank ends the job."""
        result = MPI.Status()
        while self._receive.Test(result):
            message = bytes(self._came[: result.Get_count(MPI.BYTE)])
            self._post()
            if result.Get_tag() == END:
                return True
            self._heard[result.Get_source()] = (time.monotonic(), RankStatus(**json.loads(message)))
        return False

    def _judge(self, now: float, own: RankStatus) -> None:
        """Name who is missing, or end the job, if that is this rank's to do."""
        silent = {
            rank: now - at for rank, (at, _) in self._heard.items() if now - at > self._silent_s
        }
        # it may stop before its first word
        zero_heard_s = self._heard[0][0] if 0 in self._heard else self._listens_s
        if self.rank > 1 or (self.rank == 1 and now - zero_heard_s <= self._silent_s):
            if self.limit_s and own.waits_s > BUSY_FACTOR * self.limit_s + self._silent_s:
                self._end(
                    ENDED.format(
                        f"for {own.waits_s:.0f} s in {own.place}; ranks 0 and 1 say nothing"
                    )
                )
            return
        statuses = {rank: status for rank, (_, status) in self._heard.items() if rank not in silent}
        waited_s = max(status.waits_s for status in statuses.values())
        over = is_over(statuses, silent, self.limit_s)
        if waited_s < max(0.0 if over else self.warning_s, self._silent_s + self._period_s):
            return
        words = (
            f"for {waited_s:.0f} s:"
            f" {describe(statuses, silent, set(range(self.size)) - set(self._heard))}"
        )
        if over:
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._endings = [self._comm.Isend([b"", MPI.BYTE], rank, END) for rank in others]
            self._end(ENDED.format(words))
        self.warning_s = 2 * waited_s
        what_then = (
            f"; the job is ended after {self.limit_s:.0f} s of it"
            if self.limit_s > waited_s
            else ""
        )
        complain(f"nnmpi: waiting {words}{what_then}")

    def _end(self, text: str) -> None:
        """Leave a flight record and abort the job."""
        if text:
            complain(f"nnmpi: {text}")
        with contextlib.suppress(Exception):  # whatever it is, the job must end
            self._record(text)
        time.sleep(RECORD_S if text else 4 * RECORD_S)
        abort(MPI, STALLED)

    def _record(self, text: str) -> None:
        """Write where this rank is, its last calls, and the stacks of its threads."""
        if self.folder is None:
            return
        folder = self.folder / "flight"
        folder.mkdir(parents=True, exist_ok=True)
        now = time.monotonic()
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        facts = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "peak_bytes": peak_bytes,
        }
        with (folder / f"rank-{self.rank}.txt").open("w") as stream:
            if text:
                stream.write(printable(text) + "\n")
            stream.write(
                json.dumps(facts | asdict(self.status())) + "\n\nthe last calls, seconds ago:\n"
            )
            stream.writelines(
                f"{now - at:12.6f}  {name}\n" for at, name in list(self._world.operations)
            )
            stream.write("\n")
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)


def find_line(stacks: str, thread: int) -> str:
    """Return a thread's innermost user line in a faulthandler dump."""
    _, _, stack = stacks.partition(f"hread 0x{thread:016x}")
    lines = [line for line in stack.partition("\n\n")[0].splitlines() if line.startswith("  File ")]
    others = [
        line
        for line in lines
        if not line.startswith((f'  File "{COMM_FOLDER}', f'  File "{LIBRARY}'))
    ]
    for line in others or lines:
        _, path, rest = line.split('"', 2)
        number, _, function = rest.removeprefix(", line ").partition(" in ")
        return f"{os.path.basename(path)}:{number} in {function}"
    return "an unknown line"


def describe(
    statuses: Mapping[int, RankStatus], silent: Mapping[int, float], unknown: set[int]
) -> str:
    """Return who is missing, and what all others wait for.

    Args:
        statuses: of the ranks that answer.
        silent: the others, and the seconds since they were heard last.
        unknown: ranks that were never heard.
    """
    parts = [
        f"{name_ranks([rank])} has not been heard of for {seconds:.0f} s"
        for rank, seconds in silent.items()
    ]
    if unknown:
        parts.append(f"{name_ranks(sorted(unknown))} has never been heard of")
    busy = {rank: status for rank, status in statuses.items() if not status.waits_s}
    parts += [f"{_plural(ranks, 'is', 'are')} {place}" for place, ranks in _by_place(busy).items()]
    waiting = {rank: status for rank, status in statuses.items() if status.waits_s}
    if not parts:
        parts = [
            "all ranks wait for one another; if none goes on, they are not in the same collective"
            " or message"
        ]
    parts += [
        f"{_plural(ranks, 'waits', 'wait')} in {place}"
        for place, ranks in _by_place(waiting).items()
    ]
    return "; ".join(parts)


def is_over(
    statuses: Mapping[int, RankStatus], silent: Mapping[int, float], limit_s: float
) -> bool:
    """True if the limit has passed; ten times the limit for a busy rank. 0: no limit."""
    waited_s = max((status.waits_s for status in statuses.values()), default=0.0)
    if not limit_s or waited_s < limit_s:
        return False
    busy = [status for status in statuses.values() if not status.waits_s]
    stuck = bool(silent) or not busy or any(status.still_s >= limit_s for status in busy)
    return stuck or waited_s >= BUSY_FACTOR * limit_s


def _ask(waiter: Any) -> str:
    """Return what an object waits for; nothing for one that is still being made."""
    try:
        return str(waiter.waits_for())
    except (AttributeError, IndexError):
        return ""


def _by_place(statuses: Mapping[int, RankStatus]) -> dict[str, list[int]]:
    result: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        step = "" if status.step is None else f" (step {status.step})"
        result.setdefault(status.place + step, []).append(rank)
    return result


def _plural(ranks: list[int], one: str, several: str) -> str:
    return f"{name_ranks(ranks)} {one if len(ranks) == 1 else several}"
