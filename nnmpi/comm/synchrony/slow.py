"""Ranks that are slowed down on purpose, so that experiments with stragglers are repeatable.

computed     |======|                              the time that the step took
ms=20        |======|....|                         extended to a minimum, as on a slower machine
factor=3     |======|....|.........|.........|     a straggler: three times that
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

import nnmpi.base.clock as clock
import nnmpi.base.timeline as timeline
from nnmpi.backend.random import stream
from nnmpi.base.errors import UsageError
from nnmpi.base.units import parse_settings

LEAST_S = 1e-9  # of a wait: less is the rounding of sums
FORMS = (
    '"ms=20", "rank=2,factor=3" or "probability=0.25,factor=3"; several separated by ";", with'
    " factors from 1 on"
)


@dataclass(frozen=True)
class Slow:
    """Stragglers: the least seconds of a step, and slowdown factors of ranks. Default: none.

    Attributes:
        minimum_s: the least seconds of a step.
        factors: rank -> the factor of a rank that is always slow.
        chances: random rules, (probability, factor): in each step each rank is slow with this
            probability.
        seed: draws the slow steps, the same ones in every run.
    """

    minimum_s: float = 0.0
    factors: Mapping[int, float] = field(default_factory=dict)
    chances: tuple[tuple[float, float], ...] = ()
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Slow:
        """Parse a text such as "ms=20;rank=2,factor=3"; "" slows no rank down.

        Raises:
            UsageError: for any other text, and numbers out of range.
        """
        minimum_ms, factors, chances = 0.0, dict[int, float](), list[tuple[float, float]]()
        for rule in text.split(";") if text.strip() else ():
            match sorted(parse_settings(rule).items()):
                case [("ms", ms)] if 0 < ms < inf and not minimum_ms:
                    minimum_ms = ms
                case [("factor", factor), ("rank", rank)] if (
                    1 <= factor < inf and rank >= 0 and rank % 1 == 0 and rank not in factors
                ):
                    factors[int(rank)] = factor
                case [("factor", factor), ("probability", chance)] if (
                    1 <= factor < inf and 0 < chance <= 1
                ):
                    chances.append((chance, factor))
                case _:
                    raise UsageError(
                        f"slow: {rule.strip()!r} is unknown, or given twice; give {FORMS}"
                    )
        return cls(minimum_ms / 1e3, factors, tuple(chances), seed)

    def __bool__(self) -> bool:
        return bool(self.minimum_s or self.factors or self.chances)

    def seconds(self, computed_s: float, rank: int, step: int, share: float = 1.0) -> float:
        """Return the seconds for a rank's step, or a share of it, that took `computed_s`.

        `step` is the rank's own count.
        """
        seconds = max(computed_s, self.minimum_s * share) * self.factors.get(rank, 1.0)
        for number, (probability, factor) in enumerate(self.chances):
            if stream(self.seed, "straggler", number, rank, step).random() < probability:
                seconds *= factor
        return seconds

    def wait(
        self,
        computed_s: float,
        rank: int,
        step: int,
        sleep_until: Callable[[float], object] | None = None,
        share: float = 1.0,
        waited_s: float = 0.0,
    ) -> float:
        """Sleep until the step, or a share of it, has lasted long enough; return the seconds.

        Args:
            computed_s, rank, step, share: see `seconds`.
            sleep_until: replaces the sleep: returns at a given time of `nnmpi.base.clock`, for a
                rank with other work.
            waited_s: the seconds that earlier calls for this step slept.
        """
        left_s = self.seconds(computed_s, rank, step, share) - computed_s - waited_s
        if left_s <= LEAST_S:
            return 0.0
        begin = clock.now()
        with timeline.span("slowed down", "slowdown"):
            if sleep_until is None:
                clock.sleep(left_s)
            else:
                sleep_until(begin + left_s)
        return clock.now() - begin

    def check(self, ranks: int) -> None:
        """Refuse a slow rank that does not exist.

        Raises:
            UsageError: naming the rank.
        """
        for rank in self.factors:
            if rank >= ranks:
                raise UsageError(
                    f"slow: rank {rank} does not exist; ranks are numbered from 0 to {ranks - 1}"
                )

    def describe(self) -> str:
        """Return the rules as text, for a run's header; empty if no rank is slow."""
        words = [f"a step takes at least {1e3 * self.minimum_s:g} ms"] if self.minimum_s else []
        words += [
            f"rank {rank} takes {factor:g} times as long" for rank, factor in self.factors.items()
        ]
        words += [
            f"any rank takes {factor:g} times as long with probability {p:g}"
            for p, factor in self.chances
        ]
        return "; ".join(words)


NOT_SLOW = Slow()
