"""When a message arrives, by the same machine that the cost model has (`comm.machine`).

inside a node     ready |-- curve(bytes) --| there
between nodes     ready |. waits for both links .|-- bytes --|-- latency --| there        (`simulation.links`)

short message     leaves at once, and waits at its end until it is received
long message      begins when both ends have come to it (rendezvous)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from nnmpi.comm import cost
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.simulation.links import Links

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
        self._machine = machine
        self._links = Links(max(self.places, default=0) + 1)

    def carry(self, source: int, target: int, nbytes: int, ready_s: float, both_ways: bool) -> float:
        """Return when a message arrives.

        Args:
            source, target: the ranks, by number.
            nbytes: its length.
            ready_s: when it can begin.
            both_ways: whether its sender receives something at the same time.
        """
        self.messages, self.bytes = self.messages + 1, self.bytes + nbytes
        nodes = self.places[source], self.places[target]
        link = self._machine.link(nodes[0] != nodes[1])
        curve = link.both_ways if both_ways else link.one_way
        slow = self._machine.slow_ranks
        latency_s = curve.alpha_s * max(slow.get(source, 1.0), slow.get(target, 1.0)) if slow else curve.alpha_s
        wire_s = curve(nbytes) - curve.alpha_s
        if nodes[0] == nodes[1]:
            return ready_s + wire_s + latency_s
        if self._machine.slow_nodes:
            wire_s *= max(self._machine.slow_nodes.get(node, 1.0) for node in nodes)
        return self._links.send(*nodes, ready_s, wire_s) + wire_s + latency_s

    def collective_s(self, name: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """Return what a collective of MPI's own takes from the last rank's arrival, by the course's formulas.

        Args:
            name: of the call.
            ranks: who takes part.
            nbytes: of the whole array.
        """
        if len(ranks) == 1:
            return 0.0
        across = len({self.places[rank] for rank in ranks}) > 1
        return _SECONDS.get(name, _latencies)(len(ranks), nbytes, self._machine.link(across))


def _all_reduce(size: int, nbytes: int, link: Link) -> float:
    alpha, beta = link.one_way.alpha_s, link.one_way.beta(max(nbytes, 1))
    doubling_s = cost.levels(size) * (alpha + nbytes * beta)  # recursive doubling, which MPI takes for short arrays
    return min(doubling_s, cost.ring_all_reduce(size, nbytes, alpha, beta))


def _broadcast(size: int, nbytes: int, link: Link) -> float:
    alpha, beta = link.one_way.alpha_s, link.one_way.beta(max(nbytes, 1))
    return min(cost.broadcast(size, nbytes, alpha, beta), cost.exact_ring_broadcast(size, nbytes, alpha, beta))


def _all_gather(size: int, nbytes: int, link: Link) -> float:
    return cost.all_gather(size, nbytes / size, link.one_way.alpha_s, link.one_way.beta(max(nbytes, 1)))


def _all_to_all(size: int, nbytes: int, link: Link) -> float:
    return (size - 1) * link.one_way.alpha_s + nbytes * link.one_way.beta(max(nbytes, 1))


def _latencies(size: int, nbytes: int, link: Link) -> float:
    return cost.levels(size) * link.one_way.alpha_s


_SECONDS: Mapping[str, Callable[[int, int, Link], float]] = MappingProxyType(
    {
        "allreduce": _all_reduce,
        "allreduce_max": _all_reduce,
        "broadcast": _broadcast,
        "allgather": _all_gather,
        "allgatherv": _all_gather,
        "reduce_scatter": _all_gather,
        "alltoallv": _all_to_all,
    }
)
