"""The tables of the README and the screen, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev
from types import MappingProxyType
from typing import Any

from benchmarks.pipeline.readme import table
from benchmarks.synchrony.counts import over_mpi, per_step, played
from benchmarks.synchrony.curve import cross, read
from benchmarks.synchrony.modes import CHANCE, EQUAL, FACTOR, MODES, ONE, PROBABILITY, REFERENCE
from benchmarks.synchrony.split import Content, Split, groups, select, speed, split_times
from nnmpi.parallel.parcel import HEADER_BYTES

WORDS = {
    EQUAL: "equal workers",
    ONE: f"one of them {FACTOR:g} times slower for good",
    CHANCE: f"each of them {FACTOR:g} times slower in a step with probability {PROBABILITY:g}",
}


def times(content: Content) -> str:
    """Return the time to the goal beside the model, one table for each number of workers and kind of slowness."""
    goal = content["settings"]["subject"]["goal"]
    head = f"mode | batches to {100 * goal:g} % | time to {100 * goal:g} %, s | times sooner than bsp | = throughput "
    head += (
        "| x statistics | ms per batch | by the model | model / measured | staleness, mean (max) | final accuracy, %"
    )
    parts = []
    splits = split_times(content)
    for workers, slow in groups(content):
        shown = table(head, [_time(each) for each in select(splits, workers, slow)])
        parts.append(f"**{workers} workers, {WORDS[slow]}**\n\n{shown}")
    return "\n\n".join([*parts, _seeds(content)])


def _seeds(content: Content) -> str:
    """Return in words how much chance there is in the time to the goal."""
    goal, rows = content["settings"]["subject"]["goal"], content["seeds"]
    parts = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        found = [cross(read(row["curve"]), goal) for row in rows if row["mode"] == mode]
        parts.append(f"{mode}: " + ", ".join(_whole(each and each.batches) for each in found))
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(row["seed"] for row in rows))
    return f"Batches with other seeds ({seeds}), {rows[0]['workers']} equal workers: {'; '.join(parts)}."


def _time(each: Split) -> str:
    row = each.row
    reached = ["-", "-"] if each.reached is None else [f"{each.reached.batches:.0f}", f"{each.reached.seconds:.2f}"]
    cells = [row["mode"], *reached]
    cells += [_factor(each.sooner), _factor(each.throughput), _factor(each.statistics)]
    cells += [f"{1e3 * each.batch_s:.2f}", f"{1e3 * each.model_s:.2f}", f"{each.model_s / each.batch_s:.3f}"]
    return " | ".join([*cells, stale(row["staleness"]), f"{100 * row['accuracy']:.2f}"])


def servers(content: Content) -> str:
    """Return the time of a step through several servers."""
    links, nbytes = speed(content), content["nbytes"]
    rows = []
    for row in content["rows"]:
        others = row["workers"] - 1
        step_s, taught = row["seconds"] / row["batches"], "-"
        if row["mode"] == "bsp" and row["slow"] == EQUAL:
            formula = 2 * links.alpha_s + 2 * others * nbytes / row["servers"] * links.beta_s_per_byte
            taught = f"{1e3 * (content['settings']['pace_s'] + formula):.2f}"
        counts = [f"{row['messages'] / row['batches']:.1f}", f"{row['bytes'] / row['batches'] / 2**20:.2f}"]
        rows.append(
            " | ".join([row["mode"], WORDS[row["slow"]], str(row["servers"]), f"{1e3 * step_s:.2f}", taught, *counts])
        )
    return table("mode | workers | servers | ms per batch | pace + formula | messages per batch | MiB per batch", rows)


def ranks(content: Content) -> str:
    """Return measured times on ranks beside virtual time."""
    goal = content["settings"]["subject"]["goal"]
    head = f"mode | batches to {100 * goal:g} % | predicted | seconds to {100 * goal:g} % | predicted | measured / "
    head += "predicted | times sooner than bsp | predicted | ms per batch | predicted"
    parts = []
    for slow in dict.fromkeys(row["slow"] for row in content["predicted"]):
        reference: tuple[float | None, float | None] = (None, None)
        lines = []
        for virtual in content["predicted"]:
            if virtual["slow"] != slow:
                continue
            measured, predicted = reached_on_ranks(content, virtual["mode"], slow), cross(read(virtual["curve"]), goal)
            pair = (measured[1] if measured else None, predicted.seconds if predicted else None)
            if virtual["mode"] == REFERENCE:
                reference = pair
            own = [row for row in content["rows"] if (row["mode"], row["slow"]) == (virtual["mode"], slow)]
            batch_s = median(row["seconds"] / row["steps"] for row in own)
            virtual_s = virtual["seconds"] / virtual["batches"]
            cells = [virtual["mode"], _whole(measured and measured[0]), _whole(predicted and predicted.batches)]
            cells += [_seconds(pair[0]), _seconds(pair[1]), _ratio(*pair)]
            cells += [_ratio(reference[0], pair[0]), _ratio(reference[1], pair[1])]
            lines.append(" | ".join([*cells, f"{1e3 * batch_s:.1f}", f"{1e3 * virtual_s:.1f}"]))
        parts.append(f"**4 ranks, {WORDS[slow]}**\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def reached_on_ranks(content: Content, mode: str, slow: str) -> tuple[float, float] | None:
    """Return batches and seconds to the goal, medians over the repeats; None if not all got there."""
    goal = content["settings"]["subject"]["goal"]
    own = [row for row in content["rows"] if (row["mode"], row["slow"]) == (mode, slow)]
    found = [crossing for row in own if (crossing := cross(read(row["curve"]), goal)) is not None]
    if not found or len(found) < len(own):
        return None
    return median(each.batches for each in found), median(each.seconds for each in found)


def heterogeneity(content: Content) -> str:
    """Return what asp learns while some workers get slower, and while there are more of them."""
    rows = []
    labels = ("recipe", "mode", "workers", "factor")
    for found in dict.fromkeys(tuple(row[label] for label in labels) for row in content["rows"]):
        own = pick(content, **dict(zip(labels, found, strict=True)))
        accuracies, losses = [row["accuracy"] for row in own], [row["loss"] for row in own]
        stales = [row["staleness"] for row in own]
        lag = {"mean": fmean(each["mean"] for each in stales), "max": max(each["max"] for each in stales)}
        cells = [found[0], found[1], str(found[2]), f"{found[3]:g}"]
        cells += [f"{100 * fmean(accuracies):.2f} +- {100 * spread(accuracies):.2f}"]
        rows.append(" | ".join([*cells, f"{fmean(losses):.4f} +- {spread(losses):.4f}", stale(lag)]))
    return table("recipe | mode | workers | factor | test accuracy, % | test loss | staleness, mean (max)", rows)


def pick(content: Content, **labels: Any) -> list[Mapping[str, Any]]:
    """Return the runs with these labels."""
    return [row for row in content["rows"] if all(row[name] == value for name, value in labels.items())]


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation."""
    return stdev(values) if len(values) > 1 else 0.0


def traffic(content: Content) -> str:
    """Return messages and bytes of a step beside the formula, and of the segment."""
    nbytes, rows = content["nbytes"], []
    for virtual, measured in zip(content["played"], content["rows"], strict=True):
        sync, workers, steps = MODES[virtual["mode"]], virtual["workers"], measured["steps"]
        counted = over_mpi(sync, workers, nbytes, steps, measured.get("distant", 0), HEADER_BYTES)
        expected = played(sync, workers, nbytes, steps, virtual["distant"])
        calls = "" if sync.relaxed else " calls"
        cells = [virtual["mode"]]
        for number, (what, scale) in enumerate((("messages", 1), ("bytes", 2**20))):
            step = per_step(sync, workers, nbytes)[number] / scale
            cells += [f"{step:.4g}", f"{virtual[what] / scale:.5g}", f"{expected[number] / scale:.5g}"]
            cells += [f"{measured[what] / scale:.5g}{'' if number else calls}"]
            cells += ["-" if counted is None else f"{counted[number] / scale:.5g}"]
        rows.append(" | ".join(cells))
    head = "mode | messages per step | segment in virtual time | formula | over MPI | formula "
    return table(head + "| MiB per step | segment in virtual time | formula | over MPI | formula", rows)


def stale(lag: Mapping[str, float]) -> str:
    """Return mean and largest staleness in words."""
    return f"{lag['mean']:.1f} ({lag['max']:g})" if lag["max"] else "0"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ratio(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else f"{one / other:.2f}"


TABLES: Mapping[str, Callable[[Content], str]] = MappingProxyType(
    {"times": times, "servers": servers, "ranks": ranks, "heterogeneity": heterogeneity, "traffic": traffic}
)
