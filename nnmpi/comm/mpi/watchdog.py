"""A thread in each rank that notices when ranks do not go on, says who is missing, and ends the job at a limit.

It needs neither MPI nor the main thread, which may be stuck in it: the ranks' threads talk to rank 0's by TCP.

    rank 1's thread   look at the main thread, once a second --- status --->  rank 0's thread: all statuses
                                                            <--- heard -----
                      warning_s after a rank began to wait     rank 0 says once who is missing and where all others are
                      limit_s                                  <--- end ----- each leaves a record of its flight
    rank 2 is killed: its connection ends without a farewell          at once: rank 0 says so, and ends the job
                                                            <--- lost ---- Open MPI's launcher would take half a second

Without an answer of rank 0 a rank that has waited for so long does by itself what rank 0 would have done.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

from nnmpi.comm.communicator import Communicator
from nnmpi.comm.mpi.shutdown import STALLED, forget_memory, leave, tell_launcher
from nnmpi.comm.stall import WARNING_S, RankStatus, describe, describe_loss, find_place, is_over, processor_seconds
from nnmpi.comm.world import World
from nnmpi.command import printable

PERIOD_S = 0.25
RANKS_PER_S = 200  # that rank 0 hears of in a second, at most
LEAST_S = 1e-3  # of a wait that has just begun
SILENT_S, SILENT_PERIODS = 3.0, 3  # whichever is longer, until it is told that nothing is heard of a rank
LOST_S = 0.5  # of a wait after a rank has died: it will not come
WORK_S = 1e-3  # of processor time between two looks: who has it at one place computes, or takes a slow download
CONNECT_S = 5.0
TOLD_S = 0.05  # for what was said to go out; Open MPI's launcher, which forwards it, looks for ends at 0.25 s
ENDING_S = 0.2  # from the end of a process's connections to its own
RECORD_S = 1.5  # for all to write their records
STAGGER_S = 0.35  # between two ranks that cannot ask rank 0
MOST_LINE_BYTES = 1 << 14
LONGER = 2.0  # a wait that is so many times as long as any that ended well is told
OPERATIONS = 200  # that a record tells of
ENDED = "the job is ended: {}"

Operations = deque[tuple[float, str]]
"""When the last calls to the world began, of `time.perf_counter`, and their names."""


class Watchdog:
    """Watches over the ranks of the world. Making one is collective.

    Args:
        group: all ranks.
        operations: the last calls to the world.
        world: of all ranks, which knows the step of training and what waits.
        alone: whether all ranks are on one node, as far as rank 0 knows.
        lingers: whether a launcher on this node ends the job after a rank's death, but gives the others time for that.

    Attributes:
        warning_s: after so long in one wait of a rank it is told who is missing, if no such wait has ended well before.
        limit_s: after so long the job is ended; 0 for never.
        folder: of the run, for the records; None for none.
    """

    def __init__(self, group: Communicator, operations: Operations, world: World, alone: bool, lingers: bool) -> None:
        self.warning_s, self.limit_s = WARNING_S, 0.0
        self.folder: Path | None = None
        self.rank, self.size = group.rank, group.size
        self._operations, self._world = operations, world
        self._period_s = max(PERIOD_S, group.size / RANKS_PER_S)
        self._silent_s = max(SILENT_S, SILENT_PERIODS * self._period_s)
        self._main = threading.main_thread().ident
        self._worked_s = processor_seconds(self._main or 0)
        self._mark: Any = None
        self._since_s = time.monotonic()
        self._longest_s = 0.0
        self._warned = False
        self._heard: dict[int, tuple[float, RankStatus]] = {}
        self._gone: set[int] = set()  # ranks that have come to their end
        self._lost = ""  # what is to be said of a rank that has died
        self._leaves = False
        self._lingers = lingers
        self._processes: dict[int, int] = {}  # of the ranks that have been heard
        self._lines: dict[socket.socket, _Line] = {}
        server = socket.create_server(("127.0.0.1" if alone else "", 0)) if self.rank == 0 else None
        own = (
            None if server is None else [server.getsockname()[1], secrets.token_hex(16), _addresses(alone), os.getpid()]
        )
        port, self._token, addresses, self._processes[0] = group.share(own)
        work = self._serve if server is not None else self._report
        arguments = (server,) if server is not None else (port, addresses)
        threading.Thread(target=work, args=arguments, name="nnmpi-watchdog", daemon=True).start()

    def leave(self) -> None:
        """Tell the other ranks that this one comes to its end: the end of its connections is no fault."""
        self._leaves = True
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                line.send({"token": self._token, "rank": self.rank, "leaves": True})

    # ---- what this rank says ----

    def status(self) -> RankStatus:
        """Return where the main thread is, and for how long."""
        now = time.monotonic()
        began_s, operation = self._operations[-1] if self._operations else (0.0, "the start")
        place = find_place(self._main or 0, operation, self._world.waiter)
        step = self._world.step
        mark = (place.waits, place.mark, began_s, step)
        before_s, self._worked_s = self._worked_s, processor_seconds(self._main or 0)
        works = not place.waits and self._worked_s - before_s >= WORK_S
        if mark != self._mark or works:
            if self._mark is not None and self._mark[0]:
                self._longest_s = max(self._longest_s, now - self._since_s)
            self._mark, self._since_s = mark, now
        still_s = now - self._since_s
        return RankStatus(max(still_s, LEAST_S) if place.waits else 0.0, still_s, place.words, step)

    def _patience_s(self, longest_s: float) -> float:
        soon_s = self._silent_s + self._period_s  # before it nobody knows who is silent
        return max(self.warning_s, LONGER * longest_s, soon_s)

    # ---- rank 0 ----

    def _serve(self, server: socket.socket) -> None:
        """Hear of all ranks, and judge."""
        chosen = selectors.DefaultSelector()
        chosen.register(server, selectors.EVENT_READ, None)
        next_s = time.monotonic() + self._period_s
        while True:
            ready = chosen.select(max(0.0, next_s - time.monotonic()))
            if time.monotonic() - next_s > self._silent_s:  # this process itself was stopped, and mostly in `select`
                self._heard.clear()
                self._mark = None
            for key, _ in ready:
                if key.fileobj is server:
                    link, _ = server.accept()
                    link.settimeout(self._period_s)
                    self._lines[link] = _Line(link)
                    chosen.register(link, selectors.EVENT_READ, None)
                    continue
                link = key.fileobj  # type: ignore[assignment]
                if not self._hear(self._lines[link]):
                    chosen.unregister(link)
                    self._lines.pop(link).close()
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + self._period_s
                self._judge([line for line in self._lines.values() if line.rank is not None])

    def _hear(self, line: _Line) -> bool:
        """Take down what a rank says; return whether it says anything more."""
        try:
            messages = line.receive()
        except (OSError, ValueError):
            messages = None
        if messages is None:
            if line.rank is not None and line.rank not in self._gone:
                self._gone.add(line.rank)
                self._lose(line.rank)
            return False
        for message in messages:
            if message.get("token") != self._token:
                return False
            line.rank = int(message["rank"])
            if "leaves" in message:
                self._gone.add(line.rank)
                continue
            self._processes[line.rank] = message["process"]
            self._longest_s = max(self._longest_s, message["longest_s"])
            self._heard[line.rank] = (time.monotonic(), RankStatus(**message["status"]))
            with contextlib.suppress(OSError):
                line.send({"heard": True})
        return True

    def _judge(self, lines: list[_Line]) -> None:
        """Say who is missing, or end the job."""
        now = time.monotonic()
        self._heard[0] = (now, self.status())
        known = {rank: found for rank, found in self._heard.items() if rank not in self._gone}
        late = {rank: now - at for rank, (at, _) in known.items() if now - at > self._silent_s}
        statuses = {rank: status for rank, (_, status) in known.items() if rank not in late}
        waited_s = max(status.waits_s for status in statuses.values())
        if self._lost and waited_s >= LOST_S:
            self._end_all(lines, self._lost)
        if waited_s < self._patience_s(self._longest_s):
            self._warned = False
            return
        unknown = [rank for rank in range(self.size) if rank not in self._heard]
        words = f"for {waited_s:.0f} s: {describe(statuses, late, unknown)}"
        if is_over(statuses, late, self.limit_s):
            self._end_all(lines, f"it has waited {words}")
        if not self._warned:
            self._warned = True
            self._say(f"waiting {words}{self._what_then(waited_s)}")

    def _lose(self, rank: int) -> None:
        """Say at once that a rank has died: its launcher may end this one, too, in no time."""
        if self._lost or self._leaves:
            return
        self._lost = describe_loss(rank, self._heard[rank][1], (0, self.status()))
        self._say(self._lost)
        if self._hurries(rank):
            for line in self._lines.values():
                with contextlib.suppress(OSError):
                    line.send({"lost": True})
            self._go_at_once()

    def _end_all(self, lines: list[_Line], why: str) -> NoReturn:
        for line in lines:
            with contextlib.suppress(OSError):
                line.send({"end": True})
        self._end(ENDED.format(why), RECORD_S)

    def _what_then(self, waited_s: float) -> str:
        return f"; the job is ended after {self.limit_s:.0f} s of it" if self.limit_s > waited_s else ""

    # ---- the other ranks ----

    def _report(self, port: int, addresses: list[str]) -> None:
        """Tell rank 0 where this rank is; do without rank 0 if it does not answer."""
        line = _connect(port, addresses)
        if line is None:
            return None  # rank 0 says that nothing is known of this rank
        self._lines[line.link] = line
        heard_s = time.monotonic()
        while True:
            status = self.status()
            told = {"token": self._token, "rank": self.rank, "process": os.getpid()}
            told |= {"longest_s": self._longest_s, "status": status.to_json()}
            with contextlib.suppress(OSError):
                line.send(told)
            until_s = time.monotonic() + self._period_s
            while (left_s := until_s - time.monotonic()) > 0:
                line.link.settimeout(left_s)
                try:
                    messages = line.receive()
                except TimeoutError:
                    break
                except (OSError, ValueError):
                    messages = None
                if messages is None:
                    return self._go_on_without_root(status)
                if any("leaves" in message for message in messages):
                    return None
                if any("lost" in message for message in messages):
                    self._go_at_once()
                if any("end" in message for message in messages):
                    self._end("", 4 * RECORD_S)
                heard_s = time.monotonic() if messages else heard_s
            if time.monotonic() - until_s > self._silent_s:  # this process itself was stopped
                heard_s, self._mark = time.monotonic(), None
            self._judge_alone(status, time.monotonic() - heard_s)

    def _go_on_without_root(self, last: RankStatus) -> None:
        """End this process, unless it does not need rank 0 any more, which has died."""
        lost = describe_loss(0, None, (self.rank, last))
        if self.rank == 1 and not self._leaves:
            self._say(lost)
        if self._hurries(0) and not self._leaves:
            self._go_at_once()
        while not self._leaves:
            if self.status().waits_s >= LOST_S:
                time.sleep(STAGGER_S * (self.rank - 1))
                self._end(ENDED.format(lost), RECORD_S)
            time.sleep(self._period_s)

    def _judge_alone(self, status: RankStatus, silent_s: float) -> None:
        """Do what rank 0 would do, which has not answered for so many seconds."""
        if silent_s < self._silent_s or status.waits_s < self._patience_s(self._longest_s):
            self._warned = self._warned and status.waits_s > 0
            return
        words = f"for {status.waits_s:.0f} s: {describe({self.rank: status}, {0: silent_s}, [])}"
        if is_over({self.rank: status}, {0: silent_s}, self.limit_s):
            time.sleep(STAGGER_S * self.rank)
            self._end(ENDED.format(f"it has waited {words}"), RECORD_S)
        if not self._warned:
            self._warned = True
            if self.rank == 1:
                self._say(f"waiting {words}{self._what_then(status.waits_s)}")

    # ---- the end ----

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(printable(f"nnmpi: {text}") + "\n")
            sys.stderr.flush()

    def _end(self, text: str, rest_s: float) -> NoReturn:
        """Leave a record and end this process, which ends the job."""
        if text:
            self._say(text)
        with contextlib.suppress(Exception):  # whatever it is, the job must end
            self._record(text)
        time.sleep(rest_s)
        forget_memory()
        if tell_launcher(STALLED):
            time.sleep(rest_s)
        leave(STALLED)

    def _hurries(self, rank: int) -> bool:
        """Return whether a rank has surely died, and the launcher would be slow to end the others for it."""
        if not self._lingers or rank not in self._processes:
            return False
        until_s = time.monotonic() + ENDING_S
        while not (ended := has_ended(self._processes[rank])) and time.monotonic() < until_s:
            time.sleep(ENDING_S / 100)
        return ended

    def _go_at_once(self) -> NoReturn:
        """End this process of a job that its launcher is ending: what it told goes out before."""
        time.sleep(TOLD_S)
        leave(STALLED)

    def _record(self, text: str) -> None:
        """Write where this rank is, what it did last, and the stacks of its threads."""
        if self.folder is None:
            return
        folder = self.folder / "flight"
        folder.mkdir(parents=True, exist_ok=True)
        now, status = time.perf_counter(), self.status()
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        facts = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "peak_bytes": peak_bytes}
        with (folder / f"rank-{self.rank}.txt").open("w") as stream:
            if text:
                stream.write(printable(text) + "\n")
            stream.write(json.dumps(facts | status.to_json()) + "\n\nthe last calls, seconds ago:\n")
            stream.writelines(f"{now - at:12.6f}  {name}\n" for at, name in list(self._operations))
            stream.write("\n")
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)


def has_ended(process: int) -> bool:
    """Return whether a process of this node has ended; no where the system does not say."""
    if not Path("/proc/self/stat").exists():
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


class _Line:
    """JSON values, one in a line, between two threads."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.rank: int | None = None
        self._rest = b""
        self._sends = threading.Lock()

    def send(self, value: dict[str, Any]) -> None:
        """Send a value."""
        with self._sends:
            self.link.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return what has come; None after the end."""
        came = self.link.recv(MOST_LINE_BYTES)
        *lines, self._rest = (self._rest + came).split(b"\n")
        if not came or len(self._rest) > MOST_LINE_BYTES:
            return None
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self.link.close()


def _addresses(alone: bool) -> list[str]:
    """Return under which addresses this machine may be reached."""
    if alone:
        return ["127.0.0.1"]
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        return [name, *{str(each[4][0]) for each in socket.getaddrinfo(name, None, socket.AF_INET)}]
    return [name]


def _connect(port: int, addresses: list[str]) -> _Line | None:
    for address in addresses:
        with contextlib.suppress(OSError):
            return _Line(socket.create_connection((address, port), CONNECT_S))
    return None
