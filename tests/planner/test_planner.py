"""The planner: prices add up, the search finds what pricing every layout finds, bytes are the ledger's."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Curve, Link, Machine, blocks
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.layout import Layout
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.errors import LayoutError, UsageError
from nnmpi.memory.ledger import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE
from nnmpi.memory.plan import LayerCost
from nnmpi.models.gpt import gpt
from nnmpi.models.mlp import mlp
from nnmpi.nn.chain import ModelPart, open_chain
from nnmpi.nn.module import Module
from nnmpi.optim.updates import Adam
from nnmpi.planner import profile as profiles
from nnmpi.planner.network import PRESETS, PlannedNetwork, find_network
from nnmpi.planner.price import Pricer
from nnmpi.planner.profile import (
    Profile,
    StepCost,
    Workload,
    between,
    load_profile,
    ready_worker,
    row_counts,
    shares_of,
)
from nnmpi.planner.report import describe, options
from nnmpi.planner.search import plan
from nnmpi.planner.shapes import ModelShapes
from nnmpi.planner.space import Candidate, candidates

CONTEXT, TOKENS = 8, 12


def build() -> Module:
    return gpt(TOKENS, CONTEXT, features=16, layers=4, heads=4)


def workload(
    batch_size: int = 16, make: Callable[[], Module] = build, samples: Dataset | None = None, **more: Any
) -> Workload:
    drawn = np.random.default_rng(0).integers(0, TOKENS, (batch_size, CONTEXT + 1))
    return Workload(
        build=make,
        optimizer=Adam,
        losses=lambda where: {},
        samples=samples or Dataset("tokens", drawn[:, :-1], drawn[:, 1:], TOKENS),
        batch_size=batch_size,
        state_arrays=2,
        **more,
    )


def profile(ranks: int, batch_size: int = 16) -> Profile:
    """Return times that nobody has measured: a row costs what a layer's parameters say."""
    model = build()
    elements = [sum(p.size for p in ModelPart(model, [layer]).parameters()) for layer in open_chain(model)]
    layers, steps = {}, {}
    for rows in row_counts(batch_size, ranks):
        each = [1e-6 + 1e-9 * rows * (100 + n) * (1 + i % 3) for i, n in enumerate(elements)]
        layers[rows] = tuple(
            LayerCost(
                *(str(i), 64 * rows, 0, 500 * rows, False, False, third, third, 2 * third),
                input_s=third,
                elements=n,
            )
            for i, (third, n) in enumerate(zip([seconds / 3 for seconds in each], elements, strict=True))
        )
        seconds = sum(each)
        steps[rows] = StepCost(seconds=seconds, eager_s=seconds, update_s=1e-4, activations=500 * rows * len(each))
    shared = {
        (tp, sp): {
            rows: replace(one, seconds=both, eager_s=both, exchanges=(("all-reduce", 512, 9),))
            for rows, one in steps.items()
            for both in [one.seconds / (tp * sp) + 2e-5]
        }
        for tp, sp in shares_of(ranks)
    }
    return Profile(facts={"made": "up"}, steps={(1, 1): steps, **shared}, layers=layers)


def network(ranks: int, per_node: int) -> PlannedNetwork:
    nodes = None if per_node >= ranks else blocks(ranks, per_node)
    machine = Machine(Link.line(1e-6, 1e-10), Link.line(2e-5, 1e-9), nodes, Curve.line(0.0, 1e-10))
    return PlannedNetwork("made up", machine, ranks)


@cache
def pricer(ranks: int, per_node: int, name: str = "", factor: float = 1.0) -> Pricer:
    """Return prices of a made-up machine, on which one field of the layers or steps is so many times as much."""

    def more(record: Any) -> Any:
        return replace(record, **{name: factor * getattr(record, name)}) if hasattr(record, name) else record

    work, times = workload(), profile(ranks)
    steps = {share: {rows: more(cost) for rows, cost in by.items()} for share, by in times.steps.items()}
    layers = {rows: tuple(map(more, found)) for rows, found in times.layers.items()}
    times = replace(times, steps=steps, layers=layers)
    return Pricer(work, times, network(ranks, per_node), ModelShapes(work, times, numpy_backend()))


def layouts(one: Pricer) -> list[Candidate]:
    net = one.network
    shares, several = list(one.profile.steps), 1 < len(set(net.nodes)) < net.ranks
    return candidates(net.ranks, one.workload.batch_size, shares, one.layers, net.on_one_node, several, False)[0]


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (4, 2)])
def test_the_search_finds_what_pricing_all_layouts_finds(ranks: int, per_node: int) -> None:
    """And no price is below its bound."""
    one = pricer(ranks, per_node)
    prices = {each: one.price(each) for each in layouts(one)}
    for each, price in prices.items():
        assert one.price(each, simulated=False).seconds <= price.seconds * (1 + 1e-12)
    order = sorted(prices, key=lambda each: (prices[each].seconds, prices[each].bytes, each))
    for kept in (1, 3, 10):
        found = plan(one, kept=kept)
        seconds = [prices[each].seconds for each in order[:kept]]
        assert [each.price.seconds for each in found.best] == seconds
        assert found.priced < len(prices) == found.looked_at
    firsts = {each.axes: prices[each].seconds for each in reversed(order)}
    found = plan(one, kept=3, kind=lambda each: each.axes)
    assert [each.price.seconds for each in found.best] == sorted(firsts.values())[:3]
    assert found.replicas is not None
    assert found.replicas.price.seconds == min(s.seconds for each, s in prices.items() if each.dp == ranks)


STAGES, REPLICAS = Candidate(pp=4, microbatches=4), Candidate(dp=4, allreduce="ring")
HALVES, SHARED = replace(STAGES, schedule="zero-bubble"), Candidate(dp=2, tp=2, allreduce="ring")


@pytest.mark.parametrize(
    ("field", "dearer", "unchanged"),
    [
        ("keep_s", [STAGES, HALVES], [REPLICAS]),
        ("eager_s", [HALVES], [STAGES, REPLICAS, SHARED]),
        ("update_s", [STAGES, REPLICAS, HALVES, SHARED], []),
        ("value", [STAGES, HALVES], [REPLICAS, SHARED]),
        ("kept", [], [STAGES, REPLICAS]),
    ],
)
def test_each_measured_number_is_in_the_prices_that_it_belongs_to(
    field: str, dearer: list[Candidate], unchanged: list[Candidate]
) -> None:
    plain, other = pricer(4, 4), pricer(4, 4, field, 3.0)
    for each in dearer:
        assert other.price(each).seconds > plain.price(each).seconds, each
    for each in unchanged:
        assert other.price(each).seconds == pytest.approx(plain.price(each).seconds), each


def test_a_bubble_shrinks_with_microbatches_and_links_cost_what_they_take() -> None:
    near, far = pricer(4, 4), pricer(4, 1)
    few, many = (near.price(replace(STAGES, schedule="gpipe", microbatches=count)) for count in (4, 16))
    assert few.bubble_s / few.computing_s > 1.5 * many.bubble_s / many.computing_s > 0
    for each in (REPLICAS, STAGES, SHARED):
        assert far.price(each).seconds > near.price(each).seconds
    far_s, near_s = (each.price(replace(STAGES, schedule="gpipe", microbatches=4)).bubble_s for each in (far, near))
    slower_s = far.network.message(0, 1, 256) - near.network.message(0, 1, 256)
    assert far_s - near_s > 5.5 * slower_s  # there over three links, and back
    shared = [near.price(Candidate(dp=4, zero=zero, allreduce="ring")).update_s for zero in (0, 1)]
    assert shared[0] == pytest.approx(4 * shared[1])
    (state,) = far.shapes.states(1, 1, 1, 0, 1, False)
    sum_s = far.network.exchange("all-reduce", "ring", range(4), state.gradients)
    numbers_s = far.network.exchange("all-reduce", "native", range(4), 40)
    assert far.price(REPLICAS).exposed_s == pytest.approx(sum_s + numbers_s)  # one bucket: nothing hides it


@pytest.mark.parametrize("one", [Candidate(dp=2, zero=zero) for zero in range(1, 4)], ids=str)
def test_state_is_that_of_the_ledger_to_the_byte(one: Candidate) -> None:
    def run(group: Group) -> dict[str, int]:
        worker = ready_worker(workload(), group, one.layout(), 4, numpy_backend())
        held = dict(worker.ledger.report().held)
        worker.release()
        return held

    found, told = simulate(run, 2), pricer(2, 2).memory(one)
    for kind in (PARAMETERS, GRADIENTS, STATE):
        assert told[kind] == max(each[kind] for each in found), kind


@pytest.mark.parametrize("memory", [None, "least"])
def test_activations_of_stages_are_near_those_of_the_ledger(memory: str | None, monkeypatch) -> None:
    """What operations take for a moment is not predicted."""
    monkeypatch.setattr(profiles, "MEASURE_S", 0.0)
    table = Dataset("table", np.ones((1024, 64), np.float32), np.zeros(1024, np.int64), 8)
    work = workload(1024, lambda: mlp((64,), 8, hidden=(32, 32, 32)), table)
    (times,) = simulate(lambda group: profiles.measure(work, group, 2, [], numpy_backend()), 1)
    one = Candidate(pp=2, schedule="gpipe", microbatches=4, recompute=memory is not None)
    shapes = ModelShapes(work, times, numpy_backend())
    told = Pricer(work, times, network(2, 2), shapes).memory(one)[ACTIVATIONS]
    split = [len(cut) for cut in shapes.part(1, 2, 1).cuts]

    def run(group: Group) -> int:
        layout = Layout(1, 2, schedule="gpipe", split=split, activation_memory=memory)
        worker = ready_worker(work, group, layout, 256, numpy_backend())
        for batch in islice(Loader(table, 1024, shuffle=False, microbatches=4, workers=0).epoch(0), 1):
            worker.step(batch)
            worker.step(batch)
        worker.release()
        return worker.ledger.report().peaks[ACTIVATIONS]

    counted = max(simulate(run, 2, cpu_factor=0.0))
    assert counted <= told <= 2 * counted


def test_memory_that_is_tight_asks_for_budgets_and_names_the_least() -> None:
    one = pricer(2, 2)
    limit = min(one.price(each).bytes for each in layouts(one) if each.pp == 1) - 100
    found = plan(one, limit)
    assert all(each.price.bytes <= limit for each in found.best)
    assert found.best[0].price.seconds >= plan(one).best[0].price.seconds
    assert any("bytes on a rank" in reason for reason in found.refused)
    budgets = [each for each in found.best if each.candidate.activation_memory]
    assert all("activation_memory" in options(each) for each in budgets)
    with pytest.raises(LayoutError, match=r"would with (\d+): give that much") as refused:
        plan(one, 1000)
    least = int(str(refused.value).split("would with ")[1].split(":")[0])
    assert plan(one, least).best
    with pytest.raises(LayoutError):
        plan(one, least - 1)


def test_what_is_found_is_told_in_lines_and_in_options() -> None:
    found = plan(pricer(4, 2))
    assert max(map(len, describe(found))) <= 100
    piped = options(replace(found.best[0], candidate=replace(HALVES, recompute=True)))
    assert {name: piped[name] for name in ("pp", "pipeline", "microbatches", "activation_memory")} == {
        "pp": 4,
        "pipeline": "zero-bubble",
        "microbatches": 4,
        "activation_memory": "least",
    }


def test_candidates_are_layouts_or_counted_with_a_reason() -> None:
    found, refused = candidates(8, 4, [(1, 1), (2, 1)], 6, True, False, True)
    for each in found:
        assert each.ranks == 8 and each.layout()
    assert {each.schedule for each in found if each.pp > 1} >= {"gpipe", "1f1b", "zero-bubble"}
    for word in ("replicas than rows", "stages than the model", "microbatches than", "shared out"):
        assert any(word in reason for reason in refused), word


@pytest.mark.parametrize(
    ("known", "at", "value"),
    [({2: 4.0}, 1, 2.0), ({1: 1.0, 3: 5.0}, 2, 3.0), ({1: 1.0, 3: 5.0}, 5, 9.0), ({2: 1.0, 4: 9.0}, 1, 0.0)],
)
def test_values_between_rows_are_on_straight_lines(known: dict[int, float], at: int, value: float) -> None:
    assert between(known, at) == value


@pytest.mark.parametrize(
    ("text", "nodes", "match"),
    [
        ("fit", 1, "there is no fit of this machine for 4 ranks"),
        ("token-ring", 1, "network 'token-ring' is unknown"),
        ("ethernet-1g", 3, "as many on each of 3 nodes"),
    ],
)
def test_networks_that_there_are_not_are_refused(text: str, nodes: int, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        find_network(text, 4, nodes, None)


def test_a_network_by_its_name_has_the_rate_that_is_stated() -> None:
    for name, stated in PRESETS.items():
        found = find_network(name, 4, 2, None)
        more_s = found.message(0, 2, 2 * 10**9) - found.message(0, 2, 10**9)
        assert more_s == pytest.approx(8 / stated.gbit), name


def test_a_workload_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers together take what a step takes; shares are measured as far as the model can have them."""
    monkeypatch.setattr(profiles, "MEASURE_S", 0.0)
    table = Dataset("made up", np.ones((16, 4), np.float32), np.zeros(16, np.int64), 4)

    def make() -> Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        model.sharding = {"0": nn.Sharding.COLUMN, "2": nn.Sharding.ROW}
        return model

    work = workload(16, make, table, key={"of": "this"})
    shares = [(2, 1), (1, 2)]
    value = simulate(lambda group: profiles.measure(work, group, 2, shares, numpy_backend()).to_json(), 2)[0]
    found = Profile.from_json(json.loads(json.dumps(value)))
    assert sorted(found.steps[1, 1]) == [1, 2, 4, 8, 16]
    assert found.exchanges((2, 1), 16) and (1, 2) not in found.steps
    for rows, layers in found.layers.items():
        total = sum(layer.seconds for layer in layers)
        assert total in (0.0, pytest.approx(found.steps[1, 1][rows].seconds))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(value))
    assert load_profile(file, {"of": "this"}) == found
    assert load_profile(file, {"of": "that"}) is None
    for damage in ("{", "[]", json.dumps({**value, "format": 0}), json.dumps({**value, "layers": []})):
        file.write_text(damage)
        assert load_profile(file, {"of": "this"}) is None
