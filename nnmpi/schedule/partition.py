"""Cuts a sequence of layers into stages, from measured or estimated costs alone.

A pipeline is as fast as its slowest stage, so that one is made as fast as it can be; of the cuts
that do so the most even is taken. Both are found exactly, by dynamic programming over (stages,
layers):

    times     3  1  2  2  2  2        3 stages
    cut       3  1 |2  2 |2  2        4, 4, 4

    best(s, j) = min over i of join(best(s - 1, i), cost(i, j))      the first j layers in s stages,
                                                                     the last from i on

With join = max and cost = the time of a stage, best(stages, layers) is the time of the slowest
stage. With join = +, cost = the time squared, and no stage slower than that one, it is the most
even cut. This takes stages * layers^2 / 2 steps, twice. Barany and Grinberg, Block partitions of
sequences, 2015, is faster, but has no limit of memory.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from nnmpi.errors import LayoutError, counted

# What the layers start..stop-1 cost together as one stage; None where they cannot be one.
Cost = Callable[[int, int], int | None]


def partition(
    times_s: Sequence[float],
    stages: int,
    bytes: Sequence[int] | None = None,
    limit_bytes: int | None = None,
) -> tuple[range, ...]:
    """Return each stage's layers: contiguous, none empty, the slowest stage as fast as possible.

    Most even is the least sum of squared times; of ties the later stages have fewer layers.

    Args:
        times_s: of each layer, in seconds (any unit does); finite, from 0 on.
        stages: into how many.
        bytes: of each layer; what is counted is the caller's affair.
        limit_bytes: what the layers of one stage may have together; None for no limit.

    Raises:
        LayoutError: when there are more stages than layers, or every cut has a stage over the
            limit.
    """
    layers = len(times_s)
    if not 1 <= stages <= layers:
        raise LayoutError(
            f"{layers} layers cannot be cut into {stages} stages; give 1 to {layers} stages"
        )
    time, size = _sums(times_s), _sums([0] * layers if bytes is None else bytes)
    limit = size(0, layers) if limit_bytes is None else limit_bytes
    slowest, _ = _cut(layers, stages, lambda i, j: time(i, j) if size(i, j) <= limit else None, max)
    if slowest is None:
        raise LayoutError(_too_large(bytes or (), stages, limit))

    def unevenness(start: int, stop: int) -> int | None:
        taken = time(start, stop)
        return taken**2 if taken <= slowest and size(start, stop) <= limit else None

    return _cut(layers, stages, unevenness, operator.add)[1]


def _cut(
    layers: int, stages: int, cost: Cost, join: Callable[[int, int], int]
) -> tuple[int | None, tuple[range, ...]]:
    """Return the least joined cost of all cuts and the cut that has it; None and no cut when there
    is none.
    """
    # best[j]: of the first j layers in as many stages as were gone through; begins[s][j]: where the
    # last one begins
    best: list[int | None] = [0] + [None] * layers
    begins: list[list[int]] = []
    for stage in range(1, stages + 1):
        before, best = best, [None] * (layers + 1)
        begin = [0] * (layers + 1)
        for j in range(stage, layers - (stages - stage) + 1):
            for i in range(j - 1, stage - 2, -1):
                # from the right, so that of ties the later stage is the shorter
                local, earlier, least = cost(i, j), before[i], best[j]
                if local is None:
                    break  # more layers cost no less
                if earlier is None:
                    continue
                joined = join(earlier, local)
                if least is None or joined < least:
                    best[j], begin[j] = joined, i
        begins.append(begin)
    if best[layers] is None:
        return None, ()
    stops = [layers]
    for begin in reversed(begins):
        stops.append(begin[stops[-1]])
    stops.reverse()
    return best[layers], tuple(map(range, stops, stops[1:]))


def _sums(numbers: Sequence[float]) -> Callable[[int, int], int]:
    """Return the sum of numbers[start:stop] as a function of both, in a unit in which all are
    whole.

    With whole numbers equal sums are equal, whatever the rounding of seconds.
    """
    ratios = [number.as_integer_ratio() for number in numbers]
    # of floats: a power of two, and so a multiple of the others
    unit = max(below for _, below in ratios)
    ends = list(accumulate((above * (unit // below) for above, below in ratios), initial=0))
    return lambda start, stop: ends[stop] - ends[start]


def _too_large(sizes: Sequence[int], stages: int, limit: int) -> str:
    """Return the sentence on layers that cannot be cut within the limit."""
    least, _ = _cut(len(sizes), stages, _sums(sizes), max)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return (
        f"{len(sizes)} layers in {counted(stages, 'stage')} do not fit {limit} bytes a stage: the"
        f" least possible is {least}, and the largest layer, number {largest}, has"
        f" {sizes[largest]}; give more stages or a higher limit"
    )
