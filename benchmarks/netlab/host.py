"""A host of the lab: a process with a network, a name, a memory and processes of its own.

What ranks on one machine could exchange by other ways than the link is taken away: shared memory (an IPC namespace, and
an own /dev/shm), reading one another's memory (a PID namespace). The file system is the machine's, as if by NFS.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.process import Process

# Settings of the hosts' TCP, below /proc/sys/net.
SYSTEM = {
    # The common default elsewhere; some systems have bbr, which probes for the speed instead of filling the link.
    "ipv4/tcp_congestion_control": "reno",
    # A pause between two rounds must not make the next one begin slowly.
    "ipv4/tcp_slow_start_after_idle": "0",
    # At most 64 KB of a message lie in the system: with the default of 4 MB a send of 1 MB is "done" at once, and the
    # next message shares the link with it, which no schedule of steps means.
    "ipv4/tcp_wmem": "4096 16384 65536",
    # A connection must not begin with what an earlier one learnt.
    "ipv4/tcp_no_metrics_save": "1",
    # One address per host, or MPI tries the others too.
    "ipv6/conf/all/disable_ipv6": "1",
}

# The first process of a host (or of the switch) collects orphans: a shell that waits for its children does.
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

# The switch holds the lab together: when its process 1 ends, the system ends all processes in the lab, and with them
# go the namespaces, the bridge and the links. It ends by itself when its maker dies before saying "stay".
_SWITCH = f"""
set -eu
hostname "$1"
ip link add name br0 type bridge stp_state 0
ip link set dev br0 up
exec 3<&0
(read -r word <&3 || kill -TERM 1) &
exec 3<&- </dev/null
{_LIVE}"""

_OWN = ("--net", "--uts", "--ipc", "--mount", "--propagation", "private")
_OWN_PROCESSES = ("--pid", "--fork", "--mount-proc", "--kill-child")


@dataclass(frozen=True)
class Host:
    """A host that runs, the head, or the switch.

    Attributes:
        name: h0, h1 ..., head, or switch.
        address: on the lab's network; the switch has none.
        init: its first process.
        lab_pid: that process's number as the lab's own processes see it.
    """

    name: str
    address: str
    init: Process
    lab_pid: int

    def enter(self, *kinds: str) -> tuple[str, ...]:
        """Return the beginning of a command that runs in this host; all its namespaces unless some are named."""
        return ("nsenter", "--target", str(self.init.pid), *(f"--{kind}" for kind in kinds or ENTER), "--")


ENTER = ("net", "uts", "ipc", "mount", "pid")


def switch_command(folder: Path) -> tuple[str, ...]:
    """Return the command that is the switch of the lab in this folder, which `ps` shows."""
    return ("unshare", *_OWN, *_OWN_PROCESSES, "sh", "-c", _SWITCH, str(folder), "switch")


def host_command(switch: Process, folder: Path, name: str, own_processes: bool) -> tuple[str, ...]:
    """Return the command that is a host; without processes of its own it can start some on the others (the head).

    Args:
        switch: the first process of the lab's switch.
        folder: of the lab.
        name: of the host.
        own_processes: whether it sees no processes but its own.
    """
    enter = ("nsenter", "--target", str(switch.pid), "--mount", "--pid", "--")
    own = _OWN + (_OWN_PROCESSES if own_processes else ())
    return (*enter, "unshare", *own, "sh", "-c", _HOST, str(folder), name, str(folder / "hosts"))
