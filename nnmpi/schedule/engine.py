"""Runs all ranks' programs against a clock, without MPI: what happens when, and who waits for ever.

    rank 0   |-- F0 --|s|-- F1 --|s|....        s: a send; eager ones let the sender go on at once, and the message
    rank 1   .........\\--->|-- F0 --|          arrives after its transfer time; rendezvous ones hold the sender
                                                until the receiver has come and the message is over

Every rank has one clock, and does its program in order. Messages of one channel follow one another. A REDUCE runs
beside the program, one after the other on each rank; a STEP waits for its own. This is the one interpretation of
schedules: `check` looks for who waits for ever, `lower` where a send must be met, `simulate` at the times.

(Collectives have an engine of their own, `comm.prove`: there a step is over when both of its messages
are, so that no message is under way while its rank does something else, and thousands of ranks have to be quick.)
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nnmpi.schedule.instruction import SENDS, TRANSFERS, Channel, Instruction, Item, Kind, Together, message_of, parts
from nnmpi.schedule.schedule import Program, Schedule


@dataclass(frozen=True, slots=True)
class TimedInstruction:
    """When a rank did something. A receive lasts from its posting, with the waiting for it; a send until it arrives."""

    rank: int
    instruction: Instruction
    begin_s: float
    end_s: float


@dataclass(slots=True)
class _Post:
    """A transfer that a rank has posted, and when its message is under way, as soon as that is known."""

    transfer: Instruction
    is_send: bool
    posted_s: float
    begin_s: float = 0.0
    over_s: float | None = None


@dataclass(slots=True)
class RankProgress:
    """One rank: its program, how far it is, and its clock."""

    rank: int
    program: Program
    at: int = 0
    clock_s: float = 0.0
    waited_s: float = 0.0  # of it, in transfers
    posts: list[_Post] = field(default_factory=list)  # the transfers of the item at which it is
    reduced_s: dict[tuple[int, int | None], float] = field(default_factory=dict)  # by stage and microbatch
    reducer_s: float = 0.0  # when the last of its reductions is over

    @property
    def item(self) -> Item | None:
        """What it does next, or is stuck in; None when it has finished."""
        return self.program[self.at] if self.at < len(self.program) else None

    def note(self, one: Instruction, takes_s: float) -> TimedInstruction:
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
        return TimedInstruction(self.rank, one, begin_s, begin_s + takes_s)


class ScheduleRun:
    """One run of a schedule, from the beginning as far as it comes.

    Attributes:
        ranks: one per rank, where they stand at the end.
        spans: what happened, in no order.
    """

    def __init__(self, schedule: Schedule, seconds: Callable[[Instruction], float], rendezvous: bool) -> None:
        """Run.

        Args:
            schedule: with messages; `lower` adds them.
            seconds: how long an instruction takes; for a message its send is asked.
            rendezvous: whether a send waits for its receiver.
        """
        self.ranks = [RankProgress(rank, program) for rank, program in enumerate(schedule.programs)]
        self.spans: list[TimedInstruction] = []
        self._seconds, self._rendezvous = seconds, rendezvous
        self._posts: defaultdict[tuple[Channel, bool], list[_Post]] = defaultdict(list)  # the two ends of channels
        self._free_s: defaultdict[Channel, float] = defaultdict(float)  # when a channel's last message is over
        self._todo = deque(self.ranks)
        while self._todo:
            progress = self._todo.popleft()
            while self._advance(progress):
                pass

    @property
    def stuck(self) -> list[RankProgress]:
        """The ranks that wait for ever."""
        return [progress for progress in self.ranks if progress.item is not None]

    def waiting(self, progress: RankProgress) -> list[Instruction]:
        """Return the transfers that a stuck rank waits for."""
        return [post.transfer for post in progress.posts if self._end(post) is None]

    def _advance(self, progress: RankProgress) -> bool:
        """Do the next item of a rank's program, and return whether it could be done."""
        item = progress.item
        if item is None:
            return False
        if not isinstance(item, Together) and item.kind not in TRANSFERS:
            self.spans.append(progress.note(item, self._seconds(item)))
            return True
        if not progress.posts:
            progress.posts = [self._post(progress, transfer) for transfer in parts(item)]
        over_s = progress.clock_s
        for post in progress.posts:
            end_s = self._end(post)
            if end_s is None:
                return False
            over_s = max(over_s, end_s)
        self.spans += [_span(progress.rank, post) for post in progress.posts]
        progress.waited_s += over_s - progress.clock_s
        progress.clock_s = over_s
        progress.posts = []
        progress.at += 1
        return True

    def _post(self, progress: RankProgress, transfer: Instruction) -> _Post:
        """Come to a transfer, and wake the rank at its other end if it is there."""
        message = message_of(transfer)
        channel, is_send = message.channel(len(self.ranks)), transfer.kind in SENDS
        post = _Post(transfer, is_send, progress.clock_s)
        mine, theirs = self._posts[channel, is_send], self._posts[channel, not is_send]
        mine.append(post)
        other = theirs[len(mine) - 1] if len(mine) <= len(theirs) else None
        sent, received = (post, other) if is_send else (other, post)
        if sent is not None and sent.over_s is None and (received is not None or not self._rendezvous):
            ready_s = max(sent.posted_s, received.posted_s) if self._rendezvous and received else sent.posted_s
            sent.begin_s = max(ready_s, self._free_s[channel])
            sent.over_s = self._free_s[channel] = sent.begin_s + self._seconds(message.send)
        if sent is not None and received is not None:
            received.begin_s, received.over_s = sent.begin_s, sent.over_s
            self._todo.append(self.ranks[channel[1] if is_send else channel[0]])
        return post

    def _end(self, post: _Post) -> float | None:
        """Return when a rank can go on after a transfer; None when the other end has not come."""
        if post.is_send and not self._rendezvous:
            return post.posted_s
        return None if post.over_s is None else max(post.posted_s, post.over_s)


def _span(rank: int, post: _Post) -> TimedInstruction:
    """Return when a transfer that is over happened, as its rank sees it."""
    over_s = post.posted_s if post.over_s is None else post.over_s
    if post.is_send:
        return TimedInstruction(rank, post.transfer, post.begin_s, over_s)
    return TimedInstruction(rank, post.transfer, post.posted_s, max(post.posted_s, over_s))
