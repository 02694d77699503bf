"""The search finds what pricing every layout finds, its bounds hold, and its bytes are the ledger's."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.algorithms.registry import ALGORITHMS, HIERARCHICAL
from nnmpi.comm.fitting.fit import Fit
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Curve, Link, Machine, blocks
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset
from nnmpi.errors import LayoutError, UsageError
from nnmpi.memory.ledger import GRADIENTS, PARAMETERS, STATE
from nnmpi.models.gpt import gpt
from nnmpi.nn.chain import ModelPart, open_chain
from nnmpi.nn.module import Module
from nnmpi.optim.adam import Adam
from nnmpi.parallel.pipeline.profile import LayerProfile
from nnmpi.planner.activations import measure_whole
from nnmpi.planner.network import PRESETS, PlannedNetwork, find_network
from nnmpi.planner.price import Pricer
from nnmpi.planner.profile import Profile, StepCost, Workload, between, row_counts, shares_of
from nnmpi.planner.report import describe, options
from nnmpi.planner.search import plan, search
from nnmpi.planner.shapes import ModelShapes
from nnmpi.planner.space import Candidate, candidates

LAYERS, FEATURES, CONTEXT, TOKENS = 4, 16, 8, 12
RANDOM = np.random.default_rng(0)


def build(layers: int = LAYERS) -> Module:
    return gpt(TOKENS, CONTEXT, features=FEATURES, layers=layers, heads=4)


def workload(batch_size: int = 16, layers: int = LAYERS) -> Workload:
    tokens = RANDOM.integers(0, TOKENS, (batch_size, CONTEXT + 1))
    samples = Dataset("tokens", tokens[:, :-1], tokens[:, 1:], TOKENS)
    return Workload(lambda: build(layers), Adam, lambda where: {}, samples, batch_size, 2)


def profile(ranks: int, batch_size: int = 16, layers: int = LAYERS) -> Profile:
    """Return times that nobody has measured: each row costs what the layers' parameters say, a layer a little more."""
    model = build(layers)
    elements = [sum(p.size for p in ModelPart(model, [layer]).parameters()) for layer in open_chain(model)]
    counts = row_counts(batch_size, ranks)
    layers, steps = {}, {}
    for rows in counts:
        each = [1e-6 + 1e-9 * rows * (100 + n) * (1 + i % 3) for i, n in enumerate(elements)]
        layers[rows] = tuple(
            LayerProfile(str(i), seconds, n, seconds / 3, 64 * rows, seconds / 3, seconds / 3)
            for i, (seconds, n) in enumerate(zip(each, elements, strict=True))
        )
        steps[rows] = StepCost(sum(each), 1e-4, 1000 * rows, unrecorded_s=sum(each), unrecorded_bytes=1000 * rows)
    said = (("all-reduce", 512, 9),)
    shared = {
        (tp, sp): {
            rows: replace(one, seconds=each, unrecorded_s=each, exchanges=said)
            for rows, one in steps.items()
            for each in [one.seconds / (tp * sp) + 2e-5]
        }
        for tp, sp in shares_of(ranks)
    }
    return Profile({"made": "up"}, {(1, 1): steps, **shared}, layers)


def network(ranks: int, per_node: int) -> PlannedNetwork:
    inside, across = Link.line(1e-6, 1e-10), Link.line(2e-5, 1e-9)
    nodes = None if per_node >= ranks else blocks(ranks, per_node)
    return PlannedNetwork("made up", Machine(inside, across, nodes, Curve.line(0.0, 1e-10)), ranks)


def made(work: Workload, times: Profile, messages: PlannedNetwork) -> Pricer:
    return Pricer(work, times, messages, ModelShapes(work, times, numpy_backend()))


@cache
def pricer(ranks: int, per_node: int) -> Pricer:
    return made(workload(), profile(ranks), network(ranks, per_node))


def small() -> Pricer:
    """Return what prices layouts of a model of two blocks on 2 ranks, whose activations are measured."""
    work, times = workload(4, 2), profile(2, 4, 2)
    steps = {
        share: {
            rows: replace(cost, activations=measure_whole(work, share, rows, numpy_backend()))
            for rows, cost in by.items()
        }
        for share, by in times.steps.items()
    }
    return made(work, replace(times, steps=steps), network(2, 2))


def layouts(one: Pricer) -> list[Candidate]:
    layers = len(next(iter(one.profile.layers.values())))
    found, _ = candidates(
        one.network.ranks,
        one.workload.batch_size,
        list(one.profile.steps),
        layers,
        one.network.on_one_node,
        True,
        False,
    )
    return found


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (4, 2)])
def test_the_search_finds_what_pricing_all_layouts_finds(ranks: int, per_node: int) -> None:
    """Equals among them: of these the one that needs fewer bytes is first, wherever the line is drawn."""
    one = pricer(ranks, per_node)
    found = layouts(one)
    seconds = {each: one.price(each).seconds for each in found}
    kinds_s = sorted(
        min(seconds[each] for each in found if each.axes == axes) for axes in {each.axes for each in found}
    )
    near = [each for each in found if seconds[each] <= max(kinds_s[1], sorted(seconds.values())[20])]
    everyone = sorted(near, key=lambda each: (seconds[each], one.price(each).bytes, each))
    for kept in (1, 2, 3, 5, 8, 13):
        best, priced = search(found, one.bound, one.price, kept)
        assert [each.candidate for each in best] == everyone[:kept]
        assert kept > 3 or priced < len(found)
    firsts = [each for i, each in enumerate(everyone) if each.axes not in {before.axes for before in everyone[:i]}]
    kinds, _ = search(found, one.bound, one.price, 2, kind=lambda each: each.axes)
    assert [each.candidate for each in kinds] == firsts[:2]


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (4, 4)])
def test_no_price_is_below_its_bound(ranks: int, per_node: int) -> None:
    one = pricer(ranks, per_node)
    assert all(one.bound(each) <= one.price(each).seconds * (1 + 1e-12) for each in layouts(one)[::8])


def test_a_pipeline_takes_as_long_as_its_stages_do() -> None:
    """But forwards are not replayed where backwards are done in halves; these are what they take."""
    plain, times = pricer(4, 4), profile(4)
    own = times.steps[1, 1].items()
    replayed = {**times.steps, (1, 1): {rows: replace(one, seconds=one.seconds / 2) for rows, one in own}}
    halves = {
        rows: tuple(replace(layer, weights_s=3 * layer.weights_s) for layer in layers)
        for rows, layers in times.layers.items()
    }
    other = made(workload(), replace(times, steps=replayed, layers=halves), plain.network)
    stages, replicas = Candidate(pp=4, microbatches=4), Candidate(dp=4, allreduce="ring")
    in_halves = replace(stages, schedule="zero-bubble")
    layers = {
        rows: tuple(replace(layer, seconds=2 * layer.seconds) for layer in own) for rows, own in times.layers.items()
    }
    slow_stages = made(workload(), replace(times, layers=layers), plain.network)  # the layers' times are the stages'
    assert slow_stages.price(stages).seconds > plain.price(stages).seconds
    quick = made(workload(), replace(times, steps=replayed), plain.network)  # so that forwards as they stand are slow
    assert quick.price(in_halves).seconds > plain.price(in_halves).seconds
    assert other.price(stages).seconds == plain.price(stages).seconds
    assert other.price(replicas).computing_s == plain.price(replicas).computing_s / 2
    assert other.price(in_halves).seconds > plain.price(in_halves).seconds


def fit_of(machine: Machine, native: Curve) -> Fit:
    """Return a fit of four ranks, whose own all-reduce takes the same when it is started."""
    return Fit(machine, native, native, None, {"host": "made up", "date": "", "ranks": 4})


def test_ranks_without_a_core_each_take_longer_than_the_processor_works() -> None:
    """Those of a pipeline only as far as they want it at the same time; no message takes longer for it."""
    messages, crowd = network(4, 4), 2.0
    fit = fit_of(messages.machine, Curve.line(0.0, 1e-8))
    times, stated = replace(profile(4), crowding=crowd), pricer(4, 4)
    plain, other = (made(workload(), each, PlannedNetwork.fitted(fit)) for each in (profile(4), times))
    replicas, stages = Candidate(dp=4, allreduce="ring"), Candidate(pp=4, microbatches=4)
    before, after = plain.price(replicas), other.price(replicas)
    assert (after.computing_s, after.update_s) == (crowd * before.computing_s, crowd * before.update_s)
    assert after.exposed_s == before.exposed_s
    one, two = plain.price(stages), other.price(stages)
    assert one.computing_s < two.computing_s < crowd * one.computing_s
    elsewhere = made(workload(), times, stated.network)  # a machine that is only stated has a core for each
    assert elsewhere.price(replicas).seconds == stated.price(replicas).seconds
    assert all(other.bound(each) <= other.price(each).seconds * (1 + 1e-12) for each in layouts(other)[::8])


def test_what_ranks_that_share_layers_say_is_as_long_in_every_schedule() -> None:
    """Also where backwards are done in halves; and in a crowd: messages do not wait for a core."""
    messages = network(4, 4)
    fit = fit_of(messages.machine, Curve.line(1e-5, 0.0))
    plain = profile(4)
    steps = {
        share: {rows: replace(one, exchanges=2 * one.exchanges) for rows, one in by.items()}
        for share, by in plain.steps.items()
    }
    more_s = {}
    for crowding in (1.0, 2.0):
        few, many = (
            made(workload(), replace(each, crowding=crowding), PlannedNetwork.fitted(fit))
            for each in (plain, replace(plain, steps=steps))
        )
        for schedule in ("gpipe", "1f1b", "zero-bubble"):
            one = Candidate(pp=2, tp=2, schedule=schedule, microbatches=4)
            more_s[crowding, schedule] = many.price(one).computing_s - few.price(one).computing_s
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        assert more_s[1.0, schedule] == pytest.approx(more_s[1.0, "gpipe"])
        assert 0 < more_s[2.0, schedule] < 1.05 * more_s[1.0, schedule]


def test_mpis_own_sum_is_other_code_where_it_is_started_under_computation() -> None:
    """As between nodes; for some of the ranks it is as many times as slow as the quickest as it is for all."""
    nodes, nbytes = 4, 2**16
    fit = replace(fit_of(network(nodes, 1).machine, Curve.line(0.0, 1e-8)), native_started=Curve.line(0.0, 5e-8))
    messages, everyone, some = PlannedNetwork.fitted(fit), range(nodes), range(2)
    assert messages.exchange("all-reduce", "native", everyone, nbytes, started=True) == 5e-8 * nbytes
    assert messages.exchange("all-reduce", "native", everyone, nbytes) == 1e-8 * nbytes
    quickest = [
        min(messages.exchange("all-reduce", name, ranks, nbytes) for name in ALGORITHMS if name != HIERARCHICAL)
        for ranks in (some, everyone)
    ]
    started_s = messages.exchange("all-reduce", "native", some, nbytes, started=True)
    assert started_s == pytest.approx(5e-8 * nbytes * quickest[0] / quickest[1])
    one = made(workload(), profile(nodes), messages)
    native = one.price(Candidate(dp=nodes, allreduce="native")).exposed_s
    quick = replace(fit, native_started=fit.native)
    other = made(workload(), profile(nodes), PlannedNetwork.fitted(quick))
    assert native > 2 * other.price(Candidate(dp=nodes, allreduce="native")).exposed_s


def test_batch_normalization_sums_over_the_replicas_in_every_layout() -> None:
    """In float64: counts and means, then squares; backward two sums of the derivative. In pipelines by microbatch."""
    samples = Dataset("made up", np.ones((16, 4), np.float32), np.zeros(16, np.int64), 3)

    def planned(middle: Callable[[], Module]) -> Pricer:
        model = lambda: nn.Sequential(nn.Linear(4, 8), middle(), nn.Linear(8, 3))  # noqa: E731
        work = Workload(model, Adam, lambda where: {}, samples, 16, 2)
        layer = LayerProfile("", 1e-3, 8, 4e-4, 64, 3e-4, 3e-4)
        step = StepCost(3e-3, 1e-4, 1000, unrecorded_s=3e-3, unrecorded_bytes=1000)
        return made(work, Profile({}, {(1, 1): {4: step, 8: step}}, {4: (layer,) * 3, 8: (layer,) * 3}), network(4, 1))

    plain, normal = planned(nn.ReLU), planned(lambda: nn.BatchNorm(8))
    for pp, schedule, microbatches in ((1, "1f1b", 1), (2, "1f1b", 2), (2, "zero-bubble", 2)):
        one = Candidate(dp=4 // pp, pp=pp, schedule=schedule, microbatches=microbatches, allreduce="ring")
        ranks = tuple(normal._replicas(one, normal._mesh(one)))
        sums_s = sum(normal.network.exchange("all-reduce", "native", ranks, 8 * n) for n in (9, 8, 16))
        assert normal.price(one).seconds - plain.price(one).seconds > 0.9 * sums_s > 1e-5
        assert normal.bound(one) <= normal.price(one).seconds


def test_what_does_not_fit_falls_out() -> None:
    one = pricer(4, 2)
    limit = min(each.price.bytes for each in plan(one, kept=2).best)
    found = plan(one, limit - 1, kept=2)
    assert all(each.price.bytes < limit for each in found.best)
    assert found.refused[f"more than {limit - 1} bytes on a rank, of those that might be as quick"] > 0
    with pytest.raises(LayoutError, match="no layout of 4 ranks fits 10 bytes on each; .* would with"):
        plan(one, 10)


def test_a_long_search_for_what_fits_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one, said = pricer(4, 2), list[str]()
    monkeypatch.setattr("nnmpi.planner.search.SAYS_S", 0.0)
    limit = plan(one, say=said.append).best[0].price.bytes - 1
    assert not said  # nothing is left out
    left_out = plan(one, limit, say=said.append).refused[
        f"more than {limit} bytes on a rank, of those that might be as quick"
    ]
    assert said[0] == f"looking for layouts that fit {limit} bytes: 1 looked at, 0 need more"
    assert 0 < int(said[-1].split()[-3]) <= left_out


@pytest.mark.parametrize("pp", [1])
def test_what_does_not_fit_may_compute_activations_again(pp: int) -> None:
    """Each layout that computes nothing again comes with the budget that memory leaves it, if it would not fit."""
    one, batch_size = small(), 4
    plain = layouts(one)
    limit = min(one.bytes(each) for each in plain if each.pp == pp and not each.zero) - 1
    expected = []
    for each in plain:
        room = limit - one.least_bytes(each)
        if one.bytes(each) <= limit:
            expected.append(each)
        elif room > 0 and each.pp == 1:
            budgeted = replace(each, activation_memory=room)
            if one.bytes(budgeted) <= limit:
                expected.append(budgeted)
                assert one.price(budgeted).seconds > one.price(each).seconds
                assert max(one.shapes.activations(budgeted, each.rows(batch_size))) <= room
    expected.sort(key=lambda each: (one.price(each).seconds, one.price(each).bytes, each))
    found = [each.candidate for each in plan(one, limit, kept=20).best]
    assert found == expected[:20]
    assert any(each.activation_memory for each in found if each.pp == pp)


def test_the_memory_that_is_said_to_be_enough_is_enough() -> None:
    one = small()
    with pytest.raises(LayoutError) as told:
        plan(one, 10)
    words = re.search(r"each; (.*) would with (\d+):", str(told.value))
    assert words is not None
    (only,) = plan(one, int(words[2])).best
    assert str(only.candidate) == words[1]
    assert only.price.bytes == int(words[2])


def test_ranks_that_can_have_no_layout_are_told_why() -> None:
    alone = replace(pricer(4, 2).network, ranks=13, machine=Machine.uniform(1e-5, 1e-9))
    few = made(workload(3), profile(13, 3), alone)
    for limit in (None, 1 << 40):
        with pytest.raises(LayoutError, match=r"13 ranks can have no layout of this model \(.*more replicas than rows"):
            plan(few, limit)


def test_a_report_is_readable_at_100_columns() -> None:
    lines = list(describe(plan(pricer(6, 3))))
    assert max(map(len, lines)) <= 100
    assert any("fall out" in line for line in lines)


def test_options_name_what_differs_from_the_default() -> None:
    found = plan(pricer(4, 2), kept=30)
    for each in found.best:
        given = options(each)
        assert ("split" in given) == (each.candidate.pp > 1)
        if "split" in given:
            assert len(given["split"].split(",")) == each.candidate.pp * each.candidate.virtual_stages


def held(group: Group, one: Candidate) -> dict[str, int]:
    """Return what a rank of a real layout holds between steps."""
    work = workload()
    sample = work.samples.rows(np.arange(4), "float32")
    split = [len(cut) for cut in _cuts(one)] if one.pp > 1 else "auto"
    layout = Layout(one.dp, one.pp, one.tp, one.schedule, one.virtual_stages, split, zero=one.zero)
    where = arrange(work.build(), group, layout, sample)
    where.model.initialize(storage=where.storage)
    worker = Worker(where.model, Adam(where.model.storage), group, arrangement=where)
    held: Any = worker.ledger.report().held
    worker.release()
    return dict(held)


def _cuts(one: Candidate) -> tuple[range, ...]:
    return pricer(4, 4).shapes.part(one.tp, one.pp, one.virtual_stages).cuts


@pytest.mark.parametrize(
    "one",
    [
        Candidate(dp=4, zero=1, allreduce="ring"),
        Candidate(dp=2, pp=2, microbatches=2, allreduce="ring"),
        Candidate(dp=2, pp=2, zero=1, microbatches=2, allreduce="ring"),
        Candidate(pp=2, tp=2, microbatches=2),
        Candidate(pp=4, microbatches=4),
        Candidate(tp=4),
        Candidate(dp=4, zero=2, allreduce="ring"),
        Candidate(dp=4, zero=3, allreduce="ring"),
    ],
    ids=str,
)
def test_the_state_is_that_of_the_ranks_to_the_byte(one: Candidate) -> None:
    ranks = simulate(lambda group: held(group, one), 4)
    predicted = pricer(4, 2).memory(one)
    kinds = (PARAMETERS, GRADIENTS, STATE)
    most = max(ranks, key=lambda each: sum(each[kind] for kind in kinds))
    assert {kind: predicted[kind] for kind in kinds} == {kind: most[kind] for kind in kinds}


def test_a_profile_is_read_as_it_was_written() -> None:
    first = profile(4)
    assert Profile.from_json(first.to_json()) == first
    assert first.seconds((1, 1), 16) == first.steps[1, 1][16].seconds


def test_values_between_measured_ones_are_on_straight_lines() -> None:
    assert between({2: 10.0, 4: 20.0}, 3) == 15.0
    assert between({2: 10.0, 4: 20.0}, 6) == 30.0
    assert between({4: 20.0}, 2) == 10.0


@pytest.mark.parametrize("name", PRESETS)
def test_a_network_by_its_name_has_the_rate_that_is_stated(name: str) -> None:
    found = find_network(name, 4, 4, None)
    assert found.message(0, 1, 1e9) - found.message(0, 1, 0) == pytest.approx(8 / PRESETS[name].gbit)
    assert PRESETS[name].source in found.name


@pytest.mark.parametrize(
    ("word", "ranks", "nodes", "text"),
    [
        ("fit", 4, 1, "there is no fit of this machine for 4 ranks; make one with mpirun -n 4"),
        ("carrier-pigeon", 4, 2, "network 'carrier-pigeon' is unknown; give fit, numbers such as"),
        ("ethernet-1g", 4, 3, "4 ranks cannot be as many on each of 3 nodes"),
    ],
)
def test_networks_that_are_none_are_refused(word: str, ranks: int, nodes: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        find_network(word, ranks, nodes, None)


def test_a_slower_network_makes_no_layout_quicker() -> None:
    fast = pricer(4, 2)
    slow_machine = replace(fast.network.machine, across=Link.line(1e-3, 1e-7))
    slow = Pricer(fast.workload, fast.profile, PlannedNetwork("slow", slow_machine, 4), fast.shapes)
    assert all(slow.price(each).seconds >= fast.price(each).seconds - 1e-12 for each in layouts(fast)[::40])


def test_16_ranks_and_12_blocks_are_searched_by_their_bounds() -> None:
    one = made(workload(16, 12), profile(16, 16, 12), network(16, 4))
    found = plan(one)
    assert found.looked_at > 1000
    assert found.priced < found.looked_at / 10
