"""What the basic operations give where the table does not look: at kinks and ties, beyond the
range, and with NaN.
"""

import operator

import numpy as np
import pytest

from nnmpi import Tensor, ops, tensor
from nnmpi.base.errors import DtypeError, GraphError, ShapeError, UsageError
from tests.harness.refusals import refuses


def gradient(function, values):
    """Return the gradient of the sum of function at some values."""
    x = Tensor(np.array(values, float), requires_grad=True)
    function(x).sum().backward()
    return x.grad


def zeros(*size):
    """Return a tensor of zeros."""
    return Tensor(np.zeros(size))


# ---------------------------------------------------------------- conventions where there is no
# derivative
def test_kinks():
    """The documented choice at each."""
    np.testing.assert_array_equal(gradient(abs, [-2, 0, 2]), [-1, 0, 1])
    np.testing.assert_array_equal(
        gradient(lambda x: tensor.maximum(x, 0.0), [-1, 0, 1]), [0, 0.5, 1]
    )
    np.testing.assert_array_equal(
        gradient(lambda x: tensor.minimum(x, 0.0), [-1, 0, 1]), [1, 0.5, 0]
    )
    np.testing.assert_array_equal(gradient(lambda x: tensor.maximum(x, x), [-1, 0, 1]), [1, 1, 1])
    np.testing.assert_array_equal(gradient(lambda x: x.clip(-1, 1), [-2, 0, 2]), [0, 1, 0])


def test_ties_share():
    """The largest and smallest elements get equal parts, and the parts add up to one."""
    np.testing.assert_array_equal(gradient(Tensor.max, [1, 3, 3, 3]), [0, 1 / 3, 1 / 3, 1 / 3])
    np.testing.assert_array_equal(
        gradient(lambda x: x.min(1), [[1, 1], [2, 1]]), [[0.5, 0.5], [0, 1]]
    )


def test_powers_of_zero():
    """0 ** 2, 0 ** 1 and 0 ** 0 have derivatives; in the exponent they are taken as 0."""
    for exponent, expected in ((2, 0), (1, 1), (0, 0)):
        np.testing.assert_array_equal(gradient(lambda x, e=exponent: x**e, [0.0]), [expected])
        np.testing.assert_array_equal(
            gradient(lambda x, e=exponent: x ** Tensor(np.array([float(e)])), [0.0]), [expected]
        )
    np.testing.assert_array_equal(gradient(lambda e: Tensor(np.array([0.0])) ** e, [2.0]), [0])
    np.testing.assert_array_equal(gradient(lambda x: x**2, [-3.0]), [-6])
    with np.errstate(divide="ignore"):
        exponents = gradient(lambda e: Tensor(np.array([0.0, -2.0, 4.0])) ** e, [-1.0, 2.0, 2.0])
    # of a negative number there is no logarithm
    np.testing.assert_allclose(exponents, [0, np.nan, 16 * np.log(4)])


def test_nan_passes():
    """An operation that met NaN says so."""
    x = Tensor(np.array([1.0, np.nan, 2.0]))
    for y in (
        x + 1,
        x * 0,
        x.max(),
        x.min(),
        x.sum(),
        x.clip(0, 1),
        tensor.maximum(x, 3.0),
        tensor.minimum(3.0, x),
    ):
        assert np.isnan(y.data).any()


@pytest.mark.parametrize("shape", [(), (3, 200)])
def test_gradients_that_do_not_pass_are_0(shape):
    """Also where they are NaN or infinite."""
    x = Tensor(np.full(shape, 2.0), requires_grad=True)
    for y in (x.clip(0, 1), tensor.minimum(x, 1.0), tensor.where(np.array(False), x, 1.0)):
        x.grad = None
        (y * np.array(np.inf)).sum().backward()
        np.testing.assert_array_equal(x.grad, np.zeros(shape))


@pytest.mark.parametrize("width", [2, 200])
def test_picked_rows(width):
    """Rows picked twice, from the end, or by a mask; short ones and long ones."""
    keys = np.array([[1, -1], [1, 0]]), np.array([True, False, True]), np.arange(3 * width) < 9
    for key in (*keys[:2], keys[2].reshape(3, width)):
        x, expected = Tensor(np.ones((3, width)), requires_grad=True), np.zeros((3, width))
        np.add.at(expected, key, 2.0)
        (x[key] * 2.0).sum().backward()
        np.testing.assert_array_equal(x.grad, expected)


def test_sums_of_nothing():
    """A sum without elements is 0; what has no value is refused."""
    empty = zeros(0, 3)
    np.testing.assert_array_equal(empty.sum(0).data, np.zeros(3))
    assert empty.sum().item() == 0
    for function in (Tensor.mean, Tensor.var, Tensor.max, Tensor.min):
        refuses(ShapeError, r"\(0, 3\)", function, empty)
        assert function(empty, 1).shape == (0,)


def test_moves_that_copy_nothing():
    """Reshape, transpose and slices are views of the same memory."""
    x = Tensor(np.arange(6.0).reshape(2, 3))
    for y in (x.reshape(3, 2), x.T, x[1:], x[None], x[::-1]):
        assert np.shares_memory(x.data, y.data)


# ---------------------------------------------------------------- what does not fit
ONES = np.ones(3)
SHAPES = [
    (lambda: zeros(2, 3) + zeros(4), r"add of shapes \(2, 3\) and \(4,\)"),
    (lambda: zeros(2) * np.ones(3), r"multiply of shapes \(2,\) and \(3,\)"),
    (lambda: tensor.where(np.ones(4, bool), zeros(2), 1.0), r"where of shapes \(4,\) and \(2,\)"),
    (lambda: operator.matmul(zeros(2, 3), zeros(2, 3)), "the inner sizes 3 and 2 differ"),
    (lambda: operator.matmul(zeros(), zeros(2)), "at least one dimension"),
    (lambda: operator.matmul(zeros(2, 1, 3), zeros(3, 3, 1)), r"\(2, 1, 3\) and \(3, 3, 1\)"),
    (lambda: zeros(2).sum(1), "axis 1 does not fit an array of 1 dimensions"),
    (lambda: zeros(1).var(correction=1), "too few elements for correction 1"),
    (lambda: zeros(2, 3).reshape(4), r"\(2, 3\) \(6 elements\) to \(4,\)"),
    (lambda: zeros(2, 3).reshape(-1, -1), r"to \(-1, -1\)"),
    (lambda: zeros(2, 3).permute(0, 0), r"\(0, 0\) is not a permutation"),
    (lambda: zeros(2, 3).permute(0), r"\(0,\) is not a permutation"),
    (lambda: zeros(2, 3).transpose(0, 2), "axis 2 does not fit an array of 2"),
    (lambda: zeros(2, 3).swapaxes(0, -3), "axis -3 does not fit an array of 2"),
    (lambda: tensor.concatenate([]), r"concatenate needs a list of tensors, not \[\]"),
    (lambda: tensor.stack(zeros(2, 3)), "stack needs a list of tensors, not Tensor"),
    (lambda: tensor.concatenate([zeros(2, 3), zeros(2, 2)]), r"\(2, 3\), \(2, 2\)"),
    (lambda: tensor.concatenate([zeros(2)], 1), "axis 1 does not fit"),
    (lambda: tensor.stack([zeros(2), zeros(3)]), "along axis 0"),
    (lambda: zeros(2).pad([(0, -1)]), r"\(0, -1\)"),
    (lambda: zeros(2).pad([(0, "1")]), r"per axis of shape \(2,\), not \[\(0, '1'\)\]"),
    (lambda: zeros(2).pad(1), "not 1"),
    (lambda: zeros(2, 2).pad([(0, 1)]), r"shape \(2, 2\)"),
    (lambda: zeros(2)["a":], r"index slice\('a', None, None\) does not fit"),
    (lambda: zeros(2)[::0], "step cannot be zero"),
    (lambda: zeros(2)[2], r"index 2 does not fit shape \(2,\)"),
    (lambda: zeros(2)[np.array([0, 5])], "5"),
]


@pytest.mark.parametrize("axis", ["1", 1.0, (0.0,)], ids=repr)
@pytest.mark.parametrize(
    "function",
    [*(getattr(Tensor, name) for name in ("sum", "mean", "var", "max", "min", "argmax"))]
    + [ops.softmax, ops.log_softmax, lambda x, axis: x.swapaxes(0, axis)]
    + [lambda x, axis: tensor.concatenate([x], axis), lambda x, axis: tensor.stack([x], axis)],
)
def test_axes_are_whole_numbers(function, axis):
    """Text and fractions name no axis."""
    refuses(
        ShapeError,
        r"axis .* does not fit .*; give .* a whole number",
        lambda: function(zeros(2, 3), axis),
    )


@pytest.mark.parametrize("make, words", SHAPES)
def test_shapes_that_do_not_fit(make, words):
    """One sentence with the shapes."""
    refuses(ShapeError, words, make)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: zeros(2).clip(), UsageError, "at least one of low and high"),
        (
            lambda: zeros(2, 2).sum(0, 1),
            UsageError,
            "keepdims is True or False, not 1; several axes are a tuple",
        ),
        (lambda: zeros(2).clip(2, 1), UsageError, "low 2 above high 1"),
        (lambda: tensor.where(ONES, zeros(3), 0.0), DtypeError, "boolean condition, not float64"),
        (
            lambda: Tensor(np.zeros(2, "uint8")) + 300,
            DtypeError,
            "tensor and 300, which uint8 cannot hold; convert",
        ),
        (
            lambda: -Tensor(ONES > 0),
            DtypeError,
            "negate of a bool tensor is undefined; convert with astype",
        ),
        (
            lambda: Tensor(ONES > 0) - (ONES > 0),
            DtypeError,
            "subtract of bool and bool is undefined; convert one",
        ),
        (
            lambda: zeros(2).__setitem__(0, 1),
            UsageError,
            "cannot be assigned; write to its array, x.data, or use",
        ),
        (
            lambda: operator.matmul(zeros(2), np.ones(2, "float32")),
            DtypeError,
            "matmul of float64, float32",
        ),
        (
            lambda: tensor.concatenate([zeros(2), Tensor([1.0])]),
            DtypeError,
            "concatenate of float64, float32",
        ),
        (lambda: Tensor.exp(ONES), GraphError, "exp needs a Tensor, not ndarray"),
        (lambda: Tensor.sum(ONES), GraphError, "Sum needs at least one Tensor"),
    ],
)
def test_other_misuse(make, error, words):
    """Likewise."""
    refuses(error, words, make)
