"""A Worker's replayed passes: bit for bit the passes as they stand, under every layout; and never
of another model.
"""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import islice

import numpy as np
import pytest

from nnmpi import models, nn, optim
from nnmpi.base import timeline
from nnmpi.base.shard import split
from nnmpi.compose.layout import GradientExchange, Layout, Numerics
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.nn.chain import open_chain
from nnmpi.tensor.function import Function
from tests.harness.slow import MORE_LAYOUTS, once_more
from tests.worker_options import arranged

pytestmark = pytest.mark.host_only(
    "passes on a device are not recorded: there recordings would keep more than a step takes"
)

ROWS, BATCH = 21, 8  # batches of 8, 8 and 5 rows: nothing divides
EPOCHS = 3


def images():
    generator = np.random.default_rng(0)
    return Dataset(
        "images", generator.random((ROWS, 4, 4, 1), "float32"), generator.integers(0, 3, ROWS), 3
    )


def tokens():
    text = np.random.default_rng(0).integers(0, 7, (ROWS, 5))
    return Dataset("tokens", text[:, :-1], text[:, 1:], 7)


def dropping():
    """Return a model with running statistics and masks."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(16, 3),
    )  # fmt: skip


def passing():
    """Return a model with shortcuts, one around the other, that pass through whole stages."""
    inner = nn.Residual(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU()))
    outer = nn.Residual(nn.Sequential(nn.ReLU(), inner, nn.Linear(6, 6), nn.ReLU()))
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), outer, nn.Linear(6, 3))


def yes_or_no():
    dataset = images()
    return Dataset("quantities", dataset.x, (dataset.y > 0).astype("float32"), 0)


MODELS = {
    "mlp": (lambda: models.mlp((4, 4, 1), 3, (6, 5)), images),
    "dropping": (dropping, images),
    "passing": (passing, images),
    "gpt": (lambda: models.gpt(7, 4, 12, 1, 3, dropout=0.1), tokens),
    "recomputed": (lambda: models.gpt(7, 4, 12, 2, 3), tokens),
    "lstm": (lambda: models.lstm(7, 6, 1), tokens),
    "lstm of few tokens": (lambda: models.lstm(7, 8, 1), tokens),
}


def replicas(size):
    return [Layout(dp=size)]


LAYOUTS = {
    "mlp": lambda size: [*replicas(size), Layout(dp=size, zero=1), Layout(dp=1, tp=size)],
    "gpt": lambda size: [Layout(dp=1, tp=size), Layout(dp=1, sp=size, sp_attention="ring")],
    "recomputed": lambda size: [
        Layout(dp=1, sp=size, zero=3, sp_attention="ulysses", activation_memory="least")
    ],
}


def train(group, kind, layout, replayed, change=None, epochs=EPOCHS, **options):
    """Return what some epochs of training report and leave, and how many passes were replayed.

    A trace is recorded of the others: what is looked at runs as it stands.
    """
    make, data = kind
    sgd = partial(optim.SGD, momentum=0.9)
    cuts = {
        "microbatches": options.pop("microbatches", 1),
        "whole_microbatches": options.pop("whole", False),
    }
    worker = arranged(make(), group, layout, initial=1, make=sgd, lr=0.05, seed=3, **options)
    where = worker.arrangement
    loader = Loader(data(), BATCH, where, workers=0, **cuts)
    seen, replays = [], 0
    for epoch in range(epochs):
        if change is not None:
            change(where.model, epoch)
        for batch in islice(loader.epoch(epoch), 3):
            before = worker.passes.replay.replays
            if replayed:
                report = worker.step(batch)
            else:
                with timeline.tracing(timeline.Timeline()):
                    report = worker.step(batch)
            seen.append((report.loss, report.score, report.grad_norm))
            replays += worker.passes.replay.replays - before
            assert (worker.passes.replay.replays == before) == bool(worker.explain_replay())
        with nullcontext() if replayed else timeline.tracing(timeline.Timeline()):
            evaluated = worker.evaluate(loader.epoch(epoch))
        seen.append((evaluated.loss, evaluated.score, float(evaluated.samples)))
    left = [array.copy() for array in where.model.storage.data]
    left += [buffer.data.copy() for _, buffer in where.model.named_buffers()]
    worker.release()
    return seen, left, replays


def assert_equal(group, kind, layout, least=1, **options):
    seen, left, replays = train(group, kind, layout, True, **options)
    plain, expected, none = train(group, kind, layout, False, **options)
    assert seen == plain
    for ours, theirs in zip(left, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert replays >= least
    assert none == 0


@pytest.mark.simulated(max_size=3)
@pytest.mark.parametrize("name", MODELS)
def test_replays_are_the_passes_as_they_stand(group, name):
    """Losses, scores, norms of gradients, weights, running statistics; batches of two sizes in
    turns.
    """
    for layout in LAYOUTS.get(name, replicas)(group.size):
        # the fourth call of a shape is audited
        assert_equal(group, MODELS[name], layout, epochs=6 if layout.zero == 3 else EPOCHS)


@pytest.mark.simulated(max_size=3)
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 3},
        {"numerics": Numerics(clip=0.1)},
        {"numerics": Numerics(precision="fp16")},
        {"exchange": GradientExchange(overlap=True, bucket_bytes=64, fused_update=False)},
        {"loss": "bce"},
    ],
    ids=["microbatches", "clip", "fp16", "overlap", "loss"],
)
def test_with_all_that_changes_a_step(group, options):
    """The same for sums of microbatches, clipped and scaled gradients, sums under the backward
    pass.
    """
    kind = (
        (lambda: models.mlp((4, 4, 1), 1, (5,)), yes_or_no) if "loss" in options else MODELS["mlp"]
    )
    assert_equal(group, kind, Layout(dp=group.size), **options)


def choosing():
    """Return a model with experts that ranks share out."""
    return models.gpt(7, 4, 12, 1, 3, experts=3)


@pytest.mark.simulated(min_size=2, max_size=4)
@pytest.mark.parametrize("name, microbatches", [("dropping", 2), ("dropping", 4), ("choosing", 3)])
def test_other_ranks_rows_change_while_this_ranks_stay(group, name, microbatches):
    """Some ranks have the rows of an earlier microbatch and replay, and others compute: running
    statistics take the number of all rows, and all ranks meet equally often.
    """
    kind, layout = MODELS["dropping"], Layout(dp=group.size)
    if name == "choosing":
        kind, layout = (choosing, tokens), Layout(dp=group.size, expert_parallel=True)
    assert_equal(group, kind, layout, microbatches=microbatches)


@pytest.mark.simulated(min_size=4, max_size=4)
def test_second_halves_meet_as_often_in_a_replay(group):
    """Of experts, whose backward is a pass through graphs of their own."""
    layout = Layout(dp=2, pp=2, pipeline="v-half", split=(1, 2, 2, 1), zero=3, expert_parallel=True)
    assert_equal(group, (choosing, tokens), layout, microbatches=3)


@pytest.mark.simulated(max_size=2)
def test_no_pass_outlives_its_batch(group, monkeypatch):
    """Neither eagerly, nor recorded, nor replayed: a recording calls the pass of its replay."""
    make, _ = MODELS["dropping"]
    layout = Layout(pp=group.size, split=cut(make, group.size))
    worker = arranged(make(), group, layout, initial=1)
    where = worker.arrangement
    loader = Loader(images(), 7, where, microbatches=2)
    begin, passes = worker.passes.begin, []

    def watched(*args):
        now = begin(*args)
        passes.append(weakref.ref(now))
        return now

    monkeypatch.setattr(worker.passes, "begin", watched)
    for epoch in range(2):
        for batch in loader.epoch(epoch):
            worker.step(batch)
    gc.collect()
    assert worker.passes.replay.replays > 0
    assert [item() for item in passes] == [None] * 6


def cut(make, stages):
    """Return how many layers each stage has, of a chain that is long enough."""
    return tuple(len(part) for part in split(len(open_chain(make())), stages))


def pipelines(size, make):
    """Yield layouts of so many ranks with stages: schedules, what is computed again, what goes with
    it.
    """
    layers = len(open_chain(make()))
    if size <= layers:
        plain = {"dp": 1, "pp": size, "split": cut(make, size)}
        yield Layout(**plain)
        yield Layout(**plain, pipeline="gpipe", activation_memory="least")
        yield Layout(**plain, pipeline="zero-bubble")
    if 2 * size <= layers:
        yield Layout(
            dp=1, pp=size, pipeline="interleaved", virtual_stages=2, split=cut(make, 2 * size)
        )
        yield Layout(dp=1, pp=size, pipeline="zb-v", split=cut(make, 2 * size))
    if 4 * size <= layers:
        yield Layout(
            dp=1, pp=size, pipeline="interleaved", virtual_stages=4, split=cut(make, 4 * size)
        )
    if size == 4 and make is not passing:
        yield Layout(dp=2, pp=2, zero=1, split=cut(make, 2))
        yield Layout(dp=2, pp=2, zero=3, pipeline="zero-bubble", split=cut(make, 2))
        if make in (MODELS["mlp"][0], MODELS["gpt"][0]):
            yield Layout(dp=1, pp=2, tp=2, split=cut(make, 2))
            yield Layout(dp=1, pp=2, sp=2, sp_attention="ring", split=cut(make, 2))


@pytest.mark.simulated(min_size=2, max_size=4)
@pytest.mark.parametrize(
    "name", [once_more(name, name != "mlp", MORE_LAYOUTS) for name in [*MODELS][:-1]]
)
def test_stages_replay_what_they_compute(group, name):
    """Running statistics, masks, a tied table, shortcuts over several stages; microbatches of
    several sizes.
    """
    make, _ = MODELS[name]
    for layout in pipelines(group.size, make):
        if layout.sp == 1 or name == "gpt":
            cuts = {"microbatches": 6 if group.size == 3 else 4}
            assert_equal(group, MODELS[name], layout, **cuts)


def one_call():
    """Return a model with an operation that a recording repeats as one call."""
    return nn.Sequential(
        nn.Linear(4, 4), nn.RNN(4, 5), nn.Linear(5, 4), nn.RNN(4, 4), nn.Flatten(), nn.Linear(16, 3)
    )


@pytest.mark.simulated(min_size=2, max_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_operations_of_one_call_in_halves(group, schedule):
    """Each half computes the gradients that it has to, in replays as in the recorded pass."""
    data = images()
    kind = one_call, lambda: Dataset("rows", data.x[..., 0], data.y, 3)
    layout = Layout(dp=1, pp=2, split=(3, 3), pipeline=schedule)
    assert_equal(group, kind, layout, microbatches=4)


@pytest.mark.simulated(max_size=2)
def test_a_fixed_order_of_sums(group):
    """Gradients leave the model after each microbatch, and statistics are kept until the end."""

    def make():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm(5), nn.Tanh(), nn.BatchNorm(5),
            nn.Linear(5, 3)
        )  # fmt: skip

    layout = Layout(dp=group.size, reduction="fixed")
    assert_equal(group, (make, images), layout, microbatches=2, whole=True)


@pytest.mark.simulated(min_size=2, max_size=3)
def test_updates_within_a_pass_are_not_replayed(group):
    """Weights move within a pass."""
    make, _ = MODELS["mlp"]
    given = Layout(dp=1, pp=group.size, split=cut(make, group.size), pipeline="pipedream")
    options = {"microbatches": 4}
    seen, _, count = train(group, MODELS["mlp"], given, True, **options)
    assert count == 0
    assert len(seen) == 4 * EPOCHS


class Deciding(nn.Module):
    """A layer of a user's own that decides by what it sees."""

    def __init__(self):
        self.inner = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x):
        """Return one thing or another."""
        self.calls += 1
        return self.inner(x) if float(x.data.sum()) > 0 else x * 2


class Doubling(nn.Module):
    """One that says that it decides nothing."""

    replayable = True

    def __init__(self):
        self.factor = 2.0

    def forward(self, x):
        """Return a multiple of x."""
        return x * self.factor


class Bent(Function):
    """An operation as one writes NumPy."""

    def forward(self, x):
        y = x * x + np.linalg.norm(x, axis=-1, keepdims=True)
        y += x
        self.saved = (x,)
        return y

    def backward(self, grad):
        (x,) = self.saved
        length = np.linalg.norm(x, axis=-1, keepdims=True)
        result = 2 * x * grad + grad
        result += grad.sum(-1, keepdims=True) * x / length
        return (result,)


class Natural(nn.Module):
    """A layer with an operation of its own."""

    replayable = True

    def forward(self, x):
        """Return the operation's result."""
        return Bent()(x)


class Inheriting(Doubling):
    """A subclass, which has not said it."""


def joining():
    """A layer of nnmpi's that calls a function which is not."""
    return nn.Branches(nn.Linear(3, 3), nn.Tanh(), join=lambda result: result[0] + result[1])


@pytest.mark.simulated(max_size=1)
@pytest.mark.parametrize(
    "layer, replays",
    [(Deciding, False), (Doubling, True), (Natural, True), (Inheriting, False), (joining, False)],
)
def test_modules_of_ones_own_are_replayed_if_they_say_so(group, layer, replays):
    """Each class for itself; any other runs each time."""
    kind = (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), layer()), images)
    seen, _, count = train(group, kind, Layout(), True)
    assert (count > 0) is replays
    assert seen == train(group, kind, Layout(), False)[0]


def freeze(model, epoch):
    model.layers[6].weight.requires_grad = epoch < 2


def slow_down(model, epoch):
    if epoch == 2:
        model.layers[5].p = 0.1


def exchange(model, epoch):
    if epoch == 2:
        model.layers[2] = nn.Tanh()


@pytest.mark.simulated(max_size=1)
@pytest.mark.parametrize("change", [freeze, slow_down, exchange])
def test_a_model_that_changes_is_recorded_anew(group, change):
    """A frozen parameter, another rate, another layer: the old calls are not made."""
    assert_equal(group, MODELS["dropping"], Layout(), change=change, epochs=4)
