"""The synchrony benchmark: its model beside closed forms and simulated ranks, crossings, factors, counts, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.synchrony import tables, targets
from benchmarks.synchrony.compare import compare_runs
from benchmarks.synchrony.counts import in_segment, per_step
from benchmarks.synchrony.curve import Evaluation, GoalReached, reach_goal, read, write
from benchmarks.synchrony.model import StepCosts, predict
from benchmarks.synchrony.modes import CHANCE, EQUAL, MODES, ONE, OWN, last_ones, stragglers
from benchmarks.synchrony.parts import SYNCHRONY
from benchmarks.synchrony.recipe import Recipe
from benchmarks.synchrony.simulated import SimulatedRun, simulate_run
from nnmpi.parallel.server.wire_format import HEADER_BYTES
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.sync import Sync

ROOT = Path(__file__).parents[2]
NBYTES = 4000


def _curve(*accuracies: float) -> str:
    return write([Evaluation(10.0 * i, 0.5 * i, 1.0, accuracy) for i, accuracy in enumerate(accuracies)])


def test_a_goal_is_reached_where_the_mean_of_five_evaluations_is() -> None:
    points = read(_curve(0.90, 0.92, 0.94, 0.96, 0.98, 1.00, 1.00))
    assert reach_goal(points, 0.95) == GoalReached(pytest.approx(25.0), pytest.approx(1.25))
    assert reach_goal(points, 0.94) == GoalReached(20.0, 1.0)  # from the first mean on


def test_one_lucky_evaluation_does_not_count() -> None:
    assert reach_goal(read(_curve(0.90, 0.90, 0.99, 0.90, 0.90, 0.90)), 0.93) is None
    assert reach_goal(read(_curve(0.99, 0.99)), 0.9) is None


def test_curves_are_written_and_read() -> None:
    points = [Evaluation(0.0, 0.0, 2.345, 0.1), Evaluation(12.0625, 1.2345678, 0.1, 0.9712)]
    assert read(write(points)) == [points[0], Evaluation(12.0625, 1.234568, 0.1, 0.9712)] and read("") == []


def test_slow_workers_are_written_as_the_option_has_them() -> None:
    assert Slowdown.parse(stragglers(ONE, 4)).factor(3, 0) == 3
    assert stragglers(EQUAL, 4) == last_ones(2, 4, 1.0) == ""
    assert Slowdown.parse(stragglers(CHANCE, 4)).stragglers[0].probability == 0.25
    slow = Slowdown.parse(last_ones(2, 4, 8.0))
    assert [slow.factor(rank, 0) for rank in range(4)] == [1, 1, 8, 8]


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_the_model_has_the_closed_forms(workers: int) -> None:
    equal, one = (StepCosts(workers, 1.0, NBYTES, slow=slow) for slow in (EQUAL, ONE))
    batches = 200
    assert predict(Sync(), one, batches) == pytest.approx(3 * batches)
    share = (workers - 1 + 1 / 3) / workers
    assert predict(Sync("asp"), one, batches) == pytest.approx(batches / share, rel=0.01)
    for bound in (0, 1, 16):
        expected = 3 * (batches - (bound + 1) * (workers - 1) / workers)
        assert predict(Sync("ssp", staleness=bound), one, batches) == pytest.approx(expected, abs=4)  # whole steps
    for sync in MODES.values():
        assert predict(sync, equal, batches) == pytest.approx(batches)


def test_who_is_slow_by_chance_is_waited_for_less_the_further_apart_all_may_be() -> None:
    costs, batches = StepCosts(16, 1.0, NBYTES, slow=CHANCE), 300
    bsp = predict(Sync(), costs, batches) / batches
    assert bsp == pytest.approx(1 + 2 * (1 - 0.75**16))
    found = [predict(Sync("ssp", staleness=bound), costs, batches) / batches for bound in (1, 4, 16)]
    asp = predict(Sync("asp"), costs, batches) / batches
    assert bsp > found[0] > found[1] > found[2] > asp == pytest.approx(1.5, rel=0.03)
    local = predict(Sync("local"), costs, 320) / 320
    assert asp < local < bsp


def test_messages_take_their_time() -> None:
    costs = StepCosts(4, 1.0, NBYTES, alpha_s=0.01, beta=1e-5)
    message, byte_s = 0.05, 0.04
    assert predict(Sync(), costs, 10) == pytest.approx(10 * (1 + 6 * 0.01 + 1.5 * byte_s))
    assert predict(Sync(servers=1), costs, 10) == pytest.approx(10 * (1 + 2 * 0.01 + 6 * byte_s))
    assert predict(Sync("gossip"), costs, 10) == pytest.approx(10 * (1 + 2 * message))
    assert predict(Sync("gossip", neighbours="random"), costs, 10) == pytest.approx(10 * (1 + message))
    assert predict(Sync("local"), costs, 16) == pytest.approx(16 + 2 * (6 * 0.01 + 1.5 * byte_s))


RECIPE = Recipe("digits", None, 0.8, hidden=16, batch=64, steps=22, every=2, warm=2)


@pytest.mark.parametrize("slow", [EQUAL, ONE])
@pytest.mark.parametrize("name", MODES)
def test_the_model_is_simulated_time(name: str, slow: str) -> None:
    sync = MODES[name]
    row = simulate_run(SimulatedRun(sync, 4, stragglers(slow, 4), RECIPE, 0.02, "alpha_us=50,gbit=10", observed=False))
    costs = StepCosts(4, 0.02, 4 * (64 * 16 + 16 + 16 * 10 + 10), 50e-6, 8e-10, slow)
    assert row["batches"] == 22
    # asp ends when the slow worker's last part is there, which the model of a rate does not know of; nor does it know
    # what begins and ends a segment, and what a synchronous step's report takes
    late = 0.06 if slow == ONE else 0.001
    assert 0 <= row["seconds"] - predict(sync, costs, row["batches"]) + 0.002 < late + 0.006


def test_a_run_is_seen_on_its_way() -> None:
    row = simulate_run(SimulatedRun(Sync("asp"), 4, "", RECIPE, 0.02, "", {"mode": "asp"}))
    points = read(row["curve"])
    batches = [point.batches for point in points]
    assert batches == sorted(batches) and batches[0] == 0 and batches[-1] == 22 and len(batches) == 1 + 11
    assert points[-1].accuracy == pytest.approx(row["accuracy"], abs=1e-4) and row["mode"] == "asp"
    assert points[0].loss > points[-1].loss


def test_counts_are_those_of_simulated_ranks() -> None:
    for sync in MODES.values():
        short = Recipe("digits", None, hidden=16, batch=64, steps=16, warm=2)
        row = simulate_run(SimulatedRun(sync, 4, "", short, 0.001, "", observed=False))
        nbytes = sum(array.nbytes for array in RECIPE.build(RECIPE.load()[0])[0].storage.data)
        expected = in_segment(sync, 4, nbytes, 16, row["distant"], HEADER_BYTES)
        assert expected is None or (row["messages"], row["bytes"]) == expected, sync


def test_counts_have_a_reply_at_the_start_and_headers() -> None:
    assert per_step(Sync("asp"), 4, NBYTES) == (6, 6 * NBYTES)
    assert per_step(Sync("asp", servers=3), 4, NBYTES) == (18, 6 * NBYTES)
    assert in_segment(Sync("asp"), 4, NBYTES, 10, 30, 128) == (63, 63 * (NBYTES + 128))
    assert in_segment(Sync(), 4, NBYTES, 10, 0, 128) is None
    assert in_segment(Sync("local"), 4, NBYTES, 16, 0, 128) == (48, 12 * NBYTES)


RISE = (0.1, 0.1, 0.6, 0.97, 0.97, 0.97, 0.97, 0.97)


def _times(**changes: Any) -> dict[str, Any]:
    settings = {"recipe": {"goal": 0.97, "dataset": "mnist"}, "pace_s": 0.05, "network": ""}
    rows = []
    for mode in MODES:
        row = {"mode": mode, "workers": 4, "slow": EQUAL, "curve": _curve(*RISE)}
        row |= {"staleness": {"mean": 0.0, "max": 0}, "accuracy": 0.98, "batches": 30.0, "seconds": 1.5}
        rows.append(row | (changes if mode == "asp" else {}))
    return {
        "settings": settings,
        "nbytes": NBYTES,
        "rows": rows,
        "seeds": [rows[0] | {"seed": 1}, rows[5] | {"seed": 1}],
    }


def test_a_gain_is_throughput_times_statistics() -> None:
    faster = write([Evaluation(12 * i, 0.3 * i, 1.0, accuracy) for i, accuracy in enumerate(RISE)])
    content = _times(curve=faster)
    asp = next(each for each in compare_runs(content) if each.row["mode"] == "asp")
    assert asp.sooner is not None and asp.throughput is not None and asp.statistics is not None
    assert asp.sooner == pytest.approx(5 / 3) == pytest.approx(asp.throughput * asp.statistics)
    assert asp.throughput == pytest.approx(2.0)
    assert "| asp | 60 | 1.50 | 1.67 | 2.00 | 0.83 | 25.00 | 50.00 | 2.000 | 0 | 98.00 |" in tables.times(content)
    last = "Batches with other seeds (1), 4 equal workers: bsp, ring: 50; asp: 60."
    assert tables.times(content).endswith(last)
    assert targets.missed_times(content) == ["4 workers, equal, asp: model / measured 2.000"]


def test_a_run_that_does_not_get_there_has_a_speed_all_the_same() -> None:
    assert targets.missed_times(_times()) == []
    content = _times(curve=_curve(0.1, 0.5, 0.6))
    assert "| asp | - | - | - | 1.00 | - | 50.00 |" in tables.times(content)
    for row in content["rows"]:
        row["slow"] = ONE
    late = f"4 workers, {ONE}: asp reaches the goal not sooner than bsp through a server"
    assert late in targets.missed_times(content)


def _heterogeneity(fall: float, largest: tuple[int, int] = (3, 9)) -> dict[str, Any]:
    rows = []
    for recipe in ("plain SGD", "momentum 0.8"):
        for workers, factor, accuracy, most in ((4, 1.0, 0.9 - fall, largest[0]), (4, 8.0, 0.9, largest[1])):
            row = {"recipe": recipe, "mode": "asp", "workers": workers, "factor": factor, "accuracy": accuracy}
            rows += [row | {"loss": 0.1, "staleness": {"mean": 3.0, "max": most}} for _ in range(2)]
    for factor, accuracy in ((1.0, 0.9), (8.0, 0.9 - fall)):
        row = {"recipe": OWN, "mode": "asp", "workers": 4, "factor": factor, "accuracy": accuracy, "loss": 0.1}
        rows += [row | {"staleness": {"mean": 3.0, "max": largest[factor > 1]}} for _ in range(2)]
    few = {"recipe": "momentum 0.8", "mode": "asp", "workers": 1, "factor": 1.0, "accuracy": 0.9, "loss": 0.1}
    rows += [few | {"staleness": {"mean": 0.0, "max": 0}} for _ in range(2)]
    return {"settings": {"recipe": {"dataset": "mnist"}, "workers": 4, "slow_ones": 1}, "rows": rows}


def test_staleness_is_judged() -> None:
    assert targets.missed_heterogeneity(_heterogeneity(0.05)) == []
    assert "| momentum 0.8 | asp | 4 | 8 | 90.00 +- 0.00 | 0.1000 +- 0.0000 | 3.0 (9) |" in tables.heterogeneity(
        _heterogeneity(0.05)
    )
    flat = targets.missed_heterogeneity(_heterogeneity(0.0))
    assert flat == [
        "momentum 0.8: with the workers accuracy falls by 0.00%, spread 0.00%",
        "own classes: accuracy by factor ['90.00%', '90.00%'], spread 0.00%",
    ]
    assert targets.missed_heterogeneity(_heterogeneity(0.05, (9, 3)))[0] == "plain SGD: the largest staleness is [9, 3]"


def test_the_readme_has_a_place_for_every_table() -> None:
    text = (ROOT / "benchmarks" / "synchrony" / "README.md").read_text()
    assert all(f"<!-- {name} -->" in text for name in SYNCHRONY.parts)
