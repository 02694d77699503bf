"""The runs: digits, an MLP 64-32-10, SGD at a constant rate, and rules for the rate by batch.

rule         rate at a batch of k BASE_BATCH       reason
none         r
linear       k r                                   one step replaces k small ones (Goyal et al.,
                                                   2017)
square root  sqrt(k) r                             the gradient's noise scales so (Krizhevsky, 2014)
warm-up      k r, reached after WARM_SAMPLES       k r diverges in the first steps (Goyal et al.)
             samples
"""

from math import sqrt
from statistics import fmean, stdev
from typing import Any

from benchmarks.synchrony.curve import GoalReached, reach_goal, read
from benchmarks.synchrony.recipe import Recipe
from benchmarks.synchrony.simulated import SimulatedRun
from nnmpi.comm.synchrony.sync import Sync

SAMPLES = 1438  # of digits' training part
BASE_BATCH, BASE_RATE, WARM_SAMPLES = 16, 0.05, 5 * SAMPLES
GOAL = 0.95
EACH, PACE_S, SLOW = 4, 0.02, "probability=0.25,factor=3"  # of many workers
NEVER = 10**9  # the step to which the rate would fall
RULES = ("none", "linear", "square root", "warm-up")
T95 = (0.0, 0.0, 12.71, 4.30, 3.18, 2.78, 2.57)  # Student's t, 97.5 %, by the number of values


def recipe(
    batch: int, rate: float, samples: int, seed: int, evaluations: int = 60, warm: int = 0
) -> Recipe:
    """Return a run over `samples` samples, rounded to batches.

    Args:
        batch: rows of a global batch.
        rate: of SGD; constant after the warm-up.
        samples: of all epochs together.
        seed: of the first weights and the order of the data.
        evaluations: during the run, at most.
        warm: batches in which the rate rises.
    """
    steps = max(1, round(samples / batch))
    every = max(1, steps // evaluations)
    return Recipe(
        "digits", None, GOAL, 32, batch, steps, every, rate, warm=warm, decay=NEVER, seed=seed
    )


def scaled(rule: str, batch: int, samples: int, seed: int) -> Recipe:
    """Return a run whose rate depends on the batch.

    Args:
        rule: one of RULES.
        batch, samples, seed: see `recipe`.
    """
    times = batch / BASE_BATCH
    factor = {"none": 1.0, "square root": sqrt(times)}.get(rule, times)
    warm = max(1, WARM_SAMPLES // batch) if rule == "warm-up" else 0
    return recipe(batch, BASE_RATE * factor, samples, seed, evaluations=400, warm=warm)


def one_worker(run: Recipe, /, **labels: Any) -> SimulatedRun:
    """Return the run on one worker; its time is this machine's CPU time."""
    return SimulatedRun(Sync(), 1, "", run, 0.0, "", {"seed": run.seed, **labels}, cpu_factor=1.0)


def many_workers(mode: str, workers: int, iterations: int, seed: int) -> SimulatedRun:
    """Return a run of `workers` workers with EACH rows per iteration, each slow at random.

    Args:
        mode: of `Sync`.
        workers: N.
        iterations: I, of each worker; one iteration of all workers is a global batch.
        seed: see `recipe`.
    """
    batch = EACH * workers
    run = recipe(batch, BASE_RATE * sqrt(workers), iterations * batch, seed, evaluations=4)
    return SimulatedRun(Sync(mode), workers, SLOW, run, PACE_S, "", {"seed": seed, "mode": mode})


def reached(row: dict[str, Any]) -> GoalReached | None:
    """Return the point at which a run reached the goal, or None."""
    return reach_goal(read(row["curve"]), GOAL)


def confidence(values: list[float]) -> tuple[float, float]:
    """Return the mean over seeds, and half the width of its 95 % interval (Student's t)."""
    if len(values) == 1:
        return values[0], 0.0
    return fmean(values), T95[len(values)] * stdev(values) / sqrt(len(values))
