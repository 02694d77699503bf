"""The runs of `ranks` on simulated ranks; a run is one process, and several run at once."""

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
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.comm.synchrony.sync import Sync


@dataclass(frozen=True)
class SimulatedRun:
    """One run.

    Attributes:
        labels: further fields of its row of results.
        slow: see `synchrony.slow`.
        network: see `comm.fit.parse_network`; empty: messages take no time.
        observed: True: evaluated during the run; False: at its end alone.
        cpu_factor: simulated seconds of a step per second of this machine's CPU time; 0: the pace
            alone counts.
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
    """Return a row for each run, in order; as many run at once as there are cores."""
    cases[0].recipe.fetch()
    count = min(len(cases), len(os.sched_getaffinity(0)))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the new processes: BLAS reads it once, when it loads
    try:
        context = multiprocessing.get_context("spawn")  # BLAS's threads do not survive a fork
        with ProcessPoolExecutor(count, mp_context=context) as pool:
            return list(pool.map(simulate_run, cases))
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def simulate_run(case: SimulatedRun) -> Row:
    """Simulate one case; return its labels and results."""
    recipe = case.recipe
    slow = replace(Slow.parse(case.slow, recipe.seed), minimum_s=case.pace_s)
    data = _data(recipe.dataset, recipe.data_dir)

    def main(group: Group) -> Row:
        return MeasuredRun(group, recipe, case.sync, slow, data).go(case.observed)

    machine = parse_network(case.network, case.workers) if case.network else None
    row = simulate(main, case.workers, machine, recipe.seed, cpu_factor=case.cpu_factor)[0]
    return {**case.labels, "workers": case.workers, "slow_text": case.slow, **row}


def settings(case: SimulatedRun) -> dict[str, Any]:
    """Return the settings that all runs of a table share, for its file."""
    common = asdict(case.recipe)
    del common["data_dir"]  # specific to this machine
    return {"recipe": common, "pace_s": case.pace_s, "network": case.network}


@cache
def _data(dataset: str, data_dir: str | None) -> Data:
    return Recipe(dataset=dataset, data_dir=data_dir).load()
