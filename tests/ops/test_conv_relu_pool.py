"""Convolution, ReLU and pooling as one operation, against the three after one another."""

from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi import Tensor
from nnmpi.base.errors import ShapeError
from nnmpi.ops import conv2d, conv_relu_pool, max_pool2d, relu
from nnmpi.ops.conv import im2col, winograd_numpy
from tests.ops.replays import check_replays


def chain(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, pool=2):
    """Return what conv_relu_pool is to return."""
    return max_pool2d(relu(conv2d(x, weight, bias, stride, padding, dilation, groups)), pool)


def run(function, arrays, grad, dtype, **options):
    """Return the function's result and its gradients."""
    leaves = [Tensor(a.astype(dtype), requires_grad=True) for a in arrays]
    y = function(*leaves, **options)
    y.backward(grad(y.shape).astype(dtype))
    return y.data, [leaf.grad for leaf in leaves]


def compare(
    arrays, expected=chain, function=conv_relu_pool, coarser=1, within=nullcontext, **options
):
    """Compare with the chain in float64, and in float32 with the chain in float64.

    An algorithm that rounds more may be off by `coarser` times the usual tolerance. The function,
    not the chain, runs in a context that `within` makes.
    """

    def grad(shape):
        return whole(np.random.default_rng(2), *shape)

    y, grads = run(expected, arrays, grad, "float64", **options)
    for dtype, tolerance in (("float64", coarser * 1e-13), ("float32", coarser * 2e-6)):
        with within():
            result, found_grads = run(function, arrays, grad, dtype, **options)
        assert result.shape == y.shape
        assert result.dtype == dtype
        np.testing.assert_allclose(
            result, y, rtol=0, atol=tolerance * np.abs(y).max(initial=1e-300)
        )
        for found_grad, other in zip(found_grads, grads, strict=True):
            assert found_grad.dtype == dtype
            np.testing.assert_allclose(
                found_grad, other, rtol=0, atol=tolerance * np.abs(other).max(initial=1e-300)
            )


def whole(rng, *shape):
    """Return whole numbers: there are many ties, and none by rounding alone."""
    return rng.integers(-3, 4, shape).astype(float)


@settings(deadline=None, max_examples=150)
@given(
    st.tuples(*[st.integers(a, b) for a, b in ((0, 3), (1, 9), (1, 9), (1, 9), (1, 9))]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from((1, 1, 1, 2)),
    st.integers(8, 14),
    st.booleans(),
    st.sampled_from((1, 24)),
)
def test_against_the_chain(
    sizes, kernel, padding, dilation, pool, stride, groups, block, with_bias, short
):
    """Any sizes, blocks of a few images or of a few rows, and columns stored either way, against
    one block; whole numbers, so that every result is exact.
    """

    @contextmanager
    def blocks():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(im2col, "COLUMNS_BYTES", 1 << block)
            patch.setattr(im2col, "SHORT_RUN", short)
            yield

    n, h, w, c, o = sizes
    rng = np.random.default_rng(h * w + c)
    shapes = (n, h, w, groups * c), (*kernel, c, groups * o), (groups * o,)
    arrays = [whole(rng, *shape) for shape in shapes[: 2 + with_bias]]
    options = {"padding": padding, "dilation": dilation, "pool": pool, "stride": stride}
    options["groups"] = groups
    try:
        compare(arrays, within=blocks, **options)
    except ShapeError:
        with pytest.raises(ShapeError):
            chain(*[Tensor(a) for a in arrays], **options)


@pytest.mark.parametrize("bias", [0.0, 0.5, -0.5])
def test_constant_regions(bias):
    """All places are equal, and with a bias of 0 so is the ReLU's corner: the first place wins, or
    none.
    """
    rng = np.random.default_rng(0)
    x = np.zeros((4, 12, 12, 2))
    x[:, 3:7, 4:9] = rng.standard_normal((4, 4, 5, 2))
    compare([x, rng.standard_normal((3, 3, 2, 5)), np.full(5, bias)], padding=1)
    compare([np.ones((2, 8, 8, 1)), np.full((3, 3, 1, 2), 0.25), np.full(2, bias)], padding=1)


def test_nan_and_infinity():
    """They are not hidden, and do not spread further than by the chain."""
    rng = np.random.default_rng(0)
    x, weight, bias = (
        rng.standard_normal((2, 8, 8, 2)),
        rng.standard_normal((3, 3, 2, 3)),
        np.zeros(3),
    )
    x[0, 2, 3, 0], x[1, 5, 5, 1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        first, other = (
            f(Tensor(x), Tensor(weight), Tensor(bias), padding=1).data
            for f in (conv_relu_pool, chain)
        )
    assert np.isnan(first).any()
    assert np.isinf(first).any()
    np.testing.assert_allclose(first, other)


@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize("function", [conv2d, conv_relu_pool])
def test_replayed(function, channels, monkeypatch):
    """A recorded step gives the same bits with other values; several blocks, the last one
    shorter.
    """
    monkeypatch.setattr(im2col, "COLUMNS_BYTES", 1 << 16)
    monkeypatch.setattr(winograd_numpy, "TILES_BYTES", 1 << 17)
    rng = np.random.default_rng(0)
    shapes = (10, 8, 6, channels), (3, 3, channels, 16), (16,)
    first, *others = (
        [rng.standard_normal(shape, dtype=np.float32) for shape in shapes] for _ in range(3)
    )
    leaves = [Tensor(item, requires_grad=True) for item in first]
    check_replays(partial(function, padding=1), leaves, others)
