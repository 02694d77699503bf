"""Runs all ranks' programs against a clock, without MPI: times, stalls, deadlocks.

    rank 0   |-- F0 --|s|-- F1 --|s|....        s: a send
    rank 1   .........\\--->|-- F0 --|

The sender of an eager send continues at once, and the message arrives after its transfer time. A
rendezvous send holds its sender until the receive is posted and the message has arrived.

Every rank has one clock, and does its program in order. Messages of one channel follow one another.
Ranks do not compete for resources. This is the only interpretation of schedules: `check` uses it to
find deadlocks, `lower` to find where receives must be posted early, `simulate_schedule` to get
times, from modelled or measured costs.

(Collectives have an engine of their own, `comm.prove`: a step ends there with both of its messages,
so no message is in flight while its rank does something else, and thousands of ranks must be fast.)
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from nnmpi.errors import ScheduleError, UsageError
from nnmpi.schedule.schedule import (
    COMPUTE,
    SENDS,
    TRANSFERS,
    Channel,
    Instruction,
    Item,
    Kind,
    Program,
    Schedule,
    parts,
    peak_activations,
    send_of,
)

_BUSY = COMPUTE | {Kind.STEP}

Costs: TypeAlias = Mapping[Kind, Sequence[float]]
"""Kind -> seconds for each stage; other kinds take no time. A message's time is its send's, such as
latency + bytes x seconds per byte.
"""


def even_costs(
    stages: int, forward_s: float = 1.0, backward_s: float | None = None, message_s: float = 0.0
) -> Costs:
    """Return the costs of equal stages.

    Args:
        stages: the number of stages.
        forward_s: of a microbatch.
        backward_s: of a whole backward, whose halves are equal; twice the forward by default, as in
            the papers' figures, since a backward multiplies two matrices (for inputs, for weights)
            and a forward one.
        message_s: of an activation or a gradient.
    """
    whole_s = 2 * forward_s if backward_s is None else backward_s
    item = {Kind.F: forward_s, Kind.B: whole_s, Kind.I: whole_s / 2, Kind.W: whole_s / 2}
    item |= {Kind.SEND_ACT: message_s, Kind.SEND_GRAD: message_s}
    return {kind: (seconds,) * stages for kind, seconds in item.items()}


def measured_costs(stages: int, samples: Iterable[tuple[Instruction, float]]) -> Costs:
    """Return the median of the measured seconds by kind and stage.

    Args:
        stages: the number of stages.
        samples: (instruction, seconds), in any order; for a message, its send and its travel time.
    """
    result: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for item, seconds in samples:
        result[item.kind, item.stage].append(seconds)
    return {
        kind: [median(result.get((kind, stage), (0.0,))) for stage in range(stages)]
        for kind in {k for k, _ in result}
    }


# ---- the run ----


@dataclass(frozen=True, slots=True)
class TimedInstruction:
    """A rank's instruction in time; receives last from posting, sends until arrival."""

    rank: int
    instruction: Instruction
    begin_s: float
    end_s: float


@dataclass(slots=True)
class _Post:
    """A posted transfer; `over_s` is None until its message's times are decided."""

    transfer: Instruction
    is_send: bool
    posted_s: float
    begin_s: float = 0.0
    over_s: float | None = None


@dataclass(slots=True)
class RankProgress:
    """One rank: its program, its position in it, and its clock."""

    rank: int
    program: Program
    at: int = 0
    clock_s: float = 0.0
    posts: list[_Post] = field(default_factory=list)  # the current item's transfers

    @property
    def item(self) -> Item | None:
        """The next item, or the one that it is stuck in; None at the end."""
        return self.program[self.at] if self.at < len(self.program) else None


class ScheduleRun:
    """One run of a schedule, to its end or to a deadlock.

    Attributes:
        ranks: the ranks' progress at the end.
        spans: the instructions with their times, unordered.
    """

    def __init__(self, schedule: Schedule, costs: Costs, rendezvous: bool = False) -> None:
        """Run.

        Args:
            schedule: with messages; `lower` adds them.
            costs: the seconds of instructions.
            rendezvous: whether a send waits for its receive.
        """
        self.ranks = [RankProgress(rank, program) for rank, program in enumerate(schedule.programs)]
        self.spans: list[TimedInstruction] = []
        self._costs, self._rendezvous, self._channel_of = costs, rendezvous, schedule.channel_of
        # posts by channel and end
        self._posts: defaultdict[tuple[Channel, bool], list[_Post]] = defaultdict(list)
        # the end of a channel's last message
        self._free_s: defaultdict[Channel, float] = defaultdict(float)
        self._todo = deque(self.ranks)
        while self._todo:
            progress = self._todo.popleft()
            while self._advance(progress):
                pass

    @property
    def stuck(self) -> list[RankProgress]:
        """The ranks in a deadlock."""
        return [progress for progress in self.ranks if progress.item is not None]

    def waiting(self, progress: RankProgress) -> list[Instruction]:
        """Return the transfers that a stuck rank waits for."""
        return [post.transfer for post in progress.posts if self._end(post) is None]

    def _seconds(self, instruction: Instruction) -> float:
        times = self._costs.get(instruction.kind, ())
        # a stage out of range takes no time here: `check` refuses it later
        return times[instruction.stage] if instruction.stage < len(times) else 0.0

    def _advance(self, progress: RankProgress) -> bool:
        """Do a rank's next item, if possible; return whether it was."""
        item, begin_s = progress.item, progress.clock_s
        if item is None:
            return False
        if isinstance(item, Instruction) and item.kind not in TRANSFERS:
            progress.clock_s += self._seconds(item)
            self.spans.append(TimedInstruction(progress.rank, item, begin_s, progress.clock_s))
        else:
            if not progress.posts:
                progress.posts = [self._post(progress, transfer) for transfer in parts(item)]
            ends_s = [end_s for post in progress.posts if (end_s := self._end(post)) is not None]
            if len(ends_s) < len(progress.posts):
                return False
            self.spans += [_span(progress.rank, post) for post in progress.posts]
            progress.clock_s = max(ends_s)
            progress.posts = []
        progress.at += 1
        return True

    def _post(self, progress: RankProgress, transfer: Instruction) -> _Post:
        """Post a transfer, and let the other rank continue if this completes its message."""
        channel, is_send = self._channel_of(transfer), transfer.kind in SENDS
        post = _Post(transfer, is_send, progress.clock_s)
        posts, partners = self._posts[channel, is_send], self._posts[channel, not is_send]
        posts.append(post)
        other = partners[len(posts) - 1] if len(posts) <= len(partners) else None
        sent, received = (post, other) if is_send else (other, post)
        if (
            sent is not None
            and sent.over_s is None
            and (received is not None or not self._rendezvous)
        ):
            ready_s = (
                max(sent.posted_s, received.posted_s)
                if self._rendezvous and received
                else sent.posted_s
            )
            sent.begin_s = max(ready_s, self._free_s[channel])
            sent.over_s = self._free_s[channel] = sent.begin_s + self._seconds(send_of(transfer))
        if sent is not None and received is not None:
            received.begin_s, received.over_s = sent.begin_s, sent.over_s
            self._todo.append(self.ranks[channel[1] if is_send else channel[0]])
        return post

    def _end(self, post: _Post) -> float | None:
        """Return the time when a rank continues after a transfer; None until the other posts."""
        if post.is_send and not self._rendezvous:
            return post.posted_s
        return None if post.over_s is None else max(post.posted_s, post.over_s)


def _span(rank: int, post: _Post) -> TimedInstruction:
    """Return a completed transfer's times on its rank."""
    over_s = post.posted_s if post.over_s is None else post.over_s
    if post.is_send:
        return TimedInstruction(rank, post.transfer, post.begin_s, over_s)
    return TimedInstruction(rank, post.transfer, post.posted_s, max(post.posted_s, over_s))


# ---- results ----


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule's run.

    Attributes:
        spans: all instructions with their times, rank after rank, each in program order.
        makespan_s: the end of the last one.
        busy_s: per rank, its seconds of computing (updates included).
        peak_activations: per rank, its peak number of saved activations, of one stage and
            microbatch each.
        messages: the number of messages.
    """

    spans: tuple[TimedInstruction, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_activations: tuple[int, ...]
    messages: int

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time without computation, 0 to 1."""
        whole_s = self.makespan_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole_s if whole_s else 0.0


def simulate_schedule(schedule: Schedule, costs: Costs) -> Simulation:
    """Return the times of a lowered schedule's run.

    Raises:
        UsageError: for costs of another number of stages.
        ScheduleError: on a deadlock; `check` names its place.
    """
    counts = {len(times) for times in costs.values()} - {schedule.stages}
    if counts:
        raise UsageError(
            f"the costs are of {counts.pop()} stages, but {schedule.name} has {schedule.stages}"
        )
    run = ScheduleRun(schedule, costs)
    if run.stuck:
        progress = run.stuck[0]
        raise ScheduleError(
            f"rank {progress.rank} waits for ever in its instruction {progress.at}; check the"
            " schedule first"
        )
    spans = sorted(run.spans, key=lambda span: span.rank)
    busy_s = [0.0] * schedule.ranks
    for span in spans:
        if span.instruction.kind in _BUSY:
            busy_s[span.rank] += span.end_s - span.begin_s
    return Simulation(
        spans=tuple(spans),
        makespan_s=max((span.end_s for span in spans), default=0.0),
        busy_s=tuple(busy_s),
        peak_activations=tuple(peak_activations(schedule, rank) for rank in range(schedule.ranks)),
        messages=sum(span.instruction.kind in SENDS for span in spans),
    )
