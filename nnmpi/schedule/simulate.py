"""How long a schedule takes, from what its parts take: modelled costs, or measured ones.

The model is that of `engine`: a rank does one thing at a time, a message takes its time and holds nobody up (or, with
`rendezvous`, holds its sender until it is over), and reductions run beside. Ranks do not disturb one another.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nnmpi.errors import ScheduleError, UsageError
from nnmpi.schedule.engine import ScheduleRun, TimedInstruction
from nnmpi.schedule.instruction import COMPUTE, SENDS, Instruction, Kind
from nnmpi.schedule.schedule import Schedule, peak_activations, staleness, weight_versions

_BUSY = COMPUTE | {Kind.STEP}


@dataclass(frozen=True, slots=True)
class InstructionCosts:
    """What each instruction takes.

    Attributes:
        seconds: kind -> seconds for each stage. What is not named takes no time. A message's time is its send's
            (SEND_ACT of the stage that it leaves, SEND_GRAD likewise): latency + bytes x seconds per byte, say.
        rendezvous: whether a send holds its rank until the receiver has come and the message is over.

    Raises:
        UsageError: for a time that is negative or no number, or stages that differ in number.
    """

    seconds: Mapping[Kind, Sequence[float]]
    rendezvous: bool = False

    def __post_init__(self) -> None:
        """Refuse times that are none."""
        for kind, times in self.seconds.items():
            if not all(0 <= time < float("inf") for time in times):
                raise UsageError(f"the times of {kind}, {list(times)} s, are not all numbers of seconds from 0 on")
        if len({len(times) for times in self.seconds.values()}) > 1:
            counts = ", ".join(f"{len(times)} of {kind}" for kind, times in self.seconds.items())
            raise UsageError(f"the costs are for different numbers of stages: {counts}; give one time for each stage")

    def of(self, one: Instruction) -> float:
        """Return the seconds that an instruction takes."""
        times = self.seconds.get(one.kind)
        return times[one.stage] if times is not None else 0.0

    @classmethod
    def even(
        cls,
        stages: int,
        forward_s: float = 1.0,
        backward_s: float | None = None,
        message_s: float = 0.0,
        reduce_s: float = 0.0,
        step_s: float = 0.0,
        rendezvous: bool = False,
    ) -> "InstructionCosts":
        """Return the costs of stages that are all alike.

        Args:
            backward_s: of a whole backward, whose halves are equal; twice the forward by default, since it
                multiplies two matrices (for the inputs, for the weights) where the forward multiplies one.
            message_s: of an activation or a gradient.
        """
        backward_s = 2 * forward_s if backward_s is None else backward_s
        each = {Kind.F: forward_s, Kind.B: backward_s, Kind.I: backward_s / 2, Kind.W: backward_s / 2}
        each |= {Kind.SEND_ACT: message_s, Kind.SEND_GRAD: message_s, Kind.REDUCE: reduce_s, Kind.STEP: step_s}
        return cls({kind: (seconds,) * stages for kind, seconds in each.items()}, rendezvous)

    @classmethod
    def measured(cls, stages: int, samples: Iterable[tuple[Instruction, float]]) -> "InstructionCosts":
        """Return the median of what each stage was measured to take for each kind of instruction.

        Where only whole backwards were measured their halves are taken to be equal, and where only the halves were,
        the whole is their sum: so a schedule can be simulated that was not run. What was not measured takes no time.

        Args:
            samples: (instruction, seconds), in any order. For messages: the send, and how long it was under way.

        Raises:
            UsageError: for a stage that is not one of `stages`.
        """
        found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for one, seconds in samples:
            if not 0 <= one.stage < stages:
                raise UsageError(f"{one} was measured, but there are only the stages 0..{stages - 1}")
            found[one.kind, one.stage].append(seconds)
        middle = {place: median(times) for place, times in found.items()}
        for stage in range(stages):
            whole, halves = (Kind.B, stage), [(Kind.I, stage), (Kind.W, stage)]
            if whole in middle and not any(half in middle for half in halves):
                middle |= dict.fromkeys(halves, middle[whole] / 2)
            elif whole not in middle:
                middle[whole] = sum(middle.get(half, 0.0) for half in halves)
        kinds = {kind for kind, _ in middle}
        return cls({kind: tuple(middle.get((kind, s), 0.0) for s in range(stages)) for kind in kinds})

    def to_json(self) -> dict[str, list[float]]:
        """Return the times as JSON values: {"F": [seconds of stage 0, of stage 1 ...], "B": ...}."""
        return {str(kind): list(times) for kind, times in self.seconds.items()}

    @classmethod
    def from_json(cls, value: Any) -> "InstructionCosts":
        """Return the costs that `to_json` gave the values of; halves that are not there as `measured` has them.

        Raises:
            UsageError: for anything else.
        """
        try:
            samples = [(Kind(kind).at(s), float(time)) for kind, times in value.items() for s, time in enumerate(times)]
        except (AttributeError, TypeError, ValueError):
            samples = []
        lengths = {len(times) for times in value.values()} if samples else set()
        if len(lengths) != 1 or not all(0 <= seconds < float("inf") for _, seconds in samples):
            raise UsageError(
                'a table of times has a list of seconds for each kind, one for each stage, such as {"F": [0.01, 0.02], '
                '"B": [0.02, 0.04]}'
            )
        return cls.measured(lengths.pop(), samples)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule's run.

    Attributes:
        spans: what every rank did when, rank after rank, each in the order of its program.
        makespan_s: when the last of it was over.
        busy_s: per rank, how long it computed (updates included).
        waiting_s: per rank, how long it stood in sends and receives.
        peak_activations: per rank, how many it kept at most (of one stage and microbatch each).
        staleness: per stage, per microbatch: updates of the weights between its forward and its backward.
        weight_versions: per stage, how many it kept at most.
        messages: how many there were.
    """

    spans: tuple[TimedInstruction, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    peak_activations: tuple[int, ...]
    staleness: tuple[tuple[int, ...], ...]
    weight_versions: tuple[int, ...]
    messages: int

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they do not compute, 0 to 1."""
        whole_s = self.makespan_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole_s if whole_s else 0.0


def simulate_schedule(schedule: Schedule, costs: InstructionCosts) -> Simulation:
    """Return what happens when a lowered schedule is run.

    Raises:
        UsageError: for costs of another number of stages.
        ScheduleError: when the ranks wait for one another for ever; `check` says where.
    """
    counts = {len(times) for times in costs.seconds.values()}
    if counts and counts != {schedule.stages}:
        raise UsageError(f"the costs are of {counts.pop()} stages, but {schedule.name} has {schedule.stages}")
    run = ScheduleRun(schedule, costs.of, costs.rendezvous)
    if run.stuck:
        progress = run.stuck[0]
        raise ScheduleError(f"rank {progress.rank} waits for ever in its item {progress.at}; check the schedule first")
    spans = sorted(run.spans, key=lambda span: span.rank)
    ranks, stages = range(schedule.ranks), range(schedule.stages)
    busy_s = [0.0] * schedule.ranks
    for span in spans:
        if span.instruction.kind in _BUSY:
            busy_s[span.rank] += span.end_s - span.begin_s
    return Simulation(
        spans=tuple(spans),
        makespan_s=max((span.end_s for span in spans), default=0.0),
        busy_s=tuple(busy_s),
        waiting_s=tuple(progress.waited_s for progress in run.ranks),
        peak_activations=tuple(peak_activations(schedule, rank) for rank in ranks),
        staleness=tuple(staleness(schedule, stage) for stage in stages),
        weight_versions=tuple(weight_versions(schedule, stage) for stage in stages),
        messages=sum(span.instruction.kind in SENDS for span in spans),
    )
