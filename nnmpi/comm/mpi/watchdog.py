"""A thread per rank that names the missing rank in a stall, and aborts the job at a limit.

Every wait for other ranks is recorded in `MpiWorld.waiting` with its begin. Each rank's thread
sends it to ranks 0 and 1, over a communicator of its own. MPI was started for several threads, so
this works while the main thread is stuck in MPI.

    rank 2's thread   the main thread's wait, or its line   --- status --->   ranks 0 and 1

    after warning_s of a wait    rank 0 prints the missing ranks and the waits of the others; again
                                 whenever the wait has doubled
    after limit_s                rank 0 sends an end to all ranks: each writes a flight record and
                                 aborts the job
    rank 0 itself is silent      rank 1 takes over; if that is silent, too, each rank ends by itself

The launcher reports a killed rank. An earlier version noticed its death by TCP, half a second
before Open MPI's launcher does. That took a server open to any process of the network.
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

from nnmpi.base.command import complain, printable
from nnmpi.base.errors import group_ranks, name_ranks
from nnmpi.base.files import json_text, make_folder, opened_to_write
from nnmpi.base.lines import PACKAGE, is_users
from nnmpi.comm.mpi.shutdown import AT_END, STALLED, abort
from nnmpi.comm.world import WARNING_S

PERIOD_S = 0.5
LEAST_S = 1e-3  # reported seconds of a wait that has just begun: 0 means no wait
RANKS_PER_S = 200  # statuses per second that ranks 0 and 1 receive at most
SILENT_S, SILENT_PERIODS = 3.0, 4  # a rank is silent after the longer of the two
WORK_S = 5e-3  # processor seconds of the other threads in a period that show computation
# A computing rank may still come, so others wait this many times the limit for it.
BUSY_FACTOR = 10
RECORD_S = 1.5  # for all ranks to write their flight records
STATUS, END, LAST = 1, 2, 3  # tags
# A probe makes MPI progress, and answers from what earlier progress has found: on one node, with
# MPICH, two of three messages were left by a single probe in a period.
PROBES = 8
MOST_LETTERS = 1000  # of an activity in a message
COMM_FOLDER = str(Path(__file__).parents[1])
LIBRARY = os.path.dirname(os.__file__)
ENDED = "the job is ended: it has waited {}"
CALL = "the call of "


@dataclass(frozen=True)
class RankStatus:
    """A rank's report about its main thread.

    Attributes:
        waits_s: seconds in its present wait for other ranks; 0 without one.
        still_s: seconds with the same activity and without computing.
        activity: its wait, or its line.
        step: of training.
    """

    waits_s: float
    still_s: float
    activity: str
    step: int | None


class Watchdog:
    """Watches over the ranks of MPI's world. Making one is collective.

    Attributes:
        warning_s: the missing ranks are named after a wait of this length; a warning sets it to
            twice the present wait.
        limit_s: the job is aborted after a wait of this length; 0 for never.
        folder: the run's folder, for flight records; None for none.
    """

    def __init__(self, world: Any) -> None:
        self.warning_s, self.limit_s = WARNING_S, 0.0
        self.folder: Path | None = None
        self._world, self._comm = world, MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._period_s = max(PERIOD_S, self.size / RANKS_PER_S)
        self._silent_s = max(SILENT_S, SILENT_PERIODS * self._period_s)
        self._heard: dict[int, tuple[float, RankStatus]] = {}
        self._listens_s = time.monotonic()  # the start of this rank's reception
        self._sent: dict[int, tuple[MPI.Request, bytes]] = {}
        self._to_hear = self.size - 1 if self.rank < 2 else 0  # ranks that may send more
        self._mark: Hashable = None
        self._moved_s, self._worked_s = time.monotonic(), time.process_time()
        # (SIM115 wants a `with`, but it stays open for the thread)
        self._stack = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nnmpi-watchdog", daemon=True)
        # MPI_Finalize deletes attributes first: the thread makes no call of MPI after it.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._stop())
        MPI.COMM_SELF.Set_attr(key, self)
        self._thread.start()

    def close(self) -> None:
        """End the thread and receive pending statuses. Collective, when all ranks are done."""
        self._stop()
        last = [self._comm.Isend([b"", MPI.BYTE], reader, LAST) for reader in {0, 1} - {self.rank}]
        while self._to_hear:
            self._is_ending()
        MPI.Request.Waitall([*last, *(request for request, _ in self._sent.values())])
        self._comm.Free()

    def _stop(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        previous_s = time.monotonic()
        while not self._closing.wait(self._period_s):
            now = time.monotonic()
            if now - previous_s > self._silent_s:
                # This process was stopped for a while (SIGSTOP, a laptop's lid), so old statuses
                # prove nothing about the other ranks: forget them.
                self._heard.clear()
                self._listens_s, self._mark = now, None
            previous_s, status = now, self.status()
            self._heard[self.rank] = (now, status)
            self._send(status)
            if self._is_ending():
                self._end("")
            self._judge(now, status)

    # ---- this rank's status ----

    def status(self) -> RankStatus:
        """Return the main thread's wait or line, and its duration."""
        now, waiting, waiter = time.monotonic(), self._world.waiting, self._world.waiter
        # without this thread's own time, up to 6 ms in a period on a slow host
        before_s, self._worked_s = self._worked_s, time.process_time() - time.thread_time()
        wait = _describe_wait(waiter) or (waiting[1] if waiting else "")
        line, activity = self._line(), wait
        if not wait:
            activity = f"at {line}"
        elif wait != AT_END:
            activity += f", {line}" if line.startswith(CALL) else f", called at {line}"
            if CALL in activity and " ranks" in wait:
                activity += ", which all ranks must make"
        activity = activity[:MOST_LETTERS]
        # what polls during a wait is at another line each time
        mark = waiting and waiting[0], wait or activity, self._world.step
        # A rank that uses the processor without waiting is busy, even if its line does not change.
        if mark != self._mark or (not wait and self._worked_s - before_s >= WORK_S):
            self._mark, self._moved_s = mark, now
        still_s = now - self._moved_s
        waits_s = max(still_s, LEAST_S) if wait else 0.0
        return RankStatus(waits_s, still_s, activity, self._world.step)

    def _line(self) -> str:
        """Return the main thread's place; see `find_line`.

        By faulthandler, which creates no objects: `sys._current_frames` made Python 3.11 overwrite
        memory when a garbage collection began meanwhile.
        """
        self._stack.seek(0)
        self._stack.truncate()
        faulthandler.dump_traceback(self._stack, all_threads=True)
        self._stack.seek(0)
        return find_line(self._stack.read(), threading.main_thread().ident or 0)

    def _send(self, status: RankStatus) -> None:
        message = json.dumps(asdict(status)).encode()
        for reader in {0, 1} - {self.rank}:
            # at most one status in flight: a slow reader gets the newest, not a queue
            if reader not in self._sent or self._sent[reader][0].Test():
                self._sent[reader] = self._comm.Isend([message, MPI.BYTE], reader, STATUS), message

    # ---- the others' statuses, and the verdict ----

    def _is_ending(self) -> bool:
        """Receive all messages that have arrived; return whether one ends the job.

        No receive stays posted. MPICH posts one from any rank twice, for its shared memory and for
        its network; over UCX it was lost for good when the main thread, waiting in MPI, made the
        progress that matched it. (Receives from single ranks were not lost: a buffer for each.)
        """
        result, empty = MPI.Status(), 0
        while empty < PROBES:
            found = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, result)
            if found is None:
                empty += 1
                continue
            message, empty = bytearray(result.Get_count(MPI.BYTE)), 0
            found.Recv([message, MPI.BYTE])
            if result.Get_tag() == END:
                return True
            if result.Get_tag() == LAST:
                self._to_hear -= 1
            else:
                status = RankStatus(**json.loads(message))
                self._heard[result.Get_source()] = (time.monotonic(), status)
        return False

    def _judge(self, now: float, local: RankStatus) -> None:
        """Name the missing ranks or end the job, if this rank is the one to do so."""
        silent = {
            rank: now - at for rank, (at, _) in self._heard.items() if now - at > self._silent_s
        }
        # rank 0 may stop before its first status
        zero_heard_s = self._heard[0][0] if 0 in self._heard else self._listens_s
        if self.rank > 1 or (self.rank == 1 and now - zero_heard_s <= self._silent_s):
            if self.limit_s and local.waits_s > BUSY_FACTOR * self.limit_s + self._silent_s:
                self._end(
                    ENDED.format(
                        f"for {local.waits_s:.0f} s in {local.activity}; ranks 0 and 1 send no"
                        " reports"
                    )
                )
            return
        statuses = {rank: status for rank, (_, status) in self._heard.items() if rank not in silent}
        waited_s = longest_wait(statuses, self._silent_s)
        over = is_over(statuses, silent, self.limit_s, self._silent_s)
        if waited_s < max(0.0 if over else self.warning_s, self._silent_s + self._period_s):
            return
        text = (
            f"for {waited_s:.0f} s:"
            f" {describe(statuses, silent, set(range(self.size)) - set(self._heard))}"
        )
        if over:
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._endings = [self._comm.Isend([b"", MPI.BYTE], rank, END) for rank in others]
            self._end(ENDED.format(text))
        self.warning_s = 2 * waited_s
        consequence = (
            f"; the job is ended after {self.limit_s:.0f} s of it"
            if self.limit_s > waited_s
            else ""
        )
        complain(f"waiting {text}{consequence}")

    def _end(self, text: str) -> None:
        """Write a flight record and abort the job."""
        if text:
            complain(text)
        with contextlib.suppress(Exception):  # any failure: the job must end
            self._record(text)
        time.sleep(RECORD_S if text else 4 * RECORD_S)
        abort(MPI, STALLED)

    def _record(self, text: str) -> None:
        """Write this rank's status, its last calls, and the stacks of its threads."""
        if self.folder is None:
            return
        folder = self.folder / "flight"
        self.folder.mkdir(parents=True, exist_ok=True)
        make_folder(folder, self.folder)
        now = time.monotonic()
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        facts = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "peak_bytes": peak_bytes,
        }
        with opened_to_write(folder / f"rank-{self.rank}.txt", "w", root=self.folder) as stream:
            if text:
                stream.write(printable(text) + "\n")
            stream.write(
                json_text(facts | asdict(self.status())) + "\n\nthe last calls, seconds ago:\n"
            )
            stream.writelines(
                f"{now - at:12.6f}  {name}\n" for at, name in list(self._world.operations)
            )
            stream.write("\n")
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)


def find_line(stacks: str, thread: int) -> str:
    """Return a thread's place in a faulthandler dump.

    It is the innermost line of the user's code, with the call that it makes of nnmpi, if any:
    "the call of save at mine.py:6". Without a user's line it is nnmpi's, outside `nnmpi.comm`.
    """
    _, _, stack = stacks.partition(f"hread 0x{thread:016x}")
    places = list[tuple[str, str, str]]()
    for line in stack.partition("\n\n")[0].splitlines():
        if line.startswith('  File "'):
            _, path, rest = line.split('"', 2)
            number, _, function = rest.removeprefix(", line ").partition(" in ")
            if is_users(path):
                at = f"{os.path.basename(path)}:{number}"
                within = places and places[-1][0].startswith(PACKAGE)
                return f"{CALL}{places[-1][2]} at {at}" if within else f"{at} in {function}"
            places.append((path, number, function))
    others = [place for place in places if not place[0].startswith((COMM_FOLDER, LIBRARY))]
    for path, number, function in others or places:
        return f"{os.path.basename(path)}:{number} in {function}"
    return "an unknown line"


def describe(
    statuses: Mapping[int, RankStatus], silent: Mapping[int, float], unknown: set[int]
) -> str:
    """Return a sentence with the missing ranks and the waits of all others.

    Args:
        statuses: of the ranks that send statuses.
        silent: silent ranks, with the seconds since their last status.
        unknown: ranks that never sent one.
    """
    parts = [
        f"{name_ranks([rank])} has not been heard of for {seconds:.0f} s"
        for rank, seconds in silent.items()
    ]
    if unknown:
        parts.append(f"{_plural(sorted(unknown), 'has', 'have')} never been heard of")
    busy = {rank: status for rank, status in statuses.items() if not status.waits_s}
    parts += [f"{_plural(ranks, 'is', 'are')} {what}" for what, ranks in _by_activity(busy).items()]
    waiting = {rank: status for rank, status in statuses.items() if status.waits_s}
    if ended := [rank for rank, status in waiting.items() if status.activity == AT_END]:
        parts.append(f"{_plural(ended, 'has', 'have')} ended")
    if not parts:
        parts = [
            "all ranks wait for one another; if none continues, they are not in the same"
            " collective or message"
        ]
    parts += [
        f"{_plural(ranks, 'waits', 'wait')} in {what}"
        for what, ranks in _by_activity(waiting).items()
        if not what.startswith(AT_END)
    ]
    return "; ".join(parts)


def longest_wait(statuses: Mapping[int, RankStatus], fresh_s: float) -> float:
    """Return the seconds of the longest wait; 0 if all wait, one of them for less than `fresh_s`.

    That one may have come to where others, by their last reports, wait for it. (Three of three jobs
    with random pauses were ended so: the next rank to compute had not reported it yet.)
    """
    waits_s = [status.waits_s for status in statuses.values()]
    return 0.0 if 0.0 < min(waits_s) < fresh_s else max(waits_s)


def is_over(
    statuses: Mapping[int, RankStatus],
    silent: Mapping[int, float],
    limit_s: float,
    fresh_s: float = SILENT_S,
) -> bool:
    """True after a wait of `limit_s`, or ten times that if a rank is busy; 0 means no limit."""
    waited_s = longest_wait(statuses, fresh_s)
    if not limit_s or waited_s < limit_s:
        return False
    busy = [status for status in statuses.values() if not status.waits_s]
    stuck = bool(silent) or not busy or any(status.still_s >= limit_s for status in busy)
    return stuck or waited_s >= BUSY_FACTOR * limit_s


def _describe_wait(waiter: Any) -> str:
    """Return a waiter's `waits_for()`; "" for None and for a waiter still under construction."""
    try:
        return str(waiter.waits_for())
    except (AttributeError, IndexError):
        return ""


def _by_activity(statuses: Mapping[int, RankStatus]) -> dict[str, list[int]]:
    return group_ranks(
        (rank, status.activity + ("" if status.step is None else f" (step {status.step})"))
        for rank, status in sorted(statuses.items())
    )


def _plural(ranks: list[int], singular: str, plural: str) -> str:
    return f"{name_ranks(ranks)} {singular if len(ranks) == 1 else plural}"
