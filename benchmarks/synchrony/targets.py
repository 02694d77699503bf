"""What was to be shown, and whether the numbers show it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isclose
from statistics import fmean

from benchmarks.harness.parts import Content
from benchmarks.synchrony.compare import compare_runs, groups, select
from benchmarks.synchrony.counts import in_segment
from benchmarks.synchrony.curve import reach_goal, read
from benchmarks.synchrony.modes import EQUAL, MODES, OWN, WITH_MOMENTUM
from benchmarks.synchrony.tables import pick, reached_on_ranks, server_step_s, spread
from nnmpi.parallel.server.wire_format import HEADER_BYTES

OFF = 0.10  # of the model from simulated time
OFF_RANKS = 0.25  # of the time on ranks of MPI from simulated time
OFF_MEAN = 0.05  # of the mean staleness from N - 1, as segments begin and end in step
FULL = "mnist"  # what is judged by what was learnt; a reduced run's data are too few


def missed_times(content: Content) -> list[str]:
    """Return in words what the model does not explain, and who should have been sooner than the synchronous run."""
    found = []
    runs = compare_runs(content)
    for each in runs:
        ratio = each.model_s / each.batch_s
        if abs(ratio - 1) > OFF:
            row = each.row
            found.append(f"{row['workers']} workers, {row['slow']}, {row['mode']}: model / measured {ratio:.3f}")
    for workers, slow in groups(content):
        own = {each.row["mode"]: each for each in select(runs, workers, slow)}
        if slow == EQUAL:
            continue
        served = own["bsp, server"].reached  # it sends what the others send, and differs in waiting alone
        for mode in ("ssp, S = 16", "asp"):
            reached = own[mode].reached
            if reached is None or served is None or reached.seconds >= served.seconds:
                found.append(f"{workers} workers, {slow}: {mode} reaches the goal not sooner than bsp through a server")
    return found


def missed_servers(content: Content) -> list[str]:
    """Return in words where more servers do not make a synchronous step shorter, or it is not the formula's."""
    found = []
    for row in content["rows"]:
        if row["mode"] == "bsp" and row["slow"] == EQUAL:
            formula, measured = server_step_s(content, row), row["seconds"] / row["batches"]
            if abs(measured / formula - 1) > OFF:
                found.append(f"bsp, {row['servers']} servers: {1e3 * measured:.2f} ms, {1e3 * formula:.2f}")
    return found


def missed_ranks(content: Content) -> list[str]:
    """Return in words where ranks of MPI are not as fast as simulated ones."""
    found = []
    goal = content["settings"]["recipe"]["goal"]
    for simulated in content["predicted"]:
        predicted = reach_goal(read(simulated["curve"]), goal)
        measured = reached_on_ranks(content, simulated["mode"], simulated["slow"])
        what = f"{simulated['mode']}, {simulated['slow']}"
        if predicted is None or measured is None:
            found.append(f"{what}: the goal was not reached")
        elif abs(measured.seconds / predicted.seconds - 1) > OFF_RANKS:
            found.append(f"{what}: measured / predicted {measured.seconds / predicted.seconds:.2f}")
    return found


def missed_heterogeneity(content: Content) -> list[str]:
    """Return in words where staleness is not as it should be, or does not show in what is learnt.

    The largest grows with the factor, while the mean stays at N - 1: so many other gradients are under way while one is
    computed, whoever is slow. What is learnt falls with the mean, that is with the workers; and with the factor where
    every worker has classes of its own.
    """
    found = []
    workers = content["settings"]["workers"]
    slowed = [row for row in content["rows"] if row["workers"] == workers]
    factors = sorted({row["factor"] for row in slowed})
    for recipe in dict.fromkeys(row["recipe"] for row in slowed):
        lags = [
            [r["staleness"] for r in pick(content, recipe=recipe, mode="asp", workers=workers, factor=f)]
            for f in factors
        ]
        largest = [max(lag["max"] for lag in each) for each in lags]
        if largest != sorted(set(largest)):
            found.append(f"{recipe}: the largest staleness is {largest}")
        means = [fmean(lag["mean"] for lag in each) for each in lags]
        if any(abs(mean / (workers - 1) - 1) > OFF_MEAN for mean in means):
            found.append(f"{recipe}: the mean staleness is {means}, not {workers - 1}")
    if content["settings"]["recipe"]["dataset"] == FULL:
        counts = sorted({row["workers"] for row in content["rows"]})
        few, many = (
            pick(content, recipe=WITH_MOMENTUM, mode="asp", workers=counts[end], factor=1.0) for end in (0, -1)
        )
        fall = fmean(row["accuracy"] for row in few) - fmean(row["accuracy"] for row in many)
        noise = max(spread([row["accuracy"] for row in rows]) for rows in (few, many))
        if fall <= 2 * noise:
            found.append(f"{WITH_MOMENTUM}: with the workers accuracy falls by {fall:.2%}, spread {noise:.2%}")
        found += _not_falling(content, workers, factors)
    return found


def _not_falling(content: Content, workers: int, factors: Sequence[float]) -> list[str]:
    """Return in words where asp with classes of workers' own does not learn less with every factor."""
    runs = [pick(content, recipe=OWN, mode="asp", workers=workers, factor=factor) for factor in factors]
    means = [fmean(row["accuracy"] for row in own) for own in runs]
    noise = max(spread([row["accuracy"] for row in own]) for own in runs)
    falls = all(after < before for before, after in pairwise(means)) and means[0] - means[-1] > 2 * noise
    return [] if falls else [f"{OWN}: accuracy by factor {[f'{mean:.2%}' for mean in means]}, spread {noise:.2%}"]


def missed_traffic(content: Content) -> list[str]:
    """Return in words which counts are not those of the formula."""
    found = []
    nbytes = content["nbytes"]
    for simulated, measured in zip(content["simulated"], content["rows"], strict=True):
        sync, where = MODES[simulated["mode"]], (simulated["workers"], nbytes, measured["steps"])
        for name, row in (("simulated", simulated), ("MPI", measured)):
            formula = in_segment(sync, *where, row["distant"], HEADER_BYTES)
            for number, what in enumerate(("messages", "bytes")):
                if formula is not None and not isclose(row[what], formula[number], rel_tol=1e-9):
                    found.append(f"{simulated['mode']}, {name}: {row[what]} {what}, formula {formula[number]:.0f}")
    return found
