"""Compiled convolutions against the plain ones in float64, and what they leave to the plain
ones.
"""

from functools import partial

import numpy as np
import pytest

from nnmpi import Tensor, jit, no_grad
from nnmpi.backend.jit import conv3x3
from nnmpi.backend.kernels import load
from nnmpi.ops import conv2d, conv_relu_pool, max_pool2d, relu
from nnmpi.ops.conv.compiled_3x3 import CompiledWinograd
from tests.harness.slow import KERNELS, once_more
from tests.ops.replays import check_replays
from tests.ops.test_compiled_dense import run

pytest.importorskip("numba")
pytestmark = pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """Skip where compiled code cannot call the BLAS; let few outputs be computed, which is slow but
    right.
    """
    monkeypatch.setattr("nnmpi.ops.conv.convolution.FEWEST_OUTPUTS", 1)
    if not load().has_products():
        pytest.skip("this NumPy's BLAS cannot be called from compiled code")


def draw(sizes, seed=0):
    """Return images, a kernel and a bias, float32."""
    n, h, w, c, o = sizes
    rng = np.random.default_rng(seed)
    shapes = (n, h, w, c), (3, 3, c, o), (o,)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    arrays[1] /= np.float32(np.sqrt(9 * c))
    return arrays


def chain(x, weight, bias=None, pool=2):
    """Return the plain operations' result; pool None means no ReLU either."""
    y = conv2d(x, weight, bias, padding=1)
    return y if pool is None else max_pool2d(relu(y), pool)


def fused(x, weight, bias=None, pool=2):
    """Return what is under test."""
    if pool is None:
        return conv2d(x, weight, bias, padding=1)
    return conv_relu_pool(x, weight, bias, padding=1, pool=pool)


def compare(sizes, pool, for_x=True):
    """Compare with float64, within 2e-6 of the largest."""
    arrays, nodes = draw(sizes), []

    def apply(function, *leaves):
        if not for_x:
            leaves = Tensor(arrays[0].astype(leaves[0].dtype)), *leaves
        y = function(*leaves, pool=pool)
        nodes.append(y.node)
        return y

    given = arrays if for_x else arrays[1:]
    expected = run(partial(apply, chain), given, np.float64, False)
    result = run(partial(apply, fused), given, np.float32, True)
    assert isinstance(nodes[1].algorithm, CompiledWinograd)
    for mine, theirs in zip(result, expected, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6 * abs(theirs).max(initial=1e-3))


# The first divides nothing; the second is one tile. Few, since each kind of each of them is
# compiled.
@pytest.mark.parametrize(
    "sizes",
    [
        (3, 6, 4, 5, 7),
        *(once_more(item, True, KERNELS) for item in ((1, 2, 2, 6, 1), (3, 14, 14, 8, 16))),
    ],
)
def test_pooled(sizes):
    """Against the plain chain."""
    compare(sizes, 2)


@pytest.mark.slow(KERNELS)
@pytest.mark.parametrize("sizes", [(3, 6, 4, 5, 7), (2, 30, 2, 1, 3)])
def test_not_pooled(sizes):
    """The convolution alone."""
    compare(sizes, None)


# In the second the last piece of each image is shorter; in the third there are two images, and then
# one.
@pytest.mark.slow(KERNELS)
@pytest.mark.parametrize("cache_rows, rows, pool", [(0, 1, None), (2, 2, 2), (8, 6, 2)])
def test_in_pieces(cache_rows, rows, pool, monkeypatch):
    """Some rows of an image at a time, or some of three images."""
    monkeypatch.setattr(conv3x3, "CACHE_BYTES", cache_rows * 16 * 4 * 2 * (5 + 7))
    assert conv3x3.sizes(6, 4, 5, 7).rows == rows
    compare((3, 6, 4, 5, 7), pool)


@pytest.mark.parametrize(
    "sizes", [once_more((3, 28, 28, 1, 32), True, KERNELS), (2, 12, 8, 1, 5), (0, 12, 8, 1, 5)]
)
def test_images_of_few_channels(sizes):
    """A network's first layer, whose images need no gradient."""
    compare(sizes, 2, for_x=False)


@pytest.mark.parametrize("shade", [0.0, 1.0])
def test_images_of_one_shade(shade):
    """All windows tie but at the border; with no bias, black images give exactly 0 everywhere: no
    gradient at all.
    """
    x, weight, bias = draw((2, 6, 4, 5, 7))
    x[...] = shade
    bias[...] = 0
    arrays = [x, weight, bias]
    expected, result = run(chain, arrays, np.float64, False), run(fused, arrays, np.float32, True)
    for i in (0, 2, 3):
        # of equal elements rounding may choose another: the images' gradient may lie elsewhere
        np.testing.assert_allclose(
            result[i], expected[i], rtol=0, atol=4e-6 * max(1, abs(expected[i]).max())
        )


@pytest.mark.parametrize("pool", [2, once_more(None, True, KERNELS)])
@pytest.mark.parametrize("place", [(0, 0), (2, 1), (3, 2), (5, 3)])
def test_nan_is_seen(pool, place):
    """In the images, at a corner and inside, and in the kernel: a run that diverges shows it."""
    x, weight, bias = draw((1, 6, 4, 5, 7))
    with jit(), no_grad():
        weight[1, 1, 0, 3] = np.nan
        assert np.isnan(fused(Tensor(x), Tensor(weight), Tensor(bias), pool).data[..., 3]).all()
        weight[1, 1, 0, 3] = 1
        x[0, place[0], place[1], 1] = np.nan
        assert np.isnan(fused(Tensor(x), Tensor(weight), Tensor(bias), pool).data).any()


def is_compiled(y):
    """Return whether one of numba's kernels computed this; the last operation may be a pooling by
    itself.
    """
    return isinstance(getattr(y.node, "algorithm", None), CompiledWinograd)


def test_what_does_not_fit_is_computed_plainly():
    """Another dtype, odd sizes, another kernel, stride, border, dilation, groups or pooling."""
    x, weight, bias = (Tensor(a, requires_grad=True) for a in draw((2, 6, 4, 5, 7)))
    even = [Tensor(a) for a in draw((2, 6, 4, 6, 4))]
    wide = [Tensor(a.data.astype(np.float64), requires_grad=True) for a in (x, weight, bias)]
    with jit():
        results = [
            conv_relu_pool(*wide, padding=1),
            conv_relu_pool(x[:, :5], weight, bias, padding=1),
            conv_relu_pool(x, weight[:2, :2], bias, padding=1),
            conv_relu_pool(x, weight, bias, stride=2, padding=1, pool=1),
            conv_relu_pool(x, weight, bias, padding=2),
            conv_relu_pool(x, weight, bias, padding=1, dilation=2, pool=1),
            conv_relu_pool(even[0], even[1][:, :, :3], even[2], padding=1, groups=2),
            conv_relu_pool(x, weight, bias, padding=1, pool=(2, 1)),
        ]
    for y in results:
        assert not is_compiled(y)
    assert not is_compiled(conv_relu_pool(x, weight, bias, padding=1))


def test_a_compiled_step_is_the_eager_one():
    """Bit for bit, with and without a gradient of the images, with other values."""
    first, second = (
        draw((2, 12, 8, 1, 5)),
        [Tensor(item, requires_grad=True) for item in draw((2, 6, 4, 5, 7))[1:]],
    )

    def function(*leaves):
        return conv_relu_pool(conv_relu_pool(*map(Tensor, first), padding=1), *leaves, padding=1)

    with jit():
        check_replays(function, second, [draw((2, 6, 4, 5, 7), seed=seed)[1:] for seed in (1, 2)])
