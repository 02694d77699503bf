"""Calls that would give wrong gradients without a word: each must be an error that says what to
do.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from nnmpi import models, nn, ops, optim
from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.asynchronous import AsynchronousWorker
from nnmpi.compose.layout import GradientExchange, Layout, Numerics
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Batch, Loader
from nnmpi.data.sampler import Cut
from nnmpi.errors import CommError, NnmpiError, UsageError, name_ranks
from nnmpi.parallel.data import DataParallel
from nnmpi.shard import part
from nnmpi.synchrony.sync import Sync
from nnmpi.tensor import Function, Tensor
from tests.worker_options import grouped

ROWS = 13
HOST = pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")


class Setting:
    """A model on all ranks, its loss on this rank's rows, and the serial gradient."""

    def __init__(self, group: Group) -> None:
        generator = np.random.default_rng(0)
        x, y = generator.standard_normal((ROWS, 5)), generator.integers(0, 3, ROWS)
        mine = part(ROWS, group.size, group.rank)
        self.group, self.mine = group, mine
        self.x, self.y = x[mine.start : mine.stop], y[mine.start : mine.stop]
        serial = models.mlp((5,), 3, hidden=(7,)).initialize(dtype="float64")
        ops.cross_entropy(serial(x), y).backward()
        self.gradient: Array = serial.storage.grads[0]
        self.model = models.mlp((5,), 3, hidden=(7,)).initialize(dtype="float64")

    def batch(self) -> Batch:
        """Return this rank's rows as a worker takes them."""
        cut = Cut(0, len(self.x), self.mine.start)
        return Batch(self.x, self.y, np.arange(len(self.x)), (cut,), ROWS, 0, 0)

    def loss(self) -> Tensor:
        """Return the sum of this rank's losses."""
        return ops.cross_entropy(self.model(self.x), self.y, reduction="sum")

    def assert_gradient(self, times: float = 1) -> None:
        """Fail on all ranks unless all have the serial gradient, that many times."""
        error = float(np.abs(self.model.storage.grads[0] - times * self.gradient).max())
        assert max(self.group.gather(error)) < 1e-12

    def assert_refused(
        self, action: Callable[[], object], kind: type[Exception], text: str
    ) -> None:
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
def test_forgotten_zero_grad(group: Group) -> None:
    """What is summed already would be summed again."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group)
    parallel.backward(setting.loss(), ROWS)
    setting.assert_refused(
        lambda: parallel.backward(setting.loss(), ROWS), UsageError, "model.zero_grad()"
    )
    setting.model.zero_grad()
    parallel.backward(setting.loss(), ROWS, last=False)
    parallel.backward(setting.loss(), ROWS)
    setting.assert_gradient(2)


@pytest.mark.simulated(min_size=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_backward_of_the_loss_itself(group: Group, overlap: bool) -> None:
    """Some buckets would be summed, some not, or none; and the next right call works."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, bucket_bytes=64, overlap=overlap)
    setting.assert_refused(setting.loss().backward, UsageError, "parallel.backward(loss, samples)")
    setting.model.zero_grad()
    parallel.backward(setting.loss(), ROWS)
    setting.assert_gradient()
    # nor added to it
    setting.assert_refused(setting.loss().backward, UsageError, "parallel.backward(loss, samples)")
    setting.assert_gradient()
    parallel.release()
    setting.model.zero_grad()
    setting.loss().backward()


@pytest.mark.mpi(min_size=2)
def test_two_on_one_model(group: Group) -> None:
    """Both would sum the same gradients; after a release there is one again."""
    setting = Setting(group)
    first = DataParallel(setting.model, group)
    setting.assert_refused(
        lambda: DataParallel(setting.model, group), UsageError, "release() first"
    )
    first.release()
    assert not first.exchange._group.comm.mpi  # what was given back is the null communicator
    DataParallel(setting.model, group).backward(setting.loss(), ROWS)
    setting.assert_gradient()


class Broken(Function):
    """An operation without a derivative."""

    def forward(self, x: Array) -> Array:
        """Return x."""
        return x * 1

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Fail."""
        raise ZeroDivisionError("planted")


@pytest.mark.simulated(min_size=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_pass_after_one_that_broke_off(group: Group, overlap: bool) -> None:
    """Where sums are on their way, nobody waits for them; where they come at the end, nothing has
    been sent.

    A new one can be made at once, also where ranks had launched different numbers of buckets.
    """
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, bucket_bytes=64, overlap=overlap)
    hidden = nn.Sequential(*setting.model.layers[:-1])
    logits = setting.model.layers[-1](Broken()(hidden(Tensor(setting.x))))
    loss = ops.cross_entropy(logits, setting.y, reduction="sum")
    setting.assert_refused(lambda: parallel.backward(loss, ROWS), ZeroDivisionError, "planted")
    setting.model.zero_grad()
    if overlap:
        setting.assert_refused(
            lambda: parallel.backward(setting.loss(), ROWS), CommError, "make a new one"
        )
        if group.rank == 0:
            parallel.exchange._launch()
        parallel.release()
        parallel = DataParallel(setting.model, group, bucket_bytes=64, overlap=overlap)
        setting.model.zero_grad()
    parallel.backward(setting.loss(), ROWS)
    setting.assert_gradient()
    parallel.release()


@pytest.mark.simulated
@pytest.mark.parametrize("allreduce", ["native", "shared"])
def test_pass_after_the_release(group: Group, allreduce: str) -> None:
    """Each rank would go on with gradients of its own, or write to memory that is gone."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, allreduce)
    parallel.release()
    setting.assert_refused(
        lambda: parallel.backward(setting.loss(), ROWS), UsageError, "was released; make a new one"
    )
    setting.assert_refused(parallel.finish, UsageError, "was released")
    setting.assert_refused(lambda: parallel.reduce([0]), UsageError, "was released")


@pytest.mark.simulated
@pytest.mark.parametrize("fused", [pytest.param(True, marks=HOST), False])
def test_step_after_the_release(group: Group, fused: bool) -> None:
    setting = Setting(group)
    before = setting.model.state()
    worker = Worker(
        setting.model,
        optim.SGD(setting.model.storage, lr=0.1),
        group,
        exchange=GradientExchange(fused_update=fused),
    )
    worker.release()
    worker.release()  # does nothing
    setting.assert_refused(
        lambda: worker.step(setting.batch()), UsageError, "was released; make a new one"
    )
    assert all(
        np.array_equal(values, setting.model.state()[name]) for name, values in before.items()
    )


# Inputs, and outputs on rank 0 and 1. Parameters begin at multiples of 64 bytes, so that the flat
# arrays of 3 and of 4 outputs are of one length.
OTHERS = {
    "padded alike": (3, 3, 4),
    "longer": (8, 8, 400),
    "shared gradients on one rank": (8, 64, 900),
}


@pytest.mark.simulated(min_size=2)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "strategy", ["DataParallel", "shared", "Worker", pytest.param("fused", marks=HOST)]
)
def test_different_models(group: Group, other: str, strategy: str) -> None:
    """One sentence on all ranks, whatever the lengths of the arrays are: nobody waits, none has
    another's weights.
    """
    inputs, ours, theirs = OTHERS[other]
    model = nn.Linear(inputs, theirs if group.rank == 1 else ours).initialize(
        seed=group.rank, dtype="float64"
    )
    before = model.state()

    def make() -> object:
        if strategy in ("DataParallel", "shared"):
            return DataParallel(model, group, "auto" if strategy == "DataParallel" else strategy)
        fused = True if strategy == "fused" else None
        return Worker(
            model,
            optim.SGD(model.storage, lr=0.1),
            group,
            exchange=GradientExchange(fused_update=fused),
        )

    same = name_ranks(rank for rank in range(group.size) if rank != 1) + (
        " has" if group.size == 2 else " have"
    )
    words = (
        f"models: {same} weight ({inputs}, {ours}) float64; rank 1 has weight ({inputs}, {theirs})"
        " float64; build"
    )
    if other == "padded alike":
        assert len(set(group.gather(model.storage.data[0].size))) == 1
    Setting(group).assert_refused(make, CommError, words)
    assert all(np.array_equal(values, model.state()[name]) for name, values in before.items())


@pytest.mark.simulated
def test_module_that_was_put_in_after_the_initialization(group: Group) -> None:
    """It has values of its own, which nobody would keep equal or update."""
    setting = Setting(group)
    setting.model.replace("3", nn.Linear(7, 3).initialize(dtype="float64"))
    setting.assert_refused(
        lambda: DataParallel(setting.model, group), UsageError, "'3.weight' is not in"
    )


@pytest.mark.simulated(min_size=2)
@pytest.mark.parametrize("strategy", ["DataParallel", "Worker", pytest.param("fused", marks=HOST)])
def test_a_parameter_frozen_on_one_rank(group: Group, strategy: str) -> None:
    """That rank would keep its weights, and the others theirs."""
    model = nn.Linear(3, 2).initialize(dtype="float64")
    dict(model.named_parameters())["bias"].requires_grad = group.rank > 0

    def make() -> object:
        if strategy == "DataParallel":
            return DataParallel(model, group)
        fused = GradientExchange(fused_update=strategy == "fused")
        return Worker(model, optim.SGD(model.storage, lr=0.1), group, exchange=fused)

    Setting(group).assert_refused(make, CommError, "models: rank 0 has bias (2,) float64, frozen; ")


def _once(x: Any, y: Any) -> Tensor:
    return ops.mse(x, y, reduction="none")


def _twice(x: Any, y: Any) -> Tensor:
    return ops.mse(x, y, reduction="none") * 2


def sgd(model: Any, **options: Any) -> Any:
    return optim.SGD(model.storage, **{"lr": 0.1, **options})


# (model, rank) -> what this rank gives a trainer, and words of the refusal.
DIFFERENT: dict[str, tuple[Callable[[Any, int], dict[str, Any]], str]] = {
    "rule": (
        lambda m, r: {"optimizer": optim.Adam(m.storage, lr=0.1) if r else sgd(m)},
        "updates differ: .*Adam",
    ),
    "rate": (lambda m, r: {"optimizer": sgd(m, lr=0.1 + r)}, "updates differ: .*lr 1.1"),
    "option": (
        lambda m, r: {"optimizer": sgd(m, momentum=0.5 * r)},
        "updates differ: .*momentum 0.5",
    ),
    "betas": (
        lambda m, r: {"optimizer": optim.Adam(m.storage, betas=(0.9, 0.5 * r))},
        "updates differ: .*betas",
    ),
    "decay": (
        lambda m, r: {"optimizer": sgd(m, weight_decay=0.5 * r)},
        "updates differ: .*weight decay",
    ),
    "clip": (
        lambda m, r: {"numerics": Numerics(clip=1.0 if r else None)},
        "updates differ: .*clip 1.0",
    ),
    "loss": (
        lambda m, r: {"loss": "mse" if r else None},
        "losses differ: .*cross-entropy .*rank 1 has mse",
    ),
    "delta": (
        lambda m, r: {"loss": partial(ops.huber, reduction="sum", delta=1.0 + r)},
        "losses differ: .*huber with",
    ),
    "function": (
        lambda m, r: {"loss": _twice if r else _once},
        "losses differ: .*_once; rank 1 has _twice",
    ),
    "seed": (lambda m, r: {"seed": r}, "seeds differ: rank 0 has 0; rank 1 has 1"),
}


@pytest.mark.simulated(max_size=2, min_size=2)
@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_would_train_differently(group: Group, what: str, asynchronous: bool) -> None:
    """Replicas would go apart, or wait for one another; the sum of two losses' gradients is that of
    neither.
    """
    build, words = DIFFERENT[what]
    setting = Setting(group)
    options = {"optimizer": sgd(setting.model), **build(setting.model, group.rank)}
    make = partial(AsynchronousWorker, sync=Sync("asp")) if asynchronous else Worker
    with pytest.raises(UsageError, match=words):
        make(setting.model, group=group, **options)


@pytest.mark.simulated(min_size=2)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_model_at_work(group: Group, duplicate: Callable[[object], object]) -> None:
    """Its parameters know the ranks, which cannot be copied."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group)
    again = "build (it|the model) again and use load_state"
    optimizer = sgd(setting.model)
    for item, how in (
        (setting.model, again),
        (group, again),
        (optimizer, "save both with nnmpi.save"),
    ):
        with pytest.raises(NnmpiError, match=how):
            duplicate(item)
    parallel.release()


@pytest.mark.simulated
def test_what_is_no_batch_and_no_optimizer(group: Group) -> None:
    """Samples need labels."""
    setting = Setting(group)
    optimizer = optim.SGD(setting.model.storage, lr=0.1)
    wrong: Any = Worker
    setting.assert_refused(
        lambda: wrong(setting.model, group, optimizer), UsageError, "the optimizer is a"
    )
    worker = wrong(setting.model, optimizer, group)
    setting.assert_refused(
        lambda: worker.step(setting.x), UsageError, "step takes a batch of a data.Loader"
    )
    assert optimizer.lr == 0.1
    worker.release()


@pytest.mark.simulated
def test_worker_with_an_optimizer_of_another_storage(group: Group) -> None:
    """It would update what the model does not use."""
    setting = Setting(group)
    optimizer = optim.SGD(setting.model.storage, lr=0.1)
    setting.model.initialize(dtype="float64")
    setting.assert_refused(
        lambda: Worker(setting.model, optimizer, group), UsageError, "make it for model.storage"
    )


@pytest.mark.simulated
@pytest.mark.parametrize(
    "loss",
    [ops.cross_entropy, partial(ops.cross_entropy, label_smoothing=0.1), nn.CrossEntropyLoss()],
)
@pytest.mark.parametrize("role", ["loss", "evaluation_loss"])
def test_worker_with_a_mean_for_a_loss(group: Group, role: str, loss: object) -> None:
    """It would be divided by the number of samples a second time."""
    setting = Setting(group)
    optimizer = optim.SGD(setting.model.storage, lr=0.1)
    options = {role: loss}
    setting.assert_refused(
        lambda: Worker(setting.model, optimizer, group, **grouped(**options)),  # type: ignore[arg-type]
        UsageError,
        'reduction="none"',
    )


ONE_HOT = np.eye(2)

# Means that nothing in their form tells from sums.
MEANS: dict[str, Any] = {
    "of a function": lambda z, y: ops.cross_entropy(z, y),
    "of a method": lambda z, y: ((z - ONE_HOT[y]) ** 2).mean(),
    "negative": lambda z, y: -(ops.log_softmax(z) * ONE_HOT[y]).sum(1).mean(),
    "by the rows": lambda z, y: ((z - ONE_HOT[y]) ** 2).sum() / len(y),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize(
    "layout", [Layout(dp=1), Layout(dp=3), Layout(dp=1, pp=2)], ids=["serial", "dp", "pp"]
)
def test_one_number_is_no_loss(layout: Layout, name: str) -> None:
    """It may be a mean over this rank's rows, which would be divided a second time."""
    with pytest.raises(
        UsageError, match="returned one number for labels of shape .* one value for each label"
    ):
        simulate(
            lambda group: _losses(group, layout, MEANS[name]), (layout.dp or 1) * (layout.pp or 1)
        )


@pytest.mark.simulated
def test_a_loss_for_each_label_is_added_up(group: Group) -> None:
    """Whatever the ranks' rows; a declared sum is the same, and so is nnmpi's own."""
    local = _losses(group, Layout(), None)
    for loss in (
        partial(ops.cross_entropy, reduction="none"),
        partial(ops.cross_entropy, reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        lambda z, y: ops.cross_entropy(z, y, reduction="none"),
        lambda z, y, reduction="sum": ops.cross_entropy(z, y, reduction=reduction),
    ):
        np.testing.assert_allclose(_losses(group, Layout(), loss), local, rtol=1e-12)


def _losses(group: Group, layout: Layout, loss: Any) -> list[float]:
    """Return the losses of three steps with batches of 7 and 5 rows."""
    rng = np.random.default_rng(0)
    data = Dataset(
        "rows", rng.standard_normal((12, 3)).astype("float32"), rng.integers(0, 2, 12), 2
    )
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    where = arrange(model, group, layout, np.zeros((2, 3)), "float64")
    where.model.initialize(seed=0, dtype="float64")
    worker = Worker(
        where.model, optim.SGD(where.model.storage, lr=0.5), group, loss=loss, arrangement=where
    )
    loader = Loader(
        data, 7, rank=where.data_rank, world=where.data_ranks, dtype="float64", workers=0
    )
    result = [worker.step(batch).loss for epoch in range(2) for batch in loader.epoch(epoch)]
    worker.release()
    where.free()
    return result
