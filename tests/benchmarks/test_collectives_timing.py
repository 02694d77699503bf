"""The order and the number of the timed calls."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.collectives.timing import LEAST, WARM_UP, Interrupted, gather, never, nothing, take
from benchmarks.harness.turns import shuffled


@dataclass
class Alone:
    """A rank without others."""

    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        """Go on."""

    def gather_floats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values[None]


@dataclass
class Counting:
    """A contestant that notes what is done with it."""

    name: str
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def refill(self, call: int) -> None:
        self.log.append((self.name, "refill", call))

    def run(self) -> None:
        self.log.append((self.name, "run", -1))


def test_every_round_has_every_contestant_in_a_changing_order() -> None:
    rounds = [shuffled(range(4), call) for call in range(50)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert {each[0] for each in rounds} == {0, 1, 2, 3}
    assert rounds == [shuffled(range(4), call) for call in range(50)]


def test_every_call_is_refilled_and_verified_and_has_stamps() -> None:
    log: list[tuple[str, str, int]] = []
    contestants = [Counting(name, log) for name in "abc"]
    stamps = take(
        contestants, Alone(), 4, 1.0, lambda one, call: log.append((one.name, "verify", call)), lambda seconds: 0
    )
    assert stamps.shape == (3, 2, 4)
    assert (stamps[:, 1] >= stamps[:, 0]).all()
    assert len(log) == 3 * 3 * (WARM_UP + 4)
    for first, second, third in zip(log[::3], log[1::3], log[2::3], strict=True):
        assert (first[0], first[1], second[1], third[1]) == (second[0], "refill", "run", "verify")
        assert first[2] == third[2]
    assert {call for _, what, call in log if what == "verify"} == set(range(WARM_UP + 4))
    assert gather(stamps, Alone()).shape == (1, 3, 2, 4)


def test_a_small_budget_gives_the_least_number_of_rounds() -> None:
    assert take([Counting("a")], Alone(), None, 1e-9, nothing, never).shape == (1, 2, LEAST)


def test_a_signal_ends_it_after_the_round() -> None:
    contestant = Counting("a")
    with pytest.raises(Interrupted) as caught:
        take([contestant], Alone(), 10, 1.0, nothing, lambda seconds: 2 * (len(contestant.log) >= 10))
    assert caught.value.args == (2,)
    assert len(contestant.log) == 10
