"""A lab: hosts around a switch, each on a link of limited speed, and a head without a limit where mpirun runs.

                          switch (a bridge)
       .--------------.-------+------.--------------.
       | head         | h0           | h1           | h2
    eth0, no limit  eth0 100mbit   eth0 100mbit   eth0 100mbit
    10.77.0.254     10.77.0.1      10.77.0.2      10.77.0.3

All of it lives in one PID namespace: when its first process (the switch's) ends, nothing is left but a folder. Nothing
is added to the machine's own network, and no name is taken there, so labs of different names do not meet.
"""

import contextlib
import os
from collections.abc import Sequence

from benchmarks.netlab import link
from benchmarks.netlab.host import Host
from benchmarks.netlab.link import Speed
from benchmarks.netlab.process import Process
from benchmarks.netlab.shell import LabError, call
from benchmarks.netlab.state import State
from nnmpi.errors import UsageError


class Lab:
    """A lab that is up.

    Args:
        state: its folder.
        switch: the switch, which runs.
        head: where mpirun is started, which runs.
        hosts: all others, which run.

    Attributes:
        state: its folder.
        hosts: h0, h1 ...
        head: where mpirun is started.
        switch: the switch.
        agent: path of the launch agent.
    """

    def __init__(self, state: State, switch: Host, head: Host, hosts: Sequence[Host]) -> None:
        self.state, self.switch, self.head, self.hosts = state, switch, head, tuple(hosts)
        self.agent = state.folder / "agent"

    def enter_head(self) -> tuple[str, ...]:
        """Return the beginning of a command that runs on the head, in the working folder of its caller."""
        *enter, last = self.head.enter()
        tmp = self.state.folder / "head" / "tmp"
        return (*enter, f"--wd={os.getcwd()}", last, "env", f"TMPDIR={tmp}")

    def set_speed(self, speed: Speed) -> None:
        """Limit all links, both ends."""
        for host in self.hosts:
            link.apply(host.enter("net"), "eth0", speed)
            link.apply(self.switch.enter("net"), host.name, speed)

    def bytes(self) -> dict[str, tuple[int, int]]:
        """Return the bytes that each host has (received, sent), as the switch's side of its link has counted them."""
        found = {}
        for line in call((*self.switch.enter("net"), "cat", "/proc/net/dev")).splitlines()[2:]:
            name, _, counters = line.partition(":")
            fields = counters.split()
            found[name.strip()] = int(fields[8]), int(fields[0])  # what the switch sends is what the host receives
        return {host.name: found[host.name] for host in self.hosts}


def find(state: State) -> Lab:
    """Return the lab that an earlier command has made.

    Raises:
        UsageError: when there is none, or one that is not whole.
    """
    record = state.read() if state.exists() else {}
    hosts = [Host(**{**found, "init": Process(**found["init"])}) for found in record.get("hosts", ())]
    if not hosts or not hosts[0].init.is_alive():
        raise UsageError(f"no lab named {state.name} is up; make one with 'up', or name another with --name")
    return Lab(state, hosts[0], hosts[1], hosts[2:])


def take_down(state: State) -> bool:
    """End all processes of a lab and remove its folder; return whether there was anything.

    Raises:
        LabError: when a process cannot be ended, or the folder is not a lab's.
    """
    if not state.exists():
        return False
    started = [Process(**found) for found in state.read().get("started", ())]
    for outer in started[:1]:
        with contextlib.suppress(ProcessLookupError):
            outer.child(limit_s=0.0).end()  # the process 1 of the switch: all others end with it
    for outer in started:
        outer.end()
    left = [outer.pid for outer in started if outer.is_alive()]
    if left:
        raise LabError(f"the processes {left} of lab {state.name} cannot be ended")
    state.remove()
    return True


def sweep() -> list[str]:
    """Take down labs whose maker died before they were finished or without taking them down; return their names."""
    swept = []
    for state in State.all():
        with contextlib.suppress(LabError):
            record = state.read() if state.exists() else {}
            switch = record.get("started", [])[:1]
            if (
                record
                and not Process(**record["maker"]).is_alive()
                and not any(Process(**p).is_alive() for p in switch)
            ):
                swept.append(state.name)
                take_down(state)
    return swept
