"""The parts of the benchmark: what each measures, in full and reduced."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.launch import run_job
from benchmarks.harness.parts import Part, Suite
from benchmarks.synchrony import plots, tables, targets
from benchmarks.synchrony.curve import reach_goal, read
from benchmarks.synchrony.modes import (
    EQUAL,
    MODES,
    ONE,
    OWN,
    PLAIN,
    REFERENCE,
    SLOW,
    WITH_MOMENTUM,
    last_ones,
    stragglers,
)
from benchmarks.synchrony.recipe import Recipe
from benchmarks.synchrony.simulated import SimulatedRun, settings, simulate_all
from nnmpi.synchrony.sync import Sync

PACE_S, NETWORK = 0.02, "alpha_us=50,gbit=10"
WORKERS, WORKERS_CHECK = (4, 16), (4,)
NOISE_SEEDS = (1, 2, 3, 4)  # of further runs: how much of a difference means nothing
SERVERS = (1, 2, 4)
# So much momentum that stale gradients hurt, beside the recipe of the other tables.
MOMENTUM_LR, MOMENTUM = 0.2, 0.8
SHORT_STEPS = 300
FACTORS, SLOW_ONES, SEEDS, FEWER = (1.0, 2.0, 4.0, 8.0), 4, (0, 1, 2), (1, 2, 4, 8)
PACE_RANKS_S, LONGER = 0.02, 1.12  # a run on ranks is so much longer than its prediction's way to the goal
TRAFFIC_STEPS = 16


def times(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Simulate every way of synchronization with equal and with slow workers."""
    recipe = _recipe(check, data_dir)
    cases = [
        SimulatedRun(sync, workers, stragglers(slow, workers), recipe, PACE_S, NETWORK, {"mode": name, "slow": slow})
        for workers in _workers(check)
        for slow in (SLOW[:2] if check else SLOW)
        for name, sync in MODES.items()
    ]
    others = [
        SimulatedRun(
            sync, max(_workers(check)), "", replace(recipe, seed=seed), PACE_S, NETWORK, {"mode": name, "seed": seed}
        )
        for name, sync in ((REFERENCE, Sync()), ("asp", Sync("asp")))
        for seed in (NOISE_SEEDS[:1] if check else NOISE_SEEDS)
    ]
    rows = simulate_all([*cases, *others])
    found = {"settings": settings(cases[0]), "nbytes": _nbytes(recipe)}
    return {**found, "rows": rows[: len(cases)], "seeds": rows[len(cases) :]}


def servers(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Simulate a few steps through several servers: what their links cost."""
    whole = _recipe(check, data_dir)
    recipe = replace(whole, steps=40, decay=whole.steps)
    workers = 4 if check else 16
    cases = [
        SimulatedRun(
            Sync(mode, servers=count),
            workers,
            stragglers(slow, workers),
            recipe,
            PACE_S,
            NETWORK,
            {"mode": mode, "slow": slow, "servers": count},
            observed=False,
        )
        for slow in (EQUAL, ONE)
        for mode in ("bsp", "asp")
        for count in SERVERS
    ]
    return {"settings": settings(cases[0]), "nbytes": _nbytes(recipe), "rows": simulate_all(cases)}


def heterogeneity(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Simulate asp while some workers get slower and slower, and with more and more equal workers."""
    base, workers, few = _recipe(check, data_dir), 8 if check else 16, 2 if check else SLOW_ONES
    factors, seeds = (FACTORS[::3], SEEDS[:1]) if check else (FACTORS, SEEDS)
    asp, adapted = ("asp", Sync("asp")), ("asp, adapted", Sync("asp", adapt=True))
    runs: list[tuple[str, str, Sync, int, float]] = []
    for kind in (PLAIN, WITH_MOMENTUM, OWN):
        runs.append((kind, "bsp", Sync(), workers, 1.0))
        runs += [(kind, *asp, workers, factor) for factor in factors]
        runs += [(kind, *adapted, workers, factor) for factor in factors[1:]]
    runs += [(OWN, "ssp, S = 4", MODES["ssp, S = 4"], workers, factor) for factor in factors]
    runs += [(WITH_MOMENTUM, *asp, count, 1.0) for count in FEWER if count < workers]
    cases = []
    for kind, name, sync, count, factor in runs:
        for seed in seeds:
            recipe = replace(base, seed=seed, steps=min(base.steps, SHORT_STEPS))
            if kind == WITH_MOMENTUM:
                recipe = replace(recipe, lr=MOMENTUM_LR, momentum=MOMENTUM)
            elif kind == OWN:
                recipe = replace(recipe, partition="label")
            labels = {"recipe": kind, "mode": name, "factor": factor, "seed": seed}
            slow = last_ones(few, count, factor)
            cases.append(SimulatedRun(sync, count, slow, recipe, PACE_S, NETWORK, labels, observed=False))
    common = {**settings(cases[0]), WITH_MOMENTUM: {"lr": MOMENTUM_LR, "momentum": MOMENTUM}}
    return {"settings": {**common, "slow_ones": few, "workers": workers}, "rows": simulate_all(cases)}


def ranks(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Train on four ranks of MPI, and beside them on simulated ones whose messages take no time."""
    recipe = _recipe(check, data_dir)
    pace_s = 0.002 if check else PACE_RANKS_S
    cases = [
        SimulatedRun(sync, 4, stragglers(slow, 4), recipe, pace_s, "", {"mode": name, "slow": slow})
        for slow in (EQUAL, ONE)
        for name, sync in MODES.items()
    ]
    simulated = simulate_all(cases)
    runs = []
    for row in simulated:
        reached = reach_goal(read(row["curve"]), recipe.goal)
        steps = recipe.steps if reached is None else round(LONGER * reached.batches) + 2 * recipe.every
        runs.append({"mode": row["mode"], "slow": row["slow"], "steps": min(steps, recipe.steps)})
    fixed = replace(recipe, decay=recipe.steps)
    job = {"recipe": asdict(fixed), "pace_s": pace_s, "cases": runs, "repeats": 1, "observed": True}
    part = run_job("benchmarks.synchrony.ranks", 4, job, limit_s=3600.0)
    return {**part, "settings": settings(cases[0]), "predicted": simulated}


def traffic(check: bool, data_dir: Path | None) -> dict[str, Any]:
    """Count messages and bytes of a segment on four ranks, of MPI and simulated."""
    recipe = replace(_recipe(check, data_dir), steps=TRAFFIC_STEPS, warm=0)  # fewer than an epoch's: one segment
    modes = {name: sync for name, sync in MODES.items() if name in _COUNTED}
    cases = [
        SimulatedRun(sync, 4, "", recipe, 0.001, "", {"mode": name}, observed=False) for name, sync in modes.items()
    ]
    runs = [{"mode": name, "slow": EQUAL, "steps": recipe.steps} for name in modes]
    job = {"recipe": asdict(recipe), "pace_s": 0.001, "cases": runs, "repeats": 1, "observed": False}
    part = run_job("benchmarks.synchrony.ranks", 4, job)
    return {**part, "settings": settings(cases[0]), "nbytes": _nbytes(recipe), "simulated": simulate_all(cases)}


def _recipe(check: bool, data_dir: Path | None) -> Recipe:
    """Return what is trained: MNIST, or in a reduced run the bundled digits."""
    if check:
        return Recipe("digits", None, 0.9, hidden=32, batch=64, steps=66, every=6, warm=6)
    return Recipe(data_dir=None if data_dir is None else str(data_dir))


def _workers(check: bool) -> tuple[int, ...]:
    return WORKERS_CHECK if check else WORKERS


def _nbytes(recipe: Recipe) -> int:
    """Return the bytes of the weights."""
    recipe.fetch()
    model, _ = recipe.build(recipe.load()[0])
    return sum(int(array.nbytes) for array in model.storage.data)


_COUNTED = ("bsp, ring", "bsp, server", "ssp, S = 4", "asp", "local, K = 8", "gossip, ring", "gossip, random")

SYNCHRONY = Suite(
    Path(__file__).parent,
    "Synchronous, stale-synchronous, asynchronous, local and gossip training: accuracy against time and steps.",
    {
        "times": Part(times, tables.times, targets.missed_times, draw=plots.draw_times),
        "servers": Part(servers, tables.servers, targets.missed_servers),
        "ranks": Part(ranks, tables.ranks, targets.missed_ranks, timed=True, draw=plots.draw_ranks),
        "heterogeneity": Part(
            heterogeneity, tables.heterogeneity, targets.missed_heterogeneity, draw=plots.draw_heterogeneity
        ),
        "traffic": Part(traffic, tables.traffic, targets.missed_traffic),
    },
)
