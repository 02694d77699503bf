"""When each rank enters and leaves each call, taken in rounds in one process: every contestant once in each round.

    round 1  |  A  |  B  |  C  |     the order changes from round to round (and is the same on all ranks), since a call
    round 2  |  C  |  A  |  B  |     leaves caches and threads in a state that the next one meets: MPI's own call took
    round 3  |  B  |  C  |  A  |     three times as long when it always came behind gloo

    rank 0   refill | barrier |>--- call ---|                     refill | barrier |>-- ...
    rank 1   refill | barrier  |>--- call -----|                  refill | barrier |>-- ...
                               ^ last to enter  ^ last to leave

Whatever else the machine does then meets all contestants alike. Refilling is not timed, but it is needed: without it
each rank's part of the result stays in its core's cache, and shared memory looks three times better than it is.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.turns import shuffled
from nnmpi.comm.group import Group

WARM_UP = 3  # rounds; the first calls make connections and touch memory
LEAST, MOST = 5, 1000  # rounds

Stamps: TypeAlias = NDArray[np.float64]
"""(contestants, 2, rounds): seconds on the clock of this rank at each call's begin and end."""


class Ranks(Protocol):
    """What timing needs of the ranks."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def gather_floats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return every rank's (n,) numbers on every rank: (ranks, n)."""


class TimedCall(Protocol):
    """One way to do the operation on one length of buffer."""

    name: str

    def refill(self, call: int) -> None:
        """Write the values of this call; not timed."""

    def run(self) -> None:
        """Do the operation; timed."""


Verify: TypeAlias = Callable[[Any, int], None]
"""(contestant, call): called after each call, outside the time."""

Stop: TypeAlias = Callable[[float], int]
"""(seconds of a round) -> the signal to stop for, the same on all ranks; 0 to go on."""


class MpiRanks:
    """The ranks of a group under MPI."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._comm = group.comm
        self.barrier = group.comm.barrier

    def gather_floats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return every rank's (n,) numbers on every rank: (ranks, n)."""
        everyones = np.empty((self.size, values.size))
        self._comm.allgather(np.ascontiguousarray(values), everyones)
        return everyones


class Interrupted(Exception):
    """A signal ended the measurement, on all ranks at the same round; it is the argument."""


def take(
    contestants: Sequence[TimedCall],
    ranks: Ranks,
    iterations: int | None,
    budget_s: float,
    verify: Verify,
    stop: Stop,
) -> Stamps:
    """Return this rank's stamps of all timed calls. Collective.

    Args:
        contestants: the same on all ranks, in the same order.
        ranks: those that take part.
        iterations: the number of rounds; None for as many as `budget_s` has room for.
        budget_s: seconds, warm-up and refilling included.
        verify: called after each call, warm-up too, with the contestant and the number of the round.
        stop: asked after each round; collective.

    Raises:
        Interrupted: on all ranks, when `stop` gives a signal.
    """
    begin = time.perf_counter()
    time_rounds(contestants, ranks, range(WARM_UP), verify, stop)
    seconds = float(ranks.gather_floats(np.array([time.perf_counter() - begin])).max())
    rounds = iterations or rounds_within(budget_s - seconds, seconds / WARM_UP)
    return time_rounds(contestants, ranks, range(WARM_UP, WARM_UP + rounds), verify, stop)


def rounds_within(budget_s: float, round_s: float) -> int:
    """Return how many rounds fit, within what makes sense."""
    return int(min(max(budget_s / max(round_s, 1e-9), LEAST), MOST))


def time_rounds(contestants: Sequence[TimedCall], ranks: Ranks, rounds: range, verify: Verify, stop: Stop) -> Stamps:
    """Return this rank's stamps of these rounds. Collective; arguments as in `take`."""
    clock = time.perf_counter
    stamps = np.empty((len(contestants), 2, len(rounds)))
    for column, call in enumerate(rounds):
        round_begin = clock()
        for row in shuffled(range(len(contestants)), call):
            contestant = contestants[row]
            contestant.refill(call)
            ranks.barrier()
            begin = clock()
            contestant.run()
            end = clock()
            stamps[row, :, column] = begin, end
            verify(contestant, call)
        if signal := stop(clock() - round_begin):
            raise Interrupted(signal)
    return stamps


def gather(stamps: Stamps, ranks: Ranks) -> NDArray[np.float64]:
    """Return the stamps of all ranks on every rank: (ranks, contestants, 2, rounds). Collective."""
    return ranks.gather_floats(stamps.reshape(-1)).reshape(ranks.size, *stamps.shape)


def nothing(contestant: Any, call: int) -> None:
    """Verify nothing."""


def never(round_s: float) -> int:
    """Go on."""
    return 0
