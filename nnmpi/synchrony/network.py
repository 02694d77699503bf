"""The network of virtual time: links with a latency and a rate, one pair of them at every server.

    worker 1  --alpha-->  |#1#|#2#|#3#|  server  |##1+2+3##|  --alpha-->  workers 1, 2, 3
    worker 2  --alpha-->    incoming link          outgoing link
    worker 3  --alpha-->    one message after      what is sent at the same moment shares the
                            another, in the        link evenly, so that it all arrives together
                            order of sending

A message of M bytes takes alpha + M beta alone. Those that meet at a server wait for one another's bytes, while their
latencies pass at the same time: N-1 workers that push at once, and get the weights back at once, take

    2 alpha + 2 (N-1) M beta        the course's formula for the parameter server (`comm.cost.parameter_server`)

Only the servers' links are counted, the two directions for themselves (full duplex): the workers' carry less.
"""

from dataclasses import dataclass
from math import inf, isfinite

from nnmpi.errors import UsageError

BITS_PER_BYTE = 8


@dataclass(frozen=True)
class LinkSpeed:
    """How fast every link is: latency in seconds, and seconds per byte. By default messages take no time.

    Raises:
        UsageError: for a number that is negative or not finite.
    """

    alpha_s: float = 0.0
    beta_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in (("latency", self.alpha_s), ("time per byte", self.beta_s_per_byte)):
            if not (isfinite(value) and value >= 0):
                raise UsageError(f"a {name} of {value:g} s is not possible; give 0 or more")

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message alone."""
        return self.alpha_s + nbytes * self.beta_s_per_byte

    def describe(self) -> str:
        """Return it in words: "links of 50 us and 10 Gbit/s"."""
        rate = inf if self.beta_s_per_byte == 0 else BITS_PER_BYTE / (1e9 * self.beta_s_per_byte)
        return f"links of {1e6 * self.alpha_s:g} us and " + (f"{rate:g} Gbit/s" if isfinite(rate) else "any rate")


class Network:
    """The links of some servers, and when each is free again.

    Messages of a direction are given in the order of the moments at which they are sent.

    Args:
        servers: how many.
        alpha_s, beta_s_per_byte: see `LinkSpeed`.

    Attributes:
        messages, bytes: that were sent.
    """

    def __init__(self, servers: int, alpha_s: float, beta_s_per_byte: float) -> None:
        self.speed = LinkSpeed(alpha_s, beta_s_per_byte)
        self.messages = self.bytes = 0
        self._incoming = [-inf] * servers
        self._outgoing = [-inf] * servers

    def push(self, server: int, ready_s: float, nbytes: int) -> float:
        """Return when a message has arrived at a server that a worker sends at `ready_s`."""
        return self._carry(self._incoming, server, ready_s, nbytes, 1)

    def reply(self, server: int, ready_s: float, nbytes: int, count: int = 1) -> float:
        """Return when messages of so many bytes each have arrived that a server sends to `count` workers at once."""
        return self._carry(self._outgoing, server, ready_s, nbytes, count)

    def _carry(self, free_s: list[float], server: int, ready_s: float, nbytes: int, count: int) -> float:
        self.messages += count
        self.bytes += count * nbytes
        free_s[server] = max(free_s[server], ready_s) + count * nbytes * self.speed.beta_s_per_byte
        return free_s[server] + self.speed.alpha_s


def parse_network(text: str) -> LinkSpeed:
    """Return the speed of links given as "alpha_us=50,gbit=10": microseconds of latency, and 10^9 bits per second.

    What is left out costs nothing.

    Raises:
        UsageError: says what is wrong, and how it is written.
    """
    values: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = (each.strip() for each in item.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in ("alpha_us", "gbit") or name in values or not (isfinite(value) and value >= 0):
            raise _refusal(text)
        values[name] = value
    if values.get("gbit") == 0:
        raise _refusal(text)
    beta = BITS_PER_BYTE / (1e9 * values["gbit"]) if "gbit" in values else 0.0
    return LinkSpeed(values.get("alpha_us", 0.0) / 1e6, beta)


def _refusal(text: str) -> UsageError:
    return UsageError(
        f"network {text!r} is not understood; give a latency in microseconds and a rate in Gbit/s above 0, such as "
        "alpha_us=50,gbit=10"
    )
