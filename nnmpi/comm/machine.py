"""A machine as the cost model sees it: what a message costs, what adding costs, and who sits where.

         node 0                            node 1
    +-----------------+               +-----------------+
    | rank 0   rank 1 |               | rank 2   rank 3 |     inside: a message between two ranks of a node
    |    |       |    |     across    |    |       |    |     across: one between nodes; all of a node's ranks share
    |    +--link-+----|---------------|----+--link-+    |             its link, where one message at a time goes out
    +-----------------+               +-----------------+             and one comes in

Everything is in seconds and bytes. The textbooks' machine, alpha + beta * bytes for every message,
is `Machine.uniform(alpha_s, beta_s, gamma_s)`.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nnmpi.errors import UsageError

# Where a line's second point lies: so far out that the slope computed from the two has every digit
# of beta.
_FAR_BYTES = 2.0**40


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of bytes, in straight pieces: what a message costs, or adding.

    seconds |              /          a message that is short is sent at once, a longer one after a handshake (the
            |            /            step between the pieces), and a very long one does not fit the caches
            |       ___/
            |   ___/                  below the first point: its value    beyond the last: its slope goes on
            |__/
            +------------------ bytes

    Args:
        points: (bytes, seconds) with growing bytes. Beyond the last one the last slope continues
            (level if it falls); below the first one its value holds; a single point is a constant.

    Raises:
        UsageError: for no points, bytes that do not grow, or numbers that are negative or not
            finite.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Check the points."""
        points = tuple((float(nbytes), float(seconds)) for nbytes, seconds in self.points)
        if not points or any(later[0] <= earlier[0] for earlier, later in pairwise(points)):
            raise UsageError(f"a curve needs points with growing bytes, but has {list(points)}")
        if not all(math.isfinite(number) and number >= 0 for point in points for number in point):
            raise UsageError(
                "a curve's bytes and seconds are finite and not negative, but it has"
                f" {list(points)}"
            )
        object.__setattr__(self, "points", points)

    @classmethod
    def line(cls, alpha_s: float, beta_s: float) -> "Curve":
        """Return the textbook price of a message, alpha_s + beta_s * bytes."""
        return cls(((0.0, alpha_s), (_FAR_BYTES, alpha_s + beta_s * _FAR_BYTES)))

    @property
    def alpha_s(self) -> float:
        """What the shortest message costs."""
        return self.points[0][1]

    def beta(self, nbytes: float) -> float:
        """Return the seconds per byte of a message of this length (above 0), without latency."""
        return (self(nbytes) - self.alpha_s) / nbytes

    def __call__(self, nbytes: float) -> float:
        """Return the seconds for a number of bytes."""
        points = self.points
        after = bisect_right(points, (nbytes, math.inf))  # the first point that lies beyond
        if after == 0 or len(points) == 1:
            return self.alpha_s
        (x0, y0), (x1, y1) = points[after - 1 : after + 1] if after < len(points) else points[-2:]
        slope = (y1 - y0) / (x1 - x0)
        return (
            y0 + slope * (nbytes - x0)
            if after < len(points)
            else y1 + max(slope, 0.0) * (nbytes - x1)
        )

    def shared(self, messages: float) -> "Curve":
        """Return the cost of a message while so many share the bytes of a link."""
        alpha_s = self.alpha_s
        return Curve(
            tuple(
                (nbytes, alpha_s + (seconds - alpha_s) * messages)
                for nbytes, seconds in self.points
            )
        )


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs between two ranks.

    Attributes:
        one_way: for a rank that in the same step only sends or only receives.
        both_ways: for a rank that does both at once; where a message's two ends differ, the more
            expensive curve holds.
    """

    one_way: Curve
    both_ways: Curve

    @classmethod
    def line(cls, alpha_s: float, beta_s: float) -> "Link":
        """Return a full-duplex link of alpha_s + beta_s * bytes in each direction."""
        return cls(Curve.line(alpha_s, beta_s), Curve.line(alpha_s, beta_s))


@dataclass(frozen=True, slots=True)
class Machine:
    """Links, processors, and where the ranks are.

    Attributes:
        inside: messages between ranks of one node.
        across: messages between nodes; None when they cost what those inside do.
        nodes: the node number of each rank; None when all are on one node.
        add: seconds to add that many received bytes to as many of your own (gamma per byte).

    Example:
        >>> from nnmpi.comm.machine import Machine
        >>> machine = Machine.uniform(alpha_s=50e-6, beta_s=8e-10, gamma_s=0.0)  # 50 us, 10 Gbit/s
        >>> def main(group):
        ...     group.all_reduce(np.zeros(2**18, "float32"), "ring")
        >>> run = nnmpi.simulate(main, ranks=4, machine=machine, cpu_factor=0)
        >>> round(run.seconds * 1e3, 1)  # ms
        1.7
    """

    inside: Link
    across: Link | None = None
    nodes: tuple[int, ...] | None = None
    add: Curve = Curve.line(0.0, 0.0)

    @classmethod
    def uniform(cls, alpha_s: float, beta_s: float, gamma_s: float = 0.0) -> "Machine":
        """Return the textbook machine of prices per message, byte sent and byte added."""
        return cls(Link.line(alpha_s, beta_s), add=Curve.line(0.0, gamma_s))

    def places(self, size: int) -> tuple[int, ...]:
        """Return the node of each of `size` ranks.

        Raises:
            UsageError: when this machine has another number of ranks.
        """
        if self.nodes is not None and len(self.nodes) != size:
            raise UsageError(
                f"this machine places {len(self.nodes)} ranks on nodes, so {size} ranks cannot run"
                " on it"
            )
        return self.nodes if self.nodes is not None else (0,) * size

    def link(self, across: bool) -> Link:
        """Return the link between nodes or that inside one."""
        return self.across if across and self.across is not None else self.inside

    def message(
        self, across: bool, both: Iterable[bool], lengths: Sequence[int]
    ) -> tuple[float, float]:
        """Return (latency, wire) in seconds of messages that are posted together.

        Args:
            across: whether they go between nodes.
            both: whether each of the two ends sends and receives at once; the more expensive one
                counts.
            lengths: of the messages, in bytes.
        """
        link = self.link(across)
        curves = {link.both_ways if item else link.one_way for item in both}
        costs = [
            (curve.alpha_s, sum(curve(nbytes) - curve.alpha_s for nbytes in lengths))
            for curve in curves
        ]
        return max(costs, key=sum)


def blocks(size: int, per_node: int) -> tuple[int, ...]:
    """Return each rank's node for `per_node` consecutive ranks: blocks(5, 2) -> 0 0 1 1 2."""
    return tuple(rank // per_node for rank in range(size))


# The links of the nodes: who may use them when, if several messages want to.
#
# A link carries one message out and one message in at a time, for as long as its bytes take (not
# during its latency). Messages get it in the order in which they become ready:
#
#     ready      a    b c                        a, b and c leave the same node
#     link out   |-- a --|-- b --|-- c --|
#     there               .a      .b      .c     each its latency after its last byte has left
#
# A message waits until both links are free, that of the node it leaves and that of the node it
# enters. Collectives are simulated on these links (`simulate`), and so are the messages of
# simulated ranks (`simulated.simulated_comm`).

# Moments closer than this are the same: the last digits of sums must not decide who goes first.
INSTANT_S = 1e-12


class Links:
    """The links of nodes, all free at first.

    Args:
        nodes: of each rank.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._out_free_s, self._in_free_s = [0.0] * (max(nodes) + 1), [0.0] * (max(nodes) + 1)

    def carry(
        self, sender: int, receiver: int, ready_s: float, latency_s: float, wire_s: float
    ) -> float:
        """Let messages pass from rank to rank; return when they have arrived.

        A link between nodes is taken for `wire_s` only. Who waits for the other node's link keeps
        its own node's until then: those behind it wait too, even for nodes that are free
        (head-of-line blocking).
        """
        source, target = self._nodes[sender], self._nodes[receiver]
        if source != target:
            ready_s = max(ready_s, self._out_free_s[source], self._in_free_s[target])
            self._out_free_s[source] = self._in_free_s[target] = ready_s + wire_s
        return ready_s + (latency_s + wire_s)
