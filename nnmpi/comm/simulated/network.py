"""When a message arrives, by the same machine that the cost model has (`comm.machine`).

inside a node     ready |-- curve(bytes) --| there
between nodes     ready |. waits .|-- bytes, with a share of both links --|-- latency --| there

short message     leaves at once, and waits at its end until it is received
long message      begins when both ends have come to it (rendezvous)

What leaves a node at the same time shares its link evenly; what enters it is served in the order of beginnings, and who
comes later has what is left. Messages between the same two ranks go one behind the other, in their one connection.

    a server's replies     |-- to 1 -------------|      gradients that meet     |-- of 1 --|
    to three workers       |-- to 2 -------------|      at the server           |..........|-- of 2 --|
                           |-- to 3 -------------|                              |.....................|-- of 3 --|

So after a synchronous step all workers begin at once and their gradients meet again; and workers out of step, who begin
at once, are soon spread out. Both was measured with `benchmarks/netlab`: 6 hosts of which one is the server, too, 300
KB, 95 Mbit/s, steps of 500 ms. Of 10 steps of bsp each took 766 ms (simulated 772), of 40 of asp 566 (559). One behind
the other both ways bsp would take 671, and shared evenly both ways asp 702.

Where the order of what happens is not that of the clocks (`scheduler`), what will leave meanwhile is not known when a
message leaves. There they go one behind the other (`step_simulation.links`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from nnmpi.comm import cost
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.simulated.scheduler import Scheduler
from nnmpi.comm.step_simulation.links import Links

_ROUNDING = 1e-9  # of shares
EAGER_BYTES = 4096  # Open MPI's limit between ranks of a node; its limits on networks are of that order


Due: TypeAlias = Callable[[float], None]
"""Is told when a message will be there, once that is known."""


@dataclass(eq=False)
class NetworkTransfer:
    """A message on its way between two nodes.

    Attributes:
        ranks: from which, and to which.
        nodes: theirs.
        left_s: what the rest of it would take with both links for itself.
        latency_s: what comes after its last byte.
        due: see `Due`.
        since_s: when it got its share of the links.
        share: that it has, up to 1.
        planned: how often its end was planned; only the last time counts.
    """

    ranks: tuple[int, int]
    nodes: tuple[int, int]
    left_s: float
    latency_s: float
    due: Due
    since_s: float = 0.0
    share: float = 0.0
    planned: int = 0


class SharedLinks:
    """Links that are shared by the messages on them.

    Args:
        nodes: how many there are, each with one link of two directions.
        scheduler: lets something happen at a time.
    """

    def __init__(self, nodes: int, scheduler: Scheduler) -> None:
        self._plan = scheduler.plan
        self._out: list[dict[NetworkTransfer, None]] = [{} for _ in range(nodes)]  # as dicts have an order
        self._into: list[dict[NetworkTransfer, None]] = [{} for _ in range(nodes)]
        self._lines: defaultdict[tuple[int, int], deque[NetworkTransfer]] = defaultdict(deque)

    def send(self, transfer: NetworkTransfer, now_s: float) -> None:
        """Let a message go, behind those between the same two ranks."""
        line = self._lines[transfer.ranks]
        line.append(transfer)
        if len(line) == 1:
            self._begin(line, now_s)

    def _begin(self, line: deque[NetworkTransfer], now_s: float) -> None:
        leaves, enters = line[0].nodes
        self._out[leaves][line[0]] = self._into[enters][line[0]] = None
        self._divide(leaves, enters, now_s)

    def _divide(self, leaves: int, enters: int, now_s: float) -> None:
        """Give all messages their shares that leave one node, or enter another or the nodes to which those go."""
        for node in dict.fromkeys([enters, *(each.nodes[1] for each in self._out[leaves])]):
            free = 1.0
            for each in self._into[node]:
                share = min(free, 1 / len(self._out[each.nodes[0]]))
                free = free - share if free - share > _ROUNDING else 0.0
                self._go_on(each, share, now_s)

    def _go_on(self, transfer: NetworkTransfer, share: float, now_s: float) -> None:
        """Let a message go on with another share, and plan its end."""
        if share == transfer.share:
            return
        transfer.left_s = max(0.0, transfer.left_s - transfer.share * (now_s - transfer.since_s))
        transfer.since_s, transfer.share, transfer.planned = now_s, share, transfer.planned + 1
        if share:
            end_s = now_s + transfer.left_s / share
            self._plan(end_s, partial(self._end, transfer, transfer.planned, end_s))

    def _end(self, transfer: NetworkTransfer, planned: int, now_s: float) -> None:
        """Take a message off the links when its last byte has passed, if this is still the time of it."""
        if planned != transfer.planned:
            return
        line = self._lines[transfer.ranks]
        leaves, enters = transfer.nodes
        del line[0], self._out[leaves][transfer], self._into[enters][transfer]
        transfer.due(now_s + transfer.latency_s)
        self._divide(leaves, enters, now_s)
        if line:
            self._begin(line, now_s)


class SimulatedNetwork:
    """The links between simulated ranks.

    Args:
        machine: what messages cost.
        scheduler: of the ranks.

    Attributes:
        places: the node of each rank.
        messages, bytes: how many were carried so far.
    """

    def __init__(self, machine: Machine, scheduler: Scheduler) -> None:
        self.places = machine.places(len(scheduler.ranks))
        self.messages = self.bytes = 0
        self._machine = machine
        nodes = max(self.places, default=0) + 1
        self._links, self._shared = Links(nodes), SharedLinks(nodes, scheduler) if scheduler.by_time else None

    def carry(self, source: int, target: int, nbytes: int, ready_s: float, both_ways: bool, due: Due) -> None:
        """Let a message go.

        Args:
            source, target: the ranks, by number.
            nbytes: its length.
            ready_s: when it can begin.
            both_ways: whether its sender receives something at the same time.
            due: see `Due`.
        """
        self.messages, self.bytes = self.messages + 1, self.bytes + nbytes
        nodes = self.places[source], self.places[target]
        link = self._machine.link(nodes[0] != nodes[1])
        curve = link.both_ways if both_ways else link.one_way
        slow = self._machine.slow_ranks
        latency_s = curve.alpha_s * max(slow.get(source, 1.0), slow.get(target, 1.0)) if slow else curve.alpha_s
        wire_s = curve(nbytes) - curve.alpha_s
        if nodes[0] == nodes[1]:
            return due(ready_s + wire_s + latency_s)
        if self._machine.slow_nodes:
            wire_s *= max(self._machine.slow_nodes.get(node, 1.0) for node in nodes)
        if self._shared is not None:
            return self._shared.send(NetworkTransfer((source, target), nodes, wire_s, latency_s, due), ready_s)
        return due(self._links.send(*nodes, ready_s, wire_s) + wire_s + latency_s)

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
    return min(cost.broadcast(size, nbytes, alpha, beta), cost.ring_broadcast(size, nbytes, alpha, beta))


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
