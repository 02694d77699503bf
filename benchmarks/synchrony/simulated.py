"""The runs of `ranks`, on simulated ranks in this process; several at once in processes of their
own.
"""

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from benchmarks.synchrony.ranks import MeasuredRun, Row
from benchmarks.synchrony.recipe import Data, Recipe
from nnmpi.comm.fit import parse_network
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.synchrony.slow import Slow
from nnmpi.synchrony.sync import Sync


@dataclass(frozen=True)
class SimulatedRun:
    """One run.

    Attributes:
        labels: further fields of its row of results.
        slow: see `synchrony.slow`.
        network: see `comm.fit.parse_network`; empty for messages that take no time.
        observed: whether it is evaluated on the way, or only at its end.
        cpu_factor: how many times the CPU time of this machine a step takes; 0 for nothing but the
            pace.
    """

    sync: Sync
    workers: int
    slow: str
    recipe: Recipe
    pace_s: float
    network: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    observed: bool = True
    cpu_factor: float = 0.0


def simulate_all(cases: Sequence[SimulatedRun]) -> list[Row]:
    """Return a row for each run, in their order; as many run at a time as there are cores."""
    cases[0].recipe.fetch()
    count = min(len(cases), len(os.sched_getaffinity(0)))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: BLAS reads it once
    try:
        context = multiprocessing.get_context("spawn")  # as BLAS's threads are not for a fork
        with ProcessPoolExecutor(count, mp_context=context) as pool:
            return list(pool.map(simulate_run, cases))
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def simulate_run(case: SimulatedRun) -> Row:
    """Simulate one case; return its labels and what it came to."""
    recipe = case.recipe
    slow = replace(Slow.parse(case.slow, recipe.seed), minimum_s=case.pace_s)
    data = _data(recipe.dataset, recipe.data_dir)

    def main(group: Group) -> Row:
        return MeasuredRun(group, recipe, case.sync, slow, data).go(case.observed)

    machine = parse_network(case.network, case.workers) if case.network else None
    row = simulate(main, case.workers, machine, recipe.seed, cpu_factor=case.cpu_factor)[0]
    return {**case.labels, "workers": case.workers, "slow_text": case.slow, **row}


def settings(case: SimulatedRun) -> dict[str, Any]:
    """Return what all runs of a table have in common, for its file."""
    common = asdict(case.recipe)
    del common["data_dir"]  # of this machine alone
    return {"recipe": common, "pace_s": case.pace_s, "network": case.network}


@cache
def _data(dataset: str, data_dir: str | None) -> Data:
    return Recipe(dataset=dataset, data_dir=data_dir).load()
