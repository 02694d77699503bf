"""How fast a rank goes: as fast as it can, or slowed down on purpose, so that a laptop shows what a mixed cluster does.

computed      |======|                                  what the step took here
pace          |======|....|                             at least so long, as if the machine were slower
factor 3      |======|....|.........|.........|         a straggler waits until three times that have passed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nnmpi import timeline
from nnmpi.synchrony.slowdown import Slowdown

NAP_S = 0.001


@dataclass(frozen=True)
class Pace:
    """The least time of a step, and who takes how many times as long.

    Attributes:
        seconds: every step takes at least so long.
        slowdown: by rank and step.
    """

    seconds: float = 0.0
    slowdown: Slowdown = field(default_factory=Slowdown)

    def due_s(self, computed_s: float, rank: int, step: int) -> float:
        """Return how long a step is to take that was computed in so many seconds."""
        return max(computed_s, self.seconds) * self.slowdown.factor(rank, step)

    def linger(
        self, begin_s: float, rank: int, step: int, poll: Callable[[], None] | None = None, spent_s: float | None = None
    ) -> None:
        """Return when a step that began at `begin_s` (of `time.perf_counter`) has lasted long enough.

        Args:
            poll: called about every millisecond meanwhile.
            spent_s: the seconds that were computed, if not those since `begin_s`.
        """
        computed_s = time.perf_counter() - begin_s if spent_s is None else spent_s
        left_s = self.due_s(computed_s, rank, step) - computed_s
        if left_s <= 0:
            return
        end_s = time.perf_counter() + left_s
        with timeline.span("slowed down", "slowdown"):
            while (left_s := end_s - time.perf_counter()) > 0:
                if poll is None:
                    time.sleep(left_s)
                else:
                    time.sleep(min(NAP_S, left_s))
                    poll()
