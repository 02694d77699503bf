"""Winograd's convolution against im2col, with ReLU and pooling or without, and where it is used."""

from functools import partial

import numpy as np
import pytest

from nnmpi import Tensor
from nnmpi.ops import conv2d, conv_relu_pool, max_pool2d, relu
from nnmpi.ops.conv import winograd_numpy
from nnmpi.ops.conv.algorithm import ConvSpec
from nnmpi.ops.conv.convolution import Conv2dFunction, choose
from nnmpi.ops.conv.im2col import Im2col
from nnmpi.ops.conv.winograd_numpy import WinogradNumpy
from tests.ops.test_conv_relu_pool import compare

pytestmark = pytest.mark.host_only("transforms that pay for NumPy's arrays alone")


def plain(x, weight, bias=None):
    """Return the convolution by im2col, of the images' size."""
    border, groups = len(weight) // 2, x.shape[3] // weight.shape[2]
    spec = ConvSpec(weight.shape[:2], padding=(border, border), groups=groups)
    return Conv2dFunction(Im2col(spec))(x, weight, bias)


ALONE = ConvSpec((3, 3), padding=(1, 1))
RELU_POOL = ALONE._replace(pool=(2, 2))
NAMES = ("alone", "relu and pooling")
COARSER = {3: 1, 5: 4}  # {kernel: error over that of im2col}


def expected(spec):
    """Return the convolution by im2col, and what follows it, as a function."""
    if spec.pool == (1, 1):
        return plain
    return lambda *args: max_pool2d(relu(plain(*args)), spec.pool)


def tiled(spec, side, x, weight, bias=None):
    """Return the convolution by Winograd's tiles, and what follows it."""
    return Conv2dFunction(WinogradNumpy(spec, side))(x, weight, bias)


def resized(spec, kernel):
    """Return a specification for kernels of another size."""
    border = kernel // 2
    return spec._replace(kernel=(kernel, kernel), padding=(border, border))


EACH_SPEC = pytest.mark.parametrize("spec", [ALONE, RELU_POOL], ids=NAMES)


@pytest.mark.parametrize("kernel", [3, 5])
@EACH_SPEC
@pytest.mark.parametrize("size", [(2, 2), (2, 6), (8, 4), (12, 8), (6, 14)])
@pytest.mark.parametrize("channels", [(1, 1), (3, 5), (16, 24)])
@pytest.mark.parametrize("n", [1, 7])
def test_sizes(spec, size, channels, n, kernel, monkeypatch):
    """Sizes of whole tiles and any channels, in blocks of three images, the last one shorter."""
    (c, o), two = channels, size[0] % 4 or size[1] % 4 or spec.pool != (1, 1) or kernel == 5
    side, spec = 2 if two else 4, resized(spec, kernel)
    image = winograd_numpy.places_per_image(*size, side, kernel) * (c + o) * 4
    monkeypatch.setattr(winograd_numpy, "TILES_BYTES", 3 * image)
    rng = np.random.default_rng(kernel - 3)
    compare(
        [rng.standard_normal(shape) for shape in ((n, *size, c), (kernel, kernel, c, o), (o,))],
        expected(spec),
        partial(tiled, spec, side),
        coarser=COARSER[kernel],
    )


EACH_KERNEL_AND_SIDE = pytest.mark.parametrize("kernel, side", [(3, 2), (3, 4), (5, 2)])


@EACH_KERNEL_AND_SIDE
@pytest.mark.parametrize("channels, groups", [((6, 9), 3), ((8, 8), 2), ((4, 8), 4)])
@pytest.mark.parametrize("large", [1, 1 << 17])
def test_groups(channels, groups, kernel, side, large, monkeypatch):
    """Channels in groups, as few as one, with kernels transposed as views and as copies."""
    monkeypatch.setattr(winograd_numpy, "LARGE_KERNELS", large)
    (c, o), rng = channels, np.random.default_rng(0)
    shapes = (3, 8, 12, c), (kernel, kernel, c // groups, o), (o,)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    spec = resized(ALONE, kernel)
    compare(
        arrays,
        expected(spec),
        partial(tiled, spec._replace(groups=groups), side),
        coarser=COARSER[kernel],
    )
    chosen = choose(*map(Tensor, arrays), spec._replace(groups=groups))
    assert isinstance(chosen, WinogradNumpy)


@pytest.mark.parametrize("bias", [0.0, 0.5, -0.5])
@EACH_SPEC
@EACH_KERNEL_AND_SIDE
def test_constant_regions(spec, bias, kernel, side):
    """Where a black background meets a picture: equal places, and with a bias of 0 the corner of
    the ReLU.
    """
    if side == 4 and spec.pool != (1, 1):
        side = 2
    rng = np.random.default_rng(0)
    x = np.zeros((4, 12, 12, 16))
    x[:, 3:7, 4:9] = rng.standard_normal((4, 4, 5, 16))
    arrays = [x, rng.standard_normal((kernel, kernel, 16, 5)), np.full(5, bias)]
    spec = resized(spec, kernel)
    compare(arrays, expected(spec), partial(tiled, spec, side), coarser=COARSER[kernel])


@pytest.mark.parametrize("kernel, side", [(3, 4), (5, 2)])
@pytest.mark.parametrize("fill", [0.0, -0.0, 1e-30], ids=["zero", "minus zero", "tiny"])
def test_results_that_see_zeros_alone_are_0(kernel, side, fill):
    """Not those that see a pixel whose channels cancel, or one whose sum is too small for a
    float.
    """
    rng = np.random.default_rng(0)
    x = np.full((2, 16, 16, 8), fill, "float32")
    x[:, :6, :6, :2] = 1.0, -1.0
    weight = rng.standard_normal((kernel, kernel, 8, 8), "float32")
    y = tiled(resized(ALONE, kernel), side, Tensor(x), Tensor(weight)).numpy()
    reach = 6 + kernel // 2
    seen = np.zeros((16, 16), bool)
    seen[:reach, :reach] = True
    assert np.array_equal(y.any(axis=(0, 3)), seen | (fill == 1e-30))


@pytest.mark.parametrize(
    "function, spec", [(conv2d, ALONE), (conv_relu_pool, RELU_POOL)], ids=NAMES
)
def test_it_is_taken(function, spec):
    """By the operations that users call."""
    x, weight = (
        Tensor(np.zeros(shape, "float32"), requires_grad=True)
        for shape in ((2, 8, 6, 16), (3, 3, 16, 16))
    )
    algorithm = function(x, weight, padding=1).node.algorithm
    assert type(algorithm) is WinogradNumpy
    assert algorithm.spec == spec


@pytest.mark.parametrize("channels, size", [(8, 8), (7, 8), (16, 6), (15, 6)])
def test_few_channels_are_left_to_im2col(channels, size):
    """Below 8, by tiles of 4 x 4; below 16, by tiles of 2 x 2."""
    x, weight = Tensor(np.zeros((1, size, size, channels))), Tensor(np.zeros((3, 3, channels, 16)))
    algorithm = choose(x, weight, None, ALONE)
    assert isinstance(algorithm, WinogradNumpy) == (channels in (8, 16))


def test_tiles_of_4_pool_on_their_own():
    """Larger tiles are faster than a fused pooling; sizes that they do not divide are fused."""
    weight = Tensor(np.zeros((3, 3, 16, 16)))
    whole, other = (Tensor(np.zeros((1, size, size, 16))) for size in (8, 6))
    assert choose(whole, weight, None, RELU_POOL) is None
    assert isinstance(choose(other, weight, None, RELU_POOL), WinogradNumpy)
