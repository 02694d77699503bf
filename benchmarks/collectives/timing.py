"""When each rank enters and leaves each call, taken in rounds in one process: every contestant once in each round.

    round 1  |  A  |  B  |  C  |     the order changes from round to round (and is the same on all ranks), since a call
    round 2  |  C  |  A  |  B  |     leaves caches and threads in a state that the next one meets: MPI's own call took
    round 3  |  B  |  C  |  A  |     three times as long when it always came behind gloo

    rank 0   refill | barrier |>--- call ---|                     refill | barrier |>-- ...
    rank 1   refill | barrier  |>--- call -----|                  refill | barrier |>-- ...
                               ^ last to enter  ^ last to leave

The machine's moods then meet all contestants alike. Refilling is not timed, but it is needed: without it each rank's
part of the result stays in its core's cache, and shared memory looks three times better than it is.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


class Contestant(Protocol):
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


class Interrupted(Exception):
    """A signal ended the measurement, on all ranks at the same round; it is the argument."""


def take(
    contestants: Sequence[Contestant],
    ranks: Ranks,
    iterations: int | None,
    budget_s: float,
    verify: Verify,
    stop: Stop,
) -> Stamps:
    """Return this rank's stamps of all timed calls. Collective.

    Args:
        contestants: the same on all ranks, in the same order.
        iterations: the number of rounds; None for as many as `budget_s` has room for.
        verify: called after each call, warm-up too, with the contestant and the number of the round.
        stop: asked after each round; collective.

    Raises:
        Interrupted: on all ranks, when `stop` gives a signal.
    """
    begin = time.perf_counter()
    play(contestants, ranks, range(WARM_UP), verify, stop)
    seconds = float(ranks.gather_floats(np.array([time.perf_counter() - begin])).max())
    rounds = iterations or rounds_within(budget_s - seconds, seconds / WARM_UP)
    return play(contestants, ranks, range(WARM_UP, WARM_UP + rounds), verify, stop)


def rounds_within(budget_s: float, round_s: float) -> int:
    """Return how many rounds fit, within what makes sense."""
    return int(min(max(budget_s / max(round_s, 1e-9), LEAST), MOST))


def play(contestants: Sequence[Contestant], ranks: Ranks, rounds: range, verify: Verify, stop: Stop) -> Stamps:
    """Return this rank's stamps of these rounds. Collective."""
    clock = time.perf_counter
    stamps = np.empty((len(contestants), 2, len(rounds)))
    for column, call in enumerate(rounds):
        round_begin = clock()
        for row in order(len(contestants), call):
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


def order(contestants: int, call: int) -> list[int]:
    """Return the numbers of the contestants in the order of this round, which every rank finds for itself."""
    return random.Random(call).sample(range(contestants), contestants)


def gather(stamps: Stamps, ranks: Ranks) -> NDArray[np.float64]:
    """Return the stamps of all ranks on every rank: (ranks, contestants, 2, rounds). Collective."""
    return ranks.gather_floats(stamps.reshape(-1)).reshape(ranks.size, *stamps.shape)


def nothing(contestant: Any, call: int) -> None:
    """Verify nothing."""


def never(round_s: float) -> int:
    """Go on."""
    return 0
