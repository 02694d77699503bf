"""Compiled kernels besides those of 3 x 3 convolutions: the plain operations in float64, and what
is left to these.
"""

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, jit
from nnmpi.backend.kernels import kernels_of
from nnmpi.base.errors import ShapeError
from nnmpi.ops import (
    batch_norm,
    conv2d,
    cross_entropy,
    gelu,
    group_norm,
    layer_norm,
    linear,
    lstm,
    relu,
    rms_norm,
    silu,
)
from tests.harness.slow import KERNELS, cases

pytest.importorskip("numba")

pytestmark = pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")


def run(function, arrays, dtype, compiled):
    """Return the result and the gradients, of whole numbers times the result."""
    tensors = [Tensor(a.astype(dtype), requires_grad=True) for a in arrays]
    with jit(compiled):
        y = function(*tensors)
        y.backward((np.arange(y.size) % 7 - 3.0).reshape(y.shape).astype(dtype))
    return [y.data, *(t.grad for t in tensors)]


def compare(function, arrays, share=2e-6):
    """Compare with the plain operation in float64, within a share of the largest."""
    expected = run(function, arrays, np.float64, False)
    result = run(function, arrays, np.float32, True)
    for mine, theirs in zip(result, expected, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=share * abs(theirs).max(initial=1e-3))


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (0, 3), (1, 1), (2000, 3)])
@pytest.mark.parametrize("out", [1, 17, 40])
def test_linear_and_relu(shape, out, compiled_calls):
    """For any number of axes, and no rows."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(size, dtype=np.float32) for size in (shape, (shape[-1], out), out)
    ]
    compare(lambda *args: relu(linear(*args)), arrays)
    if shape[0]:  # NumPy does nothing as well
        many, some = (shape[0] * out >= least for least in (2**16, 2**13))  # few are NumPy's
        assert compiled_calls == [*["plus"] * many, *["relu", "relu_grad"] * some]


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(5, 3), (0, 3), (70, 2, 33)])
def test_gelu_and_silu(shape, form, compiled_calls):
    """Alone, and with the product and bias before it; far from 0, too."""
    rng = np.random.default_rng(0)
    sizes = shape, (shape[-1], 17), 17
    arrays = [4 * rng.standard_normal(size, dtype=np.float32) for size in sizes]
    compare(lambda x: gelu(x, form), arrays[:1])
    compare(lambda *args: gelu(linear(*args), form), arrays)
    compare(silu, arrays[:1])
    name = "gelu" if form == "none" else "gelu_tanh"
    if shape[0]:  # NumPy does nothing as well
        assert compiled_calls == [name, name, "silu"]


@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize("size, blocks", [((3, 3), 0), ((28, 29), 1), ((64, 65), 3)])
def test_group_norm(size, blocks, groups, compiled_calls):
    """By blocks of images, few by NumPy; their mean is far from 0."""
    rng = np.random.default_rng(0)
    arrays = [5 + rng.standard_normal(shape) for shape in ((3, *size, 32), 32, 32)]
    compare(lambda *args: group_norm(*args, groups), arrays)
    names = ["itself", "squares", "scale_into"] * blocks + ["products", "move_into"] * blocks
    assert compiled_calls == names


def test_bias_gradients_of_many_rows():
    """Added up in parts; in one long sum the error would be 20 times as large."""
    arrays = [
        np.ones((50000, 1), np.float32),
        np.ones((1, 3), np.float32),
        np.full(3, 0.1, np.float32),
    ]
    tensors = [Tensor(a, requires_grad=True) for a in arrays]
    with jit():
        linear(*tensors).backward(np.full((50000, 3), 0.1, np.float32))
    np.testing.assert_allclose(tensors[2].grad, 50000 * np.float64(np.float32(0.1)), rtol=2e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7, 3), (2, 3, 40), (1, 1), (0, 4)])
def test_cross_entropy(reduction, shape, compiled_calls):
    """Each reduction; logits of more than two axes; no rows."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(shape, dtype=np.float32) * np.float32(5)
    labels = rng.integers(0, shape[-1], shape[:-1])
    compare(lambda x: cross_entropy(x, labels, reduction), [logits])
    assert compiled_calls == ["powers"] * bool(shape[0])  # NumPy does nothing as well


def test_labels_out_of_range_are_refused():
    """Before a kernel could write elsewhere; in a step that is replayed too."""
    x, labels = Tensor(np.zeros((2, 3), np.float32), requires_grad=True), np.array([0, 1])
    with jit():
        with pytest.raises(ShapeError, match="label 3"):
            cross_entropy(x, np.array([0, 3]))
        step = nnmpi.compile(lambda x, labels: cross_entropy(x, labels))
        step(x.data, Tensor(labels))
        with pytest.raises(ShapeError, match="label -1"):
            step(x.data, Tensor(np.array([0, -1])))


@pytest.mark.parametrize("settings", [{"ignore_index": 2}, {"label_smoothing": 0.1}])
def test_other_losses(settings, compiled_calls):
    """Ignored labels and smoothing; labels of another dtype are converted."""
    logits = np.random.default_rng(0).standard_normal((5, 3), dtype=np.float32)
    labels = np.array([0, 2, 1, 2, 0])
    compare(lambda x: cross_entropy(x, labels, **settings), [logits])
    assert compiled_calls == ["powers"]
    compare(lambda x: cross_entropy(x, labels.astype(np.uint8)), [logits])
    assert compiled_calls == ["powers", "powers"]


@pytest.mark.parametrize("lengths", [None, [1, 4, 3]])
def test_lstm(lengths):
    """Forward and backward, gates near their ends, and sequences of several lengths; by other bits
    than NumPy.
    """
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(size, dtype=np.float32) * 2
        for size in ((3, 4, 5), (5, 24), (6, 24), (24,))
    ]

    def function(*given):
        return lstm(*given, lengths=None if lengths is None else np.array(lengths))

    compare(function, arrays, 3e-6)
    ours, plain = (run(function, arrays, np.float32, compiled) for compiled in (True, False))
    assert not np.array_equal(ours[0], plain[0]) and not np.array_equal(ours[1], plain[1])


def test_tanh():
    """Within 3 units of the last place of float64's, near 0 and far from it."""
    x = np.float32(
        [0.0, -0.0, 1e-20, 3e-4, -0.1, 0.62, 0.63, -1.5, 5.0, -9.0, 50.0, np.inf, -np.inf, np.nan]
    )
    gates = np.zeros((1, 4 * x.size), np.float32)
    gates[0, -x.size :] = x
    zeros = np.zeros((1, x.size), np.float32)
    with jit():
        kernels_of(x).lstm_step(
            gates,
            np.zeros_like(gates),
            np.zeros_like(gates[0]),
            zeros,
            *np.zeros((2, *zeros.shape), "f"),
        )
    np.testing.assert_allclose(gates[0, -x.size :], np.tanh(x.astype("float64")), rtol=4e-7)


@pytest.mark.parametrize("shape", [(5, 3), (70, 2, 3), (700, 48), (3, 9, 7, 513)])
def test_batch_normalization_and_relu(shape, compiled_calls):
    """Channels side by side, or as they are where nothing divides their number; far from 0."""
    rng = np.random.default_rng(0)
    arrays = [
        5 + rng.standard_normal(shape, dtype=np.float32),
        *rng.standard_normal((2, shape[-1]), dtype=np.float32),
    ]
    compare(lambda *args: relu(batch_norm(*args)[0]), arrays, 1e-5)
    names = ["relu", "relu_grad"] * int(np.prod(shape) >= 2**13)  # few are NumPy's
    assert compiled_calls == ["squares", "affine", *names, "products", "norm_grad"]


@pytest.mark.parametrize("shape", [(5, 3), (0, 3), (70, 2, 33), (3, 200)])
def test_layer_normalization(shape, compiled_calls):
    """Of rows far from 0; in RMS normalization the mean counts as 0."""
    rng = np.random.default_rng(0)
    sizes = shape, shape[-1], shape[-1]
    arrays = [1 + rng.standard_normal(size, dtype=np.float32) for size in sizes]
    compare(layer_norm, arrays, 1e-5)
    compare(rms_norm, arrays[:2], 1e-5)
    if shape[0]:
        assert compiled_calls == ["layer_norm", "layer_norm_grad"] * 2


def test_equal_numbers_are_normalized_to_nothing():
    """Their float32 mean may be another number, whose difference 1 / sqrt(eps) would multiply."""
    x, ones = np.full((3, 1000), 1 / 3, np.float32), np.ones(1000, np.float32)
    with jit(True):
        assert not layer_norm(*map(Tensor, (x, ones, 0 * ones))).data.any()


def test_relu_has_the_plain_bits(compiled_calls):
    """With zeros, infinities and NaN."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 3, (5, 9, 70, 37)).astype(np.float32)
    x[0, :3, :9] = np.nan
    x[1, 3:6], x[2, 3:6] = np.inf, -np.inf
    plain, compiled = (run(relu, [x], np.float32, compiled) for compiled in (False, True))
    for mine, theirs in zip(compiled, plain, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert compiled_calls == ["relu", "relu_grad"]


# Windows, and strides with dilations. A window is compiled for each stride and each number of
# channels, in seconds: the usual ones meet all sizes, the others one.
SIZES = [(5, 8, 12, 16), (3, 9, 10, 5), (2, 7, 9, 33)]
USUAL = 2
WINDOWS = [
    ((3, 3), (1, 1)),
    ((1, 5), (1, (1, 2))),
    ((3, 3), ((2, 3), 1)),
    ((4, 2), ((3, 2), 2)),
    ((4, 2), (1, 1)),
]


@pytest.mark.parametrize(
    "sizes, kernel, steps",
    cases(
        [
            *((sizes, *window) for sizes in SIZES for window in WINDOWS[:USUAL]),
            *((sizes, *window) for sizes, window in zip(SIZES, WINDOWS[USUAL:], strict=True)),
        ],
        lambda _, *window: window in WINDOWS[:USUAL],
        KERNELS,
    ),
)
@pytest.mark.parametrize("padding", [0, 1, (0, 2)])
def test_depthwise_convolution(sizes, padding, kernel, steps, compiled_calls):
    """Of images whose last rows and columns no window sees, too; by stride and dilation."""
    stride, dilation = steps
    rng = np.random.default_rng(0)
    shapes = sizes, (*kernel, 1, sizes[3]), sizes[3]
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    compare(lambda *args: conv2d(*args, stride, padding, dilation, groups=sizes[3]), arrays)
    # one call for each phase of the stride that the kernel sees
    axes = zip(kernel, *np.broadcast_arrays(stride, dilation, kernel)[:2], strict=True)
    phases = [len({r * apart % step for r in range(size)}) for size, step, apart in axes]
    assert compiled_calls == ["forward"] * (1 + phases[0] * phases[1]) + ["products"]
