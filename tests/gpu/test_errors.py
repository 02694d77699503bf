"""What goes wrong on a device, each in a clear sentence."""

import numpy as np
import pytest

from nnmpi import NnmpiError, Tensor, jit, nn, ops
from nnmpi.backend.array import mixed_error
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import DeviceError, ShapeError
from nnmpi.base.units import format_bytes
from tests.harness.refusals import refuses


def test_out_of_memory(device):
    """The sentence says what used it, what there is, and what to lower; afterwards the device still
    works.
    """
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
    assert f"no room for {format_bytes(asked)}" in str(
        explained
    ) and "make the batch smaller" in str(explained)
    assert float(device.zeros(8, np.float64).sum()) == 0


def test_more_than_the_card_has(real_device):
    """The driver's own refusal, where no limit is set."""
    _, total = real_device.xp.cuda.runtime.memGetInfo()
    with pytest.raises(Exception, match="memory") as caught:
        real_device.zeros(2 * total // 8, np.float64)
    assert isinstance(real_device.explain(caught.value), DeviceError)


HOST = r"host's memory \(input {} \(shape \({}\), float32\)"


def tensor(xp, *shape):
    """Return ones."""
    return Tensor(xp.ones(shape, "float32"))


@pytest.mark.parametrize(
    "operation, host",
    [
        (lambda xp: tensor(np, 3) + tensor(xp, 3), (0, "3,")),
        (lambda xp: tensor(xp, 3) * tensor(np, 3), (1, "3,")),
        (lambda xp: tensor(xp, 3, 3) @ tensor(np, 3, 3), (1, "3, 3")),
        (lambda xp: tensor(np, 3, 3) @ tensor(xp, 3, 3), (0, "3, 3")),
    ],
)
def test_a_host_array_where_a_device_array_is_due(device, operation, host):
    """Or the other way round: one sentence, which names the input."""
    refuses(DeviceError, HOST.format(*host), operation, device.xp)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_batch_that_is_not_where_the_model_is(device, on_device):
    """The most common one: the data stayed on the host, or the model did."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    model.initialize(backend=device if on_device else numpy_backend())
    batch = tensor(np if on_device else device.xp, 4, 3)
    refuses(
        DeviceError, r"move them to the model's memory with backend.asarray\(x\) or", model, batch
    )


def test_a_gradient_that_is_not_where_the_result_is(device):
    """One of the host is brought to the device; the other way round somebody has mixed things
    up.
    """
    leaf = Tensor(device.xp.ones(3, "float32"), requires_grad=True)
    (leaf * 2).backward(np.ones(3, np.float32))
    assert leaf.grad.get().tolist() == [2, 2, 2]
    host = Tensor(np.ones(3, np.float32), requires_grad=True)
    refuses(
        DeviceError, HOST.format(0, "3,"), lambda: (host * 2).backward(device.xp.ones(3, "float32"))
    )


def test_other_errors_stay(device):
    """A wrong type that has nothing to do with devices is not reworded."""
    assert mixed_error([np.ones(2), 1.0, "x"]) is None
    assert mixed_error([device.xp.ones(2), None]) is None
    with pytest.raises((TypeError, ValueError), match="(?i)(?!.*host's memory)"):
        tensor(np, 3) + "x"


def test_an_index_out_of_range_is_refused(device):
    """Where it lies in the host's memory: CuPy begins again from the other end, and does so with
    one on the device.
    """
    x = tensor(device.xp, 2, 3)
    for key in (np.array([0, 5]), [0, -3], (slice(None), np.array([3]))):
        with pytest.raises(ShapeError, match="out of bounds"):
            x[key]
    assert x[np.array([1, -2, 1])].shape == (3, 3)
    assert x[device.asarray(np.array([True, False]))].shape == (1, 3)


def test_attention_without_its_kernels(device):
    """By the library's functions alone, forward and backward."""
    result = []
    for backend in (device, numpy_backend()):
        x = Tensor(
            backend.asarray(np.random.default_rng(0).normal(size=(2, 5, 12))), requires_grad=True
        )
        with jit(False):
            y = ops.attention(x, 2, causal=True)
            y.backward(backend.asarray(np.linspace(-1, 1, y.size).reshape(y.shape)))
        result.append([backend.to_host(item) for item in (y.data, x.grad)])
    for ours, host in zip(*result, strict=True):
        np.testing.assert_allclose(ours, host, 1e-12, 1e-12)


def test_labels_out_of_range_end_in_no_number(device):
    """Nobody waits for the device to look at labels: the loss is NaN, or the labels are named."""
    logits = Tensor(device.asarray(np.zeros((4, 3), np.float32)))
    try:
        loss = ops.cross_entropy(logits, device.asarray(np.array([0, 1, 2, 3]))).item()
    except NnmpiError as error:
        assert "label" in str(error)
    else:
        assert np.isnan(loss)
