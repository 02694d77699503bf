"""Activations, losses and sums on the device where the numbers or the arrays are difficult: not
finite, huge, tiny, none, one, and views.
"""

from functools import partial

import numpy as np
import pytest

from nnmpi import Tensor, ops
from nnmpi.backend.activations import FORMS
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.precision import low_dtype
from nnmpi.optim import global_norm
from nnmpi.tensor.elementwise import activated
from tests.gpu.play import BF16, FLOAT32, FLOAT64, TOLERANCES, differences

LOSSES = (ops.mse, ops.mae, partial(ops.huber, delta=0.5), ops.binary_cross_entropy)
DTYPES = {mode: np.dtype(mode) for mode in (FLOAT64, FLOAT32)} | {BF16: low_dtype(BF16)}


def both_ways(backend, function, *given):
    """Return a function's result and gradients as float64, by name."""
    leaves = [Tensor(item, requires_grad=True) for item in given]
    y = function(*leaves)
    y.backward(backend.xp.ones(y.shape, y.dtype) * 3)
    arrays = (y.data, *(leaf.grad for leaf in leaves))
    return {str(i): backend.to_host(item).astype(FLOAT64) for i, item in enumerate(arrays)}


EACH_FUNCTION = pytest.mark.parametrize(
    "function",
    [lambda x, form=form: activated(form, x, *form.settings) for form in FORMS],
    ids=[form.name for form in FORMS],
)


@EACH_FUNCTION
def test_activations_of_extreme_numbers(device, function):
    """NaN stays where it is, and nothing else becomes one."""
    x = np.float32([np.nan, 0, -0.0, 1e18, -1e18, 2e-38, -2e-38, 100, -100, 88.5, -88.5, 20, -20])
    with np.errstate(all="ignore"):
        found = both_ways(device, function, device.asarray(x))
        right = both_ways(numpy_backend(), function, x.astype(FLOAT64))
    assert np.isnan(found["0"][0])
    for name, values in found.items():
        np.testing.assert_allclose(values[1:], right[name][1:], rtol=2e-5, atol=2e-8)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (1031,)])
@pytest.mark.parametrize("mode", DTYPES)
@EACH_FUNCTION
def test_activations_of_any_size(device, function, mode, shape):
    x = np.array(np.random.default_rng(0).uniform(0.5, 2, shape)).astype(DTYPES[mode])
    found = both_ways(device, function, device.asarray(x))
    right = both_ways(numpy_backend(), function, x.astype(FLOAT64))
    assert not differences(found, right, TOLERANCES[mode])


@EACH_FUNCTION
def test_activations_of_views(device, function):
    x = np.random.default_rng(0).normal(size=(7, 6, 10)).astype("f4")

    def view(y):
        return y.transpose(2, 0, 1)[::-1, :, 1::2]

    found = both_ways(device, function, view(device.asarray(x)))
    right = both_ways(numpy_backend(), function, np.ascontiguousarray(view(x)).astype(FLOAT64))
    assert not differences(found, right, TOLERANCES[FLOAT32])


@pytest.mark.parametrize("shape", [(0,), (1,), (5, 1031), (70001,)])
@pytest.mark.parametrize("mode", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_any_size(device, loss, mode, shape):
    """With the target's gradient, and means of many elements."""
    draw = np.random.default_rng(0).uniform
    x, target = (draw(low, low + 2, shape).astype(DTYPES[mode]) for low in (-2, 0.25))
    for reduction in ("mean", "sum", "none"):
        near = partial(loss, reduction=reduction)
        found = both_ways(device, near, *map(device.asarray, (x, target)))
        right = both_ways(numpy_backend(), near, x.astype(FLOAT64), target.astype(FLOAT64))
        assert not differences(found, right, TOLERANCES[mode])


def test_losses_of_views(device):
    x = np.random.default_rng(0).normal(size=(2, 30, 20)).astype("f4")
    arrays = device.asarray(x)
    found = both_ways(device, ops.mse, arrays[0].T, arrays[1, ::-1].T)
    right = both_ways(
        numpy_backend(),
        ops.mse,
        *x[:, ::1].astype(FLOAT64).transpose(0, 2, 1)[:1],
        x[1, ::-1].T.astype(FLOAT64),
    )
    assert not differences(found, right, TOLERANCES[FLOAT32])


def test_a_loss_of_logits_never_overflows(device):
    """And of a NaN all losses are NaN."""
    x = np.float32([-1e30, -90, 0, 90, 1e30])
    y = ops.binary_cross_entropy(
        Tensor(device.asarray(x)), device.asarray(np.float32([0, 1, 0.5, 1, 1])), "none"
    )
    np.testing.assert_allclose(
        device.to_host(y.data), [0, 90, np.log(2), 0, 0], rtol=1e-6, atol=1e-30
    )
    nothing = device.asarray(np.float32([np.nan, 1]))
    for loss in LOSSES:
        leaf = Tensor(nothing, requires_grad=True)
        result = loss(leaf, device.asarray(np.float32([1, 1])))
        result.backward()
        assert np.isnan(device.to_host(result.data))
        assert np.isnan(device.to_host(leaf.grad)).tolist() == [True, False]


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("count", [0, 1, 255, 100003])
def test_norms_neither_overflow_nor_underflow(device, count, size):
    grads = np.random.default_rng(0).normal(0, size, (2, count)).astype("f4")
    found = global_norm([device.asarray(item) for item in grads])
    assert found == pytest.approx(float(np.linalg.norm(grads.astype(FLOAT64))), rel=1e-7)
