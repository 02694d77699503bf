"""A lab: hosts around a switch, each on a link of limited speed, and a head without a limit, which
runs mpirun.

                          switch (a bridge)
       .--------------.-------+------.--------------.
       | head         | h0           | h1           | h2
    eth0, no limit  eth0 100mbit   eth0 100mbit   eth0 100mbit     a token bucket at
    10.77.0.254     10.77.0.1      10.77.0.2      10.77.0.3        both ends of each link

A host is a process with its own namespaces: network, host name, IPC, mounts, PIDs. They close every
other channel between ranks on one machine: shared memory (IPC namespace, private /dev/shm) and
reading another process's memory (PID namespace). The file system is the machine's, as if by NFS.

The lab lives in one PID namespace: when its first process (the switch's) ends, only a folder is
left. The machine's own network stays untouched, so several labs can run side by side.
"""

import os
import re
import select
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nnmpi.base.errors import NnmpiError, UsageError

TOOLS = ("ip", "tc", "unshare", "nsenter")
MAX_HOSTS = 200
START_LIMIT_S = 20.0

# A bucket smaller than 16 KB cannot keep up with the clock ticks at 200 Mbit/s. A packet must be
# smaller than the bucket: a larger one would leave at the speed of memory. The queue holds more
# than the largest send buffer (64 KB at 50 Mbit/s: 11 ms), so that nothing is dropped.
BURST_BYTES, MOST_PACKET_BYTES, QUEUE_MS = 16 * 1024, 12000, 50
# Bytes of a full packet: TCP's payload, and with all headers, which the bucket counts.
PAYLOAD_BYTES, PACKET_BYTES = 1448, 1514
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# Settings of the hosts' TCP, below /proc/sys/net.
SYSTEM = {
    # A loss-based algorithm fills the link. Some systems default to bbr, which probes for the rate.
    "ipv4/tcp_congestion_control": "reno",
    # The round after a pause must not begin with a slow start.
    "ipv4/tcp_slow_start_after_idle": "0",
    # The system buffers at most 64 KB of a message. With the default of 4 MB a send of 1 MB is
    # "done" at once, and the next message shares the link with it, against the schedule of steps.
    "ipv4/tcp_wmem": "4096 16384 65536",
    # A connection must not inherit an earlier one's metrics.
    "ipv4/tcp_no_metrics_save": "1",
    # One address per host: MPI would try the others too.
    "ipv6/conf/all/disable_ipv6": "1",
}

# The first process of a host (or of the switch) must reap orphans: a shell that waits for its
# children does.
_LIVE = """
echo ready
exec >&2
trap 'exit 0' TERM
while :; do sleep 3600 & wait; done
"""

_HOST = f"""
set -eu
hostname "$1"
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$2" /etc/hosts
mount -t sysfs sysfs /sys
ip link set dev lo up
while read -r key value; do
    [ ! -e "/proc/sys/net/$key" ] || echo "$value" >"/proc/sys/net/$key"
done <<END
{chr(10).join(f"{key} {value}" for key, value in SYSTEM.items())}
END
{_LIVE}"""

# The switch reads its parent's pipe: it ends when the parent dies, and with it the entire lab.
_SWITCH = f"""
set -eu
hostname "$1"
ip link add name br0 type bridge stp_state 0
ip link set dev br0 up
exec 3<&0
(read -r word <&3 || kill -TERM 1) &
exec 3<&- </dev/null
{_LIVE}"""

# The launch agent replaces ssh, by which mpirun would start processes on the hosts.
_AGENT = """#!/bin/sh
# agent [-OPTION]... HOST COMMAND...    (options are ignored)
while :; do case $1 in -*) shift ;; *) break ;; esac; done
case $1 in
{cases}
*) echo "agent: there is no host $1 in this lab" >&2; exit 255 ;;
esac
shift
exec nsenter --target "$pid" {enter} --wd="$PWD" -- env TMPDIR="$tmp" sh -c "$*"
"""

_ALL = ("net", "uts", "ipc", "mount", "pid")
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--propagation", "private")
_PID_NAMESPACE = ("--pid", "--fork", "--mount-proc", "--kill-child")


class LabError(NnmpiError):
    """The lab could not be made, or something in it failed."""


@dataclass(frozen=True)
class Speed:
    """The speed of a link.

    Args:
        rate: bits per second in tc's notation: "100mbit".

    Raises:
        UsageError: for another notation.
    """

    rate: str

    def __post_init__(self) -> None:
        """Check the notation."""
        if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", self.rate):
            raise UsageError(
                f"{self.rate!r} is not a rate; write it like 100mbit, 1gbit or 500kbit"
            )

    @property
    def payload_bytes_per_s(self) -> float:
        """TCP's highest payload rate, without headers."""
        return float(self.rate[:-4]) * UNITS[self.rate[-4:]] / 8 * PAYLOAD_BYTES / PACKET_BYTES


@dataclass(frozen=True)
class Host:
    """A host, the head, or the switch.

    Attributes:
        name: h0, h1 ..., head, or switch.
        pid: of its first process.
    """

    name: str
    pid: int

    @property
    def lab_pid(self) -> int:
        """The PID of its first process inside the lab's namespace."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("NSpid:")[2].split()[1])

    def enter(self, *kinds: str) -> tuple[str, ...]:
        """Return the prefix of a command that runs in this host's namespaces; default: all."""
        return (
            "nsenter",
            "--target",
            str(self.pid),
            *(f"--{kind}" for kind in kinds or _ALL),
            "--",
        )


class Lab:
    """A lab; `lab_of` makes and ends one.

    Args:
        folder: for the hosts' temporary files and logs, and the launch agent.

    Attributes:
        names: of the hosts: h0, h1 ...
        agent: path of the launch agent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.agent = folder, folder / "agent"
        self.names: list[str] = []
        self._hosts: list[Host] = []
        self._processes: list[subprocess.Popen[str]] = []

    def make(self, count: int) -> None:
        """Start the switch, the head, the hosts with their links, and the agent, in this order.

        Raises:
            LabError: if the system refuses a part of it.
        """
        self.names = [f"h{i}" for i in range(count)]
        lines = [
            "127.0.0.1 localhost",
            *(f"{_address(name)} {name}" for name in ["head", *self.names]),
        ]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        shell = ("sh", "-c", _SWITCH, str(self.folder), "switch")
        local = ("unshare", *_NAMESPACES, *_PID_NAMESPACE, *shell)
        self._switch = self._start("switch", local, generations=1)
        self._head = self._start_host("head")
        self._hosts = [self._start_host(name) for name in self.names]
        cases = "\n".join(
            f"{host.name} | {_address(host.name)}) pid={host.lab_pid}"
            f" tmp={shlex.quote(str(self._tmp(host.name)))} ;;"
            for host in self._hosts
        )
        self.agent.write_text(
            _AGENT.format(cases=cases, enter=" ".join(f"--{kind}" for kind in _ALL))
        )
        self.agent.chmod(0o700)
        if not os.access(self.agent, os.X_OK):
            raise LabError(
                f"{self.folder} does not allow execution; set TMPDIR to a folder that does"
            )

    def enter_head(self) -> tuple[str, ...]:
        """Return the prefix of a command that runs on the head, in the caller's working folder."""
        *enter, last = self._head.enter()
        return (*enter, f"--wd={os.getcwd()}", last, "env", f"TMPDIR={self._tmp('head')}")

    def set_speed(self, speed: Speed) -> None:
        """Limit both ends of all links.

        Raises:
            LabError: if the kernel has no token bucket.
        """
        packet = ("gso_max_size", str(MOST_PACKET_BYTES))
        for host in self._hosts:
            for enter, device in (
                (host.enter("net"), "eth0"),
                (self._switch.enter("net"), host.name),
            ):
                call((*enter, "ip", "link", "set", "dev", device, *packet))
                call((*enter, "tc", "qdisc", "replace", *_bucket(device, speed.rate)))

    def sent_bytes(self) -> int:
        """Return the bytes that the hosts have sent over their links so far, with all headers."""
        total = 0
        for host in self._hosts:
            counters = call((*host.enter("net"), "cat", "/proc/self/net/dev"))
            total += int(counters.partition("eth0:")[2].split()[8])
        return total

    def end(self) -> None:
        """End all processes of the lab."""
        for process in self._processes[:1]:
            process.kill()  # the switch's; all others end with it
        for process in self._processes:
            process.wait()

    def _tmp(self, name: str) -> Path:
        return self.folder / name / "tmp"

    def _start_host(self, name: str) -> Host:
        """Start a host. The head shares the lab's PID namespace: it starts processes on all."""
        into = ("nsenter", "--target", str(self._switch.pid), "--mount", "--pid", "--")
        local = _NAMESPACES + (_PID_NAMESPACE if name != "head" else ())
        shell = ("sh", "-c", _HOST, str(self.folder), name, str(self.folder / "hosts"))
        host = self._start(
            name, (*into, "unshare", *local, *shell), generations=1 if name == "head" else 2
        )
        switch, inside = self._switch.enter("net"), host.enter("net")
        pair = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        call((*switch, "ip", "link", "add", "name", name, *pair))
        call((*switch, "ip", "link", "set", "dev", name, "master", "br0", "up"))
        call((*inside, "ip", "address", "add", f"{_address(name)}/24", "brd", "+", "dev", "eth0"))
        call((*inside, "ip", "link", "set", "dev", "eth0", "up"))
        return host

    def _start(self, name: str, command: Sequence[str], generations: int) -> Host:
        """Run a command; return a host once its first process, `generations` below, is ready."""
        self._tmp(name).mkdir(parents=True)
        log = self.folder / name / "log"
        with log.open("w") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # the system closes it when this process dies
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                # Ctrl-C at the terminal must reach this process alone, which then ends the lab
                start_new_session=True,
            )
        self._processes.append(process)
        assert process.stdout is not None
        if (
            not select.select([process.stdout], [], [], START_LIMIT_S)[0]
            or process.stdout.readline().strip() != "ready"
        ):
            raise LabError(f"{name} did not start: {log.read_text().strip() or 'it said nothing'}")
        pid = process.pid
        for _ in range(generations):
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return Host(name, pid)


@contextmanager
def lab_of(count: int, speed: Speed) -> Iterator[Lab]:
    """Make a lab, and end it after the `with` block, also after errors.

    Args:
        count: hosts.
        speed: of their links.

    Raises:
        UsageError: see `check_possible`; and for a number of hosts out of range.
        LabError: if the system refuses a part of it.
    """
    check_possible()
    if not 1 <= count <= MAX_HOSTS:
        raise UsageError(f"a lab has 1 to {MAX_HOSTS} hosts, not {count}")
    with tempfile.TemporaryDirectory(prefix="nnmpi-netlab-", ignore_cleanup_errors=True) as folder:
        lab = Lab(Path(folder))
        try:
            lab.make(count)
            lab.set_speed(speed)
            yield lab
        finally:
            lab.end()


def check_possible() -> None:
    """Refuse a lab without root, the tools, network namespaces or the token bucket filter.

    Raises:
        UsageError: says what is missing.
    """
    if os.geteuid() != 0:
        raise UsageError(
            "a lab is made of network namespaces, which only root may make; run the same command as"
            " root"
        )
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} cannot be found; install iproute2 and util-linux"
        )
    try:
        call(("unshare", *_NAMESPACES, "tc", "qdisc", "add", *_bucket("lo", "1mbit")))
    except LabError as error:
        raise UsageError(f"this system has no lab: {error}") from None


def _bucket(device: str, rate: str) -> tuple[str, ...]:
    """Return the words of tc that limit a device."""
    limits = ("burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
    return "dev", device, "root", "tbf", "rate", rate, *limits


def _address(name: str) -> str:
    return f"10.77.0.{254 if name == 'head' else int(name.removeprefix('h')) + 1}"


def call(command: Sequence[str]) -> str:
    """Run a short command to its end; return what it prints.

    Raises:
        LabError: with the command and its output, if its status is not 0.
    """
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        hint = (
            "; the lab needs the token bucket filter: try 'modprobe sch_tbf'"
            if "tbf" in command
            else ""
        )
        raise LabError(
            f"'{' '.join(command)}' failed: {(done.stderr or done.stdout).strip()}{hint}"
        )
    return done.stdout
