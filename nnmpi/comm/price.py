"""What a collective costs on a machine, and what for: latencies, bytes and sums along the critical path.

The critical path is the chain of messages and sums that each begin when the one before is over, and that ends with the
last rank. With the parameter server and three ranks it is the server's work; the workers' waiting is not on it:

    worker 1    |-- send --|          .          |-- receive --|
    worker 2    .          |-- send --|          .             |-- receive --|
    server      |-- 1 to --|+|-- 2 ---|+|--------|-- to 1 -----|-- to 2 -----|        4 alpha + 4 M beta + 2 M gamma

The price is exact for the machine's curves, for unequal chunks, and for slow and late ranks. It leaves out only what
messages wait for a node's link that others use: `simulate` has that, and gives the same without it.
"""

from dataclasses import dataclass, replace

from nnmpi.comm.collective import Collective
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulation.fare import Fares
from nnmpi.comm.simulation.moves import Lengths, Move
from nnmpi.comm.simulation.play import play
from nnmpi.errors import UsageError


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


def price(collective: Collective, size: int, nbytes: int, machine: Machine, itemsize: int = 4) -> Price:
    """Return the price of a collective over a buffer of `nbytes` (rounded up to whole elements) on `size` ranks.

    Raises:
        UsageError: for no ranks, or a machine with another number of them.
        ScheduleError: when the ranks wait for one another for ever.
    """
    if size < 1 or nbytes < 0 or itemsize < 1:
        raise UsageError(f"{size} ranks with {nbytes} bytes in elements of {itemsize} have no price")
    fares = Fares(machine, size)
    lengths = Lengths.of(nbytes, size, itemsize)
    moves = [lengths.moves(collective(rank, size)) for rank in range(size)]
    last = max(play(moves, [_Path(machine.late.get(rank, 0.0)) for rank in range(size)], _Counter(fares)))
    messages = sum(len(move.sends) for own in moves for move in own)
    return Price(last.seconds, last.rounds, last.sent_bytes, last.added_bytes, messages)


@dataclass(frozen=True, slots=True, order=True)
class _Path:
    """A moment, and what led to it. Of two that come at the same time the one with more counts is the later."""

    seconds: float
    rounds: int = 0
    sent_bytes: int = 0
    added_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Counter:
    """Carries messages in no time but their own, and keeps count."""

    fares: Fares

    def carry(self, sender: int, receiver: int, out: Move, into: Move, ready: _Path) -> _Path:
        """Return the path that this message goes on."""
        seconds = ready.seconds + sum(self.fares.fare(sender, receiver, out, into))
        return replace(ready, seconds=seconds, rounds=ready.rounds + 1, sent_bytes=ready.sent_bytes + sum(out.sends))

    def turn(self, ready: _Path) -> int:
        """Return 0: nobody waits for a link, so any order will do."""
        return 0

    def add(self, rank: int, move: Move, over: _Path) -> _Path:
        """Return the path with the sum of what came."""
        if not move.reduce or not move.recvs:
            return over
        seconds = over.seconds + self.fares.adding(rank, move)
        return replace(over, seconds=seconds, added_bytes=over.added_bytes + sum(move.recvs))
