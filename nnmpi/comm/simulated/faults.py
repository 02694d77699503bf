"""What can go wrong among simulated ranks, on purpose: ranks that die, stop or are slow, and messages that are late.

    kill    rank 2 ---- call 57 x                       as by kill -9: no line of its program runs any more
            others ---------------- x                   the launcher ends them a little later, whatever they do
    stop    rank 2 ---- call 57 .....................   it never goes on
            others ------------- wait for it            until nobody can go on any more

Both end the simulation with an error that names the rank, its call and its line, and what the others waited for. Where
a rank is slow or a message late, the order of all that happens is another one; the results must not be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

LATE = 50.0  # how many usual delays a late message takes
LATE_S = 1e-3  # the same on clocks, where all seconds are exact


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a simulation.

    Attributes:
        kill, stop: in which of its calls a rank is killed, or stops, by rank; calls count from 1.
        slow: how many times as long a rank lets others go first, by rank.
        late: the share of messages that are late.
    """

    kill: Mapping[int, int] = field(default_factory=dict)
    stop: Mapping[int, int] = field(default_factory=dict)
    slow: Mapping[int, float] = field(default_factory=dict)
    late: float = 0.0

    @classmethod
    def drawn(cls, seed: int, ranks: int, calls: int) -> Faults:
        """Return one kill, stop or neither, with slow ranks and late messages, as a seed draws them.

        Args:
            ranks: how many there are.
            calls: how many a rank makes, about: in one of them it falls.
        """
        draws = Random(seed)
        fate, rank, call = draws.choice(("kill", "stop", "none")), draws.randrange(ranks), draws.randrange(1, calls + 1)
        slow = {other: draws.uniform(1, 20) for other in range(ranks) if draws.random() < 0.3}
        late = draws.choice((0.0, 0.0, 0.1, 0.5))
        falls = {rank: call}
        return cls(falls if fate == "kill" else {}, falls if fate == "stop" else {}, slow, late)

    def delay(self, rank: int | None, random: Random) -> float:
        """Return how many usual delays something is put off: a rank's turn, or with None a message."""
        if rank is not None:
            return self.slow.get(rank, 1.0) - 1.0
        return LATE if self.late and random.random() < self.late else 0.0
