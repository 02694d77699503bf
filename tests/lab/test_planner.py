"""The planner: prices add up, the best are found, bytes are the ledger's; and `--layout auto`,
which races them.
"""

import json
import shlex
from copy import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import threadpoolctl

from nnmpi import simulate
from nnmpi.backend import onednn
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.kernels import setting
from nnmpi.base.errors import LayoutError, UsageError
from nnmpi.comm.machine import Curve, Link, Machine, blocks
from nnmpi.data import Dataset
from nnmpi.lab import plan
from nnmpi.lab.planner import auto_layout, profile
from nnmpi.lab.planner.auto_layout import ChosenLayout, choose, race
from nnmpi.lab.planner.network import PlannedNetwork, find_network
from nnmpi.lab.planner.price import (
    MEASURED,
    Candidate,
    LayoutPrice,
    Profile,
    ShareCost,
    StepCost,
    candidates,
)
from nnmpi.lab.planner.price import plan as search
from nnmpi.lab.planner.profile import Workload, find_profile, ready, shares_of
from nnmpi.memory.ledger import COMMUNICATION, GRADIENTS, PARAMETERS, STATE
from nnmpi.memory.plan import LayerCost
from nnmpi.models.llama_files import LlamaSize
from nnmpi.models.pretrained import save_pretrained
from nnmpi.nn.chain import ModelPart, open_chain
from nnmpi.parallel.data import NUMBERS_BYTES
from nnmpi.schedule.schedule import there_and_back
from nnmpi.schedule.schedules import SCHEDULES
from nnmpi.train import computing
from nnmpi.train.cli import main, parse
from nnmpi.train.config import assemble
from tests.base.test_launcher import SLURM
from tests.harness.refusals import usage_error
from tests.lab.little import measure_little

CONTEXT, TOKENS = 8, 12
GPT = {"model": "gpt", "context": CONTEXT, "features": 16, "layers": 4, "heads": 4}
PLANNED = "--model mlp --hidden 8 --dataset iris --batch-size 12"
SMALL = f"{PLANNED} --epochs 1 --quiet".split()


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Plan for the smallest run, measure little, and keep nothing for others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(computing, "PAYS", 0.0)
    measure_little(monkeypatch)


def workload(batch_size=16, samples=None, **options):
    drawn = np.random.default_rng(0).integers(0, TOKENS, (batch_size, CONTEXT + 1))
    dataset = samples or Dataset("tokens", drawn[:, :-1], drawn[:, 1:], TOKENS)
    return Workload(
        assemble({"batch_size": batch_size, "jit": "off", **(options or GPT)}),
        (dataset, dataset),
        numpy_backend(),
    )


def made_up(ranks, batch_size=16):
    """Return times that nobody has measured: a row costs what a layer's parameters say."""
    model = workload().build()
    elements = [
        sum(p.size for p in ModelPart(model, [layer]).parameters()) for layer in open_chain(model)
    ]
    item = [1e-6 + 1e-9 * batch_size * (100 + n) * (1 + i % 3) for i, n in enumerate(elements)]
    layers = tuple(
        LayerCost(
            *(str(i), 64 * batch_size, 0, 500 * batch_size, False, False),
            *(seconds / 3, seconds / 3, 2 * seconds / 3),
            elements=n,
        )
        for i, (seconds, n) in enumerate(zip(item, elements, strict=True))
    )
    steps = {
        rows: StepCost(sum(item) * rows / batch_size, 1e-4, 1.4 * sum(item) * rows / batch_size)
        for rows in (1, batch_size)
    }
    shared = {
        (tp, sp): ShareCost(1.1 / tp / sp, (("all-reduce", "tp" if tp > 1 else "sp", 32.0, 9),))
        for tp, sp in shares_of(ranks)
    }
    piped_s = {("gpipe", 1, 1): 1e-3, ("gpipe", 1, 4): 4e-3, ("zero-bubble", 1, 1): 3e-3}
    return Profile(steps, {(1, 1): ShareCost(), **shared}, layers, batch_size, piped_s=piped_s)


@cache
def pricer(ranks, per_node, name="", factor=1.0):
    """Return prices of a made-up machine, on which one field of the layers or steps is so many
    times as much.
    """

    def more(record):
        if not hasattr(record, name):
            return record
        old = getattr(record, name)
        many = {key: factor * old[key] for key in old} if isinstance(old, dict) else factor * old
        return replace(record, **{name: many})

    work, times = workload(), made_up(ranks)
    steps = {rows: more(cost) for rows, cost in times.steps.items()}
    shares = {share: more(cost) for share, cost in times.shares.items()}
    times = more(replace(times, steps=steps, shares=shares, layers=tuple(map(more, times.layers))))
    nodes = None if per_node >= ranks else blocks(ranks, per_node)
    machine = Machine(Link.line(1e-6, 1e-10), Link.line(2e-5, 1e-9), nodes, Curve.line(0.0, 1e-10))
    return work.pricer(times, PlannedNetwork("made up", machine, ranks))


def network_of(ranks, beta_s=1e-9):
    return PlannedNetwork("made up", Machine.uniform(alpha_s=2e-5, beta_s=beta_s), ranks)


def layouts(one):
    return candidates(
        one.network.ranks, one.batch_size, one.profile.shares, len(one.profile.layers)
    )[0]


# ---- prices, and the search ----


def test_the_search_finds_the_least_prices():
    element = pricer(4, 2)
    prices = sorted((element.price(item).seconds, item) for item in layouts(element))
    for saved in (1, 3, 10, len(prices)):
        result = search(element, count=saved)
        assert [item.price.seconds for item in result.best] == [
            seconds for seconds, _ in prices[:saved]
        ]
        assert result.considered == len(prices)
    firsts = {item.kind: seconds for seconds, item in reversed(prices)}
    result = search(element, count=3, kind=lambda entry: entry.kind)
    assert [item.price.seconds for item in result.best] == sorted(firsts.values())[:3]


STAGES, REPLICAS = Candidate(pp=4, microbatches=4), Candidate(dp=4)
HALVES, SHARED = replace(STAGES, pipeline="zero-bubble"), Candidate(dp=2, tp=2)


@pytest.mark.parametrize(
    "field, dearer, unchanged",
    [
        ("update_s", [STAGES, REPLICAS, HALVES, SHARED], []),
        ("value", [STAGES, HALVES], [REPLICAS, SHARED]),
        ("kept", [], [STAGES, REPLICAS]),
        ("piped_s", [STAGES, HALVES], [REPLICAS, SHARED]),
        (
            "least_s",
            [replace(SHARED, recompute=True)],
            [SHARED, REPLICAS, replace(SHARED, recompute=True, zero=2)],
        ),
    ],
)
def test_each_measured_number_is_in_the_prices_that_it_belongs_to(field, dearer, unchanged):
    plain, other = pricer(4, 4), pricer(4, 4, field, 3.0)
    for item in dearer:
        assert other.price(item).seconds > plain.price(item).seconds, item
    for item in unchanged:
        assert other.price(item).seconds == pytest.approx(plain.price(item).seconds), item


def test_a_microbatch_s_own_time_is_that_of_its_rows_and_halves():
    """By a line through what was measured, of a batch of 16."""
    parts = [
        [pricer(4, 4).price(replace(STAGES, pipeline=name, microbatches=n)) for n in (16, 4, 2)]
        for name in ("gpipe", "zero-bubble")
    ]
    for prices, own_s in zip(parts, ([1e-3, 4e-3, 8e-3], [3e-3, 12e-3, 24e-3]), strict=True):
        for price, count, seconds in zip(prices, (16, 4, 2), own_s, strict=True):
            assert price.computing_s == pytest.approx(count * seconds, rel=0.2)


def test_a_bubble_shrinks_with_microbatches_and_links_cost_what_they_take():
    near, far = pricer(4, 4), pricer(4, 1)
    few, many = (
        near.price(replace(STAGES, pipeline="gpipe", microbatches=count)) for count in (4, 16)
    )
    assert few.bubble_s / few.computing_s > 1.5 * many.bubble_s / many.computing_s > 0
    for item in (REPLICAS, STAGES, SHARED):
        assert far.price(item).seconds > near.price(item).seconds
    slower_s = far.network.exchange("message", [(0, 1)], 256) - near.network.exchange(
        "message", [(0, 1)], 256
    )
    # over three links, and back
    assert far.price(STAGES).bubble_s - near.price(STAGES).bubble_s > 5.5 * slower_s
    shared = [far.price(Candidate(dp=4, zero=zero)).update_s for zero in (0, 1)]
    assert shared[0] == pytest.approx(4 * shared[1])
    (state,) = far.shapes.states(Candidate().division, 0, 1)
    sums = (
        far.network.exchange(*what)
        for what in (
            ("all-reduce", [range(4)], state.gradients),
            ("all-gather", [range(4)], 4 * 40),
        )
    )
    assert far.price(REPLICAS).exposed_s == pytest.approx(sum(sums))  # one bucket: nothing hides it


@pytest.mark.parametrize(
    "name, dp, pp, microbatches, per_node",
    [("gpipe", 1, 3, 7, 1), ("1f1b", 1, 4, 7, 1), ("interleaved", 1, 3, 6, 1)]
    + [(name, 1, 3, 5, 1) for name, row in SCHEDULES.items() if row.home is there_and_back]
    + [("1f1b", 2, 2, 5, 2), ("zero-bubble", 4, 2, 4, 3)],  # replicas begin in the middle of a node
)
def test_a_step_of_a_pipeline_takes_what_it_takes_on_simulated_ranks(
    name, dp, pp, microbatches, per_node
):
    """A message takes twice a forward pass; all replicas' are at once on the nodes' links."""
    one = Candidate(dp, pp, 1, 1, 0, name, SCHEDULES[name].stages, microbatches)
    stages, rows = pp * one.virtual_stages, 19
    batch = rows * microbatches * dp
    table = Dataset("table", np.ones((batch, 16), np.float32), np.zeros(batch, np.int64), 16)
    work = workload(batch, table, model="mlp", hidden=[16] * (stages - 1))
    layers = tuple(  # all linear layers cost the same
        LayerCost(str(i), 64 * rows, 0, 0, False, False, i % 2, i % 2, i % 2 * 2.0)
        for i in range(len(open_chain(work.build())))
    )
    step_s = 3.0 * stages
    cost = Profile({rows: StepCost(step_s, 0.0, step_s)}, {(1, 1): ShareCost()}, layers, rows)
    machine = Machine(Link.line(0.2, 1.6e-3), nodes=blocks(one.ranks, per_node))
    priced = work.pricer(cost, PlannedNetwork("", machine, one.ranks))
    options = one.options() | {
        "slow": f"ms={1e3 * step_s * microbatches / pp}",
        "allreduce": "ring",
        "split": tuple(map(len, priced.shapes.cuts(pp, one.virtual_stages))),
        "batch_size": batch,
    }

    def run(group):
        return auto_layout.time_layout(work, options, group)

    took_s = simulate(run, one.ranks, machine, cpu_factor=0.0)[0]
    assert priced.price(one).seconds == pytest.approx(took_s, rel=0.005 if dp == 1 else 0.05)


@pytest.mark.parametrize("one", [Candidate(dp=2, zero=zero) for zero in range(1, 4)], ids=str)
def test_state_is_that_of_the_ledger_to_the_byte(one):
    work = workload()

    def run(group):
        with ready(work, one.options() | {"batch_size": 4}, group) as (worker, _):
            return dict(worker.ledger.report().held)

    result, text = simulate(run, 2), pricer(2, 1).memory(one)
    for kind in (GRADIENTS, STATE):
        assert text[kind] == max(item[kind] for item in result), kind
    assert text[PARAMETERS] >= max(item[PARAMETERS] for item in result)  # once on a node


COMPRESSED = ("fp16", "bf16", "powersgd:2", "topk:0.05")


@pytest.mark.parametrize("word", COMPRESSED)
@pytest.mark.parametrize("one", [Candidate(2), Candidate(2, 2, microbatches=2)], ids=str)
def test_compressed_gradients_have_the_bytes_that_a_run_reports(word, one):
    """Those of the rank of a pipeline that has most, and what each rank keeps."""
    work = workload(compress=word, **GPT)

    def run(group):
        with ready(work, one.options() | {"batch_size": 4}, group) as (worker, batches):
            reports = [worker.step(next(batches)) for _ in range(3)]
            return reports[-1].comm_bytes, worker.strategy.state_bytes

    prices = work.pricer(made_up(4), network_of(one.ranks))
    sums = [*prices._sums(one)]
    planned = sum(nbytes // (2 if what == "all-gather" else 1) for what, _, nbytes, _ in sums)
    given, kept = zip(*simulate(run, one.ranks), strict=True)
    if one.pp == 1:
        assert {*given} == {planned + NUMBERS_BYTES}
    else:  # the reports have the sums of tied parameters, too
        assert max(given) >= planned + NUMBERS_BYTES
    assert max(kept) == max(memory[COMMUNICATION] for memory in prices.memory_of_ranks(one))


def test_compression_pays_on_slow_links_and_leaves_other_layouts_out():
    plain, slow = Candidate(4), network_of(4, beta_s=1e-6)
    prices = {
        word: workload(compress=word, **GPT).pricer(made_up(4), slow)
        for word in (None, *COMPRESSED)
    }
    seconds = {word: item.price(plain).exposed_s for word, item in prices.items()}
    assert seconds["bf16"] < seconds["fp16"] < 0.7 * seconds[None]  # whose scales are sent, too
    assert seconds["topk:0.05"] < seconds["powersgd:2"] < seconds[None]
    result, refused = candidates(4, 16, {(1, 1), (2, 1)}, 6, "powersgd:2")
    assert result and not any(item.zero or item.tp > 1 for item in result)
    assert sum("compress powersgd:2 cannot" in reason for reason in refused) >= 1
    assert "--compress fp16" in plan.train_command(plan.parse(["--compress", "fp16"]), 2, {"dp": 2})
    usage_error("--compress is fp15; give fp16", plan.parse, ["--compress", "fp15"])


@pytest.mark.host_only("a simulated step for each kind of layout, on the double for minutes")
def test_memory_that_is_tight_asks_for_least_activations_and_names_the_least():
    element = copy(pricer(2, 2))
    element.profile = replace(element.profile, shares={(1, 1): ShareCost()})  # fewer to be counted
    plain = min(
        sum(element.memory(item).values()) for item in layouts(element) if not item.recompute
    )
    result = search(element, plain - 1)
    assert all(item.bytes < plain and item.candidate.recompute for item in result.best)
    assert any("bytes on a rank" in reason for reason in result.refused)
    with pytest.raises(LayoutError, match=r"would with (\d+): give that much") as refused:
        search(element, 1000)
    least = int(str(refused.value).split("would with ")[1].split(":")[0])
    assert search(element, least).best
    with pytest.raises(LayoutError):
        search(element, least - 1)


def test_what_is_found_is_told_in_lines_and_in_options():
    result = search(pricer(4, 2))
    lines = [*plan.describe(result, {str(result.best[0].candidate): 0.123})]
    assert max(map(len, lines)) <= 100
    assert sum("123 ms" in line for line in lines) == 1
    piped = replace(
        result.best[0], candidate=replace(HALVES, recompute=True), split=(2, 2, 1, 1)
    ).options()
    text = {
        "pp": 4,
        "pipeline": "zero-bubble",
        "microbatches": 4,
        "activation_memory": "least",
        "split": (2, 2, 1, 1),
    }
    assert text.items() <= piped.items()


def test_candidates_are_layouts_or_counted_with_a_reason():
    result, refused = candidates(8, 4, [(1, 1), (2, 1)], 6)
    assert {item.ranks for item in result} == {8}
    assert {item.pipeline for item in result if item.pp > 1} >= {"gpipe", "1f1b", "zero-bubble"}
    for word in ("replicas than rows", "stages than the model", "microbatches than", "be sharded"):
        assert any(word in reason for reason in refused), word


@pytest.mark.parametrize(
    "known, at, value",
    [
        ({2: 4.0}, 1, 2.0),
        ({1: 1.0, 3: 5.0}, 2, 3.0),
        ({1: 1.0, 3: 5.0}, 5, 9.0),
        ({2: 1.0, 4: 9.0}, 1, 0.0),
    ],
)
def test_values_between_rows_are_on_straight_lines(known, at, value):
    steps = {rows: StepCost(seconds, 0.0, 0.0) for rows, seconds in known.items()}
    assert Profile(steps, {}, (), 1).step(at, "seconds") == value


def test_a_network_has_the_rate_that_is_said():
    result = simulate(lambda group: find_network(group, print, 4, 2, "alpha_us=3,gbit=10"), 1)[0]
    assert result.nodes == (0, 0, 1, 1)
    for groups, shared in (([(0, 2)], 1), ([(0, 2), (1, 3)], 2)):
        seconds = [result.exchange("message", groups, count * 10**9) for count in (1, 2)]
        assert seconds[1] - seconds[0] == pytest.approx(0.8 * shared)


# ---- measuring ----


def test_a_workload_is_measured_and_kept(tmp_path, monkeypatch):
    """Shares are measured as far as the model can have them; without a folder nothing is kept."""
    table = Dataset("made up", np.ones((16, 4), np.float32), np.zeros(16, np.int64), 4)
    work = workload(16, table, model="mlp", hidden=[8])
    result = simulate(lambda group: profile.measure(work, group, 2, [(2, 1), (1, 2)]), 2)[0]
    assert sorted(result.steps) == [1, 8, 16]
    assert result.shares[2, 1].exchanges and (1, 2) not in result.shares
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    measured = []
    made = [replace(result, busy=0.0)]
    monkeypatch.setattr(profile, "measure", lambda *_: measured.append(1) or made[0])
    took = [result.steps[16].seconds + result.steps[16].update_s]
    monkeypatch.setattr(profile, "typical_s", lambda *_: took)
    said = []

    def take(batch_size=16, remeasure=False, **options):
        other = workload(batch_size, table, model="mlp", hidden=[8], **options)

        def find(group):
            return find_profile(other, group, 2, said.append, remeasure)[0]

        return simulate(find, 1)[0]

    assert take() == take() == made[0] and len(measured) == 1
    take(remeasure=True)
    took[0] *= 1.5  # another clock, or other kernels that no key knows
    take()
    assert len(measured) == 3 and " now, and " in said[-1]
    took[0] /= 1.5
    pools = threadpoolctl.threadpool_info()
    with monkeypatch.context() as other:
        other.setattr(
            threadpoolctl,
            "threadpool_info",
            lambda: [{**x, "architecture": "Prescott"} for x in pools],
        )
        made[0] = replace(result, busy=0.4)
        take()
        take()
    assert len(measured) == 5 and "other programs took 40%" in said[-1]
    made[0] = replace(result, busy=0.0)
    measured.clear()
    measured.append(1)
    assert len([*tmp_path.glob("profile-*.json")]) == 1
    (file,) = tmp_path.glob("profile-*.json")
    others = (
        *({"batch_size": 8}, {"ema": 0.9}, {"loss": "mse"}, {"label_smoothing": 0.1}),
        {"precision": "bf16"},
    )
    for other in others:
        take(**other)
    assert len(measured) == 1 + len(others)
    with monkeypatch.context() as other:
        found = onednn.Found(onednn.Library(None, "3.99", "amx_bf16", False))
        other.setattr(onednn, "find", lambda: found)
        take()
    assert len(measured) == 2 + len(others)
    del measured[2:]
    for damage in ("{", "[]", json.dumps({**json.loads(file.read_text()), "steps": [1]})):
        file.write_text(damage)
        take()
    assert len(measured) == 5

    def homeless():
        raise UsageError("this user has no home folder")

    monkeypatch.setattr(profile, "cache_folder", homeless)
    assert take() == made[0] and len(measured) == 6


def test_a_trial_is_replayed_and_not_audited():
    table = Dataset("made up", np.ones((16, 4), np.float32), np.zeros(16, np.int64), 4)

    def count(group):
        with ready(workload(16, table, model="mlp", hidden=[8]), {}, group) as (worker, batches):
            for _ in range(20):
                worker.step(next(batches), lr=0.0)
            return worker.passes.replay.replays

    assert simulate(count, 1)[0] >= 16  # with audits 12


def test_all_ranks_have_the_profile_of_the_slowest(monkeypatch):
    table = Dataset("made up", np.ones((16, 4), np.float32), np.zeros(16, np.int64), 4)
    work = workload(16, table, model="mlp", hidden=[8])
    measure_layers, times = profile.measure_layers, iter(range(1, 100))

    def slower(*args, **options):
        costs = measure_layers(*args, **options)
        return [replace(cost, keep_s=1e3 * next(times)) for cost in costs]

    monkeypatch.setattr(profile, "measure_layers", slower)
    first, *others = simulate(lambda group: profile.measure(work, group, 3, []).to_json(), 3)
    assert all(other == first for other in others)
    assert first["layers"][0]["keep_s"] > 8e3  # of the rank that was last


def test_a_step_s_parts_are_told_apart(monkeypatch):
    """What a step takes once, its update, its rows, a microbatch more of a pipeline, and ZeRO.

    In the first of two passes the machine is slower.
    """
    once_s, update_s = 0.005, 0.002
    piped_s = {"gpipe": 0.011, "zero-bubble": 0.013, "interleaved": 0.019}

    seen = set()

    def take(work, several, group, *_, timed=None, **__):
        call = (timed or group).rank, str(several)
        slow = 1 if call in seen else 1.5
        seen.add(call)
        return [slow * take_one(options) for options in several]

    def take_one(options):
        if options.get("pp", 1) > 1:
            return 0.1 + piped_s[options["pipeline"]] * options["microbatches"]
        if "dp" in options:
            return 5 + options.get("zero", 0)
        return once_s + update_s + 1e-5 * options["batch_size"]

    monkeypatch.setattr(profile, "time_layouts", take)
    monkeypatch.setattr(profile, "typical_s", lambda *_: [update_s])
    table = Dataset("made up", np.ones((256, 4), np.float32), np.zeros(256, np.int64), 4)
    work = workload(256, table, model="mlp", hidden=[8, 8])
    for ranks in (1, 2):
        seen.clear()
        found = simulate(lambda group, n=ranks: profile.measure(work, group, n, []), ranks)[0]
        assert found.steps[256].seconds == pytest.approx(once_s + 256e-5)
        assert found.once_s == pytest.approx(once_s)
        assert len(found.piped_s) == (2 * len(MEASURED) if ranks == 2 else 0)
        assert found.zero_s.keys() == ({1, 2, 3} if ranks == 2 else set())
        few = workload(32, table, model="mlp", hidden=[8, 8])
        machine = PlannedNetwork("nothing known", Machine.uniform(0.0, 0.0), ranks)
        for name, stages, rows in found.piped_s:
            layout = Candidate(1, 2, 1, 1, 0, name, stages, 256 // rows)
            taken = work.pricer(found, machine).price(layout).computing_s
            assert taken == pytest.approx(once_s + 256 // rows * piped_s[name])
        for zero in found.zero_s:  # the price is what was measured
            pricer = few.pricer(found, machine)
            plain_s, price_s = (pricer.price(Candidate(2, zero=n)).seconds for n in (0, zero))
            assert price_s == pytest.approx(plain_s + zero)
        assert found.layer_s(256, "keep_s") == [layer.keep_s for layer in found.layers]
        assert found.layer_s(1, "keep_s") == [layer.keep_s for layer in found.few]


# ---- --layout auto, and the command ----


@pytest.mark.simulated(max_size=2)
@pytest.mark.parametrize("pays", [0.0, 1e12])
def test_a_run_goes_with_the_layout_that_was_chosen(group, tmp_path, monkeypatch, pays):
    """A small run does not wait for a search."""
    monkeypatch.setattr(computing, "PAYS", pays)
    out = tmp_path.parent / f"run-{group.size}-{pays:.0e}"
    main([*SMALL, "--layout", "auto", "--out", str(out)], group)
    group.barrier()  # the first rank prints last
    console = (out / "console.txt").read_text()
    searched = group.size > 1 and not pays
    assert "planner: " in console
    for words in ("race: ", "chosen: ", "step predicted "):
        assert (words in console) == searched or words == "chosen: "
    saved = json.loads((out / "config.json").read_text())
    assert saved["layout"] == "given"


def test_a_given_layout_has_a_price_if_its_parts_were_measured(tmp_path, monkeypatch):
    """Options that no price knows have none, and nothing is measured for a run."""
    monkeypatch.setattr(profile, "BUSY", 2.0)
    priced = {
        "--dp 2 --zero 1": True,
        "--pp 2 --pipeline zb-v --microbatches 4": True,
        "--tp 2 --activation-memory least": True,
        "--pp 2 --pipeline pipedream": False,
        "--pp 2 --split 2,2": False,
        "--dp 2 --microbatches 2": False,
    }

    def has_price(words):
        out = tmp_path / f"run{len(words)}"

        def train(group):
            options = "--jit off --max-steps 3 --eval-every 0 --out"
            main([*SMALL, *words.split(), *options.split(), str(out)], group)

        simulate(train, 2)
        console = (out / "console.txt").read_text()
        assert ("plan: a step" in console) == ("step predicted" in console)
        return "plan: a step" in console

    assert not has_price("")
    simulate(lambda group: plan.main([*SMALL[:-3], "--jit", "off"], group), 2)
    monkeypatch.setattr(profile, "measure", None)
    assert {words: has_price(words) for words in priced} == priced


def test_the_layouts_that_may_be_the_best_race_once(monkeypatch):
    """The quickest is taken, whatever was predicted; what it took is kept for the next run."""
    ran = []

    def time_layout(_, options, group, *__):
        if group.is_root:
            ran.append(options)
        return 1e-9 / group.share(len(ran))  # less than any prediction: the first heat is the last

    monkeypatch.setattr(auto_layout, "time_layout", time_layout)
    # the machine of a test may have other work
    monkeypatch.setattr(profile, "_why_stale", lambda *_: "")
    monkeypatch.setattr(profile, "BUSY", 2.0)
    text = PlannedNetwork("told", Machine.uniform(1e-5, 1e-9), 2)
    monkeypatch.setattr(auto_layout, "find_network", lambda *_: text)
    config = parse([*SMALL, "--layout", "auto", "--jit", "off"])

    def chosen():
        return simulate(lambda group: choose(config, group, numpy_backend(), lambda _: None), 2)[0]

    first, count = chosen(), len(ran)
    assert len({str(item) for item in ran}) == auto_layout.RACERS
    assert first.config == config.having(**ran[-1], layout="given")
    again = chosen()
    assert (again.config, len(ran)) == (first.config, count)
    assert sum("race (kept): " in line for line in again.lines) == auto_layout.RACERS


def test_a_race_goes_in_turns(monkeypatch):
    """A layout that is disturbed once is not lost by it."""
    took = {"a": [2.0, 1.0], "b": [9.0, 9.5], "c": [1.1, 1.3]}
    ran = []

    def time_layout(_, name, *__):
        ran.append(name)
        return took[name][ran.count(name) - 1]

    monkeypatch.setattr(auto_layout, "time_layout", time_layout)
    nobody = None
    assert race(nobody, list("abc"), nobody) == [1.0, 9.0, 1.1]
    assert ran == ["a", "b", "c", "c", "b", "a"]


def test_options_that_say_a_layout_are_refused():
    refused = [
        ("chooses --zero itself; leave", {"zero": 1}),
        ("synchronous ranks", {"sync": "asp"}),
        ("a new run", {"dp": 2, "resume": "run"}),
    ]
    for words, options in refused:
        usage_error(words, assemble, {"layout": "auto", **options})


def test_a_model_has_an_output_for_each_number_that_is_predicted():
    table = Dataset("table", np.ones((8, 3), np.float32), np.ones((8, 2), np.float32), 0)
    model = workload(8, table, model="mlp", hidden=[4], loss="mse").build()
    assert [p.shape for p in model.parameters()][-1] == (2,)


def test_a_step_is_compared_with_its_prediction():
    records = [{"kind": "train", "samples_per_second": rate} for rate in (1.0, 100.0, 200.0, 300.0)]
    chosen = ChosenLayout(assemble({}), (), LayoutPrice(0.06, 0.02, 0.01, 0.01))
    assert chosen.compare(20, records) == ["step predicted 100 ms, measured 100 ms (+0 %)"]
    assert "too few steps" in chosen.compare(20, [])[0]
    assert ["most of it" in chosen.compare(size, records)[0] for size in (23, 24)] == [False, True]
    short = ChosenLayout(assemble({}), (), LayoutPrice(2e-4, 0.0, 0.0, 0.0))
    assert short.compare(1, [{"kind": "train", "samples_per_second": 2000.0}]) == [
        "step predicted 200 us, measured 500 us (-60 %); between steps as short as this a run looks"
        " after itself"
    ]
    slow = {"compute_s": 0.08, "wait_s": 0.02, "sync_s": 0.1, "input_s": 0.0}
    assert chosen.compare(40, [record | slow for record in records]) == [
        "step predicted 100 ms, measured 200 ms (-50 %); most of it in synchronization, predicted"
        " 10 ms, measured 100 ms; nnmpi comm fit measures the messages"
    ]


@pytest.mark.parametrize(
    "words, text",
    [
        ("--ranks 0", "--ranks"),
        ("--shape 8 --dataset iris", "--shape replaces --dataset"),
        ("--memory much", "much"),
        ("--dp 2", "--dp"),
        ("--shape 8 8 --model gpt", "--shape for --model gpt is one number"),
        ("--shape 8 --context 4 --model gpt", "--shape has 8 tokens, but --context is 4; leave"),
    ],
)
def test_wrong_words_of_the_plan_are_refused(words, text):
    usage_error(text, lambda: plan.parse(words.split()))


def test_the_command_that_is_printed_is_one_for_a_shell(monkeypatch):
    given = shlex.split(
        "--data-dir 'my data; rm' --dataset \"it's.csv\" --hidden 3 4 --no-normalize"
    )
    words = shlex.split(plan.train_command(plan.parse(given), 2, {"dp": 2}))
    assert " ".join(words[:5]) == "mpirun -n 2 nnmpi train"
    assert parse(words[5:]) == parse([*given, "--dp", "2"])
    words = shlex.split(
        plan.train_command(plan.parse(["--shape", "8", "--model", "lstm"]), 2, {"dp": 2})
    )
    assert parse([*words[5:-2], "--dataset", "text"]).model.context == 8
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert plan.train_command(plan.parse(given), 2, {}).startswith("srun -n 2 nnmpi train")


@pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")
@pytest.mark.parametrize("word, compiled", [("on", True), ("off", False), ("auto", True)])
def test_parts_are_measured_with_the_kernels_that_train(
    group, monkeypatch, tmp_path, word, compiled
):
    """By the plan command, and for a run whose layout is chosen."""
    pytest.importorskip("numba")

    def measured(*_):
        raise UsageError(f"compiled: {setting() is True}")

    monkeypatch.setattr(plan, "find_profile", measured)
    monkeypatch.setattr(auto_layout, "find_profile", measured)
    usage_error(f"compiled: {compiled}", lambda: plan.main([*SMALL[:-3], "--jit", word], group))
    if group.size > 1:
        usage_error(
            f"compiled: {compiled}",
            main,
            [*SMALL, "--layout", "auto", "--jit", word, "--out", str(tmp_path / "run")],
            group,
        )


@pytest.mark.simulated
def test_what_the_plan_cannot_do_is_refused(group):
    for words, text in (
        ("--shape 4 --loss mse", "has classes, but --loss mse predicts numbers"),
        ("--shape 1000000 100000000", "32 samples of shape .* do not fit this memory"),
        (f"{PLANNED} --network none --ranks 1", "network 'none' is not understood"),
        (f"{PLANNED} --nodes 7 --ranks 1", "cannot be split evenly over 7 nodes"),
        (f"{PLANNED} --nodes 2 --ranks 4", "no fit"),
    ):
        with pytest.raises(UsageError, match=text):
            plan.main(words.split(), group)


def test_a_plan_of_adapters_counts_what_stays(tmp_path):
    """Those of --pretrained: once, in half of the memory, or shared and gathered by ZeRO 3."""
    size = LlamaSize(TOKENS, CONTEXT, 16, 2, 4, 2, 24, 4)
    full = size.build().initialize(1).state()
    save_pretrained(tmp_path / "base", full, size)
    words = f"--pretrained {tmp_path / 'base'} --shape {CONTEXT} --batch-size 16 --lora 2"
    count = sum(array.size for array in full.values())
    for more, width in (("", 4), ("--base-dtype bf16", 2)):
        config = plan.parse(f"{words} {more}".split()).config
        work = replace(workload(), config=config)
        far = work.pricer(made_up(4), network_of(4))
        (whole,) = far.shapes.states(Candidate().division, 0, 1)
        (shared,) = far.shapes.states(Candidate().division, 3, 4)
        assert whole.parameters == pytest.approx(width * count + whole.gradients, rel=0.1)
        assert shared.parameters < whole.parameters / 3
        assert sum(shared.gathered) == pytest.approx(width * count, rel=0.1)
        gathers = [item for item in far._sums(Candidate(dp=4, zero=3)) if item[0] == "all-gather"]
        assert {*shared.gathered} <= {nbytes for _, _, nbytes, _ in gathers}
