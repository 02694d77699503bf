"""Makes a lab, in this order: the switch, the head, the hosts with their links, the limits, the launch agent."""

import contextlib
import os
import select
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.netlab.host import ENTER, Host, host_command, switch_command
from benchmarks.netlab.lab import Lab, take_down
from benchmarks.netlab.link import Speed
from benchmarks.netlab.process import Process
from benchmarks.netlab.shell import LabError, call
from benchmarks.netlab.state import State
from nnmpi.errors import UsageError

MAX_HOSTS = 200
_START_LIMIT_S = 20.0

# The launch agent: stands for ssh, so that mpirun can start processes on the hosts.
_AGENT = """#!/bin/sh
# Stands for ssh: agent [-OPTION]... HOST COMMAND...    (options are ignored)
while :; do case $1 in -*) shift ;; *) break ;; esac; done
case $1 in
{cases}
*) echo "agent: there is no host $1 in this lab" >&2; exit 255 ;;
esac
shift
exec nsenter --target "$pid" {enter} --wd="$PWD" -- env TMPDIR="$tmp" sh -c "$*"
"""


@contextlib.contextmanager
def built(state: State, count: int, speed: Speed) -> Iterator[Lab]:
    """Make a lab for the time of a `with`; afterwards, whatever happened, nothing is left of it.

    Args:
        state: of a name that no lab has.
        count: hosts.
        speed: of their links.
    """
    builder = Builder(state, count, speed)
    try:
        yield builder.make()
    finally:
        take_down(state)
        builder.collect()


def up(state: State, count: int, speed: Speed) -> Lab:
    """Make a lab that lives on when this process ends; if it cannot be made, nothing is left of it.

    Args:
        state: of a name that no lab has.
        count: hosts.
        speed: of their links.
    """
    builder = Builder(state, count, speed)
    try:
        lab = builder.make()
        builder.leave()
    except BaseException:
        take_down(state)
        builder.collect()
        raise
    return lab


class Builder:
    """Makes a lab, step after step, so that whatever happens in between can be taken down.

    Args:
        state: where; its folder is made here.
        count: hosts.
        speed: of the links.

    Raises:
        UsageError: for a number of hosts out of range, and when there is a lab of this name.
    """

    def __init__(self, state: State, count: int, speed: Speed) -> None:
        if not 1 <= count <= MAX_HOSTS:
            raise UsageError(f"a lab has 1 to {MAX_HOSTS} hosts, not {count}")
        self.state, self.count, self.speed = state, count, speed
        state.create()
        self.started: list[subprocess.Popen[str]] = []
        self._record: dict[str, Any] = {"maker": vars(Process.of(os.getpid())), "rate": speed.rate, "started": []}
        state.write(self._record)

    def make(self) -> Lab:
        """Start everything.

        Raises:
            LabError: when the system refuses a part of it.
        """
        folder, names = self.state.folder, [f"h{i}" for i in range(self.count)]
        lines = ["127.0.0.1 localhost", *(f"{address_of(name)} {name}" for name in ["head", *names])]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        switch = self._start("switch", switch_command(folder), generations=1, held=True)
        head = self._start_host(switch, "head", own_processes=False)
        hosts = [self._start_host(switch, name, own_processes=True) for name in names]
        lab = Lab(self.state, switch, head, hosts)
        lab.set_speed(self.speed)
        write_agent(folder, hosts)
        self._record["hosts"] = [describe(host) for host in (switch, head, *hosts)]
        self.state.write(self._record)
        return lab

    def leave(self) -> None:
        """Let the lab live on when this process ends."""
        switch = self.started[0]
        assert switch.stdin is not None
        switch.stdin.write("stay\n")
        switch.stdin.close()

    def collect(self) -> None:
        """Wait for the processes that were started and have been ended."""
        for process in self.started:
            process.wait()

    def _start_host(self, switch: Host, name: str, own_processes: bool) -> Host:
        command = host_command(switch.init, self.state.folder, name, own_processes)
        host = self._start(name, command, generations=2 if own_processes else 1)
        pair = ("ip", "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.init.pid))
        call((*switch.enter("net"), *pair))
        call((*switch.enter("net"), "ip", "link", "set", "dev", name, "master", "br0", "up"))
        call((*host.enter("net"), "ip", "address", "add", f"{host.address}/24", "brd", "+", "dev", "eth0"))
        call((*host.enter("net"), "ip", "link", "set", "dev", "eth0", "up"))
        return host

    def _start(self, name: str, command: Sequence[str], generations: int, held: bool = False) -> Host:
        """Start the first process of a host and return when it says that it is ready.

        Args:
            generations: how many processes deep below the command it is.
            held: whether it ends when this process does.
        """
        folder = self.state.folder / name
        (folder / "tmp").mkdir(parents=True)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if held else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C at the terminal is for this process, which then takes all down
            )
        self.started.append(process)
        outer = Process.of(process.pid)
        self._record["started"].append(vars(outer))
        self.state.write(self._record)
        _wait_ready(process, name, folder / "log")
        init = outer.child(generations)
        return Host(name, address_of(name), init, init.inner_pid(level=1))


def address_of(name: str) -> str:
    """Return the address of a host by its name; the switch has none."""
    if name == "switch":
        return ""
    return f"10.77.0.{254 if name == 'head' else int(name.removeprefix('h')) + 1}"


def describe(host: Host) -> dict[str, Any]:
    """Return a host as JSON takes it."""
    return {**vars(host), "init": vars(host.init)}


def _wait_ready(process: subprocess.Popen[str], name: str, log: Path) -> None:
    """Return when a host has printed its line.

    Raises:
        LabError: with the host's complaint, when it ends or does not print.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + _START_LIMIT_S
    is_readable = bool(select.select([process.stdout], [], [], deadline - time.monotonic())[0])
    if is_readable and process.stdout.readline().strip() == "ready":
        process.stdout.close()
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    complaint = log.read_text().strip().splitlines()
    raise LabError(f"{name} did not start: {complaint[0] if complaint else 'it said nothing'}")


def write_agent(folder: Path, hosts: Sequence[Host]) -> Path:
    """Write the agent for these hosts into the lab's folder and return its path.

    Raises:
        LabError: when the folder does not allow execution.
    """
    cases = "\n".join(
        f"{host.name} | {host.address}) pid={host.lab_pid} tmp={shlex.quote(str(folder / host.name / 'tmp'))} ;;"
        for host in hosts
    )
    path = folder / "agent"
    path.write_text(_AGENT.format(cases=cases, enter=" ".join(f"--{kind}" for kind in ENTER)))
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise LabError(f"{folder} does not allow execution; set TMPDIR to a folder that does")
    return path
