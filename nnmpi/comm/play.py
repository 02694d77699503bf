"""Plays all ranks' moves against a clock: what happens when, message by message.

    rank 0   |--- message to 1 ---|            a message begins when both its ends have come to it (rendezvous)
    rank 1   ..|-- from 0 --------|+++|        its step is over when its messages are, and the sum is added (+)
    rank 2   |------- to 3 -------------|      then the rank comes to its next step

Messages are taken in the order in which they become ready, which is the order in which they queue for a link. The
clock may be seconds, or seconds with a count of what they were spent on (`price`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

from nnmpi.comm.moves import Move
from nnmpi.errors import ScheduleError


class Clock(Protocol):
    """A moment: later and earlier are told apart."""

    def __lt__(self, other: Any, /) -> bool:
        """Whether this moment is before the other."""


T = TypeVar("T", bound=Clock)


class Carrier(Protocol[T]):
    """Says how long things take."""

    def carry(self, sender: int, receiver: int, out: Move, into: Move, ready: T) -> T:
        """Return when the messages are there that both ends are ready for at `ready`; called in order of `ready`."""

    def add(self, rank: int, move: Move, over: T) -> T:
        """Return when a rank has added what the move brought, whose messages were there at `over`."""


@dataclass(slots=True)
class _Player(Generic[T]):
    """One rank: its moves, the one it is in, when it came to it, and what of it has happened."""

    moves: Sequence[Move]
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


def play(moves: Sequence[Sequence[Move]], clocks: Sequence[T], carrier: Carrier[T]) -> list[T]:
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
    queue: list[tuple[T, int, int]] = []  # (ready, sender, receiver)
    for rank, player in enumerate(players):
        if player.sending is not None and players[player.sending].receiving == rank:
            heappush(queue, _meet(players, rank, player.sending))
    while queue:
        ready, sender, receiver = heappop(queue)
        source, target = players[sender], players[receiver]
        end = carrier.carry(sender, receiver, source.moves[source.at], target.moves[target.at], ready)
        source.sending = target.receiving = None
        source.over, target.over = _later(source.over, end), _later(target.over, end)
        for rank, player in ((sender, source), (receiver, target)):
            if player.sending is None and player.receiving is None:
                player.clock = carrier.add(rank, player.moves[player.at], player.over)
                player.open()
                _look(players, rank, queue)
    for rank, player in enumerate(players):
        if player.at < len(player.moves):
            raise ScheduleError(f"rank {rank} waits for ever in its step {player.at}; prove the algorithm first")
    return [player.clock for player in players]


def _look(players: Sequence[_Player[T]], rank: int, queue: list[tuple[T, int, int]]) -> None:
    """Queue the messages of the move that a rank has just come to, if the other end is there already."""
    player = players[rank]
    if player.sending is not None and players[player.sending].receiving == rank:
        heappush(queue, _meet(players, rank, player.sending))
    if player.receiving is not None and players[player.receiving].sending == rank:
        heappush(queue, _meet(players, player.receiving, rank))


def _meet(players: Sequence[_Player[T]], sender: int, receiver: int) -> tuple[T, int, int]:
    return _later(players[sender].clock, players[receiver].clock), sender, receiver


def _later(one: T, other: T) -> T:
    return other if one < other else one
