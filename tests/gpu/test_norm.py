"""Normalization on the device where the numbers are difficult: far from 0, of few rows or none, in
views, over simulated ranks, and by running statistics.
"""

from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, nn, ops
from nnmpi.backend.backend import numpy_backend
from nnmpi.ops.norm import fixed_norm
from tests.gpu.play import BF16, FLOAT32, FLOAT64, FP16, TOLERANCES, call, differences, precise
from tests.gpu.table import Sample

WIDE = np.dtype(FLOAT64)


def host(device, array):
    """Return a device's array as float64."""
    return device.to_host(array).astype(WIDE)


@pytest.mark.parametrize("shape", [(5003, 3), (700, 16), (40, 7, 130)])
@pytest.mark.parametrize("mean", [0.0, 1e4, -2e5])
def test_nothing_cancels_far_from_zero(device, mean, shape):
    """A deviation of a few roundings of the mean, beside float64."""
    x = (mean + np.random.default_rng(0).normal(0, max(abs(mean) * 1e-6, 1e-3), shape)).astype("f4")
    n = shape[-1]
    values = [Tensor(device.asarray(item)) for item in (x, *np.full((2, n), [[2], [1]], "f4"))]
    y, ours, variance, count = ops.batch_norm(*values, eps=1e-12)
    rows = x.astype(WIDE).reshape(-1, n)
    wide = rows - rows.mean(0)
    assert count == len(rows)
    np.testing.assert_allclose(host(device, ours), rows.mean(0), rtol=1e-7, atol=1e-6)
    np.testing.assert_allclose(host(device, variance), (wide**2).mean(0), rtol=1e-4)
    right = wide / np.sqrt((wide**2).mean(0) + 1e-12) * 2 + 1
    np.testing.assert_allclose(
        host(device, y.data).reshape(rows.shape), right, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("first", [0.0, 1e4])
def test_a_first_row_unlike_the_rest(device, first):
    """The distances are measured from it, and rounded: to a share of the deviation."""
    x = np.random.default_rng(0).normal(1e4 - first, 1, (3001, 4)).astype("f4")
    x[0] = first
    ones = np.ones((2, 4), "f4")
    _, mean, variance, _ = ops.batch_norm(*(Tensor(device.asarray(item)) for item in (x, *ones)))
    wide = x.astype(WIDE)
    assert (np.abs(host(device, mean) - wide.mean(0)) < 1e-5 * wide.std(0)).all()
    np.testing.assert_allclose(host(device, variance), wide.var(0), rtol=1e-4)


@pytest.mark.parametrize("mode", [FLOAT64, FLOAT32, BF16, FP16])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_few_rows(device, rows, mode):
    """An empty batch has gradients of zeros, and of one row all results are the shift."""
    x = np.random.default_rng(0).integers(-3, 4, (rows, 5)).astype(float)
    parameters = np.random.default_rng(1).integers(1, 4, (2, 5)).astype(float)

    def norm(*given):
        return ops.batch_norm(*given)[0]

    sample = Sample("ops.batch_norm", "few", norm, [x, *parameters])
    low = np.dtype(mode) if mode in (FLOAT64, FLOAT32) else nnmpi.backend.precision.low_dtype(mode)
    right = call(sample, numpy_backend(), [WIDE] * 3)
    with precise(mode):
        kinds = [low, *[WIDE if mode == FLOAT64 else np.dtype("f4")] * 2]
        found = call(sample, device, kinds)
    # the gradient of x is 0 but for rounding
    assert not differences(found, right, TOLERANCES[mode], 1.0)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (0, 4)])
@pytest.mark.parametrize("name", ["batch", "fixed", "group", "layer"])
def test_nothing_to_normalize(device, shape, name):
    """Without images or pixels all gradients are zeros."""
    statistics = device.asarray(np.ones((2, 4), "f4"))
    function = {
        "batch": lambda *x: ops.batch_norm(*x)[0],
        "fixed": lambda *x: fixed_norm(*x, *statistics, 1e-5),
        "group": partial(ops.group_norm, groups=2),
        "layer": ops.layer_norm,
    }[name]
    leaves = [
        Tensor(device.asarray(np.ones(item, "f4")), requires_grad=True) for item in (shape, 4, 4)
    ]
    function(*leaves).backward(device.asarray(np.ones(shape, "f4")))
    for leaf in leaves:
        assert not leaf.grad.any() and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("name", ["batch", "group", "rms"])
def test_views_are_what_their_copies_are(device, name):
    function = {
        "batch": lambda x, a, b: ops.batch_norm(x, a, b)[0],
        "group": lambda x, a, b: ops.group_norm(x, a, b, 2),
        "rms": lambda x, a, b: ops.rms_norm(x, a) + b,
    }[name]
    xp, rng = device.xp, np.random.default_rng(0)
    base = device.asarray(rng.normal(size=(9, 16, 6)).astype("f4"))
    weights = device.asarray(rng.normal(size=(2, 16)).astype("f4"))
    results = []
    for copy in (xp.asarray, xp.ascontiguousarray):
        given = [base.transpose(2, 0, 1)[::-1, :, ::2], *weights[:, 1::2]]
        leaves = [Tensor(copy(item), requires_grad=True) for item in given]
        y = function(*leaves)
        y.backward(copy(device.asarray(rng.normal(size=(6, 8, 9)).astype("f4")).swapaxes(1, 2)))
        results.append([host(device, item) for item in (y.data, *(leaf.grad for leaf in leaves))])
        rng = np.random.default_rng(0)
        rng.normal(size=(9, 16, 6)), rng.normal(size=(2, 16))
    for ours, copies in zip(*results, strict=True):
        np.testing.assert_allclose(ours, copies, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [FLOAT32, BF16])
@pytest.mark.parametrize("shares", [(30, 12), (41, 0, 1)])
def test_ranks_have_the_statistics_of_all(device, shares, mode):
    """The ranks' sums meet as those of threads would: each pass is run once for each rank, with the
    sums that the others gave before.
    """
    rng = np.random.default_rng(0)
    x, grad = rng.normal(100, 1, (sum(shares), 6)), rng.normal(size=(sum(shares), 6))
    sample = [nnmpi.backend.precision.low_dtype(mode) if mode == BF16 else np.dtype("f4")]
    x, grad = (item.astype(sample[0]).astype(WIDE) for item in (x, grad))
    leaves = [Tensor(item, requires_grad=True) for item in (x, *np.ones((2, 6)))]
    y = ops.batch_norm(*leaves)[0]
    y.backward(grad)
    bounds = np.cumsum((0, *shares))
    parts = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    given = [[] for _ in parts]
    turns = 3
    for done in range(turns + 1):
        results = []
        for rank, part in enumerate(parts):
            calls = iter(range(turns))

            def all_reduce(sums, rank=rank, calls=calls, done=done):
                turn = next(calls)
                if turn == done:
                    given[rank].append(sums.copy())
                return sums if turn >= done else sum(item[turn] for item in given)

            ours = [
                Tensor(device.asarray(item.astype(kind)), requires_grad=True)
                for item, kind in zip(
                    (x[part], *np.ones((2, 6))), (*sample, "f4", "f4"), strict=True
                )
            ]
            with precise(mode):
                result, mean, variance, count = ops.batch_norm(*ours, all_reduce=all_reduce)
            result.backward(device.asarray(grad[part].astype(sample[0])))
            results.append((result.data, ours[0].grad, mean, variance, float(count)))
    for part, (result, to_x, mean, variance, count) in zip(parts, results, strict=True):
        assert count == len(x)
        np.testing.assert_allclose(host(device, mean), x.mean(0), rtol=1e-6)
        np.testing.assert_allclose(host(device, variance), x.var(0), rtol=1e-4)
        found = {"result": host(device, result), "gradient": host(device, to_x)}
        right = {"result": y.data[part], "gradient": leaves[0].grad[part]}
        assert not differences(found, right, 3 * TOLERANCES[mode], 1.0)


@pytest.mark.parametrize("mode", [FLOAT64, FLOAT32, BF16])
def test_running_statistics(device, mode):
    """They move as the host's do, and the result and gradients by them are the host's."""
    low = nnmpi.backend.precision.low_dtype(mode) if mode == BF16 else np.dtype(mode)
    x = np.random.default_rng(0).normal(3, 2, (4, 50, 7)).astype(low)
    found = []
    for backend, kind in ((device, low), (numpy_backend(), WIDE)):
        wide = WIDE if kind == WIDE else np.dtype("f4")
        layer = nn.BatchNorm(7).initialize(seed=0, backend=backend, dtype=wide)
        for rows in x[:3]:
            with precise(mode if kind == low else FLOAT32), nn.training(step=0):
                layer(Tensor(backend.asarray(rows.astype(kind))))
        leaf = Tensor(backend.asarray(x[3].astype(kind)), requires_grad=True)
        with precise(mode if kind == low else FLOAT32):
            y = layer(leaf)
        y.backward(backend.asarray(x[0].astype(kind)))
        statistics = layer.running_mean.data, layer.running_variance.data
        weights = layer.weight.grad, layer.bias.grad
        arrays = (*statistics, y.data, leaf.grad, *weights)
        found.append({str(i): host(backend, item) for i, item in enumerate(arrays)})
    assert not differences(*found, TOLERANCES[mode])
