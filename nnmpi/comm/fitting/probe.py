"""Measures what messages and additions cost on the machine at hand, by the code that collectives run on.

    one way      0 ---> 1   2 ---> 3        then back: half of the time of both, with all pairs at it
                 0 <--- 1   2 <--- 3
    both ways    0 ---> 1 ---> 2 ---> 3 ---> (0)        everybody sends to the right and receives from the left

A message that is sent before anybody waits for it ("eager") costs less than one that needs a handshake first
("rendezvous"): there is a step between the two. MPI does not say where, so lengths lie close together where it may be.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.buffers import Buffer
from nnmpi.comm.curve import Curve
from nnmpi.comm.execute import Execution
from nnmpi.comm.fitting.timing import Refilled, time_calls
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Link
from nnmpi.comm.steps import Step

K = 1024
SHORT_SIZES = (8, 256, K, 2 * K, 3 * K, 4 * K, 6 * K, 8 * K, 12 * K, 16 * K)
SIZES = (*SHORT_SIZES, 32 * K, 64 * K, 128 * K, 256 * K, K**2, 4 * K**2, 16 * K**2)  # bytes
TAG = 2**13
PASSES = 2
LONGEST_ARRAY_BYTES = 2**27
LONGEST_S = 0.3  # beyond messages that take longer than that the last slope is good enough
LEAST_BYTES = K**2  # so far it is measured, however long that takes
SLACK = 1.5  # how much more than the budget may be spent: a few calls of each length are made whatever they take


def measure_link(group: Group, budget_s: float) -> Link:
    """Return what messages among these two or more ranks cost. Collective."""
    one_way = measure_curve(group, lambda nbytes: _there_and_back(group, nbytes), SIZES, budget_s / 2, share=0.5)
    both_ways = measure_curve(group, lambda nbytes: _around(group, nbytes), SIZES, budget_s / 2)
    return Link(one_way, both_ways)


def measure_add(group: Group, budget_s: float) -> Curve:
    """Return the seconds that adding so many bytes takes when all ranks do it at once. Collective."""

    def prepare(nbytes: int) -> Refilled:
        target, arrived, fresh = (np.ones(max(1, nbytes // 4), np.float32) for _ in range(3))
        return lambda: np.add(target, arrived, out=target), lambda: np.copyto(arrived, fresh)

    return measure_curve(group, prepare, SIZES, budget_s)


def measure_curve(
    group: Group, prepare: Callable[[int], Refilled], sizes: Sequence[int], budget_s: float, share: float = 1.0
) -> Curve:
    """Return the seconds of a call for each size. Collective. See `measure_curves`."""
    return measure_curves(group, lambda nbytes: [prepare(nbytes)], sizes, budget_s, share)[0]


def measure_curves(
    group: Group,
    prepare: Callable[[int], Sequence[Refilled]],
    sizes: Sequence[int],
    budget_s: float,
    share: float = 1.0,
) -> list[Curve]:
    """Return the seconds of calls that compete, for each size, the median of many. Collective.

    Args:
        prepare: bytes -> the calls, and what refills their buffers before each one.
        budget_s: seconds for all sizes together, about.
        share: of a call's time that counts.
    """
    best: dict[int, NDArray[np.float64]] = {}
    begin = time.perf_counter()
    for number in range(PASSES):  # a disturbance that lasts spoils some sizes in one pass, and others in the next
        for nbytes in sizes:
            times = time_calls(group, prepare(nbytes), budget_s / len(sizes) / PASSES)
            medians = np.median(times, axis=1)
            best[nbytes] = np.minimum(best.get(nbytes, np.inf), medians)
            spent_s = group.max_floats([time.perf_counter() - begin])[0]
            slow = medians.max() > LONGEST_S or spent_s > SLACK * budget_s * (number + 1) / PASSES
            if slow and nbytes >= LEAST_BYTES:
                break  # the curve's last slope stands for what is longer
    return [_curve({nbytes: share * float(each[i]) for nbytes, each in best.items()}) for i in range(len(medians))]


def _curve(seconds: Mapping[int, float]) -> Curve:
    """Return the curve through these points, lowered where something longer took less: that was a disturbance."""
    least, points = float("inf"), []
    for nbytes in sorted(seconds, reverse=True):
        least = min(least, seconds[nbytes])
        points.append((float(nbytes), least))
    return Curve(tuple(reversed(points)))


def _there_and_back(group: Group, nbytes: int) -> Refilled:
    """Prepare pairs of ranks that send one another a message of so many bytes, one after the other."""
    array, sent, received = _halves(nbytes, group.size)
    partner = group.rank ^ 1
    steps: tuple[Step, ...] = (Step(to=partner, send=sent), Step(from_=partner, recv=received))
    if group.rank % 2:
        steps = steps[::-1]
    return _prepared(group, steps if partner < group.size else (), array)


def _around(group: Group, nbytes: int) -> Refilled:
    """Prepare a ring on which everybody sends and receives so many bytes at once."""
    array, sent, received = _halves(nbytes, group.size)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return _prepared(group, (Step(to=right, send=sent, from_=left, recv=received),), array)


def _halves(nbytes: int, size: int) -> tuple[Buffer, range, range]:
    """Return an array in `size` chunks, and two ranges of its chunks with so many bytes each.

    With many ranks a long message is made of many chunks, so that the array is no longer than it has to be.
    """
    half = 1 if nbytes * size <= LONGEST_ARRAY_BYTES else size // 2
    chunk = max(1, -(-nbytes // (4 * half)))
    return np.ones(chunk * size, np.float32), range(half), range(half, 2 * half)


def _prepared(group: Group, steps: tuple[Step, ...], array: Buffer) -> Refilled:
    execution, fresh = Execution(steps, array, group.comm, TAG, persistent=True), array.copy()
    return execution.run, lambda: np.copyto(array, fresh)
