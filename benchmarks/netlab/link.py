"""A link of limited speed: a pair of virtual network cards, one in the host and one at the switch.

Both ends send through a token bucket: what the host sends, and what it receives.

    host  eth0 [bucket] ------------- [bucket] h3  switch
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.netlab.shell import LabError, call
from nnmpi.errors import UsageError

_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# TCP's payload in a full packet and the packet with all headers that the bucket counts, in bytes.
PAYLOAD_BYTES, PACKET_BYTES = 1448, 1514


@dataclass(frozen=True)
class Speed:
    """How a link is limited.

    Attributes:
        rate: bits per second as tc writes them: "100mbit".
        burst_bytes: what may leave at once after a rest: the fewer, the nearer is a short message to its price.
        packet_bytes: the longest packet that the system hands over in one piece.
        queue_s: the longest wait in the bucket's queue; what comes later is dropped.

    Raises:
        UsageError: for a rate that tc would not read.
    """

    rate: str = "100mbit"
    # A bucket smaller than 16 KB cannot keep up with the clock ticks at 200 Mbit/s.
    burst_bytes: int = 16 * 1024
    # Must stay below the burst: a packet larger than the bucket would leave at the speed of memory.
    packet_bytes: int = 12000
    # Longer than the largest send buffer takes (64 KB at 50 Mbit/s: 11 ms), so that nothing is dropped.
    queue_s: float = 0.05

    def __post_init__(self) -> None:
        """Refuse a rate that is not one."""
        self.bits_per_s  # noqa: B018

    @property
    def bits_per_s(self) -> float:
        """The rate as a number."""
        found = _RATE.fullmatch(self.rate)
        if found is None:
            raise UsageError(f"{self.rate!r} is not a rate; write it like 100mbit, 1gbit or 500kbit")
        return float(found[1]) * _UNITS[found[2]]

    @property
    def payload_bytes_per_s(self) -> float:
        """What TCP can carry at most, headers taken off."""
        return self.bits_per_s / 8 * PAYLOAD_BYTES / PACKET_BYTES


def limit(device: str, speed: Speed) -> Iterator[tuple[str, ...]]:
    """Yield the commands that limit a device, to be run in the network namespace that it is in."""
    yield ("ip", "link", "set", "dev", device, "gso_max_size", str(speed.packet_bytes))
    bucket = ("rate", speed.rate, "burst", str(speed.burst_bytes), "latency", f"{round(speed.queue_s * 1000)}ms")
    yield ("tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def apply(enter: tuple[str, ...], device: str, speed: Speed) -> None:
    """Limit a device in the namespaces that `enter` leads to.

    Args:
        enter: the beginning of a command that runs there.
        device: the network card.
        speed: what it is limited to.

    Raises:
        LabError: when the kernel has no token bucket.
    """
    for command in limit(device, speed):
        try:
            call((*enter, *command))
        except LabError as error:
            if command[0] == "tc":
                raise LabError(
                    f"the link's rate could not be set ({error}); the lab needs a kernel with the token bucket "
                    "filter: try 'modprobe sch_tbf'"
                ) from error
            raise
