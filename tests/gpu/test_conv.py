"""Convolutions of whole numbers, which every precision computes exactly: device and host agree to
the last bit.
"""

from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from nnmpi import Tensor, use_precision
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.precision import low_dtype
from nnmpi.backend.windows import windows
from nnmpi.base.errors import ShapeError
from nnmpi.ops import conv2d, conv_relu_pool, max_pool2d
from nnmpi.ops.conv import im2col

# the second is float32 with arrays of float64
MODES = ("float32", "float64", "tf32", "bf16", "fp16")


class Case(NamedTuple):
    """The sizes of a convolution."""

    images: tuple[int, int, int, int]
    kernel: tuple[int, int]
    outputs: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    bias: bool = True

    @property
    def options(self):
        """The arguments of conv2d after the arrays."""
        return self.stride, self.padding, self.dilation, self.groups


CASES = {
    "3x3": Case((2, 7, 6, 3), (3, 3), 5, padding=(1, 1)),
    "no bias": Case((2, 7, 6, 3), (3, 3), 5, padding=(1, 1), bias=False),
    # tiles of 2 x 2 on the host, which are exact
    "even, many channels": Case((2, 6, 6, 17), (3, 3), 16, padding=(1, 1)),
    "1x1": Case((3, 5, 4, 4), (1, 1), 6),
    "1x1 with a border": Case((2, 3, 4, 2), (1, 1), 3, padding=(1, 1)),
    "1x1, stride": Case((2, 6, 7, 4), (1, 1), 3, stride=(2, 2)),
    "1x1, groups": Case((2, 4, 3, 6), (1, 1), 4, groups=2),
    "all at once": Case((2, 8, 7, 6), (3, 2), 4, (2, 3), (1, 0), (1, 2), 2),
    "depthwise": Case((2, 6, 5, 5), (3, 3), 5, padding=(1, 1), groups=5),
    "depthwise, wide": Case((2, 7, 6, 33), (2, 9), 33, padding=(1, 4), groups=33, bias=False),
    "depthwise, all at once": Case((2, 9, 8, 8), (2, 3), 8, (3, 2), (1, 2), (2, 3), groups=8),
    "depthwise, two of each": Case((1, 9, 8, 4), (3, 3), 8, (2, 1), (2, 2), (2, 1), 4),
    "one channel": Case((2, 5, 6, 1), (5, 5), 3, padding=(2, 2)),
    "border wider than the kernel": Case((2, 3, 3, 2), (2, 2), 3, padding=(3, 3)),
    "stride wider than the kernel": Case((2, 8, 9, 2), (2, 2), 3, stride=(3, 3)),
    "one image": Case((1, 5, 5, 2), (5, 5), 3),
    "no image": Case((0, 4, 5, 2), (3, 3), 3, padding=(1, 1)),
}
FUNCTIONS = {
    "conv2d": conv2d,
    "pool 2": conv_relu_pool,
    "pool 1x3": partial(conv_relu_pool, pool=(1, 3)),
}


def arrays(case, seed=0):
    """Return images, kernels and a bias of small whole numbers, as float64."""
    rng = np.random.default_rng(seed)
    kernel = (*case.kernel, case.images[3] // case.groups, case.outputs)
    shapes = [case.images, kernel, (case.outputs,)]
    return [
        rng.integers(-1, 2, shape).astype(np.float64)
        for shape in (shapes if case.bias else shapes[:2])
    ]


def grad_of(shape):
    """Return a gradient of small whole numbers."""
    return np.random.default_rng(1).integers(-1, 2, shape).astype(np.float64)


def on_host(function, case):
    """Return the result and all gradients, by NumPy in float64."""
    leaves = [Tensor(x, requires_grad=True) for x in arrays(case)]
    y = function(*leaves, *([] if case.bias else [None]), *case.options)
    y.backward(grad_of(y.shape))
    return [y.data, *(leaf.grad for leaf in leaves)]


def on_device(device, function, case, mode):
    """Return the same by the device's library, and check the dtypes.

    Args:
        mode: of MODES.
    """
    xp, dtype = device.xp, np.dtype("float64" if mode == "float64" else "float32")
    low = low_dtype(mode) if mode != "float64" else None
    leaves = [Tensor(xp.asarray(x.astype(dtype)), requires_grad=True) for x in arrays(case)]
    with precision(mode):
        x = leaves[0]
        if low is not None:  # as it comes from the layer before
            leaves[0] = x = Tensor(x.data.astype(low), requires_grad=True)
        y = function(x, *leaves[1:], *([] if case.bias else [None]), *case.options)
        y.backward(xp.asarray(grad_of(y.shape)).astype(y.dtype))
    assert y.dtype == (dtype if low is None else low)
    assert all(leaf.grad.dtype == leaf.data.dtype for leaf in leaves)
    return [
        xp.asnumpy(item).astype(np.float64) for item in (y.data, *(leaf.grad for leaf in leaves))
    ]


@contextmanager
def precision(mode):
    """Compute in one of MODES."""
    with use_precision("float32" if mode == "float64" else mode):
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_convolution(device, case, name, mode, monkeypatch):
    """Any sizes, strides, borders, dilations and groups; one image at a time, too."""
    try:
        right = on_host(FUNCTIONS[name], case)
    except ShapeError:
        pytest.skip("too few pixels are left for the pooling")
    for most in (im2col.DEVICE_BYTES, 1):
        monkeypatch.setattr(im2col, "DEVICE_BYTES", most)
        for ours, host in zip(on_device(device, FUNCTIONS[name], case, mode), right, strict=True):
            np.testing.assert_array_equal(ours, host)


@pytest.mark.parametrize("way", [(2, 1, 1), (3, 2, 1), (4, 3, 2)])
def test_windows_of_minus_infinity(device, way):
    """The border gets no gradient from a pooling: it reaches the host's pixels."""
    grads = []
    for backend in (device, numpy_backend()):
        x = Tensor(backend.asarray(np.full((2, 5, 4, 3), -np.inf, np.float32)), requires_grad=True)
        y = max_pool2d(x, *way)
        y.backward(backend.asarray(np.arange(y.size, dtype=np.float32).reshape(y.shape)))
        assert x.grad is not None
        grads.append(backend.to_host(x.grad))
    np.testing.assert_array_equal(*grads)
    assert grads[1].sum() == np.arange(y.size).sum()


def test_windows_lie_in_the_memory_of_their_images(device):
    """And so does what is cut out of them: memory as long as all windows would reach into other
    arrays'.
    """
    x = device.zeros((2, 7, 6, 3), "float32")
    used = device.memory().used_bytes
    seen = windows(x, (3, 3), (1, 1), (1, 1))
    parts = [seen, seen[:, 1:], seen.transpose(1, 0, 2, 3, 4, 5)]
    assert all(part.data.mem is x.data.mem for part in parts)
    assert device.memory().used_bytes == used


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_add_up_in_their_place(device, groups):
    case = Case((2, 6, 5, 4), (3, 3), 4, padding=(1, 1), groups=groups)
    xp = device.xp
    leaves = [Tensor(xp.asarray(x.astype("float32")), requires_grad=True) for x in arrays(case)]
    for _ in range(2):
        y = conv2d(*leaves, *case.options)
        y.backward(xp.asarray(grad_of(y.shape).astype("float32")))
    for leaf, right in zip(leaves, on_host(conv2d, case)[1:], strict=True):
        np.testing.assert_array_equal(leaf.grad.get(), 2 * right)


def test_a_sums_gradient_is_one_number_in_many_places(device):
    """The kernel for the bias reads arrays without gaps."""
    given = arrays(CASES["3x3"])
    grads = []
    for backend in (device, numpy_backend()):
        leaves = [Tensor(backend.asarray(x), requires_grad=True) for x in given]
        conv2d(*leaves, *CASES["3x3"].options).sum().backward()
        grads.append([backend.to_host(leaf.grad) for leaf in leaves])
    for ours, host in zip(*grads, strict=True):
        np.testing.assert_array_equal(ours, host)
