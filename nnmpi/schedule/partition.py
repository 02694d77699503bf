"""Cuts a sequence of layers into stages, from measured or estimated costs alone.

A pipeline is as fast as its slowest stage, so the cut minimizes the slowest stage's time; of such
cuts it is the most even. Both are exact, by dynamic programming over (stages, layers):

    times     3  1  2  2  2  2        3 stages
    cut       3  1 |2  2 |2  2        4, 4, 4

    best(s, j) = min over i of join(best(s - 1, i), cost(i, j))      the first j layers in s stages,
                                                                     the last from i on

With join = max and cost = the time of a stage, best(stages, layers) is the time of the slowest
stage. With join = +, cost = the time squared, and no stage slower than that, it is the most even
cut. This takes stages * layers^2 / 2 steps, twice. Barany and Grinberg, Block partitions of
sequences, 2015, is faster, but has no memory limit.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from nnmpi.base.errors import LayoutError, counted

# The cost of layers start..stop-1 as one stage; None if they cannot be one.
Cost = Callable[[int, int], int | None]


def partition(
    times_s: Sequence[float],
    stages: int,
    bytes: Sequence[int] | None = None,
    limit_bytes: int | None = None,
) -> tuple[range, ...]:
    """Return each stage's layers: contiguous, none empty, the slowest stage as fast as possible.

    The most even cut has the least sum of squared times; of ties the later stages have fewer
    layers.

    Args:
        times_s: of each layer, in seconds (any unit works); finite, from 0 on.
        stages: the number of stages.
        bytes: of each layer, in any sense of the caller.
        limit_bytes: of the layers of one stage together; None for no limit.

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
    """Return the least joined cost of all cuts with its cut; None and no cut if there is none."""
    # best[j]: the least cost of the first j layers in `stage` stages;
    # begins[s][j]: the first layer of the last of them
    best: list[int | None] = [0] + [None] * layers
    begins: list[list[int]] = []
    for stage in range(1, stages + 1):
        before, best = best, [None] * (layers + 1)
        begin = [0] * (layers + 1)
        for j in range(stage, layers - (stages - stage) + 1):
            for i in range(j - 1, stage - 2, -1):
                # from the right, so that of ties the later stage is shorter
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
    """Return the sum of numbers[start:stop] as a function of both.

    The unit makes all numbers integers: equal sums are equal, whatever the rounding of seconds.
    """
    ratios = [number.as_integer_ratio() for number in numbers]
    # of floats: a power of two, and so a multiple of all others
    unit = max(below for _, below in ratios)
    prefix = list(accumulate((above * (unit // below) for above, below in ratios), initial=0))
    return lambda start, stop: prefix[stop] - prefix[start]


def _too_large(sizes: Sequence[int], stages: int, limit: int) -> str:
    least, _ = _cut(len(sizes), stages, _sums(sizes), max)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return (
        f"{len(sizes)} layers in {counted(stages, 'stage')} do not fit {limit} bytes a stage: the"
        f" least possible is {least}, and the largest layer, number {largest}, has"
        f" {sizes[largest]}; give more stages or a higher limit"
    )
