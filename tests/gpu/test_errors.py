"""What goes wrong on a device, each in a clear sentence."""

import numpy as np
import pytest

from nnmpi import nn, ops
from nnmpi.backend.backend import Backend
from nnmpi.errors import DeviceError, NnmpiError
from nnmpi.tensor.tensor import Tensor
from nnmpi.units import format_bytes


def test_out_of_memory(device: Backend) -> None:
    """The sentence says what used it, what there is, and what to lower; afterwards the device still works."""
    device.release_memory()  # or what other checks left in the pool would do
    pool = device.xp.get_default_memory_pool()
    before = pool.get_limit()
    pool.set_limit(size=pool.total_bytes() + 2**20)
    asked = pool.free_bytes() // 8 * 8 + 2**25  # or a free block, which no limit stops, would do
    try:
        with pytest.raises(Exception, match="memory") as caught:
            device.zeros(asked // 8, np.float64)
    finally:
        pool.set_limit(size=before)
    explained = device.explain(caught.value)
    assert isinstance(explained, DeviceError)
    assert f"no room for {format_bytes(asked)}" in str(explained) and "make the batch smaller" in str(explained)
    assert float(device.zeros(8, np.float64).sum()) == 0


def test_more_than_the_card_has(real_device: Backend) -> None:
    """The driver's own refusal, where no limit is set."""
    _, total = real_device.xp.cuda.runtime.memGetInfo()
    with pytest.raises(Exception, match="memory") as caught:
        real_device.zeros(2 * total // 8, np.float64)
    assert isinstance(real_device.explain(caught.value), DeviceError)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x, host: x + Tensor(host),
        lambda x, host: Tensor(host) @ x,
        lambda x, host: ops.linear(x, Tensor(host)),
        lambda x, host: ops.linear_relu(x, Tensor(host), Tensor(host[0])),
    ],
    ids=["sum", "product", "linear", "linear_relu"],
)
def test_a_host_array_where_a_device_array_is_due(device: Backend, mixed: object) -> None:
    """Refused in a sentence that names both sides, before anything is computed."""
    x, host = Tensor(device.asarray(np.ones((4, 4), np.float32))), np.ones((4, 4), np.float32)
    with pytest.raises((NnmpiError, TypeError), match=r"(?i)host|numpy|cupy|device|ndarray"):
        mixed(x, host)  # type: ignore[operator]


def test_a_host_array_in_a_layer(device: Backend) -> None:
    """A model on the device is given a batch in host memory."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).initialize(backend=device)
    with pytest.raises((NnmpiError, TypeError), match=r"(?i)host|numpy|cupy|device|ndarray"):
        model(Tensor(np.ones((5, 4), np.float32)))


def test_labels_out_of_range_end_in_no_number(device: Backend) -> None:
    """Nobody waits for the device to look at labels: the loss is NaN, or the labels are named."""
    logits = Tensor(device.asarray(np.zeros((4, 3), np.float32)))
    try:
        loss = ops.cross_entropy(logits, device.asarray(np.array([0, 1, 2, 3]))).item()
    except NnmpiError as error:
        assert "label" in str(error)
    else:
        assert np.isnan(loss)
