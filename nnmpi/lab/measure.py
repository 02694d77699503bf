"""Makes a fit: measures links, addition and library all-reduces, in under a minute.

Three parts, from the top: `measure` makes a fit; `measure_curves` measures seconds over bytes with
the code that later runs the collectives; `time_calls` times calls. A saved fit is
`comm.saved_fit`'s.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import nnmpi.base.clock as clock
from nnmpi.base.errors import DeviceError, UsageError
from nnmpi.comm.algorithms.registry import ALGORITHMS
from nnmpi.comm.collective import Step
from nnmpi.comm.execution import Execution, NativeExecution
from nnmpi.comm.fit import Fit
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Curve, Link, Machine
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.node_sum import SharedSum
from nnmpi.comm.saved_fit import facts

BUDGET_S = 24.0
# Lengths of all-reduces: dense where algorithms overtake one another, and where MPI switches
# protocols.
ALL_REDUCE_SIZES = (
    4,
    16,
    64,
    256,
    *(2**bit for bit in range(10, 15)),
    *(2**bit for bit in range(16, 27, 2)),
)

Refilled: TypeAlias = tuple[Callable[[], Any], Callable[[], Any]]
"""A call, and a function that refills its buffers: fresh data, as in training."""


def measure(group: Group, budget_s: float = BUDGET_S, say: Callable[[str], Any] = str) -> Fit:
    """Measure this machine with these ranks. Collective.

    Args:
        budget_s: seconds to spend, approximately.
        say: called on all ranks with the name of the next part; by default ignored.

    Raises:
        UsageError: for a single rank.
    """
    if group.size == 1:
        raise UsageError(
            "one rank has nobody to send to, so there is nothing to fit; start at least 2 (mpirun"
            " -n 2)"
        )
    share = budget_s / 6
    local = group.node()
    leaders = group.split(min(local.rank, 1))
    say("messages inside a node")
    inside = _links(group, local, local.size > 1, share)
    say("messages between nodes")
    several = not group.on_one_node()
    across = _links(group, leaders, several and local.rank == 0, share)
    say("adding")
    add = measure_adding(group, share / 2)
    say("MPI's own all-reduce, and the one through shared memory")
    native, started, *rest = _measure_all_reduces(group, 3 * share)
    shared = rest[0] if rest else None
    leaders.free()
    local.free()
    link = inside or across
    assert link is not None  # two ranks are on one node or on two
    machine = Machine(
        inside=link, across=across, nodes=tuple(group.nodes()) if several else None, add=add
    )
    return Fit(machine, native, started, shared, group.share(facts(group)))


def measure_sums(group: Group, budget_s: float = BUDGET_S) -> dict[str, Curve]:
    """Return the measured seconds of each all-reduce of steps, by its name. Collective.

    Args:
        budget_s: seconds to spend, approximately.
    """
    array, fresh = (np.ones(ALL_REDUCE_SIZES[-1] // 4, np.float32) for _ in range(2))

    def prepare(nbytes: int) -> list[Refilled]:
        part = array[: max(1, nbytes // 4)]
        refill = partial(np.copyto, part, fresh[: len(part)])
        return [(group.bind(part, name, TAG).run, refill) for name in ALGORITHMS]

    curves = measure_curves(group, prepare, ALL_REDUCE_SIZES, budget_s)
    return dict(zip(ALGORITHMS, curves, strict=True))


def _links(group: Group, members: Group, taking_part: bool, budget_s: float) -> Link | None:
    """Return the link measured by the first rank that takes part; None if none does."""
    local = None
    if taking_part:
        local = [
            curve.points
            for curve in measure_curves(members, partial(_messages, members), SIZES, budget_s)
        ]
    group.sum_floats([0.0], asleep=True)  # the other ranks wait here without using cores
    result = next(filter(None, group.gather(local)), None)
    if result is None:
        return None
    there_and_back, around = result
    return Link(
        Curve(tuple((nbytes, seconds / 2) for nbytes, seconds in there_and_back)), Curve(around)
    )


def _measure_all_reduces(group: Group, budget_s: float) -> list[Curve]:
    """Return the curves of the native all-reduce, blocking and started, and of the shared one."""
    longest = ALL_REDUCE_SIZES[-1] // 4
    local, fresh = np.ones(longest, np.float32), np.ones(longest, np.float32)
    memory, common = None, None
    with suppress(DeviceError):  # raised on all ranks: no shared memory, or too little
        memory = SharedMemory(group)
        common = memory.allocate(longest, np.float32)

    def prepare(nbytes: int) -> list[Refilled]:
        n = max(1, nbytes // 4)
        native = NativeExecution(local[:n], group.comm)
        refill = partial(np.copyto, local[:n], fresh[:n])

        def start_and_wait() -> None:
            native.start()
            native.wait()

        calls: list[Refilled] = [(native.run, refill), (start_and_wait, refill)]
        if memory is not None and common is not None:
            calls.append(
                (SharedSum(common[:n], memory).run, partial(np.copyto, common[:n], fresh[:n]))
            )
        return calls

    curves = measure_curves(group, prepare, ALL_REDUCE_SIZES, budget_s)
    group.barrier()
    if memory is not None:
        memory.free()
    return curves


# ---- the cost of messages and additions ----
#
#     one way      0 ---> 1   2 ---> 3        and back: half the time of both, all pairs at once
#                  0 <--- 1   2 <--- 3
#     both ways    0 ---> 1 ---> 2 ---> 3 ---> (0)    every rank sends right and receives from left
#
# A message sent without waiting for its receiver (eager) costs less than one after a handshake
# (rendezvous): the curve has a step between the two. MPI does not tell its position, so the lengths
# are dense in the likely range.

K = 1024
SHORT_SIZES = (8, 256, K, 2 * K, 3 * K, 4 * K, 6 * K, 8 * K, 12 * K, 16 * K)
SIZES = (*SHORT_SIZES, 32 * K, 64 * K, 128 * K, 256 * K, K**2, 4 * K**2, 16 * K**2)  # bytes
TAG = 2**13
PASSES = 2
LONGEST_ARRAY_BYTES = 2**27
LONGEST_S = 0.3  # after a message that takes longer, the last slope is good enough
# factor on the budget before it ends a pass: each length has a few calls at least
SLACK = 1.5


def measure_adding(group: Group, budget_s: float) -> Curve:
    """Return the seconds of adding received bytes to as many local ones. Collective."""
    return measure_curves(group, _adding, SIZES, budget_s)[0]


def _adding(nbytes: int) -> list[Refilled]:
    target, arrived, fresh = (np.ones(max(1, nbytes // 4), np.float32) for _ in range(3))
    return [(lambda: np.add(target, arrived, out=target), lambda: np.copyto(arrived, fresh))]


def measure_curves(
    group: Group,
    prepare: Callable[[int], Sequence[Refilled]],
    sizes: Sequence[int],
    budget_s: float,
) -> list[Curve]:
    """Return a curve for each of several calls: the median seconds for each size. Collective.

    Args:
        prepare: bytes -> the calls, with the functions that refill their buffers.
        sizes: lengths in bytes, growing.
        budget_s: seconds for all sizes together, approximately.
    """
    best: dict[int, NDArray[np.float64]] = {}
    begin = clock.now()
    for number in range(PASSES):
        # a long disturbance spoils different sizes in each pass, and the least of both is kept
        for nbytes in sizes:
            share_s = budget_s / len(sizes) / PASSES
            medians = np.median(time_calls(group, prepare(nbytes), share_s), axis=1)
            best[nbytes] = np.minimum(best.get(nbytes, np.inf), medians)
            pass_s = SLACK * budget_s * (number + 1) / PASSES
            is_late = group.max_floats([clock.now() - begin])[0] > pass_s
            # on slow links 64 KiB are long: at 10 Mbit/s a megabyte takes a tree 3 s
            is_long = medians.max() > LONGEST_S
            if is_long and nbytes >= 64 * K or is_late and nbytes >= K**2:
                break  # the curve's last slope extends to longer messages
    return [rising_curve(best, seconds) for seconds in np.transpose([*best.values()])]


def rising_curve(sizes: Iterable[float], seconds: Sequence[float] | NDArray[np.float64]) -> Curve:
    """Return the curve of measured seconds by bytes, without disturbances.

    More bytes do not take less time: what took longer than a longer one was disturbed.
    """
    least = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    return Curve(tuple(zip(sizes, least, strict=True)))


def _messages(group: Group, nbytes: int) -> list[Refilled]:
    """Prepare messages of this many bytes: between pairs, there and back; and around a ring.

    With many ranks a long message consists of many chunks, which keeps the array short.
    """
    rank, size = group.rank, group.size
    half = 1 if nbytes * size <= LONGEST_ARRAY_BYTES else size // 2
    sent, received = range(half), range(half, 2 * half)
    array = np.ones(max(1, -(-nbytes // (4 * half))) * size, np.float32)
    fresh, partner = array.copy(), rank ^ 1
    there_and_back = (Step(to=partner, send=sent), Step(from_=partner, recv=received))[
        :: -1 if rank % 2 else 1
    ]
    around = (Step(to=(rank + 1) % size, send=sent, from_=(rank - 1) % size, recv=received),)
    return [
        (Execution(steps, array, group.comm, TAG).run, lambda: np.copyto(array, fresh))
        for steps in (there_and_back if partner < size else (), around)
    ]


# ---- timing: from the last rank's start to the last rank's end ----
#
#     rank 0   refill | barrier |  call       |
#     rank 1   refill | barrier |     call         |
#                                  |<- seconds ->|
#
# The ranks of one node read one clock, so starts and ends can be compared. Across nodes the longest
# call counts, which includes the wait for the last start.

LEAST_ROUNDS = 3
MOST_ROUNDS = 300
WARM_UP_ROUNDS = 1


def time_calls(group: Group, calls: Sequence[Refilled], budget_s: float) -> NDArray[np.float64]:
    """Return the seconds of calls in rounds, the same on all ranks: (calls, rounds). Collective.

    A round makes each call once, in rotated order: so the machine's other load meets all calls
    alike, and each finds the caches as another one has left them.

    Args:
        calls: the timed calls, with the functions that refill their buffers, outside the time.
        budget_s: seconds to spend, approximately; at least 3 rounds are made.
    """
    trial = _time_rounds(group, calls, WARM_UP_ROUNDS)
    round_s = float(np.median((trial[:, :, 1] - trial[:, :, 0]).sum(axis=0)))
    slowest_s = group.max_floats([round_s])[0]
    rounds = int(np.clip(budget_s / max(slowest_s, 1e-7), LEAST_ROUNDS, MOST_ROUNDS))
    local = _time_rounds(group, calls, rounds)
    by_rank = np.empty((group.size, *local.shape))
    group.comm.allgather(local, by_rank)
    begin, end = by_rank[..., 0], by_rank[..., 1]
    if group.on_one_node():
        return end.max(axis=0) - begin.max(axis=0)
    return (end - begin).max(axis=0)


def _time_rounds(group: Group, calls: Sequence[Refilled], rounds: int) -> NDArray[np.float64]:
    """Return this rank's begin and end of each call, in seconds: (calls, rounds, 2)."""
    stamps = np.empty((len(calls), rounds, 2))
    read, barrier = clock.now, group.barrier
    for number in range(rounds):
        for turn in range(len(calls)):
            index = (number + turn) % len(calls)
            call, refill = calls[index]
            refill()
            barrier()
            begin = read()
            call()
            stamps[index, number] = begin, read()
    return stamps
