"""When a message arrives, by the same machine that the cost model has (`comm.machine`).

inside a node     ready |-- curve(bytes) --| there
between nodes     ready |. waits .|-- bytes, with both links for itself --|-- latency --| there

short message     leaves at once, and waits at its end until it is received
long message      begins when both ends have come to it (rendezvous)

What leaves a node, and what enters one, goes one behind the other (`links`), as in simulated collectives.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from nnmpi.comm.algorithms.bruck import bruck_gather_seconds
from nnmpi.comm.algorithms.ring import ring_seconds
from nnmpi.comm.algorithms.tree import broadcast_seconds, levels, scatter_broadcast_seconds
from nnmpi.comm.links import Links
from nnmpi.comm.machine import Link, Machine

EAGER_BYTES = 4096  # Open MPI's limit between ranks of a node; its limits on networks are of that order


class SimulatedNetwork:
    """The links between simulated ranks.

    Args:
        machine: what messages cost.
        size: the number of ranks.

    Attributes:
        places: the node of each rank.
        messages, bytes: how many were carried so far.
    """

    def __init__(self, machine: Machine, size: int) -> None:
        self.places = machine.places(size)
        self.messages = self.bytes = 0
        self._machine, self._links = machine, Links(max(self.places, default=0) + 1)

    def carry(self, source: int, target: int, nbytes: int, ready_s: float, both_ways: bool) -> float:
        """Let a message go; return when it is there.

        Args:
            source, target: the ranks, by number.
            nbytes: its length.
            ready_s: when it can begin.
            both_ways: whether its sender receives something at the same time.
        """
        self.messages, self.bytes = self.messages + 1, self.bytes + nbytes
        nodes = self.places[source], self.places[target]
        across = nodes[0] != nodes[1]
        link = self._machine.link(across)
        curve = link.both_ways if both_ways else link.one_way
        latency_s = curve.alpha_s
        wire_s = curve(nbytes) - curve.alpha_s
        if across:
            if self._machine.slow_nodes:
                wire_s *= max(self._machine.slow_nodes.get(node, 1.0) for node in nodes)
            ready_s = self._links.send(*nodes, ready_s, wire_s)
        return ready_s + wire_s + latency_s

    def collective_s(self, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """Return what a collective of MPI's own takes from the last rank's arrival, by the formulas of the algorithms.

        Args:
            name: of the call.
            ranks: who takes part.
            nbytes: of the whole array.
        """
        if len(ranks) == 1:
            return 0.0
        across = len({self.places[rank] for rank in ranks}) > 1
        link: Link = self._machine.link(across)
        alpha, beta = link.one_way.alpha_s, link.one_way.beta(max(nbytes, 1))
        return _SECONDS.get(name, _latencies)(len(ranks), nbytes, alpha, beta)


def _all_reduce(size: int, nbytes: int, alpha: float, beta: float) -> float:
    doubling_s = levels(size) * (alpha + nbytes * beta)  # recursive doubling, which MPI takes for short arrays
    return min(doubling_s, ring_seconds(size, nbytes, alpha, beta))


def _broadcast(size: int, nbytes: int, alpha: float, beta: float) -> float:
    ways = (broadcast_seconds, scatter_broadcast_seconds)
    return min(way(size, nbytes, alpha, beta) for way in ways)


def _all_to_all(size: int, nbytes: int, alpha: float, beta: float) -> float:
    return (size - 1) * alpha + nbytes * beta


def _latencies(size: int, nbytes: int, alpha: float, beta: float) -> float:
    return levels(size) * alpha


_SECONDS: Mapping[str, Callable[[int, int, float, float], float]] = MappingProxyType(
    {
        "allreduce": _all_reduce,
        "allreduce_max": _all_reduce,
        "broadcast": _broadcast,
        "allgather": bruck_gather_seconds,
        "allgatherv": bruck_gather_seconds,
        "reduce_scatter": bruck_gather_seconds,
        "alltoallv": _all_to_all,
    }
)
