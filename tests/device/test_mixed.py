"""An array of the host where one of the device is due, or the other way round: one sentence that says which."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.backend.array import mixed_error
from nnmpi.backend.backend import numpy_backend
from nnmpi.errors import DeviceError
from nnmpi.tensor import Tensor
from tests.device.library import device_backend, load

pytestmark = pytest.mark.host_only("it is about arrays of the host that meet a device's")

HOST = r"host's memory \(input {} \(shape \({}\), float32\)"


def tensor(xp: Any, *shape: int) -> Tensor:
    """Return ones."""
    return Tensor(xp.ones(shape, "float32"))


@pytest.mark.parametrize(
    ("operation", "host"),
    [
        (lambda xp: tensor(np, 3) + tensor(xp, 3), (0, "3,")),
        (lambda xp: tensor(xp, 3) * tensor(np, 3), (1, "3,")),
        (lambda xp: tensor(xp, 3, 3) @ tensor(np, 3, 3), (1, "3, 3")),
        (lambda xp: tensor(np, 3, 3) @ tensor(xp, 3, 3), (0, "3, 3")),
    ],
)
def test_operations(operation: Callable[[Any], Tensor], host: tuple[int, str]) -> None:
    """Each names the input."""
    with pytest.raises(DeviceError, match=HOST.format(*host)):
        operation(load())


@pytest.mark.parametrize("on_device", [False, True])
def test_a_batch_that_is_not_where_the_model_is(on_device: bool) -> None:
    """The most common one: the data stayed on the host, or the model did."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    model.initialize(backend=device_backend() if on_device else numpy_backend())
    batch = tensor(np if on_device else load(), 4, 3)
    with pytest.raises(DeviceError, match=r"bring them to where the model is, with backend.asarray\(x\) or"):
        model(batch)


def test_a_gradient_that_is_not_where_the_result_is() -> None:
    """One of the host is brought to the device; the other way round somebody has mixed things up."""
    leaf = Tensor(load().ones(3, "float32"), requires_grad=True)
    (leaf * 2).backward(np.ones(3, np.float32))
    assert leaf.grad is not None
    assert leaf.grad.get().tolist() == [2, 2, 2]
    host = Tensor(np.ones(3, np.float32), requires_grad=True)
    with pytest.raises(DeviceError, match=HOST.format(0, "3,")):
        (host * 2).backward(load().ones(3, "float32"))


def test_other_errors_stay() -> None:
    """A wrong type that has nothing to do with devices is not reworded."""
    assert mixed_error([np.ones(2), 1.0, "x"]) is None
    assert mixed_error([load().ones(2), None]) is None
    with pytest.raises((TypeError, ValueError), match="(?i)(?!.*host's memory)"):
        tensor(np, 3) + "x"
