"""Costs of messages on the planned machine: fitted on this one, or given in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from nnmpi.base.errors import UsageError
from nnmpi.comm.agreement import agreed
from nnmpi.comm.algorithms.registry import NATIVE, SHARED, native_algorithms
from nnmpi.comm.collective import Step, Steps, as_collective
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
from nnmpi.comm.machine import Machine
from nnmpi.comm.saved_fit import find_fit
from nnmpi.lab.measure import measure as measure_fit

FIT_S, QUICK = 6.0, "quick-fit"  # of the planner; `nnmpi comm fit` measures longer

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

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank."""
        return self.machine.nodes_of(self.ranks)

    @property
    def has_shared(self) -> bool:
        """Whether the fit has the time of an all-reduce of all ranks through shared memory."""
        return self.fit is not None and self.fit.shared is not None and self.ranks == self.fit.ranks

    def exchange(self, operation: str, groups: Sequence[Sequence[int]], nbytes: int) -> float:
        """Return the seconds of a collective by its fastest algorithm, in all groups at once.

        Args:
            operation: such as "all-reduce"; SHARED, in shared memory. Others are a message from
                each rank to the next one.
            groups: the ranks of each.
            nbytes: of the full buffer.
        """
        if not nbytes:
            return 0.0
        if operation == SHARED:
            return self.fit.predict(SHARED, nbytes) if self.fit is not None else 0.0
        parts = self.machine.parts(groups, self.ranks)
        algorithms = native_algorithms(operation) or [as_collective(_pass_on)]
        seconds = min(
            max(price(item, len(groups[0]), nbytes, machine) for machine in parts)
            for item in algorithms
        )
        if operation == "all-reduce" and self.fit and len(groups[0]) == self.fit.ranks:
            return min(seconds, self.fit.predict(NATIVE, nbytes))
        return seconds


def _pass_on(rank: int, size: int) -> Steps:
    full = range(size)
    return (Step((rank + 1) % size, full, (rank - 1) % size, full),)


def find_network(
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
        say("measuring messages for some seconds, once; nnmpi comm fit measures longer")
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
                f"fitted to {fit.facts['host']} on {fit.facts['date']}; {fit.describe_error()}",
                fit.machine,
                ranks,
                fit,
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
