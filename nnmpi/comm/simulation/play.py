"""Plays all ranks' moves (or steps) against a clock: what happens when, message by message.

    rank 0   |--- message to 1 ---|            a message begins when both its ends have come to it (rendezvous)
    rank 1   ..|-- from 0 --------|+++|        its step is over when its messages are, and the sum is added (+)
    rank 2   |------- to 3 -------------|      then the rank comes to its next step

Messages are taken in the order in which they become ready, which is the order in which they queue for a link. The
clock may be seconds, seconds with a count of what they were spent on (`price`), or rounds (`render`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

from nnmpi.errors import ScheduleError


class Clock(Protocol):
    """A moment: later and earlier are told apart."""

    def __lt__(self, other: Any, /) -> bool:
        """Whether this moment is before the other."""


class Meeting(Protocol):
    """What a rank does next, a `Step` or a `Move`: it ends when whom it names have come to theirs."""

    @property
    def to(self) -> int | None:
        """The rank that gets something."""

    @property
    def from_(self) -> int | None:
        """The rank that something comes from."""


T = TypeVar("T", bound=Clock)
M = TypeVar("M", bound=Meeting)
M_contra = TypeVar("M_contra", bound=Meeting, contravariant=True)


class Carrier(Protocol[M_contra, T]):
    """Says how long things take."""

    def carry(self, sender: int, receiver: int, out: M_contra, into: M_contra, ready: T) -> T:
        """Return when the messages are there that both ends are ready for at `ready`; called in order of `turn`."""

    def turn(self, ready: T) -> int:
        """Return a number by which messages that become ready are put in order; of equals the lower sender is first."""

    def add(self, rank: int, move: M_contra, over: T) -> T:
        """Return when a rank has added what the move brought, whose messages were there at `over`."""


@dataclass(slots=True)
class _Player(Generic[M, T]):
    """One rank: its moves, the one it is in, when it came to it, and what of it has happened."""

    moves: Sequence[M]
    clock: T
    over: T
    at: int = -1
    sending: int | None = None  # to whom, until the messages are there
    receiving: int | None = None

    def open(self) -> None:
        """Come to the next move."""
        self.at += 1
        self.over = self.clock
        if self.at < len(self.moves):
            move = self.moves[self.at]
            self.sending, self.receiving = move.to, move.from_


def play(moves: Sequence[Sequence[M]], clocks: Sequence[T], carrier: Carrier[M, T]) -> list[T]:
    """Return when each rank has finished its moves.

    Args:
        moves: those of each rank.
        clocks: when each rank begins.
        carrier: tells how long messages and sums take.

    Raises:
        ScheduleError: when the ranks wait for one another for ever; `prove` says where.
    """
    players = [_Player(own, clock, clock) for own, clock in zip(moves, clocks, strict=True)]
    for player in players:
        player.open()
    queue: list[tuple[int, int, int, T]] = []  # (turn, sender, receiver, ready)

    def meet(sender: int | None, receiver: int | None) -> None:
        """Queue what one sends to the other if both have come to it."""
        if sender is None or receiver is None:
            return
        source, target = players[sender], players[receiver]
        if source.sending == receiver and target.receiving == sender:
            ready = target.clock if source.clock < target.clock else source.clock
            heappush(queue, (carrier.turn(ready), sender, receiver, ready))

    for rank, player in enumerate(players):
        meet(rank, player.sending)
    while queue:
        _, sender, receiver, ready = heappop(queue)
        source, target = players[sender], players[receiver]
        end = carrier.carry(sender, receiver, source.moves[source.at], target.moves[target.at], ready)
        source.sending = target.receiving = None
        for rank, player in ((sender, source), (receiver, target)):
            player.over = end if player.over < end else player.over
            if player.sending is None and player.receiving is None:
                player.clock = carrier.add(rank, player.moves[player.at], player.over)
                player.open()
                meet(rank, player.sending)
                meet(player.receiving, rank)
    for rank, player in enumerate(players):
        if player.at < len(player.moves):
            raise ScheduleError(f"rank {rank} waits for ever in its step {player.at}; prove the algorithm first")
    return [player.clock for player in players]
