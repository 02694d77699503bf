"""Why a run reaches its goal sooner than another: more gradients per second, or fewer gradients needed.

times sooner = (seconds of the reference / seconds)
             = throughput  (seconds per batch of the reference / seconds per batch)
             x statistics  (batches of the reference / batches)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.parts import Content
from benchmarks.synchrony.curve import GoalReached, reach_goal, read
from benchmarks.synchrony.model import StepCosts, predict
from benchmarks.synchrony.modes import MODES, REFERENCE
from nnmpi.comm.machine import Curve, parse_network


@dataclass(frozen=True)
class Comparison:
    """A run beside the reference of the same workers.

    Attributes:
        row: what was measured.
        reached: where the goal was reached, or None.
        batch_s: seconds of a batch's worth of gradients, up to the goal (of the whole run if it was not reached).
        model_s: the same by the model.
        sooner, throughput, statistics: the factors; None where the goal was not reached.
    """

    row: Mapping[str, Any]
    reached: GoalReached | None
    batch_s: float
    model_s: float
    sooner: float | None = None
    throughput: float | None = None
    statistics: float | None = None


def compare_runs(content: Content) -> list[Comparison]:
    """Return all runs beside their references, in their order."""
    found: list[Comparison] = []
    references: dict[tuple[int, str], Comparison] = {}
    for row in content["rows"]:
        one = _read(content, row)
        where = (row["workers"], row["slow"])
        if row["mode"] == REFERENCE:
            references[where] = one
        found.append(_compare(one, references[where]))
    return found


def select(splits: Sequence[Comparison], workers: int, slow: str) -> list[Comparison]:
    """Return those of so many workers and one kind of slowness.

    Args:
        runs: of several numbers of workers and kinds of slowness.
        workers: how many.
        slow: one of `modes.SLOW`.
    """
    return [each for each in splits if (each.row["workers"], each.row["slow"]) == (workers, slow)]


def groups(content: Content) -> list[tuple[int, str]]:
    """Return which numbers of workers and kinds of slowness there are, in order."""
    return list(dict.fromkeys((row["workers"], row["slow"]) for row in content["rows"]))


def message_costs(content: Content) -> Curve:
    """Return what a message costs in a part's runs."""
    network = content["settings"]["network"]
    return parse_network(network, 1).inside.one_way if network else Curve.line(0.0, 0.0)


def _read(content: Content, row: Mapping[str, Any]) -> Comparison:
    reached = reach_goal(read(row["curve"]), content["settings"]["recipe"]["goal"])
    batches, seconds = reached or (row["batches"], row["seconds"])
    messages, nbytes = message_costs(content), content["nbytes"]
    costs = StepCosts(
        row["workers"],
        content["settings"]["pace_s"],
        nbytes,
        messages.alpha_s,
        messages.beta(nbytes),
        row["slow"],
    )
    return Comparison(row, reached, seconds / batches, predict(MODES[row["mode"]], costs, batches) / batches)


def _compare(one: Comparison, reference: Comparison) -> Comparison:
    throughput = reference.batch_s / one.batch_s
    sooner = statistics = None
    if one.reached is not None and reference.reached is not None:
        sooner = reference.reached.seconds / one.reached.seconds
        statistics = reference.reached.batches / one.reached.batches
    return Comparison(one.row, one.reached, one.batch_s, one.model_s, sooner, throughput, statistics)
