"""How long a collective takes on a machine, rank by rank, for thousands of ranks.

A rank works its steps off in order. Rank 1 of a ring, in one step:

    rank 0   ==|--------- chunk 0 to 1 ----------|
    rank 1   =====|------ chunk 0 from 0 --------|++++|--- next step          = the step before
               .  |--- chunk 3 to 2 ---|         .    .                       + adds what came (machine.add)
    rank 2   ====================|-----.---|     .    .
               .  .                    .         .    over, and added
               .  both ends have come to it:     the step's last message is there
               .  the message begins             (here the one from rank 0)
               rank 0 waits for rank 1

- A message begins when both ends have come to its step (as MPI sends long ones), and, between nodes, when the links of
  both nodes are free: `links`. It costs what `fare` says: the link's curve for one way or both, by where its ends are
  and what they do; slow ranks and nodes take their factor more; late ranks begin later.
- Chunks have the exact bytes that `shard.split` gives them; empty ones send nothing.
- Symmetric phases are executed round by round over all ranks at once (`rounds`), all others message by message
  (`play`). Both give the same times; where links are shared, see `Timeline.out_of_turn`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.collective import Collective, Phase
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulation.fare import Fares
from nnmpi.comm.simulation.links import INSTANT_S, Links
from nnmpi.comm.simulation.moves import Lengths, Move
from nnmpi.comm.simulation.play import play
from nnmpi.comm.simulation.rounds import Rounds, in_rounds
from nnmpi.errors import UsageError


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the ranks were done.

    Attributes:
        finish_s: (size,) seconds from the common start until each rank has finished.
        messages: how many messages were sent.
        waited_s: seconds that messages waited for links between nodes, all together.
        out_of_turn: messages that got a link after one that was ready later, because of how symmetric phases are
            executed; with 0 the order is exactly first come, first served.
    """

    finish_s: NDArray[np.float64]
    messages: int
    waited_s: float
    out_of_turn: int

    @property
    def seconds(self) -> float:
        """When the last rank has finished."""
        return float(self.finish_s.max())


def simulate(collective: Collective, size: int, nbytes: int, machine: Machine, itemsize: int = 4) -> Timeline:
    """Return when each of `size` ranks finishes a collective over a buffer of `nbytes`.

    Args:
        collective: what they do.
        size: number of ranks, at least 1.
        nbytes: the whole buffer of a rank, rounded up to whole elements.
        machine: what messages and sums cost, where the ranks are, who is slow or late.
        itemsize: bytes of an element.

    Raises:
        UsageError: for no ranks, or a machine with another number of them.
        ScheduleError: when the ranks wait for one another for ever.
    """
    return simulate_phases(collective.phases, size, nbytes, machine, itemsize)


def simulate_phases(phases: Sequence[Phase], size: int, nbytes: int, machine: Machine, itemsize: int = 4) -> Timeline:
    """Return when each rank finishes these phases. See `simulate`."""
    if size < 1 or nbytes < 0 or itemsize < 1:
        raise UsageError(f"{size} ranks with {nbytes} bytes in elements of {itemsize} cannot be simulated")
    fares = Fares(machine, size)
    links = Links(max(fares.nodes) + 1)
    lengths = Lengths.of(nbytes, size, itemsize)
    rounds = Rounds(machine, lengths, links)
    seconds = _Seconds(fares, links)
    clock = np.array([machine.late.get(rank, 0.0) for rank in range(size)])
    for at_once, part in groupby(phases, lambda phase: phase.symmetric and in_rounds(phase.steps(0, size), size)):
        if at_once:
            for phase in part:
                clock = rounds.work_off(phase.steps(0, size), clock)
        else:
            together = tuple(part)
            moves = [lengths.moves(s for phase in together for s in phase.steps(rank, size)) for rank in range(size)]
            clock = np.array(play(moves, clock.tolist(), seconds))
    return Timeline(clock, rounds.messages + seconds.messages, links.waited_s, links.out_of_turn)


@dataclass(slots=True)
class _Seconds:
    """Carries messages over a machine's links, in seconds."""

    fares: Fares
    links: Links
    messages: int = 0

    def carry(self, sender: int, receiver: int, out: Move, into: Move, ready: float) -> float:
        """Return when the messages are there."""
        latency, wire = self.fares.fare(sender, receiver, out, into)
        nodes = self.fares.nodes
        if nodes[sender] != nodes[receiver]:
            ready = self.links.send(nodes[sender], nodes[receiver], ready, wire)
        self.messages += len(out.sends)
        return ready + (latency + wire)

    def turn(self, ready: float) -> int:
        """Return the instant."""
        return round(ready / INSTANT_S)

    def add(self, rank: int, move: Move, over: float) -> float:
        """Return when what came has been added."""
        return over + self.fares.adding(rank, move)
