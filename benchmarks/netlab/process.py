"""Processes by number, told apart from later ones that were given the same number."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process of this machine.

    Attributes:
        pid: its number.
        began: when it began, in clock ticks since the machine's start: no later process has the same two numbers.
    """

    pid: int
    began: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this number now.

        Raises:
            ProcessLookupError: when there is none.
        """
        return cls(pid, int(_stat(pid)[19]))

    def is_alive(self) -> bool:
        """Return whether it still runs; one that has ended and waits to be collected does not."""
        try:
            fields = _stat(self.pid)
        except ProcessLookupError:
            return False
        return int(fields[19]) == self.began and fields[0] not in "ZX"

    def end(self, limit_s: float = 10.0) -> None:
        """Kill it and return when it is gone, or after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while self.is_alive() and time.monotonic() < deadline:
            os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)

    def child(self, generations: int = 1, limit_s: float = 10.0) -> Process:
        """Return its child, or the child's child and so on; waits for them to be born.

        Raises:
            ProcessLookupError: when there is none after `limit_s`.
        """
        found, deadline = self, time.monotonic() + limit_s
        while generations:
            children = children_of(found.pid)
            if children:
                found, generations = children[0], generations - 1
            elif time.monotonic() > deadline or not self.is_alive():
                raise ProcessLookupError(f"process {found.pid} has no child")
            else:
                time.sleep(0.005)
        return found

    def inner_pid(self, level: int) -> int:
        """Return its number in a nested PID namespace: level 0 is the outermost that is seen here."""
        for line in (PROC / str(self.pid) / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[1 + level])
        raise ProcessLookupError(f"process {self.pid} has no NSpid line")


def children_of(pid: int) -> list[Process]:
    """Return the processes whose parent has this number."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = _stat(int(entry.name))
            except ProcessLookupError:
                continue
            if int(fields[1]) == pid:
                found.append(Process(int(entry.name), int(fields[19])))
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third, the state, on (the second may hold blanks)."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"there is no process {pid}") from error
