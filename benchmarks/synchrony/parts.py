"""The parts of the benchmark: what each measures, in full and reduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.pipeline.command import Benchmark
from benchmarks.pipeline.launch import run_job
from benchmarks.synchrony import picture
from benchmarks.synchrony.curve import cross, read
from benchmarks.synchrony.marks import MISSED
from benchmarks.synchrony.modes import EQUAL, MODES, ONE, OWN, REFERENCE, SLOW, last_ones, stragglers
from benchmarks.synchrony.play import Case, play_all, settings
from benchmarks.synchrony.subject import Subject
from benchmarks.synchrony.tables import TABLES
from nnmpi.synchrony.sync import Sync

Found = dict[str, Any]

PACE_S, NETWORK = 0.02, "alpha_us=50,gbit=10"
WORKERS, WORKERS_CHECK = (4, 16), (4,)
NOISE_SEEDS = (1, 2, 3, 4)  # of further runs: how much of a difference means nothing
SERVERS = (1, 2, 4)
# Lively: so much momentum that stale gradients hurt; calm is the recipe of the other tables.
LIVELY_LR, LIVELY_MOMENTUM = 0.2, 0.8
SHORT_STEPS = 300
FACTORS, SLOW_ONES, SEEDS, FEWER = (1.0, 2.0, 4.0, 8.0), 4, (0, 1, 2), (1, 2, 4, 8)
PACE_RANKS_S, LONGER = 0.02, 1.12  # a run on ranks is so much longer than its prediction's way to the goal
TRAFFIC_STEPS = 16


def times(check: bool, data_dir: Path | None) -> Found:
    """Play every way of synchronisation with equal and with slow workers."""
    subject = _subject(check, data_dir)
    cases = [
        Case(sync, workers, stragglers(slow, workers), subject, PACE_S, NETWORK, {"mode": name, "slow": slow})
        for workers in _workers(check)
        for slow in (SLOW[:2] if check else SLOW)
        for name, sync in MODES.items()
    ]
    others = [
        Case(sync, max(_workers(check)), "", replace(subject, seed=seed), PACE_S, NETWORK, {"mode": name, "seed": seed})
        for name, sync in ((REFERENCE, Sync()), ("asp", Sync("asp")))
        for seed in (NOISE_SEEDS[:1] if check else NOISE_SEEDS)
    ]
    rows = play_all([*cases, *others])
    found = {"settings": settings(cases[0]), "nbytes": _nbytes(subject)}
    return {**found, "rows": rows[: len(cases)], "seeds": rows[len(cases) :]}


def servers(check: bool, data_dir: Path | None) -> Found:
    """Play a few steps through several servers: what their links cost."""
    whole = _subject(check, data_dir)
    subject = replace(whole, steps=40, decay=whole.steps)
    workers = 4 if check else 16
    cases = [
        Case(
            Sync(mode, servers=count),
            workers,
            stragglers(slow, workers),
            subject,
            PACE_S,
            NETWORK,
            {"mode": mode, "slow": slow, "servers": count},
            observed=False,
        )
        for slow in (EQUAL, ONE)
        for mode in ("bsp", "asp")
        for count in SERVERS
    ]
    return {"settings": settings(cases[0]), "nbytes": _nbytes(subject), "rows": play_all(cases)}


def heterogeneity(check: bool, data_dir: Path | None) -> Found:
    """Play asp while some workers get slower and slower, and with more and more equal workers."""
    base, workers, few = _subject(check, data_dir), 8 if check else 16, 2 if check else SLOW_ONES
    factors, seeds = (FACTORS[::3], SEEDS[:1]) if check else (FACTORS, SEEDS)
    asp, adapted = ("asp", Sync("asp")), ("asp, adapted", Sync("asp", adapt=True))
    runs: list[tuple[str, str, Sync, int, float]] = []
    for recipe in ("calm", "lively", OWN):
        runs.append((recipe, "bsp", Sync(), workers, 1.0))
        runs += [(recipe, *asp, workers, factor) for factor in factors]
        runs += [(recipe, *adapted, workers, factor) for factor in factors[1:]]
    runs += [(OWN, "ssp, S = 4", MODES["ssp, S = 4"], workers, factor) for factor in factors]
    runs += [("lively", *asp, count, 1.0) for count in FEWER if count < workers]
    cases = []
    for recipe, name, sync, count, factor in runs:
        for seed in seeds:
            subject = replace(base, seed=seed, steps=min(base.steps, SHORT_STEPS))
            if recipe == "lively":
                subject = replace(subject, lr=LIVELY_LR, momentum=LIVELY_MOMENTUM)
            elif recipe == OWN:
                subject = replace(subject, partition="label")
            labels = {"recipe": recipe, "mode": name, "factor": factor, "seed": seed}
            slow = last_ones(few, count, factor)
            cases.append(Case(sync, count, slow, subject, PACE_S, NETWORK, labels, observed=False))
    common = {**settings(cases[0]), "lively": {"lr": LIVELY_LR, "momentum": LIVELY_MOMENTUM}}
    return {"settings": {**common, "slow_ones": few, "workers": workers}, "rows": play_all(cases)}


def ranks(check: bool, data_dir: Path | None) -> Found:
    """Run on four ranks, and beside it the same in virtual time, on a network that takes no time."""
    subject = _subject(check, data_dir)
    pace_s = 0.002 if check else PACE_RANKS_S
    cases = [
        Case(sync, 4, stragglers(slow, 4), subject, pace_s, "", {"mode": name, "slow": slow})
        for slow in (EQUAL, ONE)
        for name, sync in MODES.items()
    ]
    played = play_all(cases)
    runs = []
    for row in played:
        reached = cross(read(row["curve"]), subject.goal)
        steps = subject.steps if reached is None else round(LONGER * reached.batches) + 2 * subject.every
        runs.append({"mode": row["mode"], "slow": row["slow"], "steps": min(steps, subject.steps)})
    fixed = replace(subject, decay=subject.steps)
    job = {"subject": asdict(fixed), "pace_s": pace_s, "cases": runs, "repeats": 1, "observed": True}
    part = run_job("benchmarks.synchrony.ranks", 4, job, limit_s=3600.0)
    return {**part, "settings": settings(cases[0]), "predicted": played}


def traffic(check: bool, data_dir: Path | None) -> Found:
    """Count messages and bytes of a segment on four ranks, and in virtual time."""
    subject = replace(_subject(check, data_dir), steps=TRAFFIC_STEPS, warm=0)  # fewer than an epoch's: one segment
    modes = {name: sync for name, sync in MODES.items() if name in _COUNTED}
    cases = [Case(sync, 4, "", subject, 0.001, "", {"mode": name}, observed=False) for name, sync in modes.items()]
    runs = [{"mode": name, "slow": EQUAL, "steps": subject.steps} for name in modes]
    job = {"subject": asdict(subject), "pace_s": 0.001, "cases": runs, "repeats": 1, "observed": False}
    part = run_job("benchmarks.synchrony.ranks", 4, job)
    return {**part, "settings": settings(cases[0]), "nbytes": _nbytes(subject), "played": play_all(cases)}


def _subject(check: bool, data_dir: Path | None) -> Subject:
    """Return what is trained: MNIST, or in a reduced run the bundled digits."""
    if check:
        return Subject("digits", None, 0.9, hidden=32, batch=64, steps=66, every=6, warm=6)
    return Subject(data_dir=None if data_dir is None else str(data_dir))


def _workers(check: bool) -> tuple[int, ...]:
    return WORKERS_CHECK if check else WORKERS


def _nbytes(subject: Subject) -> int:
    """Return the bytes of the weights."""
    subject.fetch()
    model, _ = subject.build(subject.load()[0])
    return sum(int(array.nbytes) for array in model.storage.data)


_COUNTED = ("bsp, ring", "bsp, server", "ssp, S = 4", "asp", "local, K = 8", "gossip, ring", "gossip, random")

PARTS: Mapping[str, Callable[[bool, Path | None], Found]] = MappingProxyType(
    {"times": times, "servers": servers, "ranks": ranks, "heterogeneity": heterogeneity, "traffic": traffic}
)

SYNCHRONY = Benchmark(
    "python benchmarks/synchrony",
    "Synchronous, stale-synchronous, asynchronous, local and gossip training: accuracy against time and steps.",
    PARTS,
    TABLES,
    MISSED,
    Path(__file__).parent,
    ("ranks",),
    picture.PICTURES,
)
