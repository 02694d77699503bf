"""The machines that are simulated: the textbooks' one, a cluster of nodes, and one that was measured."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from nnmpi.comm.curve import Curve
from nnmpi.comm.fit import Fit
from nnmpi.comm.machine import Link, Machine, blocks

RANKS_PER_NODE = 8
INSIDE = Link.line(0.5e-6, 1 / 10e9)  # through memory: 0.5 us, 10 GB/s for each pair of ranks
ACROSS = Link.line(2e-6, 1 / 12.5e9)  # 100 Gbit/s for all of a node's ranks together
ADDING = Curve.line(0.0, 1 / 50e9)  # 50 GB/s in cache


@dataclass(frozen=True)
class Model:
    """A machine of any number of ranks.

    Attributes:
        name: a word.
        description: its numbers in words.
        build: number of ranks -> the machine.
    """

    name: str
    description: str
    build: Callable[[int], Machine]


def flat(alpha_s: float, beta_s: float, gamma_s: float) -> Model:
    """Return the textbooks' machine: every rank has a link of its own to every other."""
    return Model(
        "flat",
        f"flat: alpha {1e6 * alpha_s:g} us, beta {1e9 * beta_s:g} ns/byte, gamma {1e9 * gamma_s:g} ns/byte, "
        "a link for every rank",
        lambda ranks: Machine.uniform(alpha_s, beta_s, gamma_s),
    )


def fitted(fit: Fit) -> Model:
    """Return more and more of a machine that was measured: nodes with as many ranks as its first one had."""
    machine, nodes = fit.machine, fit.machine.nodes
    per_node = fit.ranks if nodes is None else nodes.count(nodes[0])
    where = f"{fit.ranks} ranks on {fit.facts['host']} under {fit.facts['mpi']}"
    if machine.across is None:
        apart = "as if all ranks were on that node, each with a core of its own"
        return Model("fit", f"fit: {where}, {apart}", lambda ranks: replace(machine, nodes=None))
    return Model(
        "fit",
        f"fit: {where}, nodes of {per_node} ranks",
        lambda ranks: replace(machine, nodes=blocks(ranks, per_node)),
    )


def cluster() -> Model:
    """Return nodes of 8 ranks that share one link."""
    return Model(
        "cluster",
        f"cluster: nodes of {RANKS_PER_NODE} ranks, inside 0.5 us and 10 GB/s, between nodes 2 us and 12.5 GB/s for "
        "all ranks of a node together, adding 50 GB/s",
        lambda ranks: Machine(INSIDE, ACROSS, blocks(ranks, RANKS_PER_NODE), ADDING),
    )
