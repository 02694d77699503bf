"""How long computing takes: measured, and lasting as long as a table says.

    forward     |==computed==|..........|          it lasts until the table's time is over: a slower machine
    backward    |===g|..|==g|....|==g|..|          each gradient (g) is final when its share of that time is over,
                                                   so that sums can begin under the backward pass as they would

A table says what each kind of instruction takes in each stage (see `schedule.simulate.InstructionCosts`); a model that
is not cut is one stage. A run writes what it has measured as such a table, and another one can take it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from nnmpi import clock, timeline
from nnmpi.comm.group import Group
from nnmpi.schedule.instruction import Kind
from nnmpi.schedule.simulate import InstructionCosts

SAMPLES_KEPT = 20  # enough for a median, and old ones may be of another load of the machine

Rest: TypeAlias = Callable[[float], object]
"""Returns at a given time of `nnmpi.clock`; for a rank that has something else to do meanwhile than to sleep."""


class Pace:
    """Lets computing last as long as a table says, and notes how long it took.

    Args:
        costs: seconds of F, B, I and W for a microbatch, and of STEP; None to let everything take what it takes.
    """

    def __init__(self, costs: InstructionCosts | None = None) -> None:
        self.costs = costs
        self._samples: defaultdict[tuple[Kind, int], deque[float]] = defaultdict(partial(deque, maxlen=SAMPLES_KEPT))

    def reach(self, kind: Kind, stage: int, begin_s: float, share: float = 1.0, rest: Rest | None = None) -> None:
        """Return when a part of what began at `begin_s` has lasted as long as it is to.

        Args:
            kind: what is computed.
            stage: of which stage.
            begin_s: when it began, of `nnmpi.clock.now`.
            share: how much of it is done.
            rest: see `rest_until`.
        """
        if self.costs is not None:
            rest_until(begin_s + share * self.costs.of(kind.at(stage)), rest)

    def finish(self, kind: Kind, stage: int, begin_s: float, rest: Rest | None = None) -> None:
        """Return when all of it has lasted as long as it is to, and note how long that was; see `reach`."""
        self.reach(kind, stage, begin_s, rest=rest)
        self._note(kind, stage, clock.now() - begin_s)

    def finish_update(self, stages: Sequence[int], begin_s: float) -> None:
        """Do so with the update of all of a rank's stages, which is noted for each as its part."""
        if self.costs is not None:
            rest_until(begin_s + sum(self.costs.of(Kind.STEP.at(stage)) for stage in stages))
        for stage in stages:
            self._note(Kind.STEP, stage, (clock.now() - begin_s) / len(stages))

    def _note(self, kind: Kind, stage: int, seconds: float) -> None:
        self._samples[kind, stage].append(seconds)

    def measured(self, group: Group) -> InstructionCosts | None:
        """Return the medians of what was noted on all ranks; None if nothing was. Collective."""
        own = [[str(kind), stage, list(taken)] for (kind, stage), taken in self._samples.items()]
        told = [each for theirs in group.gather(own) for each in theirs]
        if not told:
            return None
        samples = [(Kind(kind).at(stage), seconds) for kind, stage, taken in told for seconds in taken]
        return InstructionCosts.measured(1 + max(stage for _, stage, _ in told), samples)


def rest_until(end_s: float, rest: Rest | None = None) -> None:
    """Do `rest`, or sleep, until a moment of `nnmpi.clock.now`."""
    left_s = end_s - clock.now()
    if left_s <= 0:
        return
    with timeline.span("slowed down", "slowdown"):
        if rest is None:
            clock.sleep(left_s)
        else:
            rest(end_s)
