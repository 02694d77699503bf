"""The tables of the README and the screen, from what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.harness.parts import Content
from benchmarks.harness.tables import Cell, Columns, number, render
from benchmarks.synchrony.compare import compare_runs, groups, message_costs, select
from benchmarks.synchrony.counts import in_segment, per_step
from benchmarks.synchrony.curve import GoalReached, reach_goal, read
from benchmarks.synchrony.modes import CHANCE, EQUAL, FACTOR, MODES, ONE, PROBABILITY, REFERENCE
from nnmpi.parallel.server.wire_format import HEADER_BYTES

WORDS = {
    EQUAL: "equal workers",
    ONE: f"one of them {FACTOR:g} times slower for good",
    CHANCE: f"each of them {FACTOR:g} times slower in a step with probability {PROBABILITY:g}",
}


def times(content: Content) -> str:
    """Return the time to the goal beside the model, one table for each number of workers and kind of slowness."""
    goal = f"{100 * content['settings']['recipe']['goal']:g} %"
    columns: Columns = (
        ("mode", lambda run: run.row["mode"]),
        (f"batches to {goal}", lambda run: number(run.reached and run.reached.batches, ".0f")),
        (f"time to {goal}, s", lambda run: number(run.reached and run.reached.seconds)),
        ("times sooner than bsp", lambda run: number(run.sooner)),
        ("= throughput", lambda run: number(run.throughput)),
        ("x statistics", lambda run: number(run.statistics)),
        ("ms per batch", lambda run: f"{1e3 * run.batch_s:.2f}"),
        ("by the model", lambda run: f"{1e3 * run.model_s:.2f}"),
        ("model / measured", lambda run: f"{run.model_s / run.batch_s:.3f}"),
        ("staleness, mean (max)", lambda run: stale(run.row["staleness"])),
        ("final accuracy, %", lambda run: f"{100 * run.row['accuracy']:.2f}"),
    )
    parts = []
    runs = compare_runs(content)
    for workers, slow in groups(content):
        parts.append(f"**{workers} workers, {WORDS[slow]}**\n\n{render(columns, select(runs, workers, slow))}")
    return "\n\n".join([*parts, _seeds(content)])


def _seeds(content: Content) -> str:
    """Return in words how much chance there is in the time to the goal."""
    goal, rows = content["settings"]["recipe"]["goal"], content["seeds"]
    parts = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        found = [reach_goal(read(row["curve"]), goal) for row in rows if row["mode"] == mode]
        parts.append(f"{mode}: " + ", ".join(number(each and each.batches, ".0f") for each in found))
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(row["seed"] for row in rows))
    return f"Batches with other seeds ({seeds}), {rows[0]['workers']} equal workers: {'; '.join(parts)}."


def servers(content: Content) -> str:
    """Return the time of a step through several servers."""

    def formula(row: Mapping[str, Any]) -> str:
        known = row["mode"] == "bsp" and row["slow"] == EQUAL
        return f"{1e3 * server_step_s(content, row):.2f}" if known else "-"

    columns = (
        ("mode", "mode"),
        ("workers", lambda row: WORDS[row["slow"]]),
        ("servers", "servers"),
        ("ms per batch", lambda row: f"{1e3 * row['seconds'] / row['batches']:.2f}"),
        ("pace + formula", formula),
        ("messages per batch", lambda row: f"{row['messages'] / row['batches']:.1f}"),
        ("MiB per batch", lambda row: f"{row['bytes'] / row['batches'] / 2**20:.2f}"),
    )
    return render(columns, content["rows"])


def server_step_s(content: Content, row: Mapping[str, Any]) -> float:
    """Return by the formula how long a synchronous step of equal workers through servers takes.

    Args:
        content: of the part.
        row: one of its rows, with "workers" and "servers".
    """
    messages, nbytes = message_costs(content), content["nbytes"]
    sent = 2 * (row["workers"] - 1) * nbytes / row["servers"]
    return float(content["settings"]["pace_s"] + 2 * messages.alpha_s + sent * messages.beta(nbytes))


@dataclass(frozen=True)
class RanksAndSimulation:
    """One mode on ranks of MPI beside simulated ones: batches and seconds to the goal, and seconds of a batch.

    Attributes:
        mode: its name.
        measured, predicted: on ranks of MPI and on simulated ones; None where the goal was not reached.
        batch_s, predicted_batch_s: of the whole run.
    """

    mode: str
    measured: GoalReached | None
    predicted: GoalReached | None
    batch_s: float
    predicted_batch_s: float


def ranks(content: Content) -> str:
    """Return measured times on ranks of MPI beside those on simulated ones."""
    parts = []
    for slow in dict.fromkeys(row["slow"] for row in content["predicted"]):
        runs = [_beside(content, row) for row in content["predicted"] if row["slow"] == slow]
        bsp = next(run for run in runs if run.mode == REFERENCE)
        parts.append(f"**4 ranks, {WORDS[slow]}**\n\n{render(_ranks_columns(content, bsp), runs)}")
    return "\n\n".join(parts)


def _beside(content: Content, simulated: Mapping[str, Any]) -> RanksAndSimulation:
    """Return the runs on ranks of MPI of the mode and slowness of a simulated one, beside it."""
    mode, slow = simulated["mode"], simulated["slow"]
    own = [row for row in content["rows"] if (row["mode"], row["slow"]) == (mode, slow)]
    return RanksAndSimulation(
        mode,
        reached_on_ranks(content, mode, slow),
        reach_goal(read(simulated["curve"]), content["settings"]["recipe"]["goal"]),
        median(row["seconds"] / row["steps"] for row in own),
        simulated["seconds"] / simulated["batches"],
    )


def _ranks_columns(content: Content, bsp: RanksAndSimulation) -> Columns:
    goal = f"{100 * content['settings']['recipe']['goal']:g} %"

    def seconds(one: GoalReached | None) -> str:
        return number(one and one.seconds)

    def ratio(one: GoalReached | None, other: GoalReached | None) -> str:
        return number(one.seconds / other.seconds if one and other else None)

    return (
        ("mode", lambda run: run.mode),
        (f"batches to {goal}", lambda run: number(run.measured and run.measured.batches, ".0f")),
        ("predicted", lambda run: number(run.predicted and run.predicted.batches, ".0f")),
        (f"seconds to {goal}", lambda run: seconds(run.measured)),
        ("predicted", lambda run: seconds(run.predicted)),
        ("measured / predicted", lambda run: ratio(run.measured, run.predicted)),
        ("times sooner than bsp", lambda run: ratio(bsp.measured, run.measured)),
        ("predicted", lambda run: ratio(bsp.predicted, run.predicted)),
        ("ms per batch", lambda run: f"{1e3 * run.batch_s:.1f}"),
        ("predicted", lambda run: f"{1e3 * run.predicted_batch_s:.1f}"),
    )


def reached_on_ranks(content: Content, mode: str, slow: str) -> GoalReached | None:
    """Return batches and seconds to the goal, medians over the repeats; None if not all got there.

    Args:
        content: of the part "ranks".
        mode: a name of `modes.MODES`.
        slow: who was slow; see `modes`.
    """
    goal = content["settings"]["recipe"]["goal"]
    own = [row for row in content["rows"] if (row["mode"], row["slow"]) == (mode, slow)]
    found = [reached for row in own if (reached := reach_goal(read(row["curve"]), goal)) is not None]
    if not found or len(found) < len(own):
        return None
    return GoalReached(median(each.batches for each in found), median(each.seconds for each in found))


def heterogeneity(content: Content) -> str:
    """Return what asp learns while some workers get slower, and while there are more of them."""
    labels = ("recipe", "mode", "workers", "factor")
    kinds = dict.fromkeys(tuple(row[label] for label in labels) for row in content["rows"])

    def both(runs: Sequence[Mapping[str, Any]], name: str, scale: float, form: str) -> str:
        values = [scale * row[name] for row in runs]
        return f"{fmean(values):{form}} +- {spread(values):{form}}"

    def staleness(runs: Sequence[Mapping[str, Any]]) -> str:
        every = [row["staleness"] for row in runs]
        return stale({"mean": fmean(each["mean"] for each in every), "max": max(each["max"] for each in every)})

    columns: Columns = (
        ("recipe", lambda runs: runs[0]["recipe"]),
        ("mode", lambda runs: runs[0]["mode"]),
        ("workers", lambda runs: runs[0]["workers"]),
        ("factor", lambda runs: f"{runs[0]['factor']:g}"),
        ("test accuracy, %", lambda runs: both(runs, "accuracy", 100, ".2f")),
        ("test loss", lambda runs: both(runs, "loss", 1, ".4f")),
        ("staleness, mean (max)", staleness),
    )
    return render(columns, [pick(content, **dict(zip(labels, kind, strict=True))) for kind in kinds])


def pick(content: Content, **labels: Any) -> list[Mapping[str, Any]]:
    """Return the runs with these labels."""
    return [row for row in content["rows"] if all(row[name] == value for name, value in labels.items())]


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation."""
    return stdev(values) if len(values) > 1 else 0.0


def traffic(content: Content) -> str:
    """Return messages and bytes of a step beside the formula, and of the segment."""
    rows = []
    for simulated, measured in zip(content["simulated"], content["rows"], strict=True):
        sync, where = MODES[simulated["mode"]], (simulated["workers"], content["nbytes"])
        rows.append(
            {
                "mode": simulated["mode"],
                "step": per_step(sync, *where),
                "simulated": (simulated["messages"], simulated["bytes"]),
                "expected": in_segment(sync, *where, measured["steps"], simulated["distant"], HEADER_BYTES),
                "measured": (measured["messages"], measured["bytes"]),
                "counted": in_segment(sync, *where, measured["steps"], measured["distant"], HEADER_BYTES),
                "unit": "" if sync.asynchronous else " calls",
            }
        )
    columns: list[tuple[str, Cell]] = [("mode", "mode")]
    for which, (what, scale) in enumerate((("messages", 1), ("MiB", 2**20))):

        def of(name: str, which: int = which, scale: int = scale) -> Cell:
            return lambda row: number(row[name] and row[name][which] / scale, ".5g")

        columns += [
            (f"{what} per step", lambda row, which=which, scale=scale: f"{row['step'][which] / scale:.4g}"),
            ("segment, simulated", of("simulated") if which else lambda row: f"{row['simulated'][0]:.5g}{row['unit']}"),
            ("formula", of("expected")),
            ("over MPI", of("measured") if which else lambda row: f"{row['measured'][0]:.5g}{row['unit']}"),
            ("formula", of("counted")),
        ]
    return render(columns, rows)


def stale(lag: Mapping[str, float]) -> str:
    """Return mean and largest staleness in words."""
    return f"{lag['mean']:.1f} ({lag['max']:g})" if lag["max"] else "0"
