"""Convolution, ReLU and pooling as one operation, against the three after one another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnmpi
from nnmpi.errors import DtypeError, ShapeError, UsageError
from nnmpi.ops.activation import relu
from nnmpi.ops.conv import columns, winograd_numpy
from nnmpi.ops.conv.conv2d import conv2d, conv_relu, conv_relu_pool
from nnmpi.ops.pool import max_pool2d
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor


def chain(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, pool=2):
    """Return what conv_relu_pool is to return."""
    return max_pool2d(relu(conv2d(x, weight, bias, stride, padding, dilation, groups)), pool)


def run(function, arrays, grad, dtype, **options):
    """Return the function's result and its gradients."""
    leaves = [Tensor(a.astype(dtype), requires_grad=True) for a in arrays]
    y = function(*leaves, **options)
    y.backward(grad(y.shape).astype(dtype))
    return y.data, [leaf.grad for leaf in leaves]


def compare(arrays, expected=chain, function=conv_relu_pool, **options):
    """Compare with the chain in float64, and in float32 with the chain in float64."""

    def grad(shape):
        return np.random.default_rng(2).standard_normal(shape)

    y, grads = run(expected, arrays, grad, "float64", **options)
    for dtype, tolerance in (("float64", 1e-13), ("float32", 2e-6)):
        found, found_grads = run(function, arrays, grad, dtype, **options)
        assert found.shape == y.shape
        assert found.dtype == dtype
        np.testing.assert_allclose(found, y, rtol=0, atol=tolerance * np.abs(y).max(initial=1e-300))
        for one, other in zip(found_grads, grads, strict=True):
            assert one.dtype == dtype
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max(initial=1e-300))


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
    st.integers(8, 14),
    st.booleans(),
)
def test_against_the_chain(sizes, kernel, padding, dilation, pool, block, with_bias):
    """Any sizes, and blocks of a few images or of a few rows; whole numbers, so that every result is exact."""
    n, h, w, c, o = sizes
    rng = np.random.default_rng(h * w + c)
    arrays = [whole(rng, n, h, w, c), whole(rng, *kernel, c, o)] + ([whole(rng, o)] if with_bias else [])
    options = {"padding": padding, "dilation": dilation, "pool": pool}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "COLUMNS_BYTES", 1 << block)
        try:
            compare(arrays, **options)
        except ShapeError:
            with pytest.raises(ShapeError):
                chain(*[Tensor(a) for a in arrays], **options)


@pytest.mark.parametrize("pool", [1, 2, 3, (1, 2), (3, 1)])
@pytest.mark.parametrize("channels", [1, 3, 8, 32])
def test_random_numbers(pool, channels):
    """More than a block of images; the kernel's row is a short run of memory or a long one."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((20, 13, 10, channels), (3, 3, channels, 16), (16,))]
    compare(arrays, padding=1, pool=pool)


@pytest.mark.parametrize("size", [(200, 3), (3, 200), (90, 70)])
def test_large_images(size):
    """One image's columns are more than a block."""
    rng = np.random.default_rng(0)
    compare([rng.standard_normal(shape) for shape in ((2, *size, 8), (3, 3, 8, 4), (4,))], padding=(1, 2))


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"groups": 2}, {"padding": 3}, {"padding": (0, 4)}, {"stride": (1, 2), "dilation": 2}],
)
def test_what_has_no_fast_path(options):
    """Strides, groups, and borders wider than the kernel."""
    rng = np.random.default_rng(0)
    shapes = (3, 9, 9, 4), (3, 3, 4 // options.get("groups", 1), 6), (6,)
    compare([rng.standard_normal(shape) for shape in shapes], **options)


@pytest.mark.parametrize("bias", [0.0, 0.5, -0.5])
def test_constant_regions(bias):
    """All places are equal, and with a bias of 0 so is the ReLU's corner: the first place wins, or none."""
    rng = np.random.default_rng(0)
    x = np.zeros((4, 12, 12, 2))
    x[:, 3:7, 4:9] = rng.standard_normal((4, 4, 5, 2))
    compare([x, rng.standard_normal((3, 3, 2, 5)), np.full(5, bias)], padding=1)
    compare([np.ones((2, 8, 8, 1)), np.full((3, 3, 1, 2), 0.25), np.full(2, bias)], padding=1)


def test_nan_and_infinity():
    """They are not hidden, and do not spread further than by the chain."""
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((2, 8, 8, 2)), rng.standard_normal((3, 3, 2, 3)), np.zeros(3)
    x[0, 2, 3, 0], x[1, 5, 5, 1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        one, other = (f(Tensor(x), Tensor(weight), Tensor(bias), padding=1).data for f in (conv_relu_pool, chain))
    assert np.isnan(one).any()
    assert np.isinf(one).any()
    np.testing.assert_allclose(one, other)


def test_arrays_with_gaps():
    """Images seen from elsewhere, a gradient that is broadcast."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((10, 3, 12, 4))
    x = Tensor(base.transpose(2, 0, 3, 1)[::2, ::-1], requires_grad=True)  # (6, 10, 4, 3)
    weight = Tensor(rng.standard_normal((4, 3, 3, 3)).swapaxes(0, 3), requires_grad=True)  # no order that C knows
    results = []
    for function in (conv_relu_pool, chain):
        x.grad = weight.grad = None
        function(x, weight, padding=1).sum().backward()
        results.append((x.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_only_what_is_wanted():
    """Gradients of some inputs alone, and none at all."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((3, 6, 6, 2), (3, 3, 2, 4), (4,))]
    everything = run(conv_relu_pool, arrays, np.ones, "float64", padding=1)[1]
    for wanted in np.ndindex(2, 2, 2):
        leaves = [Tensor(a, requires_grad=bool(want)) for a, want in zip(arrays, wanted, strict=True)]
        y = conv_relu_pool(*leaves, padding=1)
        if any(wanted):
            y.sum().backward()
        for leaf, expected, want in zip(leaves, everything, wanted, strict=True):
            if want:
                np.testing.assert_allclose(leaf.grad, expected, atol=1e-12)
            else:
                assert leaf.grad is None
    with no_grad():
        np.testing.assert_array_equal(conv_relu_pool(*leaves, padding=1).data, y.data)


@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize("function", [conv2d, conv_relu, conv_relu_pool])
def test_replayed(function, channels, monkeypatch):
    """A recorded step gives the same bits with other values; several blocks, the last one shorter."""
    monkeypatch.setattr(columns, "COLUMNS_BYTES", 1 << 16)
    monkeypatch.setattr(winograd_numpy, "TILES_BYTES", 1 << 17)
    rng = np.random.default_rng(0)
    leaves = [
        Tensor(rng.standard_normal(shape).astype("float32"), requires_grad=True)
        for shape in ((10, 8, 6, channels), (3, 3, channels, 16), (16,))
    ]

    def step():
        for leaf in leaves:
            leaf.grad = None
        y = function(*leaves, padding=1)
        y.backward(np.linspace(1, 2, y.size, dtype=y.dtype).reshape(y.shape))
        return y

    compiled = nnmpi.compile(step)
    compiled()
    for _ in range(2):
        for leaf in leaves:
            leaf.data[...] = Tensor(rng.standard_normal(leaf.shape)).data
        replayed = [compiled().data.copy(), *[leaf.grad.copy() for leaf in leaves]]
        eager = [step().data, *[leaf.grad for leaf in leaves]]
        for one, other in zip(replayed, eager, strict=True):
            np.testing.assert_array_equal(one, other)
    assert compiled.recordings == 1


def test_without_pooling():
    """conv_relu is the same without it."""
    rng = np.random.default_rng(0)

    def expected(*args, **options):
        return relu(conv2d(*args, **options))

    for options in ({"padding": 1}, {"stride": 2}, {"dilation": 2, "padding": 2}, {"groups": 2}):
        shapes = (5, 7, 6, 4), (3, 3, 4 // options.get("groups", 1), 6), (6,)
        compare([rng.standard_normal(shape) for shape in shapes], expected, conv_relu, **options)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "words"),
    [
        (((1, 5, 5, 1), (3, 3, 2, 2)), {}, ShapeError, r"needs a weight \(\.\., \.\., 1, \.\.\)"),
        (((1, 2, 5, 1), (3, 3, 1, 2)), {}, ShapeError, "does not fit a height of 2"),
        (((1, 5, 5, 1), (3, 3, 1, 2)), {"pool": 4}, ShapeError, r"window of \(4, 4\) does not fit the height"),
        (((1, 5, 5, 1), (3, 3, 1, 2)), {"pool": 0}, UsageError, "pool is one whole number of at least 1"),
        (((1, 5, 5, 1), (3, 3, 1, 2), (3,)), {}, ShapeError, r"bias has shape \(3,\)"),
    ],
)
def test_what_does_not_fit(arrays, options, error, words):
    """The same sentences as the chain's."""
    with pytest.raises(error, match=words):
        conv_relu_pool(*[Tensor(np.zeros(shape)) for shape in arrays], **options)


def test_dtypes_are_not_mixed():
    """Nor changed silently."""
    with pytest.raises(DtypeError, match="conv2d of float64, float32"):
        conv_relu_pool(Tensor(np.zeros((1, 5, 5, 1))), Tensor(np.zeros((3, 3, 1, 1), "float32")))
    for channels in (1, 16):
        x, weight = Tensor(np.ones((1, 6, 6, channels), int)), Tensor(np.ones((3, 3, channels, 16), int))
        with pytest.raises(DtypeError, match="floating point, not int64"):
            conv_relu_pool(x, weight, padding=1)
        assert (conv2d(x, weight).data == 9 * channels).all()
