"""Pipelines within a budget for activations: the peak is the predicted one, and below it."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from nnmpi.base.errors import UsageError
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.layout import Layout
from nnmpi.memory.fitting import choose_recomputed
from tests.equivalence.reference import batches, build
from tests.equivalence.rows import GPT

PLAIN = {"pp": 2, "split": (4, 4)}


def peaks(layout: dict[str, Any], ranks: int) -> list[tuple[int, int, str]]:
    """Return each rank's peak of activations, the number of recomputed segments, and its lines."""

    def main(group: Group) -> tuple[int, int, str]:
        worker = build(GPT, group, Layout(**layout))
        for batch in islice(batches(GPT, worker), 3):
            worker.step(batch)
        counted = worker.ledger.report().peaks["activations"]
        return counted, len(worker.passes.executor.recomputed), "\n".join(worker.passes.summary())

    return simulate(main, ranks)


def test_the_pass_fits_and_is_as_predicted() -> None:
    plain = max(peak for peak, *_ in peaks(PLAIN, 2))
    for budget in (30_000, 40_000):
        assert budget < plain
        results = peaks(PLAIN | {"activation_memory": budget}, 2)
        for peak, _, lines in results:
            kib = float(lines.partition("activations take ")[2].partition(" KiB")[0])
            assert peak <= budget and peak == pytest.approx(1024 * kib, rel=0.01)
        assert sum(count for _, count, _ in results) > 0


def test_what_fits_is_not_computed_again() -> None:
    assert [count for _, count, _ in peaks(PLAIN | {"activation_memory": 10**6}, 2)] == [0, 0]


def test_too_small_a_budget_is_refused_on_all_ranks() -> None:
    with pytest.raises(UsageError, match="too little: with every segment .* recomputed") as error:
        peaks(PLAIN | {"activation_memory": 3_000}, 2)
    assert "rank 0: " in str(error.value) and "rank 1: " in str(error.value)


def test_chosen_sets_fit_and_none_of_theirs_does() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        held, again = rng.integers(1, 20, 7), rng.integers(0, 5, 7)
        seconds = dict(enumerate(rng.random(7)))

        def peak(chosen: Any, held: Any = held, again: Any = again) -> int:
            return sum(again[i] if i in chosen else held[i] for i in range(7))

        least, budget = peak(range(7)), int(rng.integers(10, 60))
        if least > budget and peak([i for i in range(7) if again[i] < held[i]]) > budget:
            with pytest.raises(UsageError):
                choose_recomputed(seconds, peak, budget)
            continue
        chosen = choose_recomputed(seconds, peak, budget)
        assert peak(chosen) <= budget
        assert all(peak(chosen - {item}) > budget for item in chosen)
