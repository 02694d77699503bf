"""A machine for the cost model: the seconds of messages and additions, and the nodes of the ranks.

         node 0                   node 1
    +---------------+        +---------------+    inside: a message between two ranks of a node
    | rank 0  rank 1|        | rank 2  rank 3|    across: a message between nodes; the ranks of a
    |   |      |    | across |   |      |    |            node share its link, which carries one
    |   +-link-+----|--------|---+-link-+    |            message out and one in at a time
    +---------------+        +---------------+

All numbers are in seconds and bytes. The textbooks' machine, alpha + beta * bytes for every
message, is `Machine.uniform(alpha_s, beta_s, gamma_s)`. Its straight line is not enough for
forecasts: a real curve has a step where MPI changes from eager to rendezvous sends, and a bend
where messages outgrow the caches. Hence the piecewise `Curve`.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from nnmpi.base.errors import UsageError

# The second point of a line lies so far out that the slope between both has all digits of beta.
_FAR_BYTES = 2.0**40


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a message or an addition as a piecewise linear function of its bytes.

    seconds |              /          short messages are sent at once (eager), longer ones after
            |            /            a handshake (rendezvous: the step), and very long ones do
            |       ___/              not fit the caches
            |   ___/
            |__/                      left of the first point: its value
            +------------------ bytes right of the last one: the last slope

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
            raise UsageError(f"a curve needs points with increasing bytes, not {list(points)}")
        if not all(math.isfinite(number) and number >= 0 for point in points for number in point):
            raise UsageError(
                f"a curve's bytes and seconds must be finite and not negative, not {list(points)}"
            )
        object.__setattr__(self, "points", points)

    @classmethod
    def line(cls, alpha_s: float, beta_s: float) -> "Curve":
        """Return the textbook price of a message, alpha_s + beta_s * bytes."""
        return cls(((0.0, alpha_s), (_FAR_BYTES, alpha_s + beta_s * _FAR_BYTES)))

    @property
    def alpha_s(self) -> float:
        """The seconds of the shortest message."""
        return self.points[0][1]

    def beta(self, nbytes: float) -> float:
        """Return the seconds per byte of a message of this length (above 0), without latency."""
        return (self(nbytes) - self.alpha_s) / nbytes

    def __call__(self, nbytes: float) -> float:
        """Return the seconds for a number of bytes."""
        points = self.points
        after = bisect_right(points, (nbytes, math.inf))  # the first point beyond nbytes
        if after == 0 or len(points) == 1:
            return self.alpha_s
        (x0, y0), (x1, y1) = points[after - 1 : after + 1] if after < len(points) else points[-2:]
        slope = (y1 - y0) / (x1 - x0)
        return (
            y0 + slope * (nbytes - x0)
            if after < len(points)
            else y1 + max(slope, 0.0) * (nbytes - x1)
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of a message between two ranks.

    Attributes:
        one_way: for a sender that receives nothing at the same time.
        both_ways: for one that does.
    """

    one_way: Curve
    both_ways: Curve

    @classmethod
    def line(cls, alpha_s: float, beta_s: float) -> "Link":
        """Return a full-duplex link of alpha_s + beta_s * bytes in each direction."""
        return cls(Curve.line(alpha_s, beta_s), Curve.line(alpha_s, beta_s))


@dataclass(frozen=True, slots=True)
class Machine:
    """Links, processors, and the nodes of the ranks.

    Attributes:
        inside: messages between ranks of one node.
        across: messages between nodes; None when they cost the same as inside.
        nodes: the node number of each rank; None when all are on one node.
        add: seconds to add received bytes to as many local ones (gamma per byte).

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

    def nodes_of(self, size: int) -> tuple[int, ...]:
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
        """Return the link between nodes or inside one."""
        return self.across if across and self.across is not None else self.inside

    def parts(self, groups: Iterable[Sequence[int]], size: int) -> list["Machine"]:
        """Return the machine of each set of groups that share links, equal ones once.

        Its nodes are those of one group after the other. Groups inside a node share nothing;
        all have equally many ranks.
        """
        node_of = self.nodes_of(size)
        # by node, the nodes of all ranks whose groups share its link, or others through them
        sharing: dict[int, tuple[int, ...]] = {}
        for ranks in groups:
            on = tuple(node_of[rank] for rank in ranks)
            if len({*on}) == 1:
                sharing[-1] = on
            else:
                on = sum(dict.fromkeys(sharing[node] for node in on if node in sharing), ()) + on
                sharing |= dict.fromkeys(on, on)
        places = dict.fromkeys(tuple(map(on.index, on)) for on in dict.fromkeys(sharing.values()))
        return [replace(self, nodes=nodes) for nodes in places]

    def message(self, across: bool, both_ways: bool, lengths: Sequence[int]) -> tuple[float, float]:
        """Return (latency, wire) in seconds of messages that are posted together.

        Args:
            across: whether they go between nodes.
            both_ways: whether their sender receives at the same time.
            lengths: bytes of each message.
        """
        link = self.link(across)
        curve = link.both_ways if both_ways else link.one_way
        return curve.alpha_s, sum(curve(nbytes) - curve.alpha_s for nbytes in lengths)


def blocks(size: int, per_node: int) -> tuple[int, ...]:
    """Return each rank's node for `per_node` consecutive ranks: blocks(5, 2) -> 0 0 1 1 2."""
    return tuple(rank // per_node for rank in range(size))


# Contention for links.
#
# Each node has a link, and inside a node each pair of ranks has one. A link carries one message out
# and one message in at a time, for the time of its bytes (not during its latency). Messages get it
# in the order in which they become ready:
#
#     ready      a    b c                        a, b and c leave the same node
#     link out   |-- a --|-- b --|-- c --|
#     arrival             .a      .b      .c     each its latency after its last byte has left
#
# A message between nodes waits until both links are free: its source's and its target's. All three
# simulations use these links: collectives (`duration`), simulated ranks (`simulated_comm`) and
# pipelines (`schedule.simulate`).

# Times closer than this are equal: rounding must not decide the order of messages.
INSTANT_S = 1e-12
# The longest message that leaves before its receiver waits for it. Open MPI's limit between ranks
# of a node; its limits on networks are of the same order.
EAGER_BYTES = 4096


class Links:
    """The links of nodes and of pairs inside a node, all free at first.

    Args:
        machine: the costs of messages, and the nodes.
        size: number of ranks, if the machine has no nodes.
    """

    def __init__(self, machine: Machine, size: int = 0) -> None:
        self._nodes = machine.nodes or machine.nodes_of(size)
        self._message = cache(machine.message)
        self._free_s: defaultdict[tuple[int | str, int], float] = defaultdict(float)

    def carry(
        self,
        sender: int,
        receiver: int,
        ready_s: float,
        lengths: tuple[int, ...],
        both_ways: bool = False,
    ) -> float:
        """Occupy the links for messages from one rank to another; return the last one's arrival.

        While a message waits for the target's link it blocks its source's: messages behind it wait
        too, even those to free nodes (head-of-line blocking).

        Args:
            sender, receiver: the ranks.
            ready_s: the earliest start.
            lengths, both_ways: see `Machine.message`.
        """
        source, target = self._nodes[sender], self._nodes[receiver]
        latency_s, wire_s = self._message(source != target, both_ways, lengths)
        pair, free_s = (sender, receiver), self._free_s
        out, into = (pair, pair) if source == target else (("out", source), ("in", target))
        ready_s = max(ready_s, free_s[out], free_s[into])
        free_s[out] = free_s[into] = ready_s + wire_s
        return ready_s + (latency_s + wire_s)

    def occupy(self, ranks: Sequence[int], ready_s: float, wire_s: float) -> float:
        """Occupy the links of all nodes of some ranks for a collective; return its start.

        Args:
            ranks: that take part.
            ready_s: the earliest start.
            wire_s: for which its bytes travel. Within a node they share no link.
        """
        nodes = {self._nodes[rank] for rank in ranks}
        if len(nodes) == 1:
            return ready_s
        links = [(way, node) for node in nodes for way in ("out", "in")]
        start_s = max(ready_s, *(self._free_s[link] for link in links))
        self._free_s |= dict.fromkeys(links, start_s + wire_s)
        return start_s
