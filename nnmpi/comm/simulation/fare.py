"""What one rank's messages to another cost on a machine, and what adding what arrived costs.

The messages of one step between two ranks are posted together (`execute`), so they pay the latency once, and their
bytes follow one another:

    seconds  =  alpha  +  the sum over messages of (curve(bytes) - alpha)
                -----     -----------------------------------------------
               latency    wire

(Two short messages instead of one of the same bytes took half an alpha more between two ranks of one node, under Open
MPI and MPICH alike, because there alpha is the processor's work; on a network it is the way, and they travel together.)
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from nnmpi.comm.curve import Curve
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulation.moves import Move

Fare: TypeAlias = tuple[float, float]
"""(latency, wire) in seconds: a link is taken for `wire` only, and the messages are there after both."""


@dataclass(slots=True)
class Fares:
    """The prices on one machine with so many ranks.

    Raises:
        UsageError: when the machine does not have that many ranks.
    """

    machine: Machine
    size: int
    nodes: tuple[int, ...] = field(init=False)
    _fares: dict[tuple[bool, bool, bool, tuple[int, ...]], Fare] = field(init=False, default_factory=dict)
    _adding: dict[tuple[int, ...], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Look where the ranks are."""
        self.nodes = self.machine.places(self.size)

    def fare(self, sender: int, receiver: int, out: Move, into: Move) -> Fare:
        """Return what the messages of `out` cost, which are those that `into` receives."""
        machine, nodes = self.machine, self.nodes
        across = nodes[sender] != nodes[receiver]
        key = across, out.both, into.both, out.sends
        if key not in self._fares:
            link = machine.link(across)
            curves = {link.both_ways if both else link.one_way for both in (out.both, into.both)}
            self._fares[key] = max((_fare(curve, out.sends) for curve in curves), key=sum)
        latency, wire = self._fares[key]
        if machine.slow_ranks:
            latency *= max(machine.slow_ranks.get(rank, 1.0) for rank in (sender, receiver))
        if across and machine.slow_nodes:
            wire *= max(machine.slow_nodes.get(nodes[rank], 1.0) for rank in (sender, receiver))
        return latency, wire

    def adding(self, rank: int, move: Move) -> float:
        """Return the seconds that a rank takes to add what a move brought; 0 when it replaces or brings nothing."""
        if not move.reduce or not move.recvs:
            return 0.0
        if move.recvs not in self._adding:
            self._adding[move.recvs] = sum(self.machine.add(nbytes) for nbytes in move.recvs)
        return self._adding[move.recvs] * self.machine.slow_ranks.get(rank, 1.0)


def _fare(curve: Curve, messages: tuple[int, ...]) -> Fare:
    return curve.alpha_s, sum(curve(nbytes) - curve.alpha_s for nbytes in messages)
