"""The ledger: bytes by kind, predicted and measured alike, and where they can be seen."""

import contextvars
import gc
import tracemalloc
from contextlib import nullcontext
from itertools import chain, count, islice

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, Worker, models, nn, ops, optim, simulate
from nnmpi.backend import onednn
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import UsageError
from nnmpi.base.timeline import Timeline, to_chrome, tracing
from nnmpi.data import Dataset, Loader
from nnmpi.memory import RecomputedModel
from nnmpi.memory.ledger import ACTIVATIONS, BATCHES, COMMUNICATION, KINDS, MemoryLedger
from nnmpi.memory.store import Store, saved_memory
from tests.equivalence.reference import Setup, batches, build
from tests.worker_options import arranged

HIDDEN = (30, 20, 40)


def ones():
    return Dataset("ones", np.ones((24, 6), np.float32), np.zeros(24, int), 3)


def train(group, zero, allreduce="native", trace=False, hidden=HIDDEN):
    setup = Setup(models.mlp, {"hidden": hidden}, dtype="float32", data=ones, batch_size=8)
    layout = Layout(zero=zero, memory_limit=2**40, unit_bytes=1)
    options = {"allreduce": allreduce, "fused_update": False, "check": False}
    worker, timeline = build(setup, group, layout, counts=True, **options), Timeline()
    for batch in islice(batches(setup, worker), 3):
        with tracing(timeline) if trace else nullcontext():
            worker.step(batch)
    result, (line, *kinds) = nnmpi.memory.report(), worker.memory()
    assert kinds and max(map(len, kinds)) <= 98
    worker.release()
    return result, line, to_chrome({group.rank: timeline.events})["traceEvents"]


@pytest.mark.host_only("memory that a node's ranks share is the host's")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_predicted_is_what_is_measured(zero):
    """Of the kinds that formulas know; batches and activations are counted, too."""
    for allreduce in ("native", "shared"):
        for result, line, _ in simulate(lambda group, way=allreduce: train(group, zero, way), 3):
            assert tuple(result.peaks) == KINDS
            assert result.predicted == {kind: result.peaks[kind] for kind in result.predicted}
            assert len(result.predicted) == 3
            assert result.peaks[BATCHES] >= 2 * (6 * 4 + 8)  # 2 or 3 of 8 samples with their labels
            assert result.peaks[ACTIVATIONS] >= 2 * sum(HIDDEN) * 4
            assert result.held[ACTIVATIONS] == 0
            assert result.peak <= sum(result.peaks.values())
            assert (result.peaks[COMMUNICATION] > 0) == (zero > 1)  # slots and scratch
            assert "as predicted" in line


def test_a_short_last_batch_does_not_stand_for_full_ones(group):
    """Where it is the second step, as in an epoch of two, the next full batch is counted, too."""

    def activations(samples, steps):
        data = Dataset("numbers", np.ones((samples, 6), np.float32), np.zeros(samples, int), 3)
        model = models.mlp((6,), 3, HIDDEN).initialize()
        worker = Worker(model, optim.Adam(model.storage), group)
        loader = Loader(data, 8, workers=0)
        for batch in islice(chain.from_iterable(map(loader.epoch, count())), steps):
            worker.step(batch)
        worker.release()
        return nnmpi.memory.report().peaks[ACTIVATIONS]

    full = activations(16, 2)
    assert activations(12, 2) < full
    assert activations(12, 3) == pytest.approx(full, rel=0.05)  # with Python's own objects


@pytest.mark.host_only("memory that a node's ranks share is the host's")
def test_each_stage_of_zero_takes_less_than_the_one_before():
    """Of layers none of which has most of the parameters."""
    stages = [
        simulate(lambda group, stage=stage: train(group, stage, hidden=(32,) * 8), 4)
        for stage in range(4)
    ]
    peaks = [max(result.peak for result, _, _ in ranks) for ranks in stages]
    assert peaks == sorted(set(peaks), reverse=True)


def test_it_is_drawn_where_a_trace_is_recorded():
    """As amounts by kind, at the beginning of a step and after its passes."""
    (_, _, rows), *_ = simulate(lambda group: train(group, 2, trace=True), 2)
    curve = [row["args"] for row in rows if row["ph"] == "C"]
    assert len(curve) == 6
    assert all(set(item) == set(KINDS) for item in curve)
    assert [item[ACTIVATIONS] > 0 for item in curve] == [False, True] * 3


def test_mistakes_are_refused():
    with pytest.raises(UsageError, match="make an nnmpi.Worker first"):
        contextvars.Context().run(nnmpi.memory.report)
    with pytest.raises(KeyError, match="weights"):
        MemoryLedger().note({"weights": 1})


ON_HOST = pytest.mark.host_only("the host's allocations")


@ON_HOST
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_meter_counts_its_own_rank(ranks):
    """What lives, and the most meanwhile, without what other ranks do in their turns."""

    def main(group):
        size = 2**20 * (1 + group.rank)

        def work():
            held = [np.empty(size, np.uint8), np.empty(size, np.uint8)]
            group.gather(group.rank)
            held.pop()
            group.gather(group.rank)
            return held

        with numpy_backend().meter() as meter:
            _, most, left = meter.measure(work)
        return most // size, left // size

    assert simulate(main, ranks) == [(2, 1)] * ranks
    assert not tracemalloc.is_tracing()


@ON_HOST
@pytest.mark.parametrize("budget", [None, "least"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_peak_is_that_of_a_trace(budget, microbatches, monkeypatch):
    """With all temporary arrays, within a plan and without one. (Where oneDNN adds in place, these
    are so few that Python's own objects would count.)
    """
    monkeypatch.setattr(onednn, "for_float32", lambda: None)
    data = Dataset("numbers", np.ones((64, 64), np.float32), np.zeros(64, int), 3)
    (batch,) = Loader(data, 64, workers=0, microbatches=microbatches).epoch(0)

    def main(group):
        layout = Layout(activation_memory=budget)
        net, sample = models.mlp((64,), 3, [512] * 4), data.rows(np.arange(4))
        worker = arranged(net, group, layout, sample)
        for _ in range(3):
            worker.step(batch)
        with numpy_backend().meter() as meter, tracing(Timeline()):  # a replay has other memory
            _, most, _ = meter.measure(lambda: worker.step(batch))
        return most, nnmpi.memory.report().peaks[ACTIVATIONS]

    ((most, counted),) = simulate(main, 1)
    assert counted == pytest.approx(most, rel=0.03)


def live_and_counted(layer):
    """Return the bytes that a forward pass leaves in memory, and those that are counted."""
    model = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 8)).initialize(seed=0)
    x = np.random.default_rng(0).normal(size=(8, 64, 64)).astype("float32")
    with nn.training():
        model(x)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        y = model(x)
        live = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    outside = [x, y.data, *(parameter.data for parameter in model.parameters())]
    return live, sum(saved_memory(y.tape.find().nodes, outside).values()) + y.data.nbytes


@ON_HOST
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.MixtureOfExperts(64, experts=4, top_k=2, hidden=256),
        lambda: nn.MixtureOfExperts(64, experts=2, top_k=1, hidden=64, capacity=1.0),
        lambda: nn.LSTM(64, 64),
        lambda: nn.CausalSelfAttention(64, 4),
    ],
)
def test_all_that_a_layer_saves_is_counted(layer):
    """A mixture of experts saves graphs of its own, in which the arrays are."""
    live, counted = live_and_counted(layer())
    assert counted == pytest.approx(live, rel=0.05)


@ON_HOST
def test_a_plan_sees_the_experts_activations(tmp_path):
    """A budget is kept, and what goes out comes back: the gradients are those of an ordinary
    pass.
    """
    x, y = np.random.default_rng(0).normal(size=(8, 32, 64)), np.zeros((8, 32), int)

    def peak(model):
        tracemalloc.start()
        with nn.training():
            model(x.astype("float32"), lambda out: ops.cross_entropy(out, y)).backward()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    layers = [nn.MixtureOfExperts(64, experts=4, top_k=2, hidden=256) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 8)).initialize(seed=0)
    ordinary = RecomputedModel(model, None)
    peak(ordinary)
    grads = [grad.copy() for grad in model.storage.grads]
    model.zero_grad()
    assert peak(ordinary) == pytest.approx(ordinary.price.peak, rel=0.03)
    for options in (
        {"budget": "least"},
        {"budget": "least", "store": Store(str(tmp_path), numpy_backend())},
    ):
        planned = RecomputedModel(model, **options)
        peak(planned)
        model.zero_grad()
        peak(planned)
        assert planned.price.peak < 0.6 * ordinary.price.peak
        for now, then in zip(model.storage.grads, grads, strict=True):
            np.testing.assert_allclose(now, then, rtol=1e-4, atol=1e-7)
        planned.release()
        model.zero_grad()
