"""Plays all ranks' programs against a clock: what happens when, and who waits for ever.

    rank 0   |-- F0 --|s|-- F1 --|s|....        s: a send; eager ones let the sender go on at once, and the message
    rank 1   .........\\--->|-- F0 --|          arrives after its transfer time; rendezvous ones hold the sender
                                                until the receiver has come and the message is over

Every rank has one clock, and does its program in order. Messages of one channel follow one another. A REDUCE runs
beside the program, one after the other on each rank; a STEP waits for its own. This is the one interpretation of
schedules: `check` looks for who waits for ever, `lower` where a send must be met, `simulate` at the times.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nnmpi.schedule.instruction import SENDS, TRANSFERS, Instruction, Item, Kind, Together, parts
from nnmpi.schedule.message import message_of
from nnmpi.schedule.schedule import Program, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank did something. A receive lasts from its posting, with the waiting for it; a send until it arrives."""

    rank: int
    instruction: Instruction
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Key:
    """Which message of which channel: (sending rank, receiving rank, is gradient), and its number there."""

    channel: tuple[int, int, bool]
    number: int


@dataclass(slots=True)
class _Post:
    """A transfer that a rank has posted."""

    transfer: Instruction
    key: _Key
    posted_s: float

    @property
    def is_send(self) -> bool:
        """Whether it is the sender's end."""
        return self.transfer.kind in SENDS


@dataclass(slots=True)
class Player:
    """One rank: its program, how far it is, and its clock."""

    rank: int
    program: Program
    at: int = 0
    clock_s: float = 0.0
    posts: list[_Post] = field(default_factory=list)  # the transfers of the item at which it is
    reduced_s: dict[tuple[int, int | None], float] = field(default_factory=dict)  # by stage and microbatch
    reducer_s: float = 0.0  # when the last of its reductions is over

    @property
    def item(self) -> Item | None:
        """What it does next, or is stuck in; None when it has finished."""
        return self.program[self.at] if self.at < len(self.program) else None

    def note(self, one: Instruction, takes_s: float) -> Span:
        """Do what is no transfer, and return when."""
        begin_s, work = self.clock_s, (one.stage, one.microbatch)
        if one.kind is Kind.REDUCE:
            begin_s = max(begin_s, self.reducer_s)
            self.reducer_s = self.reduced_s[work] = begin_s + takes_s
        else:
            if one.kind is Kind.STEP:
                begin_s = max(begin_s, self.reduced_s.get(work, 0.0))
            self.clock_s = begin_s + takes_s
        self.at += 1
        return Span(self.rank, one, begin_s, begin_s + takes_s)


class Play:
    """A play of a schedule, from the beginning as far as it comes.

    Attributes:
        players: one per rank, where they stand at the end.
        spans: what happened, in no order.
    """

    def __init__(self, schedule: Schedule, seconds: Callable[[Instruction], float], rendezvous: bool) -> None:
        """Play.

        Args:
            schedule: with messages; `lower` adds them.
            seconds: how long an instruction takes; for a message its send is asked.
            rendezvous: whether a send waits for its receiver.
        """
        self.players = [Player(rank, program) for rank, program in enumerate(schedule.programs)]
        self.spans: list[Span] = []
        self._seconds, self._rendezvous = seconds, rendezvous
        self._posted: dict[tuple[_Key, bool], float] = {}  # by message, and whether it is the sender's end
        self._counts: dict[tuple[tuple[int, int, bool], bool], int] = {}
        self._over: dict[_Key, tuple[float, float]] = {}  # when a message was under way
        self._free: dict[tuple[int, int, bool], float] = {}  # when a channel's last message is over
        self._todo = deque(self.players)
        while self._todo:
            player = self._todo.popleft()
            while self._advance(player):
                pass

    @property
    def stuck(self) -> list[Player]:
        """The ranks that wait for ever."""
        return [player for player in self.players if player.item is not None]

    def waiting(self, player: Player) -> list[Instruction]:
        """Return the transfers that a stuck rank waits for."""
        return [post.transfer for post in player.posts if self._end(post) is None]

    def _advance(self, player: Player) -> bool:
        """Do the next item of a rank's program, and return whether it could be done."""
        item = player.item
        if item is None:
            return False
        if not isinstance(item, Together) and item.kind not in TRANSFERS:
            self.spans.append(player.note(item, self._seconds(item)))
            return True
        if not player.posts:
            player.posts = [self._post(player, transfer) for transfer in parts(item)]
        ends = [self._end(post) for post in player.posts]
        over_s = [end for end in ends if end is not None]
        if len(over_s) < len(ends):
            return False
        self.spans += [self._span(player.rank, post) for post in player.posts]
        player.clock_s = max(over_s)
        player.posts = []
        player.at += 1
        return True

    def _post(self, player: Player, transfer: Instruction) -> _Post:
        """Come to a transfer, and wake the rank at its other end."""
        is_send, channel = transfer.kind in SENDS, message_of(transfer).channel(len(self.players))
        number = self._counts.get((channel, is_send), 0)
        self._counts[channel, is_send] = number + 1
        post = _Post(transfer, _Key(channel, number), player.clock_s)
        self._posted[post.key, is_send] = player.clock_s
        sent_s, received_s = self._posted.get((post.key, True)), self._posted.get((post.key, False))
        if sent_s is not None and post.key not in self._over and not (self._rendezvous and received_s is None):
            ready_s = max(sent_s, received_s or 0.0) if self._rendezvous else sent_s
            begin_s = max(ready_s, self._free.get(channel, 0.0))
            self._free[channel] = begin_s + self._seconds(message_of(transfer).send)
            self._over[post.key] = begin_s, self._free[channel]
        self._todo.append(self.players[channel[1] if is_send else channel[0]])
        return post

    def _end(self, post: _Post) -> float | None:
        """Return when a rank can go on after a transfer; None when the other end has not come."""
        if post.is_send and not self._rendezvous:
            return post.posted_s
        if post.key not in self._over:
            return None
        return max(post.posted_s, self._over[post.key][1])

    def _span(self, rank: int, post: _Post) -> Span:
        begin_s, end_s = self._over[post.key]
        if post.is_send:
            return Span(rank, post.transfer, begin_s, end_s)
        return Span(rank, post.transfer, post.posted_s, max(post.posted_s, end_s))
