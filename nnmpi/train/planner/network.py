"""Costs of messages on the planned machine: fitted on this one, or given in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from nnmpi.comm.agreement import agreed
from nnmpi.comm.algorithms.registry import NATIVE, SHARED, find_collective
from nnmpi.comm.duration import price
from nnmpi.comm.fit import (
    Fit,
    default_file,
    describe_network,
    find_network_fit,
    missing_fit,
    parse_network,
    save_fit,
)
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.measure import find_fit
from nnmpi.comm.measure import measure as measure_fit
from nnmpi.errors import UsageError

ALGORITHMS = ("ring", "tree", "halving-doubling")  # the last one is for all-reduce only
FIT_S, QUICK = 6.0, "quick-fit"  # of the planner; `python -m nnmpi.comm fit` measures longer

Say = Callable[[str], None]


@dataclass(frozen=True)
class PlannedNetwork:
    """Costs of messages between the planned ranks.

    Attributes:
        name: a description.
        machine: links, sums, and the node of each rank.
        ranks: their number.
        fit: of exactly these ranks on one node, if there is one: it has the times of MPI's own
            all-reduce and of the one through shared memory.
    """

    name: str
    machine: Machine
    ranks: int
    fit: Fit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_exchange", cache(self._exchange))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank."""
        return self.machine.nodes_of(self.ranks)

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks can share memory."""
        return len(set(self.nodes)) == 1

    @property
    def has_shared(self) -> bool:
        """Whether the fit has the time of an all-reduce of all ranks through shared memory."""
        return self.fit is not None and self.fit.shared is not None and self.ranks == self.fit.ranks

    def message(self, sender: int, receiver: int, nbytes: float) -> float:
        """Return the seconds of a message between two ranks."""
        nodes = self.nodes
        return self.machine.link(nodes[sender] != nodes[receiver]).one_way(nbytes)

    def exchange(
        self, operation: str, ranks: Sequence[int], nbytes: int, sharing: int = 1
    ) -> float:
        """Return the seconds of a collective by its fastest algorithm on these ranks.

        Args:
            operation: "all-reduce", "reduce-scatter" or "all-gather".
            ranks: of the group.
            nbytes: of the full buffer.
            sharing: the number of groups that use a node's link at once.
        """
        return (
            self._exchange(operation, tuple(ranks), nbytes, sharing)
            if len(ranks) > 1 and nbytes
            else 0.0
        )

    def _exchange(self, operation: str, ranks: tuple[int, ...], nbytes: int, sharing: int) -> float:
        machine = self._part(ranks, sharing)
        result = [
            price(find_collective(operation, name, machine.nodes), len(ranks), nbytes, machine)
            for name in ALGORITHMS[: 3 if operation == "all-reduce" else 2]
        ]
        if operation == "all-reduce" and self.fit is not None and len(ranks) == self.fit.ranks:
            result.append(self.fit.predict(NATIVE, nbytes))
        return min(result)

    def shared(self, nbytes: int) -> float:
        """Return an all-reduce's seconds through shared memory, if `has_shared`."""
        return self.fit.predict(SHARED, nbytes) if self.fit is not None else 0.0

    def _part(self, ranks: Sequence[int], sharing: int) -> Machine:
        """Return the machine of some ranks, with `sharing` groups on each node's link."""
        nodes = [self.nodes[rank] for rank in ranks]
        numbers = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        if len(numbers) == 1:
            return replace(self.machine, nodes=None, across=None)
        link = self.machine.link(across=True)
        shared = Link(link.one_way.shared(sharing), link.both_ways.shared(sharing))
        return replace(self.machine, nodes=tuple(numbers[node] for node in nodes), across=shared)


def take_network(
    group: Group, say: Callable[[str], None], ranks: int, nodes: int = 1, word: str = "fit"
) -> PlannedNetwork:
    """Return the costs of messages between ranks on nodes. Collective.

    Args:
        group: the ranks of this job. If they are the planned ones and have no fit yet, they measure
            one in a few seconds.
        say: called with a sentence before a measurement.
        ranks: the number of planned ranks, the same on each node.
        nodes: the number of planned nodes.
        word: "fit"; the file of a fit; or numbers such as "alpha_us=50,gbit=10".

    Raises:
        UsageError: on all ranks, for ranks that are no multiple of the nodes, a bad word, or a
            missing fit.
    """
    known = find_fit(group, QUICK) if group.size > 1 else None
    if known is None and word == "fit" and ranks == group.size > 1 == nodes:
        say("measuring messages for some seconds, once; python -m nnmpi.comm fit measures longer")
        known = measure_fit(group, budget_s=FIT_S)
        if group.is_root:
            with suppress(UsageError, OSError):
                save_fit(known, default_file(known.facts, QUICK))
    with agreed(group):
        if ranks % nodes:
            raise UsageError(
                f"{ranks} ranks cannot be split evenly over {nodes} nodes; give a divisor of"
                f" {ranks}"
            )
        fit = known if word == "fit" else find_network_fit(word, ranks)
        if fit is not None and fit.ranks == ranks and (nodes == 1 or fit.machine.nodes is not None):
            return PlannedNetwork(
                f"fitted to {fit.facts['host']} on {fit.facts['date']}", fit.machine, ranks, fit
            )
        is_given = fit is None and word != "fit"
        machine = (
            parse_network(word, ranks, ranks // nodes) if is_given else Machine.uniform(0.0, 0.0)
        )
        if ranks == 1:
            return PlannedNetwork("one rank sends nothing", machine, 1)
        if not is_given:
            raise missing_fit(ranks, nodes)
        if known is None:
            return PlannedNetwork(describe_network(word), machine, ranks)
        inside = machine.inside if nodes == 1 or "inside" in word else known.machine.inside
        where = (
            ""
            if inside is machine.inside
            else f"; inside a node as fitted to {known.facts['host']}"
        )
        add = machine.add if "gamma" in word else known.machine.add
        return PlannedNetwork(
            f"{describe_network(word)}{where}", replace(machine, inside=inside, add=add), ranks
        )
