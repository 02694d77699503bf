"""What messages cost on the machine that is planned for: fitted here, said in numbers, or a network by its name.

A network by name has the rate that its standard or maker states, and nothing taken off: real ones give less. Latencies
are stated by no standard; those here are round numbers of the right size, and are marked as assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from nnmpi.comm.algorithms.registry import NATIVE, SHARED, find_collective
from nnmpi.comm.fit import Fit
from nnmpi.comm.machine import Curve, Link, Machine, blocks, parse_network
from nnmpi.comm.simulate import price
from nnmpi.errors import UsageError

BYTES_PER_GBIT = 1e9 / 8
WAYS = ("ring", "tree", "halving-doubling")  # the last of an all-reduce alone


@dataclass(frozen=True)
class NamedNetwork:
    """A network that is known by its name.

    Attributes:
        gbit: 10^9 bits per second, in each direction.
        alpha_us: microseconds of latency, assumed.
        source: who states the rate.
    """

    gbit: float
    alpha_us: float
    source: str


PRESETS: Mapping[str, NamedNetwork] = MappingProxyType(
    {
        "ethernet-1g": NamedNetwork(1, 50, "IEEE 802.3ab, 1000BASE-T"),
        "ethernet-10g": NamedNetwork(10, 30, "IEEE 802.3ae"),
        "ethernet-25g": NamedNetwork(25, 20, "IEEE 802.3by"),
        "ethernet-100g": NamedNetwork(100, 10, "IEEE 802.3bj"),
        "infiniband-edr": NamedNetwork(100, 2, "InfiniBand Trade Association, EDR with 4 lanes"),
        "infiniband-hdr": NamedNetwork(200, 2, "InfiniBand Trade Association, HDR with 4 lanes"),
        "infiniband-ndr": NamedNetwork(400, 2, "InfiniBand Trade Association, NDR with 4 lanes"),
        "pcie3-x16": NamedNetwork(126, 5, "PCI-SIG, PCI Express 3.0: 8 GT/s, 16 lanes, 128b/130b"),
        "nvlink2": NamedNetwork(1200, 5, "NVIDIA, Tesla V100 white paper: 300 GB/s both ways"),
        "nvlink3": NamedNetwork(2400, 5, "NVIDIA, A100 white paper: 600 GB/s both ways"),
        "nvlink4": NamedNetwork(3600, 5, "NVIDIA, H100 white paper: 900 GB/s both ways"),
    }
)


@dataclass(frozen=True)
class PlannedNetwork:
    """What messages cost between the ranks that are planned for.

    Attributes:
        name: in words, for people.
        machine: links, sums, and the node of each rank.
        ranks: how many.
        fit: of just these ranks on one node, where there is one: what MPI's own and the shared all-reduce take.
    """

    name: str
    machine: Machine
    ranks: int
    fit: Fit | None = None
    _known: dict[tuple[object, ...], float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank."""
        return self.machine.places(self.ranks)

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks can share memory."""
        return len(set(self.nodes)) == 1

    @classmethod
    def fitted(cls, fit: Fit) -> PlannedNetwork:
        """Return the network of the ranks that a fit was made for."""
        return cls(f"fitted to {fit.facts['host']} on {fit.facts['date']}", fit.machine, fit.ranks, fit)

    @property
    def has_shared(self) -> bool:
        """Whether it is known what an all-reduce of all ranks through shared memory takes."""
        return self.fit is not None and self.fit.shared is not None and self.ranks == self.fit.ranks

    def message(self, sender: int, receiver: int, nbytes: float) -> float:
        """Return the seconds of a message between two ranks."""
        nodes = self.nodes
        return self.machine.link(nodes[sender] != nodes[receiver]).one_way(nbytes)

    def exchange(self, operation: str, ranks: Sequence[int], nbytes: int, sharing: int = 1) -> float:
        """Return the seconds of a collective by the way that is quickest here.

        Args:
            operation: "all-reduce", "reduce-scatter" or "all-gather".
            ranks: who takes part.
            nbytes: of the whole buffer.
            sharing: how many such groups of ranks use a node's link at once.
        """
        if len(ranks) < 2 or not nbytes:
            return 0.0
        key = (operation, tuple(ranks), nbytes, sharing)
        if key not in self._known:
            machine, ways = self._part(ranks, sharing), WAYS[: 3 if operation == "all-reduce" else 2]
            found = [price(find_collective(operation, way, machine.nodes), len(ranks), nbytes, machine) for way in ways]
            if operation == "all-reduce" and self.fit is not None and len(ranks) == self.fit.ranks:
                found.append(self.fit.predict(NATIVE, nbytes))
            self._known[key] = min(found)
        return self._known[key]

    def shared(self, nbytes: int) -> float:
        """Return the seconds of an all-reduce of all ranks through shared memory, where `has_shared`."""
        return self.fit.predict(SHARED, nbytes) if self.fit is not None else 0.0

    def _part(self, ranks: Sequence[int], sharing: int) -> Machine:
        """Return the machine of some of the ranks, whose nodes' links others use, too."""
        places = [self.nodes[rank] for rank in ranks]
        numbers = {node: i for i, node in enumerate(dict.fromkeys(places))}
        if len(numbers) == 1:
            return replace(self.machine, nodes=None, across=None)
        link = self.machine.link(across=True)
        shared = Link(link.one_way.shared(sharing), link.both_ways.shared(sharing))
        return replace(self.machine, nodes=tuple(numbers[place] for place in places), across=shared)


def find_network(text: str, ranks: int, nodes: int, fit: Fit | None, other: Fit | None = None) -> PlannedNetwork:
    """Return the network that a word names, between so many ranks on so many nodes.

    Args:
        text: "fit"; a name of `PRESETS`; or numbers such as "alpha_us=50,gbit=10".
        ranks: how many, as many on each node.
        nodes: how many.
        fit: of just these ranks here, if one is kept.
        other: any fit of this machine, which says what messages inside a node take.

    Raises:
        UsageError: for ranks that the nodes do not divide, a word that names nothing, or a fit that there is not.
    """
    if nodes < 1 or ranks % nodes:
        raise UsageError(f"{ranks} ranks cannot be as many on each of {nodes} nodes; give a divisor of {ranks}")
    if text == "fit":
        if fit is None:
            raise UsageError(
                f"there is no fit of this machine for {ranks} ranks; make one with mpirun -n {ranks} python -m "
                f"nnmpi.comm fit, or name the network: {', '.join(PRESETS)}"
            )
        on_several = fit.machine.nodes is not None
        if on_several != (nodes > 1):
            raise UsageError(f"the fit is of {'several nodes' if on_several else 'one node'}, not of {nodes}")
        return PlannedNetwork.fitted(fit)
    if text in PRESETS:
        found = PRESETS[text]
        link = Link.line(found.alpha_us / 1e6, 1 / (found.gbit * BYTES_PER_GBIT))
        name = f"{text}: {found.gbit:g} Gbit/s ({found.source}), latency {found.alpha_us:g} us (assumed)"
    elif "=" in text:
        link, name = parse_network(text, 1).inside, text
    else:
        raise UsageError(
            f"network {text!r} is unknown; give fit, numbers such as alpha_us=50,gbit=10, or one of "
            f"{', '.join(PRESETS)}"
        )
    known = fit or other
    add = known.machine.add if known is not None else Curve.line(0.0, 0.0)
    if nodes == 1:
        return PlannedNetwork(name, Machine(link, add=add), ranks)
    inside = known.machine.inside if known is not None else link
    where = f"as fitted to {known.facts['host']}" if known is not None else "the same"
    machine = Machine(inside, link, blocks(ranks, ranks // nodes), add)
    return PlannedNetwork(f"{name}; inside a node {where}", machine, ranks)
