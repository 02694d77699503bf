"""Stragglers made on purpose: the texts that describe them, and when they are slow."""

import pytest

from nnmpi.errors import UsageError
from nnmpi.synchrony.slowdown import Slowdown, Straggler

FORMS = '"rank=2,factor=3" or "random,probability=0.25,factor=3", several separated by ";"'

REFUSED = {
    "rank=2": f"straggler 'rank=2' is not of the form {FORMS}",
    "factor=3": f"straggler 'factor=3' is not of the form {FORMS}",
    "random,factor=3": f"straggler 'random,factor=3' is not of the form {FORMS}",
    "rank=1,probability=0.5,factor=3": f"straggler 'rank=1,probability=0.5,factor=3' is not of the form {FORMS}",
    "random,rank=1,factor=3": f"straggler 'random,rank=1,factor=3' is not of the form {FORMS}",
    "rank=2,speed=3": f"straggler 'rank=2,speed=3' has 'speed=3', which means nothing; give {FORMS}",
    "rank=2,factor": f"straggler 'rank=2,factor' has 'factor', which means nothing; give {FORMS}",
    "rank=2,rank=3,factor=2": f"straggler 'rank=2,rank=3,factor=2' has 'rank=3', which means nothing; give {FORMS}",
    "rank=2,factor=3;": f"straggler '' has '', which means nothing; give {FORMS}",
    "rank=two,factor=3": "straggler 'rank=two,factor=3': the rank 'two' is no whole number",
    "rank=2,factor=fast": "straggler 'rank=2,factor=fast': 'fast' is no number",
    "rank=2,factor=0.5": "a straggler has the factor 0.5; give a finite number of at least 1",
    "rank=2,factor=nan": "a straggler has the factor nan; give a finite number of at least 1",
    "rank=2,factor=inf": "a straggler has the factor inf; give a finite number of at least 1",
    "random,probability=0,factor=2": "a straggler has the probability 0; give a number above 0, at most 1",
    "random,probability=1.5,factor=2": "a straggler has the probability 1.5; give a number above 0, at most 1",
    "rank=-1,factor=2": "a straggler has the rank -1; ranks are numbered from 0",
    "rank=1,factor=2;rank=1,factor=3": "two stragglers have the rank 1; give it one factor",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_text_that_means_nothing_is_refused(text: str) -> None:
    """In one sentence with what would work."""
    with pytest.raises(UsageError) as caught:
        Slowdown.parse(text, 0)
    assert str(caught.value) == REFUSED[text]


def test_nobody_is_slow_by_default() -> None:
    """Neither without a text."""
    assert Slowdown.parse(" ", 0) == Slowdown() == Slowdown(())
    assert {Slowdown().factor(rank, step) for rank in range(3) for step in range(3)} == {1.0}
    assert Slowdown().describe() == ""


def test_chosen_ranks_are_slow_in_every_step() -> None:
    """Each by its factor; spaces do not matter."""
    slowdown = Slowdown.parse(" rank = 2, factor=3 ; rank=0,factor=1.5", 0)
    assert slowdown.stragglers == (Straggler(3.0, 2), Straggler(1.5, 0))
    assert [[slowdown.factor(rank, step) for rank in range(4)] for step in (0, 7)] == [[1.5, 1.0, 3.0, 1.0]] * 2
    assert slowdown.describe() == "rank 2 takes 3 times as long; rank 0 takes 1.5 times as long"


def test_chance_is_the_same_in_every_run() -> None:
    """By seed, rank and step; as frequent as it says; and another rule draws anew and multiplies."""
    text = "random,probability=0.25,factor=3"
    first, again, other = Slowdown.parse(text, 1), Slowdown.parse(text, 1), Slowdown.parse(text, 2)
    places = [(rank, step) for rank in range(4) for step in range(250)]
    factors = [first.factor(*place) for place in places]
    assert factors == [again.factor(*place) for place in places]
    assert factors != [other.factor(*place) for place in places]
    assert set(factors) == {1.0, 3.0}
    assert 200 < factors.count(3.0) < 300
    assert factors[:250] != factors[250:500]
    twice = [Slowdown.parse(f"{text};{text}", 1).factor(*place) for place in places]
    assert set(twice) == {1.0, 3.0, 9.0}
    assert first.describe() == "any worker takes 3 times as long with probability 0.25"


def test_a_straggler_that_does_not_exist_is_refused() -> None:
    """Ranks that do nothing but serve are not among the workers; chance needs nobody by name."""
    Slowdown.parse("rank=3,factor=2;random,probability=1,factor=2", 0).check(range(4))
    with pytest.raises(
        UsageError, match="a straggler has the rank 4, which is none of the workers; these are ranks 0 to 3$"
    ):
        Slowdown.parse("rank=4,factor=2", 0).check(range(4))
    with pytest.raises(
        UsageError, match="a straggler has the rank 0, which is none of the workers; the only one is rank 1$"
    ):
        Slowdown.parse("rank=0,factor=2", 0).check(range(1, 2))
