"""Workers that are made slower on purpose, by a known factor, so that experiments with stragglers repeat anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nnmpi.backend.random import stream
from nnmpi.errors import UsageError

_FORMS = '"rank=2,factor=3" or "random,probability=0.25,factor=3", several separated by ";"'


@dataclass(frozen=True)
class Straggler:
    """One rule.

    Args:
        factor: how many times as long a step takes.
        rank: the rank that is always slow; None for a rule of chance.
        probability: with which any worker is slow in a step, for a rule of chance.

    Raises:
        UsageError: for a factor below 1, a negative rank or a probability outside (0, 1].
    """

    factor: float
    rank: int | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 1 <= self.factor < math.inf:  # false for NaN, too
            raise UsageError(f"a straggler has the factor {self.factor:g}; give a finite number of at least 1")
        if not 0 < self.probability <= 1:
            raise UsageError(f"a straggler has the probability {self.probability:g}; give a number above 0, at most 1")
        if self.rank is not None and self.rank < 0:
            raise UsageError(f"a straggler has the rank {self.rank}; ranks are numbered from 0")


@dataclass(frozen=True)
class Slowdown:
    """Who is slow in which step; nobody by default. The factors of several rules for one step are multiplied.

    Args:
        stragglers: the rules.
        seed: of the rules of chance, which give the same steps in every run with it.
    """

    stragglers: tuple[Straggler, ...] = ()
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Slowdown:
        """Return what a text such as "rank=2,factor=3;random,probability=0.25,factor=3" says; nobody for "".

        Raises:
            UsageError: for anything else, with the forms that there are; and see `Straggler`.
        """
        rules = [_parse(rule) for rule in text.split(";")] if text.strip() else []
        ranks = [rule.rank for rule in rules if rule.rank is not None]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice:
            raise UsageError(f"two stragglers have the rank {twice[0]}; give it one factor")
        return cls(tuple(rules), seed)

    def factor(self, rank: int, step: int) -> float:
        """Return how many times as long a rank's step takes; the same in every run."""
        factor = 1.0
        for number, rule in enumerate(self.stragglers):
            if rule.rank is None:
                is_slow = stream(self.seed, "straggler", number, rank, step).random() < rule.probability
            else:
                is_slow = rule.rank == rank
            factor *= rule.factor if is_slow else 1.0
        return factor

    def check(self, ranks: range) -> None:
        """Check that the ranks that are to be slow are among the workers.

        Raises:
            UsageError: for a straggler that does not exist.
        """
        for rule in self.stragglers:
            if rule.rank is not None and rule.rank not in ranks:
                one = f"the only one is rank {ranks[0]}"
                several = f"these are ranks {ranks[0]} to {ranks[-1]}"
                raise UsageError(
                    f"a straggler has the rank {rule.rank}, which is none of the workers; "
                    f"{one if len(ranks) == 1 else several}"
                )

    def describe(self) -> str:
        """Return it in words, for the head of a run; empty if nobody is slow."""
        return "; ".join(
            f"rank {rule.rank} takes {rule.factor:g} times as long"
            if rule.rank is not None
            else f"any worker takes {rule.factor:g} times as long with probability {rule.probability:g}"
            for rule in self.stragglers
        )


def _parse(text: str) -> Straggler:
    """Return one rule."""
    random, values = False, dict[str, str]()
    for entry in text.split(","):
        key, equals, value = (word.strip() for word in entry.partition("="))
        if key == "random" and not equals and not random:
            random = True
        elif key in ("rank", "factor", "probability") and equals and key not in values:
            values[key] = value
        else:
            raise UsageError(f"straggler {text.strip()!r} has {entry.strip()!r}, which means nothing; give {_FORMS}")
    expected = {"factor", "probability"} if random else {"factor", "rank"}
    if values.keys() != expected:
        raise UsageError(f"straggler {text.strip()!r} is not of the form {_FORMS}")
    factor = _number(values["factor"], text)
    if random:
        return Straggler(factor, probability=_number(values["probability"], text))
    try:
        rank = int(values["rank"])
    except ValueError:
        raise UsageError(f"straggler {text.strip()!r}: the rank {values['rank']!r} is no whole number") from None
    return Straggler(factor, rank)


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"straggler {text.strip()!r}: {value!r} is no number") from None
