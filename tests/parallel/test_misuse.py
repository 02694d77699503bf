"""Calls that would give wrong gradients without a word: each must be an error that says what to
do.
"""

import copy
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from nnmpi import (
    AsynchronousWorker,
    DataParallel,
    GradientExchange,
    Layout,
    NnmpiError,
    Numerics,
    ShardedDataParallel,
    Sync,
    Worker,
    arrange,
    models,
    nn,
    ops,
    optim,
    simulate,
)
from nnmpi.base.errors import CommError, LayoutError, UsageError, name_ranks
from nnmpi.base.shard import part
from nnmpi.data import Batch
from nnmpi.data.sampler import Cut
from nnmpi.tensor import Function, Tensor
from tests.equivalence.reference import Setup, run
from tests.harness.refusals import refuses, usage_error
from tests.worker_options import replicas, sgd, work

ROWS = 13
ON_2, FROM_2 = (pytest.mark.simulated(min_size=2, max_size=n) for n in (2, 33))
HOST = pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")


def small():
    return models.mlp((5,), 3, hidden=(7,)).initialize(dtype="float64")


class Setting:
    """A model on all ranks, its loss on this rank's rows, and the serial gradient."""

    def __init__(self, group):
        generator = np.random.default_rng(0)
        x, y = generator.standard_normal((ROWS, 5)), generator.integers(0, 3, ROWS)
        mine = part(ROWS, group.size, group.rank)
        self.group, self.mine = group, mine
        self.x, self.y = x[mine.start : mine.stop], y[mine.start : mine.stop]
        serial = small()
        ops.cross_entropy(serial(x), y).backward()
        self.gradient = serial.storage.grads[0]
        self.model = small()

    def batch(self):
        """Return this rank's rows as a worker takes them."""
        cut = Cut(0, len(self.x), self.mine.start)
        return Batch(self.x, self.y, np.arange(len(self.x)), (cut,), ROWS, 0, 0)

    def worker(self, **options):
        """Return a worker of the model."""
        return work(self.model, self.group, **options)

    def backward(self, parallel, **options):
        """Do a backward pass of this rank's losses."""
        parallel.backward(self.loss(), ROWS, **options)

    def loss(self):
        """Return the sum of this rank's losses."""
        return ops.cross_entropy(self.model(self.x), self.y, reduction="sum")

    def assert_gradient(self, times=1):
        """Fail on all ranks unless all have the serial gradient, that many times."""
        error = float(np.abs(self.model.storage.grads[0] - times * self.gradient).max())
        assert max(self.group.gather(error)) < 1e-12

    def assert_refused(self, action, text, kind=UsageError):
        """Fail on all ranks unless the action raises this on all."""
        try:
            action()
            result = "nothing was raised"
        except Exception as error:
            result = (
                ""
                if isinstance(error, kind) and text in str(error)
                else f"{type(error).__name__}: {error}"
            )
        assert not any(self.group.gather(result)), result


@pytest.mark.simulated
def test_forgotten_zero_grad(group):
    """What is summed already would be summed again."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group)
    setting.backward(parallel)
    setting.assert_refused(lambda: setting.backward(parallel), "model.zero_grad()")
    setting.model.zero_grad()
    setting.backward(parallel, last=False)
    setting.backward(parallel)
    setting.assert_gradient(2)


@FROM_2
@pytest.mark.parametrize("overlap", [True, False])
def test_backward_of_the_loss_itself(group, overlap):
    """Some buckets would be summed, some not, or none; and the next right call works."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, bucket_bytes=64, overlap=overlap)
    setting.assert_refused(setting.loss().backward, "parallel.backward(loss, samples)")
    setting.model.zero_grad()
    setting.backward(parallel)
    setting.assert_gradient()
    # nor added to it
    setting.assert_refused(setting.loss().backward, "parallel.backward(loss, samples)")
    setting.assert_gradient()
    parallel.release()
    setting.model.zero_grad()
    setting.loss().backward()


@pytest.mark.mpi(min_size=2)
def test_two_on_one_model(group):
    """Both would sum the same gradients; after a release there is one again."""
    setting = Setting(group)
    first = DataParallel(setting.model, group)
    setting.assert_refused(lambda: first(setting.x), "call its model, as before")
    setting.assert_refused(lambda: first.backward(setting.loss(), -1), "samples is -1; give")
    setting.assert_refused(lambda: DataParallel(setting.model, group), "release() first")
    first.release()
    assert not first.exchange._group.comm.mpi  # what was given back is the null communicator
    setting.backward(DataParallel(setting.model, group))
    setting.assert_gradient()


class Broken(Function):
    """An operation without a derivative."""

    def forward(self, x):
        """Return x."""
        return x * 1

    def backward(self, grad):
        """Fail."""
        raise ZeroDivisionError("planted")


@FROM_2
@pytest.mark.parametrize("overlap", [True, False])
def test_pass_after_one_that_broke_off(group, overlap):
    """Where sums are on their way, nobody waits for them; where they come at the end, nothing has
    been sent.

    A new one can be made at once, also where ranks had launched different numbers of buckets.
    """
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, bucket_bytes=64, overlap=overlap)
    hidden = nn.Sequential(*setting.model.layers[:-1])
    logits = setting.model.layers[-1](Broken()(hidden(Tensor(setting.x))))
    loss = ops.cross_entropy(logits, setting.y, reduction="sum")
    setting.assert_refused(lambda: parallel.backward(loss, ROWS), "planted", ZeroDivisionError)
    setting.model.zero_grad()
    if overlap:
        setting.assert_refused(lambda: setting.backward(parallel), "make a new one", CommError)
        if group.rank == 0:
            parallel.exchange._launch()
        parallel.release()
        parallel = DataParallel(setting.model, group, bucket_bytes=64, overlap=overlap)
        setting.model.zero_grad()
    setting.backward(parallel)
    setting.assert_gradient()
    parallel.release()


@pytest.mark.simulated
@pytest.mark.parametrize("allreduce", ["native", "shared"])
def test_pass_after_the_release(group, allreduce):
    """Each rank would go on with gradients of its own, or write to memory that is gone."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, allreduce)
    parallel.release()
    setting.assert_refused(lambda: setting.backward(parallel), "was released; make a new one")
    setting.assert_refused(parallel.finish, "was released")
    setting.assert_refused(lambda: parallel.final([0]), "was released")


@pytest.mark.simulated
@pytest.mark.parametrize("fused", [pytest.param(True, marks=HOST), False])
def test_step_after_the_release(group, fused):
    setting = Setting(group)
    before = setting.model.state()
    worker = setting.worker(exchange=GradientExchange(fused_update=fused))
    worker.release()
    worker.release()  # does nothing
    setting.assert_refused(lambda: worker.step(setting.batch()), "was released; make a new one")
    np.testing.assert_equal(setting.model.state(), before)


def attach(model, group, strategy):
    """Make a strategy, by name."""
    if strategy in ("auto", "shared"):
        return DataParallel(model, group, strategy)
    if strategy in ("asp", "local"):
        return AsynchronousWorker(model, sgd(model), group, Sync(strategy))
    fused = GradientExchange(fused_update=True if strategy == "fused" else None)
    return work(model, group, exchange=fused)


# Inputs, and outputs on rank 0 and 1. Parameters begin at multiples of 64 bytes, so that the flat
# arrays of 3 and of 4 outputs are of one length.
OTHERS = {
    "padded alike": (3, 3, 4),
    "longer": (8, 8, 400),
    "shared gradients on one rank": (8, 64, 900),
}


@FROM_2
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "strategy", ["auto", "shared", "asp", "local", "Worker", pytest.param("fused", marks=HOST)]
)
def test_different_models(group, other, strategy):
    """One sentence on all ranks, whatever the lengths of the arrays are: nobody waits, none has
    another's weights.
    """
    inputs, ours, theirs = OTHERS[other]
    model = nn.Linear(inputs, theirs if group.rank == 1 else ours).initialize(
        seed=group.rank, dtype="float64"
    )
    before = model.state()

    same = name_ranks(rank for rank in range(group.size) if rank != 1) + (
        " has" if group.size == 2 else " have"
    )
    words = (
        f"models: {same} weight ({inputs}, {ours}) float64; rank 1 has weight ({inputs}, {theirs})"
        " float64; build"
    )
    if other == "padded alike":
        assert len(set(group.gather(model.storage.data[0].size))) == 1
    Setting(group).assert_refused(lambda: attach(model, group, strategy), words, CommError)
    np.testing.assert_equal(model.state(), before)


@pytest.mark.simulated
def test_module_that_was_put_in_after_the_initialization(group):
    """It has values of its own, which nobody would keep equal or update."""
    setting = Setting(group)
    setting.model.replace("3", nn.Linear(7, 3).initialize(dtype="float64"))
    setting.assert_refused(lambda: DataParallel(setting.model, group), "'3.weight' is not in")


@FROM_2
@pytest.mark.parametrize("strategy", ["auto", "Worker", pytest.param("fused", marks=HOST)])
def test_a_parameter_frozen_on_one_rank(group, strategy):
    """That rank would keep its weights, and the others theirs."""
    model = nn.Linear(3, 2).initialize(dtype="float64")
    dict(model.named_parameters())["bias"].requires_grad = group.rank > 0

    Setting(group).assert_refused(
        lambda: attach(model, group, strategy),
        "models: rank 0 has bias (2,) float64, frozen; ",
        CommError,
    )


def _once(x, y):
    return ops.mse(x, y, reduction="none")


def _twice(x, y):
    return ops.mse(x, y, reduction="none") * 2


# By words of the refusal: (model, rank) -> what this rank gives a trainer.
DIFFERENT = {
    "Adam": lambda m, r: {"optimizer": optim.Adam(m.storage, lr=0.1) if r else sgd(m)},
    "lr 1.1": lambda m, r: {"optimizer": sgd(m, lr=0.1 + r)},
    "momentum 0.5": lambda m, r: {"optimizer": sgd(m, momentum=0.5 * r)},
    "betas": lambda m, r: {"optimizer": optim.Adam(m.storage, betas=(0.9, 0.5 * r))},
    "weight decay": lambda m, r: {"optimizer": sgd(m, weight_decay=0.5 * r)},
    "clip 1.0": lambda m, r: {"numerics": Numerics(clip=1.0 if r else None)},
    "cross-entropy .*rank 1 has mse": lambda m, r: {"loss": "mse" if r else None},
    "huber": lambda m, r: {"loss": partial(ops.huber, reduction="sum", delta=1.0 + r)},
    "_once>; rank 1 has <function _twice": lambda m, r: {"loss": _twice if r else _once},
    "rank 0 has seed 0; rank 1 has seed 1": lambda m, r: {"seed": r},
}


@ON_2
@pytest.mark.parametrize("words", DIFFERENT)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_would_train_differently(group, words, asynchronous):
    """Replicas would go apart, or wait for one another; the sum of two losses' gradients is that of
    neither.
    """
    setting = Setting(group)
    options = {"optimizer": sgd(setting.model), **DIFFERENT[words](setting.model, group.rank)}
    make = partial(AsynchronousWorker, sync=Sync("asp")) if asynchronous else Worker
    usage_error(f"options differ: .*{words}", make, setting.model, group=group, **options)


@ON_2
def test_ranks_whose_steps_differ(group):
    setting = Setting(group)
    worker, batch = setting.worker(), replace(setting.batch(), first=group.rank)
    setting.assert_refused(
        lambda: worker.step(batch, lr=0.1 + group.rank),
        "step 1: the ranks differ in learning rate: rank 0 has 0.1; rank 1 has 1.1",
    )


@pytest.mark.simulated(max_size=4, min_size=4)
def test_parameters_that_replicas_freeze_later(group):
    """As many of a stage, but not the same."""
    setting = Setting(group)
    model = models.mlp((5,), 3, hidden=(7,))
    where = arrange(model, group, Layout(pp=2, split=(2, 2)), dtype="float64")
    setting.model = where.model.initialize(dtype="float64", storage=where.storage)
    worker, replicas = setting.worker(arrangement=where), Setting(where.mesh.dp)
    worker.step(replicas.batch())
    list(setting.model.parameters())[replicas.group.rank].requires_grad = False
    setting.assert_refused(
        lambda: worker.step(replicas.batch()), "the ranks differ in parameters frozen: rank 0 has "
    )


@pytest.mark.parametrize("option", ["exchange", "numerics"])
def test_options_of_another_type(group, option):
    usage_error(
        rf"str is no .* call Worker\(\.\.\., {option}=",
        lambda: Setting(group).worker(**{option: "bf16"}),
    )


@ON_2
def test_ranks_whose_layouts_differ(group):
    layout = Layout(pp=2, split=(1 + group.rank, 2 - group.rank))
    usage_error(
        r"rank 0 has split \(1, 2\); rank 1 has split \(2, 1\)",
        lambda: arrange(models.mlp((5,), 3), group, layout),
    )


@ON_2
def test_shards_of_other_weights(group):
    """A Worker compares seeds, as in stage 3 no rank has all weights. Others are rank 0's."""
    where = arrange(models.mlp((5,), 3), group, Layout(zero=1))
    model = where.model.initialize(seed=group.rank, storage=where.storage)
    usage_error(
        "rank 0 has initial seed 0; rank 1 has initial seed 1",
        work,
        model,
        group,
        arrangement=where,
    )
    first, _ = group.gather([float(item.data.sum()) for item in model.parameters()])
    ShardedDataParallel(model, group).release()
    assert [float(item.data.sum()) for item in model.parameters()] == first


@FROM_2
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_model_at_work(group, duplicate):
    """Its parameters know the ranks, which cannot be copied."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group)
    again = r"keep its values, .* by model.state\(\) and model.load_state"
    optimizer = sgd(setting.model)
    for item, how in (
        (setting.model, again),
        (group, again),
        (setting.model.parameters()[0] * 2, r"copy x.detach\(\)"),
        (optimizer, "save both with nnmpi.save"),
    ):
        refuses(NnmpiError, how, duplicate, item)
    parallel.release()


@pytest.mark.simulated
def test_what_is_no_batch_and_no_optimizer(group):
    """Samples need labels."""
    setting = Setting(group)
    optimizer = sgd(setting.model)
    known = {"Module": setting.model, "Optimizer": optimizer, "Group": group}
    known |= {"Sync": Sync("asp"), "Layout": Layout()}
    calls = (
        (Worker, "Module Optimizer Group"),
        (AsynchronousWorker, "Module Optimizer Group Sync"),
        (arrange, "Module Group Layout"),
        (DataParallel, "Module Group"),
        (ShardedDataParallel, "Module Group"),
    )
    for call, kinds in calls:
        for missing in kinds.split():
            given = [None if kind == missing else known[kind] for kind in kinds.split()]
            text = f"NoneType is no {missing}; call "
            setting.assert_refused(partial(call, *given), text)
    worker = Worker(setting.model, optimizer, group)
    setting.assert_refused(lambda: worker.step(setting.x), "step takes a batch of a data.Loader")
    assert optimizer.lr == 0.1
    worker.release()


@pytest.mark.simulated
def test_worker_with_an_optimizer_of_another_storage(group):
    """It would update what the model does not use."""
    setting = Setting(group)
    optimizer = sgd(setting.model)
    setting.model.initialize(dtype="float64")
    setting.assert_refused(
        lambda: Worker(setting.model, optimizer, group), "make it for model.storage"
    )


@pytest.mark.simulated
@pytest.mark.parametrize(
    "loss",
    [ops.cross_entropy, partial(ops.cross_entropy, label_smoothing=0.1), nn.CrossEntropyLoss()],
)
@pytest.mark.parametrize("role", ["loss", "evaluation_loss"])
def test_worker_with_a_mean_for_a_loss(group, role, loss):
    """It would be divided by the number of samples a second time."""
    setting = Setting(group)
    setting.assert_refused(lambda: setting.worker(**{role: loss}), 'reduction="none"')


ONE_HOT = np.eye(10)

# Means that nothing in their form tells from sums.
MEANS = {
    "of a function": lambda z, y: ops.cross_entropy(z, y),
    "of a method": lambda z, y: ((z - ONE_HOT[y]) ** 2).mean(),
    "negative": lambda z, y: -(ops.log_softmax(z) * ONE_HOT[y]).sum(1).mean(),
    "by the rows": lambda z, y: ((z - ONE_HOT[y]) ** 2).sum() / len(y),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("dp, pp", [(1, 1), (3, 1), (1, 2)])
def test_one_number_is_no_loss(dp, pp, name):
    """It may be a mean over this rank's rows, which would be divided a second time."""
    usage_error(
        "returned one number for labels of shape .* one value for each label",
        lambda: simulate(lambda group: _losses(group, MEANS[name], Layout(dp=dp, pp=pp)), dp * pp),
    )


@pytest.mark.simulated
def test_a_loss_for_each_label_is_added_up(group):
    """Whatever the ranks' rows; a declared sum is the same, and so is nnmpi's own."""
    local = _losses(group, None)
    for loss in (
        partial(ops.cross_entropy, reduction="none"),
        partial(ops.cross_entropy, reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        lambda z, y: ops.cross_entropy(z, y, reduction="none"),
        lambda z, y, reduction="sum": ops.cross_entropy(z, y, reduction=reduction),
    ):
        np.testing.assert_allclose(_losses(group, loss), local, rtol=1e-12)


def _losses(group, loss, layout=None):
    return run(Setup(worker={"loss": loss}), group, layout).losses


SUMS_OF_LOSSES = {
    "classes": lambda out, y: ops.cross_entropy(out, y, reduction="sum"),
    "ignored": lambda out, y: ops.cross_entropy(out, y, "sum", ignore_index=0),
    "quantities": lambda out, y: ops.mse(out, np.eye(3)[y], reduction="sum"),
    "own": lambda out, y: ((out - np.eye(3)[y]) ** 2).sum(),
    "two, as many as ranks": lambda out, y: ops.mse(out[:, :2], np.eye(3)[y, :2], "sum"),
    "below a factor": lambda out, y: 0.5 * ops.cross_entropy(out, y, reduction="sum"),
    "from a mean": lambda out, y: ops.cross_entropy(out, y) * float(len(y)),
}
MEANS_OF_LOSSES = {
    "classes": ops.cross_entropy,
    "quantities": lambda out, y: ops.mse(out, np.eye(3)[y]),
    "own": lambda out, y: ((out - np.eye(3)[y]) ** 2).mean(),
}


def divide(group, loss, rows, samples, stage=0):
    """Return the gradient's norm after one step of rank 0 with some rows, and rank 1 with others.

    `samples` is called with a rank's labels, and its number of rows and of ranks.
    """
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((8, 5)), draw.integers(0, 3, 8)
    mine = slice(None) if group.size == 1 else slice(*((0, rows[0]), (rows[0], 8))[group.rank])
    model = small()
    replicas(model, group, stage).backward(
        loss(model(x[mine]), y[mine]), samples(y[mine], y, group.size)
    )
    return optim.global_norm(model.storage.grads)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", SUMS_OF_LOSSES)
def test_a_sum_is_divided_by_the_samples_of_all_ranks(name, stage):
    loss = SUMS_OF_LOSSES[name]
    count = np.count_nonzero if name == "ignored" else len

    def step(rows, samples, ranks=2):
        return simulate(lambda group: divide(group, loss, rows, samples, stage), ranks)

    (serial,) = step((8, 0), lambda own, everyones, ranks: count(everyones), 1)
    for rows in ((4, 4), (7, 1), (8, 0)):
        norms = step(rows, lambda own, everyones, ranks: count(everyones))
        assert norms == pytest.approx([serial] * 2)
    usage_error(
        "different numbers of samples: rank 0 has",
        step,
        (5, 3),
        lambda own, everyones, ranks: len(own),
    )
    if name != "ignored":
        usage_error(
            "by its own 4 samples; give backward the number of",
            step,
            (4, 4),
            lambda own, everyones, ranks: len(own),
        )


@pytest.mark.host_only("on a device the host would have to wait for the loss")
@pytest.mark.parametrize("rows", [(4, 4), (5, 3)])
@pytest.mark.parametrize("weighted", [1, 0])
def test_a_rank_whose_loss_is_nothing_has_no_say_in_the_denominator(rows, weighted):
    """Only one rank's rows count: its own number is the number of the global batch."""
    total, mine = SUMS_OF_LOSSES["classes"], (slice(0, rows[0]), slice(rows[0], 8))[weighted]

    def step(group):
        if group.size == 1:
            own = partial(divide, loss=lambda out, y: total(out[mine], y[mine]))
            return own(group, rows=rows, samples=lambda *_: rows[weighted])
        counts = float(group.rank == weighted)
        return divide(group, lambda *pair: total(*pair) * counts, rows, lambda y, *_: len(y))

    (serial,) = simulate(step, 1)
    assert simulate(step, 2) == pytest.approx([serial] * 2)


@pytest.mark.parametrize("loss", MEANS_OF_LOSSES.values(), ids=MEANS_OF_LOSSES)
def test_a_mean_is_not_divided_again(loss):
    def step(samples, ranks=2):
        return simulate(lambda group: divide(group, loss, (4, 4), samples), ranks)

    (serial,) = step(lambda own, everyones, ranks: 1, 1)
    assert step(lambda own, everyones, ranks: ranks) == pytest.approx([serial] * 2)
    for samples in (lambda *labels: len(labels[0]), lambda *labels: len(labels[1])):
        usage_error("the loss is a mean already; give it with reduc", step, samples)


@pytest.mark.parametrize("kind", ["worker", "overlapped", "zero"])
def test_a_hook_set_later_would_see_a_part(kind):
    def program(group):
        model = models.mlp((5,), 3, hidden=(7,)).initialize()
        attached = {
            "worker": lambda: work(model, group),
            "overlapped": lambda: DataParallel(model, group, overlap=True),
            "zero": lambda: ShardedDataParallel(model, group, stage=2),
        }[kind]()
        weight = model.parameters()[0]
        with pytest.raises(UsageError, match="this rank's part of the gradient") as caught:
            weight.hook = lambda parameter: None
        attached.release()
        weight.hook = lambda parameter: None
        return str(caught.value)

    simulate(program, 2)


class Mixed(nn.Module):
    """A model with experts, of which `i` and `o` are on every rank."""

    def __init__(self):
        self.i, self.e, self.o = nn.Linear(6, 8), nn.MixtureOfExperts(8, 4), nn.Linear(8, 3)

    def forward(self, x):
        return self.o(self.e(self.i(x)))


def _columns():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model.sharding = {"0": nn.Sharding.COLUMN, "2": nn.Sharding.ROW}
    return model


@pytest.mark.parametrize(
    "ranks, layout, is_mixed",
    [
        (2, Layout(tp=2), False),
        (3, Layout(tp=3), False),
        (4, Layout(dp=2, tp=2), False),
        (4, Layout(dp=2, tp=2, zero=1), False),
        (4, Layout(dp=2, tp=2, zero=3), False),
        *((3, Layout(zero=stage), False) for stage in (1, 2, 3)),
        (2, Layout(expert_parallel=True), True),
        (3, Layout(expert_parallel=True), True),
    ],
)
def test_clipping_takes_the_norm_of_the_whole_model(ranks, layout, is_mixed):
    """On every rank, in a loop of one's own; so replicated weights stay equal."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 5, 6)), rng.integers(0, 3, (6, 5))

    def program(group):
        chosen = Layout() if group.size == 1 else layout
        built = Mixed() if is_mixed else _columns()
        where = arrange(built, group, chosen, sample=x[:1], dtype="float64")
        model = where.model.initialize(seed=0, dtype="float64", storage=where.storage)
        ranks = where.mesh.replicas
        parallel, optimizer = replicas(model, ranks, min(chosen.zero, 1)), sgd(model, 0.5)
        rows, norms = part(6, ranks.size, ranks.rank), []
        here = slice(rows.start, rows.stop)
        for step in range(3):
            with nn.training(step=step, first_row=rows.start, weight=1 / 30):
                loss = ops.cross_entropy(model(x[here]), y[here], reduction="sum")
            model.zero_grad()
            parallel.backward(loss, 30)
            given = model.storage.grads if step else [*model.parameters()]
            norms.append(optim.clip_by_global_norm(given, 0.05))
            norms.append(optim.global_norm(model.storage.grads))
            optimizer.step()
        whole = [] if chosen.zero else [p.data for p in model.parameters() if p.ranks is None]
        return norms, b"".join(item.tobytes() for item in whole)

    ((right, _),) = simulate(program, 1)
    results = simulate(program, ranks)
    np.testing.assert_allclose([norms for norms, _ in results], [right] * ranks, rtol=1e-10)
    assert len({weights for _, weights in results}) == 1


PARTS = {"tp": Layout(tp=2), "both": Layout(dp=2, tp=2), "pp": Layout(pp=2), "zero": Layout(zero=1)}
PARTS["experts"] = Layout(expert_parallel=True)
SHARDED = "this part of a model is sharded over ranks; give the model's"
STAGE = r"has only its stages' gradients; nnmpi.Worker\(..., clip=1.0\)"
NO_REPLICAS = "0.weight is sharded over .* where.mesh.replicas"
PART = "only part of this model's parameters; gather them"


def _norm(part):
    return lambda model, _: optim.global_norm(model.get(part).parameters())


def _clip(part):
    return lambda model, _: optim.clip_by_global_norm(model.get(part).parameters(), 1.0)


@pytest.mark.parametrize(
    "layouts, use, kind, sentence",
    [
        *((names, call(part), UsageError, text)
          for call in (_norm, _clip)
          for names, part, text in (("tp zero", "0", SHARDED), ("pp", "", STAGE))),
        *(("tp both", make, LayoutError, NO_REPLICAS)
          for make in (DataParallel, partial(ShardedDataParallel, stage=1))),
        ("experts", lambda model, group: DataParallel(model, group.split(group.rank // 2)),
         LayoutError, "e.w1 is sharded over other ranks, .*where.mesh.replicas"),
        ("tp pp experts", lambda model, _: model.state(), UsageError, PART),
        ("tp experts", lambda model, _: copy.deepcopy(model), CommError, "cannot be copied"),
        ("pp", lambda model, _: model(np.ones((2, 6), "float32")), UsageError,
         "only some of the model's layers; compute through"),
    ],
)  # fmt: skip
def test_a_part_of_a_model_is_not_taken_for_the_whole(layouts, use, kind, sentence):
    """Shards are no replicas, whose values would be overwritten by rank 0's; and ranks with some of
    the experts would add the gradients of their rows alone to experts that all ranks' rows reach.
    """
    for layout in map(PARTS.get, layouts.split()):

        def program(group, layout=layout):
            built = Mixed() if layout.expert_parallel else _columns()
            where = arrange(built, group, layout, np.zeros((1, 6), "float32"))
            use(where.model.initialize(seed=0, storage=where.storage), group)

        with pytest.raises(kind, match=sentence):
            simulate(program, 4 if layout.dp == 2 or layouts == "experts" else 2)
