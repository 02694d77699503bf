"""Runs all ranks' programs against a clock, without MPI: times, stalls, deadlocks.

    rank 0   |-- F0 --|s|-- F1 --|s|....        s: a send
    rank 1   .........\\--->|-- F0 --|

The sender of an eager send continues at once, and the message arrives after its transfer time. A
rendezvous send holds its sender until the receive is posted and the message has arrived.

Every rank has one clock, and does its program in order. Messages of one channel follow one another,
or those of all ranks share a machine's links. This is the only interpretation of
schedules: `check` uses it to find deadlocks, `lower` to find where receives must be posted early,
`simulate_schedule` to get times, from modelled or measured costs.

(Collectives have an engine of their own, `comm.prove`: a step ends there with both of its messages,
so no message is in flight while its rank does something else, and thousands of ranks must be fast.)
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from statistics import median
from typing import TypeAlias

from nnmpi.base.errors import ScheduleError, UsageError
from nnmpi.comm.machine import Links, Machine
from nnmpi.schedule.schedule import (
    COMPUTE,
    RECEIVES,
    SENDS,
    TRANSFERS,
    USES,
    Channel,
    Instruction,
    Instructions,
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

Lengths: TypeAlias = Callable[[Instruction], tuple[int, ...]]
"""send -> bytes of its messages, which are posted together."""


def even_costs(
    stages: int,
    forward_s: float = 1.0,
    halves_s: tuple[float, float] | None = None,
    message_s: float = 0.0,
) -> Costs:
    """Return the costs of equal stages.

    Args:
        stages: the number of stages.
        forward_s: of a microbatch.
        halves_s: of a backward's halves, I and W; each as the forward by default, as in the papers'
            figures, since a backward multiplies two matrices (for inputs, for weights) and a
            forward one.
        message_s: of an activation or a gradient.
    """
    inputs_s, weights_s = halves_s or (forward_s, forward_s)
    item = {Kind.F: forward_s, Kind.B: inputs_s + weights_s, Kind.I: inputs_s, Kind.W: weights_s}
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


@dataclass(slots=True)
class TimedInstruction:
    """A rank's instruction in time; receives last from posting, sends until arrival.

    The end of a posted transfer is infinite until its message's times are decided.
    """

    rank: int
    instruction: Instruction
    begin_s: float
    end_s: float = inf


@dataclass(slots=True)
class RankProgress:
    """One rank: its program, its position in it, and its clock."""

    rank: int
    program: Program
    at: int = 0
    clock_s: float = 0.0
    posts: list[TimedInstruction] = field(default_factory=list)  # the current item's transfers

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

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        rendezvous: bool = False,
        machine: Machine | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        """Run.

        Args:
            schedule: with messages; `lower` adds them.
            costs: the seconds of instructions.
            rendezvous: whether a send waits for its receive.
            machine: with the node of each rank; its links carry the messages, instead of their
                seconds in `costs`. With the nodes of several pipelines, one after the other, all
                run at once.
            lengths: of the messages on a machine.
        """
        nodes = machine and machine.nodes
        programs = schedule.programs * (len(nodes or schedule.programs) // schedule.ranks)
        self.ranks = [RankProgress(rank, program) for rank, program in enumerate(programs)]
        self.spans: list[TimedInstruction] = []
        self._costs, self._rendezvous, self._schedule = costs, rendezvous, schedule
        # posts by channel and end
        self._posts: defaultdict[tuple[Channel, bool], list[TimedInstruction]] = defaultdict(list)
        # the end of a channel's last message
        self._free_s: defaultdict[Channel, float] = defaultdict(float)
        self._links = machine and Links(machine, schedule.ranks)
        self._lengths = lengths
        # (clock, rank): the earliest first, so that messages start in the order of time
        self._todo = [(0.0, progress.rank) for progress in self.ranks]
        while self._todo:
            clock_s, rank = heappop(self._todo)
            progress = self.ranks[rank]
            # a rank that was woken twice may have gone on
            if clock_s == progress.clock_s and self._advance(progress):
                heappush(self._todo, (progress.clock_s, rank))

    @property
    def stuck(self) -> list[RankProgress]:
        """The ranks in a deadlock."""
        return [progress for progress in self.ranks if progress.item is not None]

    def waiting(self, progress: RankProgress) -> list[Instruction]:
        """Return the transfers that a stuck rank waits for."""
        return [post.instruction for post in progress.posts if post.end_s == inf]

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
            if self.waiting(progress):
                return False
            for post in progress.posts:
                if self._rendezvous or post.instruction.kind in RECEIVES:
                    progress.clock_s = max(progress.clock_s, post.end_s)
            self.spans += progress.posts
            progress.posts = []
        progress.at += 1
        return True

    def _post(self, progress: RankProgress, transfer: Instruction) -> TimedInstruction:
        """Post a transfer, and let the other rank continue if this completes its message."""
        sender, receiver, kind = self._schedule.channel_of(transfer)
        first = progress.rank - progress.rank % self._schedule.ranks  # of its pipeline
        channel, is_send = (sender + first, receiver + first, kind), transfer.kind in SENDS
        post = TimedInstruction(progress.rank, transfer, progress.clock_s)
        posts, partners = self._posts[channel, is_send], self._posts[channel, not is_send]
        posts.append(post)
        other = partners[len(posts) - 1] if len(posts) <= len(partners) else None
        sent, received = (post, other) if is_send else (other, post)
        if sent is not None and sent.end_s == inf and (received or not self._rendezvous):
            sent.begin_s = max(progress.clock_s, self._free_s[channel])
            sent.end_s = self._carry(send_of(transfer), channel, sent.begin_s)
        if sent is not None and received is not None:
            received.end_s = max(received.begin_s, sent.end_s)
            partner = channel[1] if is_send else channel[0]
            heappush(self._todo, (self.ranks[partner].clock_s, partner))
        return post

    def _carry(self, send: Instruction, channel: Channel, ready_s: float) -> float:
        """Return the arrival of a message; starts come in the order of time."""
        if self._links and self._lengths:
            return self._links.carry(*channel[:2], ready_s, self._lengths(send))
        # messages of a channel follow one another
        self._free_s[channel] = end_s = ready_s + self._seconds(send)
        return end_s


# ---- results ----


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule's run.

    Attributes:
        spans: all instructions with their times, rank after rank, each in program order.
        makespan_s: the end of the last one.
        busy_s: per rank, its seconds of computing (updates included).
        peak_activations: per rank of a pipeline, its peak number of saved activations, of one stage
            and microbatch each.
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


def _receive_late(program: Instructions) -> Iterator[Item]:
    """Yield each receive at its use, where `compose.walk` waits for its message."""
    received = {op for op in program if op.kind in RECEIVES}
    for op in program:
        if op.kind in USES:
            yield from received & {USES[op.kind].at(op.stage, op.microbatch)}
        if op.kind not in RECEIVES:
            yield op


def simulate_schedule(
    schedule: Schedule,
    costs: Costs,
    machine: Machine | None = None,
    lengths: Lengths | None = None,
) -> Simulation:
    """Return the times of a lowered schedule's run; see `ScheduleRun`.

    Raises:
        UsageError: for costs of another number of stages.
        ScheduleError: on a deadlock; `check` names its place.
    """
    counts = {len(times) for times in costs.values()} - {schedule.stages}
    if counts:
        raise UsageError(
            f"the costs are of {counts.pop()} stages, but {schedule.name} has {schedule.stages}"
        )
    run = ScheduleRun(
        schedule.map_instructions(_receive_late), costs, machine=machine, lengths=lengths
    )
    if run.stuck:
        progress = run.stuck[0]
        raise ScheduleError(
            f"rank {progress.rank} waits for ever in its instruction {progress.at}; check the"
            " schedule first"
        )
    spans = sorted(run.spans, key=lambda span: span.rank)
    busy_s = [0.0] * len(run.ranks)
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
