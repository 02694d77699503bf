"""ZeRO: the bytes held and sent, what is refused, and checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np
import pytest

import nnmpi
from nnmpi import (
    DataParallel,
    GradientExchange,
    Layout,
    NnmpiError,
    Tensor,
    Worker,
    arrange,
    models,
    nn,
    ops,
    optim,
    simulate,
)
from nnmpi.base.errors import DeviceError, DivergenceError
from nnmpi.base.shard import part
from nnmpi.comm.fit import parse_network
from nnmpi.comm.simulated.simulated_comm import SimulatedComm
from nnmpi.data import Dataset, Loader
from nnmpi.nn import Module
from nnmpi.nn.sharding import STAGES
from nnmpi.parallel.zero.storage import NodeTransport, cut_units, predict_bytes, sharded
from nnmpi.train.cli import main as train
from nnmpi.train.metrics import read_metrics
from tests.equivalence.reference import Setup, batches, build, differences, run
from tests.equivalence.rows import GPT, LIMITED, ZERO
from tests.harness.refusals import refuses, told, usage_error
from tests.worker_options import arranged, replicas, sgd, work

TOKENS, TIME = 13, 6


def mlp():
    return models.mlp((5,), 3, hidden=(37, 7, 41), dropout=0.2)


MODELS = {
    "mlp": mlp,
    "gpt": lambda: models.gpt(TOKENS, TIME, features=8, layers=2, heads=2, dropout=0.1),
}


def samples(name):
    draw = np.random.default_rng(1)
    if name == "gpt":
        x, y = draw.integers(0, TOKENS, (2, 10, TIME))
        return Dataset("tokens", x.astype(np.uint16), y, TOKENS)
    return Dataset(
        "numbers", draw.standard_normal((10, 5)).astype(np.float32), draw.integers(0, 3, 10), 3
    )


def test_stage_3_has_the_bits_of_stage_2():
    for name in ("mlp", "lstm"):
        two, three = (
            simulate(partial(run, ZERO[name], layout=Layout(zero=stage, unit_bytes=1)), 3)[0]
            for stage in (2, 3)
        )
        assert not differences(three, two, ZERO[name], exact=True)


def test_a_part_does_not_depend_on_the_list_that_holds_the_arrays():
    """The storage's own list and a copy of it; all weights of a rank are asked for by name."""

    def shapes(group):
        model = mlp()
        model.initialize(seed=0, storage=sharded(model, group, 1, unit_bytes=1))
        storage = model.storage
        span = storage.spans[0]
        parts = [storage.view(span, flats) for flats in (storage.data, [*storage.data])]
        return [prod(part.values.shape) for part in parts], storage.weights(span).size

    (one, other), whole = simulate(shapes, 2)[0]
    assert one == other < whole == 5 * 37


class Counting:
    """Makes arrays and counts their bytes."""

    def __init__(self):
        self.nbytes = 0

    def __call__(self, elements, dtype):
        self.nbytes += elements * np.dtype(dtype).itemsize
        return np.zeros(elements, dtype)


EACH_RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])


@pytest.mark.host_only("counts the arrays that NumPy makes")
@EACH_RANKS
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_bytes_of_state_are_those_of_the_formulas(name, ranks):
    """float32 and Adam: 16 bytes for each of P parameters with plain replicas. The peak falls from
    stage to stage.
    """
    model = MODELS[name]()
    units, shared = cut_units(model, 1, 4)
    # rounded to 64 bytes
    lengths = [
        sum(-(-parameter.size // 16) * 16 for parameter in unit.parameters) for unit in units
    ]
    apart = sum(-(-item.size // 16) * 16 for item in shared)
    full, unit = sum(lengths) + apart, max(lengths) + apart
    slots = max(lengths[0::2]) + max(lengths[1::2]) + apart

    def main(group):
        local = sum(len(part(length, ranks, group.rank)) for length in [*lengths, apart])
        formulas = (
            16 * full,
            8 * full + 8 * local,
            4 * full + 12 * local + 4 * unit,
            16 * local + 4 * (slots + unit),
        )
        totals = []
        for stage in (0, *STAGES):
            model, count = MODELS[name](), Counting()
            options = {"storage": sharded(model, group, stage, 1)} if stage else {}
            model.initialize(seed=0, allocate=count, **options)
            state = optim.Adam(model.storage).slots()
            measured = count.nbytes + sum(
                array.nbytes for arrays in state.values() for array in arrays
            )
            assert measured == formulas[stage], (stage, measured, formulas)
            assert (
                predict_bytes(MODELS[name](), stage, group.rank, ranks, 4, 2, 1).total == measured
            )
            totals.append(measured)
        return totals

    for dp, first, *_ in simulate(main, ranks):
        assert first == dp if ranks == 1 else first < dp


@EACH_RANKS
def test_the_bytes_sent_are_those_of_the_formulas(ranks):
    """By a ring, over all ranks: (N - 1) times 8P in stages 1 and 2, and 12P in stage 3; and in
    `traffic`, by rank.
    """

    def main(group, stage, steps):
        model = mlp()
        model.initialize(seed=0, storage=sharded(model, group, stage))
        parallel = nnmpi.ShardedDataParallel(model, group, algorithm="ring")
        optimizer = optim.Adam(model.storage)
        for _ in range(steps):
            model.zero_grad()
            parallel.backward(
                ops.cross_entropy(
                    model(np.ones((2, 5), np.float32)), np.zeros(2, int), reduction="sum"
                ),
                2 * group.size,
            )
            optimizer.step()
        held = sum(len(array) for array in model.storage.data)
        full = sum(int(count) for count in group.sum_floats([held]))
        parallel.release()
        return full, group.comm.world.traffic.bytes

    for stage, times in zip(STAGES, (8, 8, 12), strict=True):
        item, two = (simulate(lambda group, n=n: main(group, stage, n), ranks) for n in (1, 2))  # noqa: B023
        elements, told = two[0]
        assert two.bytes - item.bytes == (ranks - 1) * times * elements
        assert told - item[0][1] == (times * elements if ranks > 1 else 0)


def test_a_model_that_only_stage_3_fits_under_the_limit():
    """The others are refused with the stage that would do; without any, with what else would."""

    def main(group):
        def place(limit, **options):
            # 128 thousand parameters, 2 MiB of state
            model = models.mlp((64,), 10, hidden=(64,) * 31)
            return told(
                DeviceError, lambda: arrange(model, group, Layout(memory_limit=limit, **options))
            )

        limit = 700 * 2**10
        assert "with zero 3, which needs" in place(limit)
        assert "with zero 3, which needs" in place(limit, zero=1)
        assert "with zero 3, which needs" in place(limit, zero=2)
        assert not place(limit, zero=3)
        none = place(limit // 2)
        assert "with zero" not in none
        assert "spread the model over at least" in none

    simulate(main, 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_misuse_is_refused(ranks):
    """Stray passes, looks at what is not here, passes that were left halfway, and what is no
    stage.
    """

    def loss_of(model):
        return ops.cross_entropy(model(np.ones((1, 5), np.float32)), np.zeros(1, int))

    def main(group):
        usage_error("no stage 4", lambda: nnmpi.ShardedDataParallel(mlp().initialize(), group, 4))
        model = mlp().initialize()
        early = sgd(model)
        parallel = nnmpi.ShardedDataParallel(model, group, 3, unit_bytes=1)
        for call, words in (
            (early.step, "make a new optimizer"),
            (model.state, "gather_model"),
            (model[1].state, "gather_model"),
            (lambda: loss_of(model).backward(), "call parallel.backward"),
        ):
            usage_error(words, call)
        parallel.backward(loss_of(model), 1)
        usage_error("call model.zero_grad", lambda: parallel.backward(loss_of(model), 1))
        parallel.release()
        parallel.release()
        usage_error("gather_model", model, np.ones((1, 5), np.float32))
        usage_error("was released", lambda: parallel.backward(Tensor(np.ones(())), 1))

    simulate(main, ranks, check=False)


def test_a_gradient_that_is_not_finite_is_named():
    """By the rank that has it, on all ranks, and the weights are those of before."""

    def main(group):
        worker = arranged(mlp(), group, Layout(zero=3, unit_bytes=1), lr=1.0)
        storage = worker.model.storage
        before = [array.copy() for array in storage.data]
        batch = next(Loader(samples("mlp"), 7, group, workers=0).epoch(0))
        batch.x[...] = np.inf
        place = "first found in the gradient of '10.weight'.* on rank 0"
        with pytest.raises(DivergenceError, match=place), np.errstate(all="ignore"):
            worker.step(batch)
        assert all((a == b).all() for a, b in zip(before, storage.data, strict=True))

    simulate(main, 3)


def test_what_does_not_go_with_it_is_refused():
    """In a sentence that says what would."""

    def main(group):
        where = arrange(mlp(), group, Layout(zero=3))
        where.model.initialize(seed=0)
        usage_error(
            r"storage=arrangement\.storage", work, where.model, group, lr=1.0, arrangement=where
        )
        where.model.initialize(seed=0, storage=where.storage)
        optimizer = sgd(where.model, 1.0)
        exchange = GradientExchange(fused_update=True)
        worker = Worker(where.model, optimizer, group, exchange=exchange, arrangement=where)
        assert worker.notice.startswith("the update is not fused: it needs replicas")
        worker.release()

    simulate(main, 2)


class Plain(nn.Module):
    """No chain of layers."""

    def __init__(self):
        self.flat, self.only = nn.Flatten(), nn.Linear(64, 10)

    def forward(self, x):
        """Return logits."""
        return self.only(self.flat(x))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_is_one_unit_is_one_segment(stage):
    """Which a pass's program gathers, also where the model's own forward computes it."""
    setup = Setup(lambda *_: Plain())
    (serial,) = simulate(lambda group: run(setup, group), 1)
    for options in ({}, {"activation_memory": 10**7}, {"activation_memory": "least"}):
        layout = Layout(dp=2, zero=stage, **options)
        parallel = simulate(partial(run, setup, layout=layout, allreduce="ring"), 2)
        assert not differences(parallel[0], serial, setup)


@pytest.mark.host_only("windows are of the host's memory")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("room", range(5))
def test_without_room_for_windows_it_sends_messages_and_says_so(stage, room, monkeypatch):
    """It gives back those that it had. However many units there are, it takes no window for each of
    them.
    """
    share_pages, left, held = SimulatedComm.share_pages, Counter(), Counter()

    def share(comm, own_bytes):
        left[comm.rank] += 1
        if left[comm.rank] > room:
            raise DeviceError("there is no more room")
        pages = share_pages(comm, own_bytes)
        free, held[comm.rank] = pages.free, held[comm.rank] + 1

        def give_back():
            held[comm.rank] -= 1
            free()

        monkeypatch.setattr(pages, "free", give_back)
        return pages

    def train(group, kind):
        model = models.mlp((5,), 3, hidden=(7,) * 20).initialize(seed=0)
        parallel, losses = kind(model, group), []
        optimizer = sgd(model)
        for _ in range(2):
            model.zero_grad()
            loss = ops.cross_entropy(
                model(np.ones((2, 5), np.float32)), np.zeros(2, int), reduction="sum"
            )
            losses.append(loss.item())
            parallel.backward(loss, 4)
            optimizer.step()
        return losses, parallel

    def main(group):
        losses, parallel = train(
            group, partial(nnmpi.ShardedDataParallel, stage=stage, unit_bytes=1)
        )
        enough = left[group.rank] <= room
        assert (
            enough
            == ("no more room" not in parallel.notice)
            == parallel.model.storage.is_node_shared
        )
        assert enough or room < 4  # flags, gradients (those of several units apart), weights
        assert held[group.rank] == (left[group.rank] if enough else 0)
        parallel.release()
        assert not held[group.rank]
        return losses

    reference = simulate(lambda group: train(group, DataParallel)[0], 2)[0]
    monkeypatch.setattr(SimulatedComm, "share_pages", share)
    np.testing.assert_allclose(simulate(main, 2)[0], reference, rtol=1e-6)


@pytest.mark.host_only("the ranks are simulated")
@pytest.mark.parametrize("apart", [True, False])
def test_the_table_of_the_memory_page_is_what_runs_hold(apart, tmp_path):
    """Its formulas, without slots and scratch, beside what training counts: by messages, and on one
    node.
    """
    page = (Path(__file__).parents[2] / "docs" / "reference" / "memory.md").read_text()
    rows = re.findall(r"^\| (\d) \| [^|]+ \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    assert [stage for stage, *_ in rows] == ["0", "1", "2", "3"]
    ranks, held, elements = 3, {}, 0
    for stage, *_ in rows:
        words = (
            f"--model mlp --hidden 256 256 --max-steps 4 --log-every 2 --zero {stage} --out"
            f" {tmp_path / stage}"
        )
        machine = parse_network("gbit=10", ranks) if apart else None
        simulate(partial(train, [*words.split(), "--quiet"]), ranks, machine)
        last = [
            item
            for item in read_metrics(tmp_path / stage / "metrics.jsonl")
            if item["kind"] == "train"
        ][-1]
        held[stage] = sum(
            last[f"memory_{kind}"] for kind in ("parameters", "gradients", "optimizer")
        )
        elements = last["memory_gradients"] // 4 if stage == "0" else elements
    for stage, *formulas in rows:
        formula = re.sub(r"(\d) (?=[PU(])", r"\1 * ", formulas[not apart])
        expected = eval(formula, {"P": elements, "N": ranks, "U": 0, "A": 0, "B": 0})
        assert held[stage] == pytest.approx(expected, rel=1e-3), stage


def test_a_step_on_one_node_has_few_barriers(monkeypatch):
    """However many units there are: all of stage 1 are summed between two."""
    waits = Counter()

    def wait(self, *told):
        waits[self._group.rank] += 1
        return old(self, *told)

    old = NodeTransport.meet
    monkeypatch.setattr(NodeTransport, "meet", wait)

    def main(group):
        net = models.mlp((6,), 3, hidden=[8] * 5)
        worker = arranged(net, group, Layout(zero=1, unit_bytes=1))
        for _ in range(2):
            waits[group.rank] = 0
            worker.step(np.ones((4, 6)), np.arange(4) % 3)

    simulate(main, 2)
    assert max(waits.values()) <= 3


@pytest.mark.parametrize(
    "name, layout",
    [
        ("gpt", Layout(dp=2, pp=2, split=(4, 4), zero=3, unit_bytes=1)),
        ("gpt", Layout(dp=2, pp=2, split=(2, 2, 2, 2), pipeline="zb-v", zero=2)),
        ("experts", Layout(dp=3, pp=1, zero=3, expert_parallel=True)),
        ("experts", Layout(dp=2, pp=2, split=(4, 4), zero=3, expert_parallel=True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["auto", "ring"])
def test_mixes_hold_the_predicted_bytes(name, layout, way):
    """To the byte, also where ranks hold other parts: a stage, an expert."""
    setup = GPT if name == "gpt" else LIMITED

    def main(group):
        worker = build(setup, group, layout, allreduce=way)
        for batch in islice(batches(setup, worker), 2):
            worker.step(batch)
        report = worker.ledger.report()
        assert report.predicted
        assert {kind: report.held[kind] for kind in report.predicted} == report.predicted

    simulate(main, prod(layout.shape))


class Inputs(Module):
    """Takes two inputs, and returns several results."""

    def __init__(self):
        self.layers = [nn.Linear(3, 3), nn.Linear(3, 3)]

    def forward(self, x, *, other):
        return {"y": self.layers[0](x) + self.layers[1](other), "rest": x}


def _squares(y):
    return (y * y).sum() * 1.0


# (model, x, rank) -> a loss that uses the model's parameters in an unusual way
LOSSES = {
    "two inputs": lambda model, x, rank: _squares(model(x, other=2 * x)["y"]),
    "twice": lambda model, x, rank: _squares(model(x)) + _squares(model(2 * x)),
    "of its own result": lambda model, x, rank: _squares(model(model(x))),
    "twice on one rank": lambda model, x, rank: (
        _squares(model(x)) + _squares(model(2 * x)) * rank if rank else _squares(model(x + x) - x)
    ),
    "not on one rank": lambda model, x, rank: _squares(
        model(x) if rank else model(x).detach() * Tensor(np.ones(3), requires_grad=True)
    ),
    "a penalty": lambda model, x, rank: (
        _squares(model(x)) + sum(map(_squares, model.parameters()), start=Tensor(np.zeros(())))
    ),
    "by its layers": lambda model, x, rank: _squares(model[2](model[1](model[0](x)))),
}


def cut(model, group, stage, algorithm):
    options = {"algorithm": algorithm, "unit_bytes": 8} if stage else {}
    return replicas(model, group, stage, **options)


def learn(parallel, loss, optimizer, samples=100):
    """Do an update."""
    parallel.model.zero_grad()
    parallel.backward(loss, samples)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_gradient_of_data_parallelism_or_is_refused(name):
    x = np.random.default_rng(0).standard_normal((2, 2, 3))

    def program(group, stage, algorithm):
        layers = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)
        model = Inputs() if name == "two inputs" else nn.Sequential(*layers)
        model.initialize(seed=0, dtype="float64")
        parallel = cut(model, group, stage, algorithm)
        optimizer, losses = sgd(model), []
        for _ in range(3):
            if stage == 3 and name == "twice on one rank" and group.is_root:
                model(x[0])  # a forward gathers weights, and is every rank's
            loss = LOSSES[name](model, x[group.rank], group.rank)
            losses.append(learn(parallel, loss, optimizer))
        return losses

    expected = simulate(partial(program, stage=0, algorithm=""), 2)
    for stage, algorithm in ((1, "auto"), (2, "auto"), (3, "auto"), (2, "ring"), (3, "ring")):
        run_it = partial(program, stage=stage, algorithm=algorithm)
        if stage == 1 or name not in ("a penalty", "by its layers"):
            np.testing.assert_allclose(simulate(run_it, 2), expected, rtol=1e-12)
        else:
            refuses(NnmpiError, r"[02].(weight|bias) .* forward.* stage=1", simulate, run_it, 2)


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_passes_through_another_model_that_is_frozen(stage, algorithm):
    """As a generator's through the discriminator."""
    x = np.random.default_rng(0).standard_normal((2, 2, 3))

    def program(group, stage):
        each, losses = [], []
        for seed in (0, 1):
            model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
            model.initialize(seed=seed, dtype="float64")
            each.append((model, cut(model, group, stage, algorithm), sgd(model)))
        (one, _, _), (other, _, _) = each
        for step in range(4):
            model, parallel, optimizer = each[step % 2]
            for parameter in other.parameters():
                parameter.requires_grad = step % 2 == 1
            y = one(x[group.rank])
            loss = _squares(other(y.detach() if step % 2 else y) - 1)
            losses.append(learn(parallel, loss, optimizer))
        return losses

    expected = simulate(partial(program, stage=0), 2)
    np.testing.assert_allclose(simulate(partial(program, stage=stage), 2), expected, rtol=1e-12)
