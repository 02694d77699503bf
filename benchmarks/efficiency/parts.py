"""The parts of the benchmark: measurement, table and missed marks of each."""

from collections.abc import Sequence
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.efficiency import plots
from benchmarks.efficiency.runs import (
    BASE_BATCH,
    BASE_RATE,
    GOAL,
    RULES,
    SAMPLES,
    confidence,
    many_workers,
    one_worker,
    reached,
    recipe,
    scaled,
)
from benchmarks.harness.parts import Content, Part, Suite
from benchmarks.harness.tables import render
from benchmarks.synchrony.simulated import simulate_all

SEEDS, SEEDS_CHECK = (0, 1, 2), (0, 1)
RATES, BATCHES = (0.003, 0.03, 0.3, 1.5, 6.0), (8, 32, 128, 512, SAMPLES)
RATE, BATCH, EPOCHS = 0.3, 32, 20  # fixed while the other one varies
WORKERS, ITERATIONS = (1, 2, 4, 8, 16, 32, 64), 120
SCALED, MOST_STEPS, MOST_EPOCHS = (16, 32, 64, 128, 256, 512, 1024), 800, 150


def descent(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Train with rates from too small to too large, and with batches from 8 to all samples."""
    rates, batches, epochs = (RATES[::2], BATCHES[1::2], 4) if check else (RATES, BATCHES, EPOCHS)
    cases = [
        one_worker(recipe(batch, rate, epochs * SAMPLES, seed), vary=vary, batch=batch, rate=rate)
        for vary, pairs in (
            ("rate", [(BATCH, r) for r in rates]),
            ("batch", [(b, RATE) for b in batches]),
        )
        for batch, rate in pairs
        for seed in (SEEDS_CHECK if check else SEEDS)
    ]
    return {"rows": simulate_all(cases)}


def descent_table(content: Content) -> str:
    """Return each rate's and batch's loss and accuracy, over the seeds."""
    rows = []
    for vary, value in plots.kinds(content):
        local = [row for row in content["rows"] if row["vary"] == vary and row[vary] == value]
        losses = [row["loss"] for row in local]
        mean, half = confidence(losses) if all(map(isfinite, losses)) else (float("nan"), 0.0)
        rows.append(
            {
                "batch": local[0]["batch"],
                "rate": f"{local[0]['rate']:g}",
                "steps": round(local[0]["batches"]),
                "loss": f"{mean:.3f} ± {half:.3f}",
                "accuracy": f"{100 * fmean(row['accuracy'] for row in local):.1f}",
            }
        )
    columns = ("batch", "rate", "steps", "loss", "accuracy")
    return render(tuple((_TITLES.get(name, name), name) for name in columns), rows)


_TITLES = {"loss": "test loss, 95 % interval", "accuracy": "test accuracy, %"}


def missed_descent(content: Content) -> list[str]:
    """Return a sentence if a rate at the end is the best, or many small steps learn less than few
    large ones.
    """
    result = []
    losses = {
        (vary, value): [
            row["loss"] for row in content["rows"] if row["vary"] == vary and row[vary] == value
        ]
        for vary, value in plots.kinds(content)
    }
    rates = sorted(value for vary, value in losses if vary == "rate")
    best = min(rates, key=lambda rate: fmean(losses["rate", rate]))
    if best in (rates[0], rates[-1]):
        result.append(f"the best rate is {best:g}, at the end of {rates}")
    batches = sorted(value for vary, value in losses if vary == "batch")
    if fmean(losses["batch", batches[0]]) >= fmean(losses["batch", batches[-1]]):
        result.append(
            f"after as many samples a batch of {batches[-1]} has learnt as much as one of"
            f" {batches[0]}"
        )
    return result


def scaling(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Count the steps to the goal for growing batches, with the rate by each rule."""
    batches, most, rules = (SCALED[:3:2], 500, RULES[:2]) if check else (SCALED, MOST_STEPS, RULES)
    seeds = SEEDS_CHECK if check else SEEDS
    cases = [
        one_worker(
            scaled(rule, batch, min(most * batch, MOST_EPOCHS * SAMPLES), seed),
            rule=rule,
            batch=batch,
        )
        for rule in rules
        for batch in batches
        for seed in seeds
    ]
    return {"rows": simulate_all(cases)}


def scaling_table(content: Content) -> str:
    """Return steps to the goal by batch and rule, as the mean over the seeds with its interval."""
    batches = sorted({row["batch"] for row in content["rows"]})
    rules = dict.fromkeys(row["rule"] for row in content["rows"])
    rows = []
    for batch in batches:
        result = {rule: steps_to_goal(content, rule=rule, batch=batch) for rule in rules}
        rows.append({"batch": batch} | {rule: _steps(values) for rule, values in result.items()})
    return render((("batch", "batch"), *((rule, rule) for rule in rules)), rows)


def steps_to_goal(content: Content, **labels: Any) -> list[float | None]:
    """Return each seed's steps to the goal, of the runs with these labels; None if not reached."""
    local = [
        row for row in content["rows"] if all(row[name] == value for name, value in labels.items())
    ]
    return [None if (goal := reached(row)) is None else goal.batches for row in local]


def _steps(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"not reached by {len(values) - len(known)} of {len(values)}"
    mean, half = confidence(known)
    return f"{mean:.0f} ± {half:.0f}"


def missed_scaling(content: Content) -> list[str]:
    """Return a sentence if a batch four times as large, with a rate that grows with it, does not
    need fewer steps.
    """
    batches = sorted({row["batch"] for row in content["rows"]})
    first = _mean(steps_to_goal(content, rule="linear", batch=batches[0]))
    later = _mean(steps_to_goal(content, rule="linear", batch=batches[1]))
    still = _mean(steps_to_goal(content, rule="none", batch=batches[1]))
    if (
        first is None
        or later is None
        or later > 0.75 * first
        or (still is not None and later >= still)
    ):
        return [
            f"linear: {first} steps with a batch of {batches[0]}, {later} with {batches[1]}; none:"
            f" {still}"
        ]
    return []


def workers(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Train with a growing number of workers, synchronously and asynchronously; iterations and rows
    per worker stay the same.
    """
    counts, iterations, seeds = ((1, 4), 40, SEEDS_CHECK) if check else (WORKERS, ITERATIONS, SEEDS)
    cases = [
        many_workers(mode, n, iterations, seed)
        for n in counts
        for mode in ("bsp", "asp")
        for seed in seeds
    ]
    return {"rows": simulate_all(cases)}


def workers_table(content: Content) -> str:
    """Return the loss of each number of workers, beside the bounds, scaled to one worker's loss."""
    first = fmean(_of_workers(content, "bsp", 1, "loss"))
    rows = []
    for n in sorted({row["workers"] for row in content["rows"]}):
        result: dict[str, Any] = {
            "workers": n,
            "1/sqrt(N I)": f"{first / sqrt(n):.3f}",
            "1/sqrt(I)": f"{first:.3f}",
        }
        for mode in ("bsp", "asp"):
            mean, half = confidence(_of_workers(content, mode, n, "loss"))
            result[f"{mode}, test loss"] = f"{mean:.3f} ± {half:.3f}"
            result[f"{mode}, s"] = f"{fmean(_of_workers(content, mode, n, 'seconds')):.2f}"
        rows.append(result)
    columns = (
        "workers",
        "bsp, test loss",
        "asp, test loss",
        "1/sqrt(N I)",
        "1/sqrt(I)",
        "bsp, s",
        "asp, s",
    )
    return render(tuple((name, name) for name in columns), rows)


def missed_workers(content: Content) -> list[str]:
    """Return a sentence if more workers have not learnt more in as many iterations."""
    most = max(row["workers"] for row in content["rows"])
    result = []
    for mode in ("bsp", "asp"):
        item, many = (fmean(_of_workers(content, mode, n, "loss")) for n in (1, most))
        if many >= item:
            result.append(f"{mode}: {most} workers have a loss of {many:.3f}, one of {item:.3f}")
    return result


def _of_workers(content: Content, mode: str, count: int, key: str) -> list[float]:
    return [row[key] for row in content["rows"] if (row["mode"], row["workers"]) == (mode, count)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


EFFICIENCY = Suite(
    Path(__file__).parent,
    f"Statistical efficiency: rates and batches against samples, time and steps to {GOAL:.0%} "
    f"(digits; rate {BASE_RATE:g} at a batch of {BASE_BATCH}).",
    {
        "descent": Part(descent, descent_table, missed_descent, draw=plots.draw_descent),
        "scaling": Part(scaling, scaling_table, missed_scaling, draw=plots.draw_scaling),
        "workers": Part(workers, workers_table, missed_workers),
    },
)
