"""How a pipeline rank's segments save memory, so that activations fit a number of bytes.

    1F1B, rank 0 of 2, segments 0 and 1; 0 is recomputed

    F0.0  F1.0  F0.1  F1.1  B1.0  B0.0 ...    held: inputs of 0.0 and 0.1, all of 1.0 and 1.1;
                                              B0.0 computes 0.0 again, and holds all of it meanwhile

A segment is kept, recomputed, or moved to a store meanwhile. The program says which microbatches
are in flight at each moment, so the peak is a sum of measured bytes: for a pass, the ledger and the
planner. Segments are chosen by the bytes that they save per second, until the peak fits; then those
that need not save are taken back, the slowest first. The best of all choices takes exponential time
to find.
"""

from collections.abc import Callable, Collection, Mapping
from math import ceil
from typing import NamedTuple

from nnmpi.base.errors import UsageError
from nnmpi.schedule.lower import offload
from nnmpi.schedule.schedule import Schedule, StageMemory, peak_saved


class StageCost(NamedTuple):
    """What a microbatch costs a stage, the largest one.

    Attributes:
        inputs: bytes of its inputs, which it holds from the forward to the backward.
        inner: bytes of what else its operations save.
        outputs: bytes of its outputs, without inputs.
        seconds: of a recomputation.
        work: the most bytes that a forward or a backward takes besides.
        deferred: how many more bytes it holds between the halves of a backward than before; mostly
            fewer, a negative number.
        finishing: the most bytes that the second half takes besides.
    """

    inputs: float = 0
    inner: float = 0
    outputs: float = 0
    seconds: float = 0.0
    work: float = 0
    deferred: float = 0
    finishing: float = 0


def peak_of_stages(
    costs: Mapping[int, StageCost],
    schedule: Schedule,
    rank: int,
    recomputed: Collection[int] = (),
    moved: Collection[int] = (),
) -> float:
    """Return the peak bytes of activations of a rank's stages.

    A stage's outputs are the next one's inputs if that is on this rank; the data are no
    activations.

    Args:
        costs: by stage.
        schedule, rank: when each stage computes.
        recomputed: the stages that are recomputed.
        moved: those whose saved arrays are moved to a store meanwhile.
    """
    stages: dict[int, StageMemory] = {}
    for number, cost in costs.items():
        inputs = cost.inputs * (number > 0)
        staying = inputs + cost.outputs * (number + 1 not in costs)
        saved = staying + cost.inner
        waiting = inputs if number in recomputed else saved
        rest = cost.work, cost.deferred, cost.finishing
        stages[number] = StageMemory(saved, waiting, staying, *rest)
    if moved:  # not checked: many choices are tried
        schedule = offload(schedule, rank, moved)
    return peak_saved(schedule, rank, stages)


class Savings(NamedTuple):
    """How segments save memory.

    Attributes:
        recomputed: the segments to recompute.
        moved: the segments whose saved arrays are moved to a store between forward and backward.
    """

    recomputed: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()

    def toggled(self, number: int, way: int) -> "Savings":
        """Return the choice with a segment added to, or taken from, its field of this number."""
        fields = list(self)
        fields[way] ^= {number}
        return Savings(*fields)


def choose_savings(
    recomputing_s: Mapping[int, float],
    moving_s: Mapping[int, float],
    hidden_s: float,
    peak: Callable[[Collection[int], Collection[int]], float],
    budget: int,
) -> Savings:
    """Return how to save memory.

    Args:
        recomputing_s: seconds of recomputing each segment.
        moving_s: seconds of moving what a segment saves out and back; empty without a store.
        hidden_s: the seconds of transfers that computing hides.
        peak: (recomputed, moved) -> the most bytes at once.
        budget: in bytes.

    Raises:
        UsageError: for too small a budget.

    Example:
        >>> from nnmpi.memory.fitting import choose_savings
        >>> held = {0: 10, 1: 8}
        >>> def peak(recomputed, moved):
        ...     return sum(held[i] for i in held if i not in {*recomputed, *moved})
        >>> choose_savings({0: 2.0, 1: 1.0}, {}, 0.0, peak, 12).recomputed
        frozenset({1})
        >>> choose_savings({0: 2.0, 1: 1.0}, {0: 0.5, 1: 0.5}, 0.6, peak, 12).moved
        frozenset({0})
    """
    ways = (recomputing_s, moving_s)

    def seconds(choice: Savings) -> float:
        exposed_s = max(sum(moving_s[item] for item in choice.moved) - hidden_s, 0.0)
        return sum(recomputing_s[item] for item in choice.recomputed) + exposed_s

    choice, now = Savings(), peak((), ())
    while now > budget:
        tries = [
            choice.toggled(number, way)
            for way, options in enumerate(ways)
            for number in sorted(options)
            if not any(number in field for field in choice)
        ]
        if not tries:
            break
        before_s = seconds(choice)
        gains = [(now - peak(*item)) / (seconds(item) - before_s + 1e-9) for item in tries]
        choice = tries[max(range(len(tries)), key=gains.__getitem__)]
        now = peak(*choice)
    if now > budget:  # moving may have been cheaper, and recomputing save more
        choice = Savings(frozenset(recomputing_s))
        now = peak(*choice)
    if now > budget:
        raise UsageError(
            f"{budget} bytes of activation_memory are too few: with every segment of this rank's"
            f" stages recomputed a pass takes {ceil(now)}; give at least that, or"
            ' "least", smaller microbatches, or more stages'
        )
    chosen = [(number, way) for way in range(len(ways)) for number in choice[way]]
    for item in sorted(chosen, key=lambda item: seconds(choice.toggled(*item))):
        fewer = choice.toggled(*item)
        choice = fewer if peak(*fewer) <= budget else choice
    return choice
