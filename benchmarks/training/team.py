"""A contestant's processes, as the benchmark drives them: start, send an order, wait, end.

Each process has its own connection to the benchmark, and sleeps between orders: so all contestants
stay alive and take turns.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from socket import AF_UNIX, socket
from types import TracebackType
from typing import Any, Self

from benchmarks.harness.launch import environment, spawn
from benchmarks.training.contestants import TORCH, TUNED_MALLOC, Contestant
from benchmarks.training.member import SOCKET
from nnmpi.base.errors import LaunchError
from nnmpi.lab.launching import find_mpirun

MEMBER = Path(__file__).with_name("member.py")
LIMIT_S = 900.0
LAST_WORDS_S = 5.0
AT_ONCE = 2  # contestants that start at the same time
SHARED_MEMORY = Path("/dev/shm")
VARIABLES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_directory")


class Team:
    """One contestant: a process per rank.

    Args:
        folder: of data, first weights and the socket.
        number: names the file of its output.
    """

    def __init__(self, contestant: Contestant, folder: Path, number: int) -> None:
        self.contestant, self.hello = contestant, [{}] * contestant.ranks
        self._connections: list[Any] = [None] * contestant.ranks
        self._output = folder / f"{number}.output"
        words = [sys.executable, str(MEMBER), str(folder), json.dumps(asdict(contestant))]
        if contestant.side == TORCH or contestant.ranks == 1:
            every = [[*words, str(rank)] for rank in range(contestant.ranks)]
        else:
            every = [[find_mpirun(), "-n", str(contestant.ranks), *words, "-"]]
        # Open MPI names its files in /dev/shm by 16 bits of a hash of the job. If two jobs collide,
        # the later one truncates the file of the other, which dies of a segmentation fault; and
        # here two dozen jobs are alive at once. So each gets its own folder; other MPIs ignore the
        # variables.
        self._shared = (
            tempfile.mkdtemp(prefix="nnmpi-", dir=SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ""
        )
        local = dict.fromkeys(VARIABLES, self._shared) if self._shared else {}
        environ = {**environment(), **local, **(TUNED_MALLOC if contestant.tuned else {})}
        with open(self._output, "wb") as sink:
            self._processes = [spawn(item, sink, environ) for item in every]

    @property
    def complete(self) -> bool:
        """Whether all processes have connected."""
        return all(connection is not None for connection in self._connections)

    def join(self, connection: Any, hello: Mapping[str, Any]) -> None:
        """Add a process that has connected."""
        self._connections[hello["rank"]], self.hello[hello["rank"]] = connection, dict(hello)

    def ask(self, what: str, **how: Any) -> list[Any]:
        """Send all processes an order; return their answers by rank.

        Raises:
            LaunchError: if one has ended, with the end of its output.
        """
        try:
            for connection in self._connections:
                connection.write(json.dumps({"do": what, **how}) + "\n")
                connection.flush()
            return [json.loads(connection.readline()) for connection in self._connections]
        except (OSError, ValueError):  # a broken connection, or an empty answer
            raise LaunchError(self._ended(f"ended at {what!r}")) from None

    def check_alive(self) -> None:
        """Raise LaunchError if a process has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise LaunchError(self._ended("did not start"))

    def end(self) -> None:
        """Close the connections, which ends the processes; kill those that stay."""
        for connection in self._connections:
            if connection is not None:
                connection.close()
        begin = time.monotonic()
        for process in self._processes:
            try:
                process.wait(max(0.0, 10 - (time.monotonic() - begin)) if self.complete else 0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # mpirun ends its ranks
                process.wait()
        if self._shared:
            shutil.rmtree(self._shared, ignore_errors=True)

    def _ended(self, when: str) -> str:
        """Return a sentence with the end of the output, once the processes have flushed it."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S)
        words = self._output.read_text(errors="replace")[-4000:].strip()
        return f"{self.contestant.name} on {self.contestant.ranks} ranks {when}; it said: {words}"


class Teams:
    """All contestants of a case on a number of ranks, alive inside the `with` block.

        with Teams(contestants, folder) as teams:
            teams[name].ask("block", lr=0.01, steps=10)

    Raises:
        LaunchError: if a process ends or does not connect in time.
    """

    def __init__(self, contestants: Sequence[Contestant], folder: Path) -> None:
        self._contestants, self._folder = contestants, folder
        self._teams: dict[str, Team] = {}

    def __enter__(self) -> Self:
        address = self._folder / SOCKET
        address.unlink(missing_ok=True)
        try:
            with socket(AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen(64)
                listener.settimeout(1.0)
                for number, contestant in enumerate(self._contestants):
                    self._teams[contestant.name] = Team(contestant, self._folder, number)
                    if number % AT_ONCE == AT_ONCE - 1 or number == len(self._contestants) - 1:
                        self._gather(listener, list(self))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end()

    def __getitem__(self, name: str) -> Team:
        return self._teams[name]

    def __iter__(self) -> Any:
        return iter(self._teams.values())

    def _gather(self, listener: socket, teams: Sequence[Team]) -> None:
        """Accept connections until these teams are complete."""
        begin = time.monotonic()
        while not all(team.complete for team in teams):
            try:
                link, _ = listener.accept()
            except TimeoutError:
                for team in teams:
                    team.check_alive()
                if time.monotonic() - begin > LIMIT_S:
                    raise LaunchError(f"contestants did not start within {LIMIT_S:g} s") from None
                continue
            link.settimeout(LIMIT_S)
            talk = link.makefile("rw")
            link.close()  # the file keeps it open
            hello = json.loads(talk.readline())
            self._teams[hello["name"]].join(talk, hello)

    def _end(self) -> None:
        for team in self._teams.values():
            team.end()
