"""How long a collective takes on a machine, and what for, for up to thousands of ranks.

    rank 0   ........|=======|+++|              .    .            steps in order, as `steps` and `execution` have them:
    rank 1   ----------------|=======|+++|      .    .            - waits for the other end, = message under way,
               .  .                    .         .    .            + adds what came (machine.add)
    rank 2   ====================|-----.---|     .    .
               .  .                    .         .    over, and added
               .  both ends have come to it:     the step's last message has arrived
               .  the message begins             (here the one from rank 0)
               rank 0 waits for rank 1

- A message begins when both ends have come to its step (as MPI sends long ones), and, between nodes, when the links of
  both nodes are free (`step_simulation.links`). What it costs is said in `step_simulation.costs`: the link's curve for
  one way or both, by where its ends are and what they do; slow ranks and nodes take their factor more; late ranks
  begin later.
- Chunks have the exact bytes that `shard.split` gives them; empty ones send nothing.
- Symmetric phases are executed round by round over all ranks at once (`step_simulation.rounds`), all others message by
  message (`step_simulation.engine`). Both give the same times; where links are shared, see
  `CollectiveTimes.out_of_turn`.

`price` is the same simulation, told as what its time was spent on: the latencies, bytes and sums along the critical
path. That is the chain of messages and sums that each begin when the one before is over, and that ends with the last
rank. With the parameter server and three ranks it is the server's work; the workers' waiting is not on it:

    worker 1    |-- send --|          .          |-- receive --|
    worker 2    .          |-- send --|          .             |-- receive --|
    server      |-- 1 to --|+|-- 2 ---|+|--------|-- to 1 -----|-- to 2 -----|        4 alpha + 4 M beta + 2 M gamma
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.collective import Collective, Phase, as_collective
from nnmpi.comm.machine import Machine
from nnmpi.comm.step_simulation.costs import ChunkBytes, Costs, Transfer
from nnmpi.comm.step_simulation.engine import finish
from nnmpi.comm.step_simulation.links import INSTANT_S, Links
from nnmpi.comm.step_simulation.rounds import Rounds, in_rounds
from nnmpi.comm.steps import Algorithm
from nnmpi.errors import UsageError


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
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


def simulate_collective(
    collective: Collective | Algorithm, size: int, nbytes: int, machine: Machine, itemsize: int = 4
) -> CollectiveTimes:
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
    return simulate_phases(as_collective(collective).phases, size, nbytes, machine, itemsize)


def simulate_phases(
    phases: Sequence[Phase], size: int, nbytes: int, machine: Machine, itemsize: int = 4
) -> CollectiveTimes:
    """Return when each rank finishes these phases; errors are those of `simulate_collective`.

    Args:
        phases: of one collective or several, one after the other.
        size, nbytes, machine, itemsize: see `simulate_collective`.
    """
    _check(size, nbytes, itemsize, "cannot be simulated")
    costs = Costs(machine, size)
    links = Links(max(costs.nodes) + 1)
    chunks = ChunkBytes.of(nbytes, size, itemsize)
    rounds = Rounds(machine, chunks, links)
    seconds = _Seconds(costs, links)
    clock = np.array([machine.late.get(rank, 0.0) for rank in range(size)])
    for at_once, part in groupby(phases, lambda phase: phase.symmetric and in_rounds(phase.steps(0, size), size)):
        if at_once:
            for phase in part:
                clock = rounds.work_off(phase.steps(0, size), clock)
        else:
            together = tuple(part)
            steps = [chunks.transfers(s for phase in together for s in phase.steps(rank, size)) for rank in range(size)]
            clock = np.array(finish(steps, clock.tolist(), seconds))
    return CollectiveTimes(clock, rounds.messages + seconds.messages, links.waited_s, links.out_of_turn)


@dataclass(frozen=True, slots=True)
class Price:
    """What a collective costs.

    Attributes:
        seconds: until the last rank has finished.
        rounds: latencies on the critical path.
        sent_bytes: bytes whose journey is on it.
        added_bytes: bytes that are added on it.
        messages: messages sent by all ranks, on it or not.
    """

    seconds: float
    rounds: int
    sent_bytes: int
    added_bytes: int
    messages: int


def price(collective: Collective | Algorithm, size: int, nbytes: int, machine: Machine, itemsize: int = 4) -> Price:
    """Return what the time of a collective is spent on; errors are those of `simulate_collective`.

    The price is exact for the machine's curves, for unequal chunks, and for slow and late ranks. It leaves out what
    messages wait for a node's link that others use: where links are shared, `simulate_collective` takes that much
    longer.

    Args:
        collective, size, nbytes, machine, itemsize: see `simulate_collective`.
    """
    _check(size, nbytes, itemsize, "have no price")
    chunks = ChunkBytes.of(nbytes, size, itemsize)
    seconds = _Seconds(Costs(machine, size), links=None)
    begin = [_Path(machine.late.get(rank, 0.0)) for rank in range(size)]
    last = max(finish([chunks.transfers(collective(rank, size)) for rank in range(size)], begin, _Counted(seconds)))
    return Price(last.seconds, last.rounds, last.sent_bytes, last.added_bytes, seconds.messages)


def _check(size: int, nbytes: int, itemsize: int, what: str) -> None:
    if size < 1 or nbytes < 0 or itemsize < 1:
        raise UsageError(f"{size} ranks with {nbytes} bytes in elements of {itemsize} {what}")


@dataclass(slots=True)
class _Seconds:
    """Carries messages over a machine's links, in seconds; without `links` nobody waits for one."""

    costs: Costs
    links: Links | None
    messages: int = 0

    def carry(self, sender: int, receiver: int, out: Transfer, into: Transfer, ready: float) -> float:
        """Return when the messages have arrived."""
        latency, wire = self.costs.message(sender, receiver, out, into)
        nodes = self.costs.nodes
        if self.links is not None and nodes[sender] != nodes[receiver]:
            ready = self.links.send(nodes[sender], nodes[receiver], ready, wire)
        self.messages += len(out.sends)
        return ready + (latency + wire)

    def turn(self, ready: float) -> int:
        """Return the instant."""
        return round(ready / INSTANT_S)

    def add(self, rank: int, step: Transfer, over: float) -> float:
        """Return when what came has been added."""
        return over + self.costs.adding(rank, step)


@dataclass(frozen=True, slots=True, order=True)
class _Path:
    """A moment, and what led to it. Of two that come at the same time the one with more counts is the later."""

    seconds: float
    rounds: int = 0
    sent_bytes: int = 0
    added_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Counted:
    """Carries messages as `_Seconds` does, and keeps count of what led to each moment."""

    times: _Seconds

    def carry(self, sender: int, receiver: int, out: Transfer, into: Transfer, ready: _Path) -> _Path:
        """Return the path that goes on with this message."""
        seconds = self.times.carry(sender, receiver, out, into, ready.seconds)
        return replace(ready, seconds=seconds, rounds=ready.rounds + 1, sent_bytes=ready.sent_bytes + sum(out.sends))

    def turn(self, ready: _Path) -> int:
        """Return the instant."""
        return self.times.turn(ready.seconds)

    def add(self, rank: int, step: Transfer, over: _Path) -> _Path:
        """Return the path with the sum of what came."""
        if not step.reduce or not step.recvs:
            return over
        added_bytes = over.added_bytes + sum(step.recvs)
        return replace(over, seconds=self.times.add(rank, step, over.seconds), added_bytes=added_bytes)
