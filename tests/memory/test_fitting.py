"""Pipelines within a budget for activations: the peak is the predicted one, and below it."""

from itertools import islice

import numpy as np
import pytest

from nnmpi import Layout, simulate
from nnmpi.base.errors import UsageError
from nnmpi.memory.fitting import choose_savings
from tests.device.here import on_device
from tests.equivalence.reference import batches, build
from tests.equivalence.rows import GPT
from tests.harness.refusals import usage_error

PLAIN = {"pp": 2, "split": (4, 4)}


def peaks(layout, ranks):
    """Return each rank's peak of activations, the number of recomputed segments, and its lines."""

    def main(group):
        worker = build(GPT, group, Layout(**layout), counts=True)
        for batch in islice(batches(GPT, worker), 3):
            worker.step(batch)
        counted = worker.ledger.report().peaks["activations"]
        return counted, len(worker.passes.executor.recomputed), "\n".join(worker.passes.summary())

    return simulate(main, ranks)


def test_the_pass_fits_and_is_as_predicted():
    plain = max(peak for peak, *_ in peaks(PLAIN, 2))
    for budget in (60_000, 70_000):
        assert budget < plain
        results = peaks(PLAIN | {"activation_memory": budget}, 2)
        for peak, _, lines in results:
            kib = float(lines.partition("activations take ")[2].partition(" KiB")[0])
            assert peak <= budget and peak == pytest.approx(1024 * kib, rel=0.01)
        assert sum(count for _, count, _ in results) > 0


def test_what_fits_is_not_computed_again():
    assert [count for _, count, _ in peaks(PLAIN | {"activation_memory": 10**6}, 2)] == [0, 0]


def test_too_small_a_budget_is_refused_on_all_ranks():
    with pytest.raises(UsageError, match="too few: with every segment .* recomputed") as error:
        peaks(PLAIN | {"activation_memory": 3_000}, 2)
    assert "rank 0: " in str(error.value) and "rank 1: " in str(error.value)


def test_saved_arrays_go_out_where_that_is_faster(tmp_path):
    """Of GPipe's three microbatches in flight; by 1F1B's two none could be away."""
    store = "host" if on_device() else str(tmp_path)
    layout = PLAIN | {"pipeline": "gpipe", "activation_memory": 60_000, "offload": store}

    def main(group):
        worker = build(GPT, group, Layout(**layout), counts=True)
        losses = [worker.step(batch).loss for batch in islice(batches(GPT, worker), 3)]
        peak = worker.ledger.report().peaks["activations"]
        return peak, len(worker.passes.executor.moved), losses

    results = simulate(main, 2)
    assert all(peak <= 60_000 for peak, *_ in results)
    assert sum(moved for _, moved, _ in results) > 0


@pytest.mark.parametrize("layout", [PLAIN, {"zero": 3}], ids=str)
def test_least_in_segments_leaves_nothing_to_offload(layout, tmp_path):
    usage_error(
        "nothing is left to offload",
        Layout,
        **layout,
        activation_memory="least",
        offload=str(tmp_path),
    )


def test_chosen_savings_fit_and_none_of_theirs_does():
    rng = np.random.default_rng(0)
    for _ in range(60):
        held, left = rng.integers(6, 20, 7), rng.integers(0, 5, (2, 7))
        again_s, moving_s = (dict(enumerate(rng.random(7).tolist())) for _ in range(2))
        moving_s = moving_s if rng.random() < 0.5 else {}

        def peak(again, moved, held=held, left=left):
            return sum(
                int(left[0, i] if i in again else left[1, i] if i in moved else held[i])
                for i in range(7)
            )

        budget, hidden_s = int(rng.integers(10, 90)), float(rng.random())
        least = sum(min(left[way, i] for way in ((0, 1) if moving_s else (0,))) for i in range(7))
        if least > budget:
            with pytest.raises(UsageError):
                choose_savings(again_s, moving_s, hidden_s, peak, budget)
            continue
        try:
            chosen = choose_savings(again_s, moving_s, hidden_s, peak, budget)
        except UsageError:  # a segment has taken the way that leaves more
            assert moving_s
            continue
        assert peak(*chosen) <= budget and not chosen.recomputed & chosen.moved
        for way in (0, 1):
            for number in chosen[way]:
                assert peak(*chosen.toggled(number, way)) > budget


def test_recomputing_all_is_tried_where_moving_saves_too_little():
    """What stays when a segment is moved is more than what a recomputed one leaves."""
    held, stays = {0: 10, 1: 10}, {0: 6, 1: 6}

    def peak(again, moved):
        return sum(
            1 if i in again else stays[i] if i in moved else nbytes for i, nbytes in held.items()
        )

    slow, fast = dict.fromkeys(held, 9.0), dict.fromkeys(held, 0.1)
    assert choose_savings(slow, fast, 1.0, peak, 12).moved == {0, 1}
    assert choose_savings(slow, fast, 1.0, peak, 5).recomputed == {0, 1}
    usage_error("too few: .* a pass takes 2;", choose_savings, slow, fast, 1.0, peak, 1)
