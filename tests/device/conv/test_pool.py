"""Pooling on a device: NumPy's numbers and winners, for any windows and in every dtype."""

from typing import Any

import numpy as np
import pytest

from nnmpi.backend.precision import dtype_named
from nnmpi.ops.pool import AvgPool2dFunction, MaxPool2dFunction, avg_pool2d, max_pool2d, pool_windows, pooled
from nnmpi.tensor.tensor import Tensor
from tests.device.library import device_backend

DTYPES = ("float32", "float64", "float16", "bfloat16")
WINDOWS = {
    "2x2": ((2, 7, 6, 3), (2, 2), (2, 2), (0, 0)),
    "2x2 with a border": ((2, 7, 6, 3), (2, 2), (2, 2), (1, 1)),
    "overlapping": ((2, 6, 7, 5), (3, 3), (2, 2), (1, 1)),
    "stride 1": ((1, 5, 4, 2), (3, 2), (1, 1), (1, 0)),
    "apart": ((2, 9, 8, 1), (2, 1), (3, 2), (0, 0)),
    "whole image": ((3, 4, 5, 9), (4, 5), (1, 1), (0, 0)),
    "more than 255 places": ((2, 17, 18, 2), (16, 17), (1, 1), (8, 8)),
    "one pixel": ((2, 3, 3, 4), (1, 1), (1, 1), (0, 0)),
    "no image": ((0, 4, 4, 2), (2, 2), (2, 2), (0, 0)),
}


def numbers(shape: tuple[int, ...], seed: int = 0, gap: int = 4) -> Any:
    """Return small numbers with many equal ones, which all dtypes represent; sums of them, too."""
    return np.random.default_rng(seed).integers(-gap, gap + 1, shape) / 2


def run(function: Any, x: Any, grad: Any) -> list[Any]:
    """Return the result and the gradient."""
    leaf = Tensor(x, requires_grad=True)
    y = function(leaf)
    y.backward(grad(y))
    return [y.data, leaf.grad]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("function", [max_pool2d, avg_pool2d])
def test_as_on_the_host(function: Any, window: Any, dtype: str) -> None:
    """Every window, also of half precision on the host: the first of equal elements gets the gradient."""
    shape, *sizes = window
    xp, kind = device_backend().xp, dtype_named(dtype)
    exact = run(lambda x: function(x, *sizes), numbers(shape), lambda y: numbers(y.shape, 1))
    host = run(lambda x: function(x, *sizes), numbers(shape).astype(kind), lambda y: numbers(y.shape, 1).astype(kind))
    device = run(
        lambda x: function(x, *sizes),
        xp.asarray(numbers(shape).astype(kind)),
        lambda y: xp.asarray(numbers(y.shape, 1).astype(kind)),
    )
    tolerance = (
        0 if function is max_pool2d else {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    )
    for ours, near, wide in zip(device, host, exact, strict=True):
        assert ours.dtype == near.dtype == kind
        for each in (xp.asnumpy(ours), near):
            np.testing.assert_allclose(each.astype(np.float64), wide, rtol=tolerance, atol=4 * tolerance)


def test_not_numbers_and_infinities() -> None:
    """A window that has no number gives none, and one of minus infinities gives that."""
    xp = device_backend().xp
    x = np.array([np.nan, 1, -np.inf, -np.inf], np.float32).reshape(1, 1, 4, 1)
    for array, as_host in ((x, np.asarray), (xp.asarray(x), xp.asnumpy)):
        y = as_host(max_pool2d(Tensor(array), (1, 2)).data)
        assert np.isnan(y[0, 0, 0, 0])
        assert y[0, 0, 1, 0] == -np.inf
    whole = np.full((1, 2, 2, 1), -np.inf, np.float32)
    leaf = Tensor(xp.asarray(whole), requires_grad=True)
    max_pool2d(leaf, 2).sum().backward()
    np.testing.assert_array_equal(xp.asnumpy(leaf.grad).ravel(), [1, 0, 0, 0])


@pytest.mark.parametrize("function", [MaxPool2dFunction, AvgPool2dFunction])
def test_a_part_without_windows(function: Any) -> None:
    """A rank that has no rows of an image computes nothing, and sends nothing back."""
    xp = device_backend().xp
    leaf = Tensor(xp.asarray(np.ones((2, 1, 5, 3), np.float32)), requires_grad=True)
    y = pooled(function, leaf, pool_windows(2, None, 0))
    assert y.shape == (2, 0, 2, 3)
    y.backward(xp.empty(y.shape, np.float32))
    assert not xp.asnumpy(leaf.grad).any()


@pytest.mark.parametrize("function", [max_pool2d, avg_pool2d])
def test_images_with_gaps(function: Any) -> None:
    """Every second column of wider images, and a gradient that is one number seen everywhere."""
    xp, x = device_backend().xp, numbers((2, 6, 12, 3)).astype(np.float32)
    results = []
    for lib in (np, xp):
        leaf = Tensor(lib.asarray(x)[:, :, ::2], requires_grad=True)
        function(leaf, 3, 1, 1).sum().backward()
        results.append(np.asarray(leaf.grad if lib is np else xp.asnumpy(leaf.grad)))
    np.testing.assert_allclose(*results, rtol=1e-5)
