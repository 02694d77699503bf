"""The efficiency benchmark: rates by rule, intervals, tables and marks, and a run."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.efficiency.parts import (
    EFFICIENCY,
    descent_table,
    missed_descent,
    missed_scaling,
    missed_workers,
    scaling_table,
    steps_to_goal,
    workers_table,
)
from benchmarks.efficiency.runs import BASE_RATE, RULES, confidence, one_worker, recipe, scaled
from benchmarks.synchrony.curve import Evaluation, write
from benchmarks.synchrony.simulated import simulate_run

ROOT = Path(__file__).parents[2]


def test_rates_go_with_the_batch_by_the_rule() -> None:
    rates = {rule: scaled(rule, 64, 1438, 0) for rule in RULES}
    assert [rates[rule].lr / BASE_RATE for rule in RULES] == pytest.approx([1, 4, 2, 4])
    schedule = rates["warm-up"].schedule()
    assert schedule(0) < schedule(50) < schedule(112) == pytest.approx(4 * BASE_RATE)
    assert rates["linear"].schedule()(5000) == pytest.approx(4 * BASE_RATE)  # it stays


def test_intervals_are_those_of_student() -> None:
    assert confidence([2.0]) == (2.0, 0.0)
    assert confidence([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.30 / 3**0.5))


def test_a_run_sees_as_many_samples_as_it_is_told_and_learns() -> None:
    row = simulate_run(one_worker(recipe(64, 0.3, 6400, 1, evaluations=10), rate=0.3))
    assert (row["batches"], row["seed"], row["rate"]) == (100, 1, 0.3)
    assert row["accuracy"] > 0.8 and row["seconds"] > 0


def _row(steps: float | None, **labels: Any) -> dict[str, Any]:
    """Return a run that reaches the goal after so many steps, or never."""
    places = [(10.0 * i, 1.0 if steps is not None and 10 * i >= steps else 0.1) for i in range(60)]
    curve = write([Evaluation(batches, batches, 1.0, accuracy) for batches, accuracy in places])
    return {"curve": curve, "loss": 1.0, "accuracy": 0.5, "batches": 590.0, **labels}


def test_steps_to_the_goal_are_counted_and_judged() -> None:
    content = {
        "rows": [
            _row(steps, rule=rule, batch=batch)
            for rule, batch, steps in (("none", 16, 400), ("none", 64, None), ("linear", 16, 400), ("linear", 64, 100))
        ]
    }
    assert steps_to_goal(content, rule="none", batch=64) == [None]
    assert "| 64 | not reached by 1 of 1 | 117 ± 0 |" in scaling_table(content)
    assert missed_scaling(content) == []
    content["rows"][3] = _row(400, rule="linear", batch=64)
    assert "linear" in missed_scaling(content)[0]


def test_workers_stand_beside_the_bounds() -> None:
    rows = [
        {"mode": mode, "workers": n, "loss": loss, "seconds": 2.0}
        for mode, n, loss in (("bsp", 1, 0.8), ("bsp", 4, 0.3), ("asp", 1, 0.8), ("asp", 4, 0.5))
    ]
    assert "| 4 | 0.300 ± 0.000 | 0.500 ± 0.000 | 0.400 | 0.800 | 2.00 | 2.00 |" in workers_table({"rows": rows})
    assert missed_workers({"rows": rows}) == []
    assert missed_workers({"rows": [*rows[:3], rows[3] | {"loss": 0.9}]}) == [
        "asp: 4 workers have a loss of 0.900, one of 0.800"
    ]


def test_a_best_rate_at_an_end_is_a_miss() -> None:
    rows = [
        _row(1, vary=vary, batch=batch, rate=rate) | {"loss": loss}
        for vary, batch, rate, loss in (
            ("rate", 32, 0.1, 1.0),
            ("rate", 32, 0.3, 0.5),
            ("rate", 32, 1.0, 2.0),
            ("batch", 8, 0.3, 0.4),
            ("batch", 512, 0.3, 0.9),
        )
    ]
    assert missed_descent({"rows": rows}) == []
    assert "| 32 | 0.3 | 590 | 0.500 ± 0.000 | 50.0 |" in descent_table({"rows": rows})
    assert "at the end" in missed_descent({"rows": rows[:2] + rows[3:]})[0]


def test_the_readme_has_a_place_for_each_table() -> None:
    text = (ROOT / "benchmarks/efficiency/README.md").read_text()
    assert all(f"<!-- {name} -->" in text for name in EFFICIENCY.parts)
