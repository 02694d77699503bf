"""The parts of the benchmark: measurement, full and reduced, table and missed marks of each."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.harness.launch import run_job
from benchmarks.harness.parts import Content, Part, Suite
from benchmarks.harness.tables import Columns, number, render
from benchmarks.synchrony.curve import GoalReached, reach_goal, read
from benchmarks.synchrony.modes import (
    CHANCE,
    EQUAL,
    MODES,
    ONE,
    REFERENCE,
    WORDS,
    last_ones,
    slow_text,
)
from benchmarks.synchrony.recipe import Recipe
from benchmarks.synchrony.simulated import SimulatedRun, settings, simulate_all

PACE_S, NETWORK = 0.02, "alpha_us=50,gbit=10"
# 0.8: enough momentum for stale gradients to hurt
PLAIN, WITH_MOMENTUM, BY_LABEL = "plain SGD", "momentum 0.8", "own classes"
SHORT_STEPS, STRAGGLERS = 300, 4
LONGER = 1.12  # steps of a run on ranks over those of its simulation to the goal
OFF = 0.25  # tolerance of the time on ranks of MPI against simulated time


def times(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Simulate every mode of synchronization with equal workers and with stragglers."""
    recipe = _recipe(check, data_dir)
    cases = [
        SimulatedRun(
            sync,
            workers,
            slow_text(slow, workers),
            recipe,
            PACE_S,
            NETWORK,
            {"mode": name, "slow": slow},
        )
        for workers in ((4,) if check else (4, 16))
        for slow in (EQUAL, ONE, CHANCE)[: 2 if check else 3]
        for name, sync in MODES.items()
    ]
    return {"settings": settings(cases[0]), "rows": simulate_all(cases)}


def ranks(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Train on four ranks of MPI, and on simulated ranks whose messages take no time."""
    recipe, pace_s = _recipe(check, data_dir), 0.002 if check else PACE_S
    paces = (ONE,) if check else (EQUAL, ONE)
    cases = [
        SimulatedRun(sync, 4, slow_text(slow, 4), recipe, pace_s, "", {"mode": name, "slow": slow})
        for slow in paces
        for name, sync in MODES.items()
    ]
    simulated, runs, goal = simulate_all(cases), [], recipe.goal
    for row in simulated:
        reached = reach_goal(read(row["curve"]), goal)
        steps = (
            recipe.steps if reached is None else round(LONGER * reached.batches) + 2 * recipe.every
        )
        runs.append({"mode": row["mode"], "slow": row["slow"], "steps": min(steps, recipe.steps)})
    fixed = asdict(replace(recipe, decay=recipe.steps))
    job = {"recipe": fixed, "pace_s": pace_s, "cases": runs, "repeats": 1, "observed": True}
    part = run_job("benchmarks.synchrony.ranks", 4, job, limit_s=3600.0)
    return {**part, "settings": settings(cases[0]), "predicted": simulated}


def heterogeneity(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Simulate asp with stragglers of growing factors, and with more and more equal workers."""
    base, workers, few = _recipe(check, data_dir), 8 if check else 16, 2 if check else STRAGGLERS
    factors, seeds = ((1.0, 8.0), (0,)) if check else ((1.0, 2.0, 4.0, 8.0), (0, 1, 2))
    changes = {
        PLAIN: {},
        WITH_MOMENTUM: {"lr": 0.2, "momentum": 0.8},
        BY_LABEL: {"partition": "label"},
    }
    runs = [(kind, REFERENCE, workers, 1.0) for kind in changes]
    runs += [(kind, "asp", workers, factor) for kind in changes for factor in factors]
    runs += [(BY_LABEL, "ssp, S = 4", workers, factor) for factor in factors]
    runs += [(WITH_MOMENTUM, "asp", count, 1.0) for count in (1, 2, 4, 8) if count < workers]
    cases = []
    for kind, mode, count, factor in runs:
        for seed in seeds:
            recipe = replace(base, seed=seed, steps=min(base.steps, SHORT_STEPS), **changes[kind])
            labels = {"recipe": kind, "mode": mode, "factor": factor, "seed": seed}
            slow = last_ones(few, count, factor)
            cases.append(
                SimulatedRun(
                    MODES[mode], count, slow, recipe, PACE_S, NETWORK, labels, observed=False
                )
            )
    return {
        "settings": {**settings(cases[0]), "slow_ones": few, "workers": workers},
        "rows": simulate_all(cases),
    }


def _recipe(check: bool, data_dir: Path | None) -> Recipe:
    """Return the recipe: on MNIST, or in a reduced run on the bundled digits."""
    if check:
        return Recipe("digits", None, 0.9, hidden=32, batch=64, steps=66, every=6, warm=6)
    return Recipe(data_dir=None if data_dir is None else str(data_dir))


# ---- tables ----


def _reached(content: Content, row: Any) -> GoalReached | None:
    return reach_goal(read(row["curve"]), content["settings"]["recipe"]["goal"])


def _pick(rows: Sequence[Any], **labels: Any) -> list[Any]:
    return [row for row in rows if all(row[name] == value for name, value in labels.items())]


def _ratio(over: float | None, under: float | None) -> str:
    return number(over / under if over and under else None)


def sooner_table(content: Content) -> str:
    """Return each mode's time to the goal, and its ratio to the reference's, split into gradients
    needed and seconds per gradient.
    """
    parts = []
    for workers, slow in dict.fromkeys((row["workers"], row["slow"]) for row in content["rows"]):
        local = _pick(content["rows"], workers=workers, slow=slow)
        reference = _reached(content, local[0]) or GoalReached(
            local[0]["batches"], local[0]["seconds"]
        )
        rows = [(row, _reached(content, row) or GoalReached(0.0, 0.0)) for row in local]
        columns: Columns = (
            ("mode", lambda item: item[0]["mode"]),
            ("batches to the goal", lambda item: number(item[1].batches or None, ".0f")),
            ("time, s", lambda item: number(item[1].seconds or None)),
            (
                "times sooner than bsp",
                lambda item, best=reference: _ratio(best.seconds, item[1].seconds),
            ),
            ("x statistics", lambda item, best=reference: _ratio(best.batches, item[1].batches)),
            ("ms per batch", lambda item: f"{1e3 * item[0]['seconds'] / item[0]['batches']:.2f}"),
            ("staleness, mean (max)", lambda item: _stale([item[0]])),
            ("final accuracy, %", lambda item: f"{100 * item[0]['accuracy']:.2f}"),
        )
        parts.append(f"**{workers} workers, {WORDS[slow]}**\n\n{render(columns, rows)}")
    return "\n\n".join(parts)


def ranks_table(content: Content) -> str:
    """Return times on ranks of MPI beside those on simulated ranks."""
    columns: Columns = (
        ("workers", lambda pair: WORDS[pair[0]["slow"]]),
        ("mode", lambda pair: pair[0]["mode"]),
        (
            "seconds to the goal",
            lambda pair: number((at := _reached(content, pair[0])) and at.seconds),
        ),
        ("predicted", lambda pair: number((at := _reached(content, pair[1])) and at.seconds)),
        ("ms per batch", lambda pair: f"{1e3 * pair[0]['seconds'] / pair[0]['steps']:.1f}"),
        ("predicted", lambda pair: f"{1e3 * pair[1]['seconds'] / pair[1]['batches']:.1f}"),
    )
    return render(columns, list(zip(content["rows"], content["predicted"], strict=True)))


def heterogeneity_table(content: Content) -> str:
    """Return asp's accuracy and staleness by factor of the stragglers and number of workers."""
    labels = ("recipe", "mode", "workers", "factor")
    kinds = dict.fromkeys(tuple(row[label] for label in labels) for row in content["rows"])
    columns: Columns = (
        *((name, lambda runs, name=name: f"{runs[0][name]}") for name in labels),
        (
            "test accuracy, %",
            lambda runs: f"{100 * _accuracy(runs):.2f} +- {100 * _spread(runs):.2f}",
        ),
        ("staleness, mean (max)", _stale),
    )
    return render(
        columns, [_pick(content["rows"], **dict(zip(labels, kind, strict=True))) for kind in kinds]
    )


def _accuracy(runs: Sequence[Any]) -> float:
    return fmean(row["accuracy"] for row in runs)


def _spread(runs: Sequence[Any]) -> float:
    return stdev(row["accuracy"] for row in runs) if len(runs) > 1 else 0.0


def _stale(runs: Sequence[Any]) -> str:
    result = [row["staleness"] for row in runs]
    largest = max(item["max"] for item in result)
    return f"{fmean(item['mean'] for item in result):.1f} ({largest:g})" if largest else "0"


# ---- marks ----


def missed_times(content: Content) -> list[str]:
    """Return a sentence for each case whose straggler does not slow asp down by N / (N - 2/3), or
    bsp threefold.
    """
    result = []
    for workers in dict.fromkeys(row["workers"] for row in content["rows"]):
        for mode, expected in (("asp", workers / (workers - 2 / 3)), (REFERENCE, 3.0)):
            each_s = [
                row["seconds"] / row["batches"]
                for slow in (EQUAL, ONE)
                for row in _pick(content["rows"], workers=workers, slow=slow, mode=mode)
            ]
            if abs(each_s[1] / each_s[0] / expected - 1) > 0.1:
                result.append(
                    f"{workers} workers, {mode}: one slow takes {each_s[1] / each_s[0]:.2f} times"
                    " as long"
                )
    return result


def missed_ranks(content: Content) -> list[str]:
    """Return a sentence for each mode whose speed on ranks of MPI differs from the simulation."""
    result = []
    for row, simulated in zip(content["rows"], content["predicted"], strict=True):
        ratio = row["seconds"] / row["steps"] / (simulated["seconds"] / simulated["batches"])
        if abs(ratio - 1) > OFF:
            result.append(f"{row['mode']}, {row['slow']}: measured / predicted {ratio:.2f}")
    return result


def missed_heterogeneity(content: Content) -> list[str]:
    """Return a sentence for each run whose mean staleness is not N - 1, the number of updates
    during the computation of a gradient.
    """
    workers = content["settings"]["workers"]
    means = [
        row["staleness"]["mean"] for row in _pick(content["rows"], mode="asp", workers=workers)
    ]
    return [
        f"mean staleness {mean:.2f}, not {workers - 1}"
        for mean in means
        if abs(mean / (workers - 1) - 1) > 0.1
    ]


SYNCHRONY = Suite(
    Path(__file__).parent,
    "Synchronous, stale-synchronous, asynchronous, local and gossip training: accuracy against time"
    " and steps.",
    {
        "times": Part(times, sooner_table, missed_times),
        "ranks": Part(ranks, ranks_table, missed_ranks, timed=True),
        "heterogeneity": Part(heterogeneity, heterogeneity_table, missed_heterogeneity),
    },
)
