"""Calls that would give wrong gradients without a word: each must be an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from nnmpi import models, nn, ops, optim
from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.compose import Worker
from nnmpi.errors import CommError, UsageError
from nnmpi.parallel.data import DataParallel
from nnmpi.shard import part
from nnmpi.tensor import Function, Tensor

ROWS = 13


class Setting:
    """A model on all ranks, its loss on this rank's rows, and the serial gradient."""

    def __init__(self, group: Group) -> None:
        generator = np.random.default_rng(0)
        x, y = generator.standard_normal((ROWS, 5)), generator.integers(0, 3, ROWS)
        mine = part(ROWS, group.size, group.rank)
        self.group, self.x, self.y = group, x[mine.start : mine.stop], y[mine.start : mine.stop]
        serial = models.mlp((5,), 3, hidden=(7,)).initialize(dtype="float64")
        ops.cross_entropy(serial(x), y).backward()
        self.gradient: Array = serial.storage.grads[0]
        self.model = models.mlp((5,), 3, hidden=(7,)).initialize(dtype="float64")

    def loss(self) -> Tensor:
        """Return the sum of this rank's losses."""
        return ops.cross_entropy(self.model(self.x), self.y, reduction="sum")

    def assert_gradient(self, times: float = 1) -> None:
        """Fail on all ranks unless all have the serial gradient, that many times."""
        error = float(np.abs(self.model.storage.grads[0] - times * self.gradient).max())
        assert max(self.group.gather(error)) < 1e-12

    def assert_refused(self, action: Callable[[], object], kind: type[Exception], text: str) -> None:
        """Fail on all ranks unless the action raises this on all."""
        try:
            action()
            found = "nothing was raised"
        except Exception as error:
            found = "" if isinstance(error, kind) and text in str(error) else f"{type(error).__name__}: {error}"
        assert not any(self.group.gather(found)), found


@pytest.mark.mpi
def test_forgotten_zero_grad(group: Group) -> None:
    """What is summed already would be summed again."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group)
    parallel.backward(setting.loss(), ROWS)
    setting.assert_refused(lambda: parallel.backward(setting.loss(), ROWS), UsageError, "model.zero_grad()")
    setting.model.zero_grad()
    parallel.backward(setting.loss(), ROWS, last=False)
    parallel.backward(setting.loss(), ROWS)
    setting.assert_gradient(2)


@pytest.mark.mpi(min_size=2)
def test_backward_of_the_loss_itself(group: Group) -> None:
    """Some buckets would be summed, some not; and the next right call works."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, bucket_bytes=64)
    setting.assert_refused(setting.loss().backward, UsageError, "parallel.backward(loss, samples)")
    setting.model.zero_grad()
    parallel.backward(setting.loss(), ROWS)
    setting.assert_gradient()
    parallel.release()
    setting.model.zero_grad()
    setting.loss().backward()


@pytest.mark.mpi(min_size=2)
def test_two_on_one_model(group: Group) -> None:
    """Both would sum the same gradients; after a release there is one again."""
    setting = Setting(group)
    first = DataParallel(setting.model, group)
    setting.assert_refused(lambda: DataParallel(setting.model, group), UsageError, "release() first")
    first.release()
    assert not first.exchange._group.comm  # what was given back is the null communicator
    DataParallel(setting.model, group).backward(setting.loss(), ROWS)
    setting.assert_gradient()


@pytest.mark.mpi
def test_gradients_set_by_hand_before_the_pass(group: Group) -> None:
    """They are no views into the buffers that are summed, but count like those that are."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, bucket_bytes=64)
    for parameter in setting.model.parameters():
        parameter.grad = np.zeros(parameter.shape)
    parallel.backward(setting.loss(), ROWS)
    setting.assert_gradient()


class Broken(Function):
    """An operation without a derivative."""

    def forward(self, x: Array) -> Array:
        """Return x."""
        return x * 1

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Fail."""
        raise ZeroDivisionError("planted")


@pytest.mark.mpi(min_size=2)
def test_pass_after_one_that_broke_off(group: Group) -> None:
    """Sums are on their way that nobody waits for."""
    setting = Setting(group)
    parallel = DataParallel(setting.model, group, bucket_bytes=64)
    hidden = nn.Sequential(*setting.model.layers[:-1])
    logits = setting.model.layers[-1](Broken()(hidden(Tensor(setting.x))))
    loss = ops.cross_entropy(logits, setting.y, reduction="sum")
    setting.assert_refused(lambda: parallel.backward(loss, ROWS), ZeroDivisionError, "planted")
    setting.model.zero_grad()
    setting.assert_refused(lambda: parallel.backward(setting.loss(), ROWS), CommError, "make a new one")


@pytest.mark.mpi
def test_module_that_was_put_in_after_the_initialization(group: Group) -> None:
    """It has values of its own, which nobody would keep equal or update."""
    setting = Setting(group)
    setting.model.replace("3", nn.Linear(7, 3).initialize(dtype="float64"))
    setting.assert_refused(lambda: DataParallel(setting.model, group), UsageError, "'3.weight' is not in")


@pytest.mark.mpi
def test_worker_with_an_optimizer_of_another_storage(group: Group) -> None:
    """It would update what the model does not use."""
    setting = Setting(group)
    optimizer = optim.SGD(setting.model.storage, lr=0.1)
    setting.model.initialize(dtype="float64")
    setting.assert_refused(lambda: Worker(setting.model, optimizer, group), UsageError, "make it over model.storage")


@pytest.mark.mpi
@pytest.mark.parametrize("loss", [ops.cross_entropy, partial(ops.cross_entropy, label_smoothing=0.1)])
@pytest.mark.parametrize("role", ["loss", "evaluation_loss"])
def test_worker_with_a_mean_for_a_loss(group: Group, role: str, loss: object) -> None:
    """It would be divided by the number of samples a second time."""
    setting = Setting(group)
    optimizer = optim.SGD(setting.model.storage, lr=0.1)
    options = {role: loss}
    setting.assert_refused(
        lambda: Worker(setting.model, optimizer, group, **options),  # type: ignore[arg-type]
        UsageError,
        'reduction="sum"',
    )
