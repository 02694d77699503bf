"""Learning-rate schedules: frozen values that map the number of an update to its learning rate.

`schedule(0)` is the rate of the first update. Schedules have no state, so a run that resumes, or a
rank that joins, gets the same rate for the same step. `ReduceOnPlateau` alone depends on losses and
has state.

    Warmup(500, then=Cosine(0.1, total=9500))        lr
                                                     |   /`-.
                                                     |  /    `-.
                                                     | /        `-._
                                                     +----------------- step
                                                        500        10000
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, inf, pi
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from nnmpi.base.errors import UsageError, check_int, check_ints, number
from nnmpi.base.ownership import claim
from nnmpi.base.settled import Settled
from nnmpi.base.words import raise_missing

__all__ = [
    "ConstantRate",
    "Cosine",
    "MultiStep",
    "OneCycle",
    "RateSchedule",
    "ReduceOnPlateau",
    "StepDecay",
    "WarmRestarts",
    "Warmup",
]

RateSchedule: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class _Rate:
    """A schedule from a rate, by shares of it and numbers of steps."""

    lr: float
    least: ClassVar[int] = 1  # of a number of steps

    def __post_init__(self) -> None:
        number("lr", self.lr)
        for name, value in vars(self).items():
            if name in {"factor", "rise", "start", "end", "final"}:
                number(name, value, most=1)
            elif name in {"every", "total"}:
                check_int(name, value, self.least)

    if not TYPE_CHECKING:
        __getattr__ = raise_missing


@dataclass(frozen=True)
class ConstantRate(_Rate):
    """The same rate at every step."""

    def __call__(self, step: int) -> float:
        """Return lr."""
        check_int("step", step, 0)
        return self.lr


@dataclass(frozen=True)
class StepDecay(_Rate):
    """Multiply the rate by `factor` after every `every` steps.

    Raises:
        UsageError: for lr < 0, every < 1, or a factor outside [0, 1].
    """

    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        """Return lr * factor^(step // every)."""
        return float(self.lr * self.factor ** (check_int("step", step, 0) // self.every))


@dataclass(frozen=True)
class MultiStep(_Rate):
    """Multiply the rate by `factor` at each of these steps: PyTorch's MultiStepLR, in updates.

    Raises:
        UsageError: for lr < 0, steps that do not rise from 0 or later, or a factor outside [0, 1].
    """

    steps: Sequence[int]
    factor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ints("steps", self.steps, 0)
        if list(self.steps) != sorted(set(self.steps)):
            raise UsageError(f"steps are {tuple(self.steps)}; give each once, in increasing order")

    def __call__(self, step: int) -> float:
        """Return lr * factor^n after n of the steps."""
        return float(self.lr * self.factor ** bisect_right(self.steps, check_int("step", step, 0)))


@dataclass(frozen=True)
class OneCycle(_Rate):
    """Half a cosine up to lr over the first fraction `rise` of `total` steps, then one down.

    Smith and Topin, "Super-convergence", 2019. The numbers are those of PyTorch's OneCycleLR: from
    lr * start up to lr, and down to lr * start * end at the last step.

    Raises:
        UsageError: for lr < 0, total < 2, or a fraction outside [0, 1].
    """

    total: int
    rise: float = 0.3
    start: float = 1 / 25
    end: float = 1e-4
    least = 2

    def __call__(self, step: int) -> float:
        """Return the rate between lr * start, lr, and lr * start * end."""
        last, top = self.total - 1, self.rise * self.total - 1
        at, first = min(check_int("step", step, 0), last), self.lr * self.start
        if at <= top:
            a, b, share = first, self.lr, at / top if top else 1.0
        else:
            a, b, share = self.lr, first * self.end, (at - top) / (last - top)
        return b + (a - b) * (1 + cos(pi * share)) / 2


class ReduceOnPlateau(Settled):
    """Reduce the rate when a loss stops falling; for a loop of your own, since it has state.

    Args:
        lr: the initial rate.
        factor: multiplies the rate after more than `patience` losses in a row without improvement.
        patience: the number of losses without improvement to tolerate.
        threshold: an improvement is a loss below the lowest so far by more than this share of it.

    Give it to `nnmpi.save` and `nnmpi.resume` with the model: `plateau=plateau`.

    Example:
        >>> rate = optim.ReduceOnPlateau(0.1, patience=0)
        >>> [round(rate(loss), 3) for loss in (3.0, 2.0, 2.0, 1.0)]
        [0.1, 0.1, 0.01, 0.01]
    """

    def __init__(
        self, lr: float, factor: float = 0.1, patience: int = 10, threshold: float = 1e-4
    ) -> None:
        self.lr, self.factor = number("lr", lr), number("factor", factor, most=1)
        self.patience = check_int("patience", patience, 0)
        self.threshold = number("threshold", threshold, most=1)
        self.best, self.waited = inf, 0

    def __call__(self, loss: float) -> float:
        """Return the rate from now on, after an epoch with this loss."""
        claim(self, "plateau")
        margin = 0 if self.best == inf else self.threshold * abs(self.best)
        if loss < self.best - margin:  # not NaN, also as the first one
            self.best, self.waited = float(loss), 0
        else:
            self.waited += 1
        if self.waited > self.patience:
            self.lr, self.waited = self.lr * self.factor, 0
        return PlateauRate(self)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        best = None if self.best == inf else self.best
        return {"lr": self.lr, "best": best, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.lr, best, self.waited = state["lr"], state["best"], state["waited"]
        self.best = inf if best is None else best


class PlateauRate(float):
    """The rate of a `ReduceOnPlateau`, which `nnmpi.save` finds by it."""

    plateau: ReduceOnPlateau

    def __new__(cls, plateau: ReduceOnPlateau) -> Self:
        """Return the present rate."""
        rate = super().__new__(cls, plateau.lr)
        rate.plateau = plateau
        return rate


@dataclass(frozen=True)
class Cosine(_Rate):
    """Half a cosine from lr at step 0 to the floor final * lr at step `total`, then constant.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts" (2017), equation
    5, one period. The last of `total` updates has step total - 1, above the floor: with final = 0
    no update has rate 0.

    Raises:
        UsageError: for lr < 0, total < 1, or a final fraction outside [0, 1].
    """

    total: int
    final: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the rate between lr and final * lr."""
        progress = min(check_int("step", step, 0), self.total) / self.total
        # The weight is exactly 1 at the start and exactly 0 at the end. So this mix of two values
        # is exact at both ends, unlike floor + weight * difference. In between, rounding may leave
        # the range of the two: clamp.
        weight = (1 + cos(pi * progress)) / 2
        floor = self.final * self.lr
        return min(max(weight * self.lr + (1 - weight) * floor, floor), self.lr)


@dataclass(frozen=True)
class WarmRestarts(_Rate):
    """Half a cosine from lr to nearly 0 in `every` steps, and again in `growth` times as many.

    Loshchilov and Hutter, "SGDR" (2017). PyTorch's CosineAnnealingWarmRestarts, in updates.

    Raises:
        UsageError: for lr < 0, every < 1, or growth < 1.
    """

    every: int
    growth: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= number("growth", self.growth) < inf:
            raise UsageError(f"growth is {self.growth}; give a number of at least 1")

    def __call__(self, step: int) -> float:
        """Return the rate of this step in its period."""
        at, period = check_int("step", step, 0), self.every
        if self.growth == 1:
            at %= period
        while at >= period:
            at, period = at - period, round(period * self.growth)
        return self.lr * (1 + cos(pi * at / period)) / 2


@dataclass(frozen=True)
class Warmup:
    """A linear rise to the first rate of another schedule, which then begins at step 0.

    Step s < steps has then(0) * (s + 1) / (steps + 1). So the first update has a rate above 0, and
    the line meets then(0) exactly at step `steps`. Goyal et al., "Accurate, large minibatch SGD"
    (2017), section 2.2.

    Raises:
        UsageError: for steps < 0.
    """

    steps: int
    then: RateSchedule

    def __post_init__(self) -> None:
        check_int("steps", self.steps, 0)

    def __call__(self, step: int) -> float:
        """Return the rate on the line, or the other schedule's."""
        if check_int("step", step, 0) >= self.steps:
            return self.then(step - self.steps)
        return self.then(0) * ((step + 1) / (self.steps + 1))
