"""Random programs of NumPy inside an operation give the same bits eager, recorded and replayed.

A program is a function of a seed, the shapes and the dtypes. What NumPy refuses is left out.
"""

import warnings

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor
from nnmpi.tensor import Function

pytestmark = pytest.mark.host_only("a device records by itself")

BINARY = np.add, np.subtract, np.multiply, np.maximum, np.hypot, np.greater, np.fmod, np.copysign
UNARY = np.exp, np.tanh, np.negative, np.abs, np.square, np.floor, np.isfinite, np.conjugate
REDUCTIONS = "sum", "mean", "max", "min", "std", "var", "prod", "any", "all", "cumsum", "argsort"
DTYPES = "float64", "float32", "float16", "int64", "bool", "complex128"


def changed(array, function):
    """Return an array of the operation's own after a call that returns nothing."""
    y = array * 1
    function(y)
    return y


def halved(number):
    before = number
    number /= 2
    return before + number


def rows(array):
    total = 0
    for row in array:
        total = total + row * 2
    return total


OPERATIONS = [
    lambda draw, xp, a, b: BINARY[draw.integers(len(BINARY))](a, b),
    lambda draw, xp, a, b: UNARY[draw.integers(len(UNARY))](a),
    lambda draw, xp, a, b: [a + 2, 0.5 * b, a - b, a > 1, abs(a) ** 2, a / 3][draw.integers(6)],
    lambda draw, xp, a, b: getattr(a, REDUCTIONS[draw.integers(11)])(axis=draw.integers(-1, 2)),
    lambda draw, xp, a, b: getattr(np, REDUCTIONS[draw.integers(9)])(a, keepdims=True),
    lambda draw, xp, a, b: getattr(np, REDUCTIONS[draw.integers(10)])(a),
    lambda draw, xp, a, b: a.astype(DTYPES[draw.integers(6)], copy=False),
    lambda draw, xp, a, b: [a[0], a[::-1], a[..., :1], a[[0, -1]], a.T, a[()]][draw.integers(6)],
    lambda draw, xp, a, b: [a.reshape(-1), a.real, a.ravel("K"), np.flip(a)][draw.integers(4)],
    lambda draw, xp, a, b: halved(a.sum() if draw.integers(2) else a.reshape(-1)[0]),
    lambda draw, xp, a, b: a.sum().reshape(1) + a.reshape(-1)[-1].astype("float32"),
    lambda draw, xp, a, b: changed(a, lambda y: y.__setitem__(slice(1, None), y[:-1])),
    lambda draw, xp, a, b: changed(a, lambda y: y.__setitem__((..., 0), b)),
    lambda draw, xp, a, b: changed(a, lambda y: y.sort(axis=0)),
    lambda draw, xp, a, b: changed(a, lambda y: np.add.at(y, [0, 0], 1)),
    lambda draw, xp, a, b: changed(a, lambda y: np.nan_to_num(y, copy=False)),
    lambda draw, xp, a, b: changed(a, lambda y: np.clip(y, -1, 1, y[::-1])),
    lambda draw, xp, a, b: changed(a, lambda y: y.reshape(-1)[::2].__iadd__(1)),
    lambda draw, xp, a, b: changed(np.zeros_like(a), lambda y: np.multiply(a, b, out=y)),
    lambda draw, xp, a, b: xp.full((2, *a.shape), a) + xp.ones(a.shape, "float32"),
    lambda draw, xp, a, b: np.where(a > 0, a, b) + np.concatenate([a, b])[: len(a)],
    lambda draw, xp, a, b: np.divmod(a, 3)[draw.integers(2)],
    lambda draw, xp, a, b: np.take_along_axis(a, np.argsort(b, -1), -1),
    lambda draw, xp, a, b: np.einsum("ij,kj->ik", a, b) + np.linalg.norm(a, axis=0)[0],
    lambda draw, xp, a, b: np.broadcast_arrays(a, b)[draw.integers(2)],
    lambda draw, xp, a, b: np.sin(np.sin(a) * 2 + b) + xp.ascontiguousarray(a.T).T,
    lambda draw, xp, a, b: rows(a) * np.median(a) + np.pad(a, 1)[..., 1:-1].sum(),
]


class Program(Function):
    """Computes with random calls, from the values it has so far; forward and backward."""

    def __init__(self, seed, length, skipped):
        self.seed, self.length, self.skipped = seed, length, skipped

    def run(self, part, values):
        for i in range(self.length):
            draw = np.random.default_rng((self.seed, part, i))
            a, b = (values[draw.integers(len(values))] for _ in range(2))
            operation = OPERATIONS[draw.integers(len(OPERATIONS))]
            if (part, i) in self.skipped:
                continue
            try:
                values.append(operation(draw, self.xp, a, b))
            except (ValueError, TypeError, IndexError, AttributeError):
                self.skipped.add((part, i))
                continue
            if draw.integers(4) == 0:
                del values[draw.integers(len(values))]
        parts = [np.ravel(getattr(x, name)) for x in values for name in ("real", "imag")]
        return np.concatenate(parts).astype("float64")

    def forward(self, x, weight):
        values = [x, weight]
        result = self.run(0, values)
        self.saved = x, weight, *values[-3:]
        return result

    def backward(self, grad):
        x, weight = self.saved[:2]
        result = np.nan_to_num(self.run(1, [grad, np.ones(1), *self.saved]))
        return result.sum() + 0 * x, np.tanh(weight) * result.std() + result.dot(result)


def results(wrap, seed, skipped):
    """Return the results and gradients of four steps."""
    draw = np.random.default_rng(seed)
    shape = [(3, 4), (4, 4), (2, 3, 2), (5,), (1, 4), (0, 3)][draw.integers(6)]
    length, weight = draw.integers(1, 12), Tensor(draw.normal(size=shape), requires_grad=True)

    def step(x):
        weight.grad = None
        y = Program(seed, length, skipped)(x * weight, weight * 1)
        (y * 2).backward(np.linspace(1, 2, y.size))
        return y

    wrapped = wrap(step)
    found = [
        (wrapped(draw.normal(size=shape)).data, weight.grad, weight.grad.tobytes())
        for _ in range(4)
    ]
    assert all(grad.tobytes() == before for _, grad, before in found)  # they stay the caller's
    return [array for *arrays, _ in found for array in arrays], wrapped


@pytest.mark.parametrize("first", [0, 25, 50])
def test_random_programs(first):
    refused = 0
    for seed in range(first, first + 25):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overflows
            skipped = set()
            for _ in range(2):  # the first one finds what NumPy refuses
                right, _ = results(lambda step: lambda x: step(Tensor(x)), seed, skipped)
            ours, compiled = results(nnmpi.compile, seed, skipped)
        for array, expected in zip(ours, right, strict=True):
            np.testing.assert_array_equal(array, expected, err_msg=f"program {seed}")
        refused += bool(compiled.refusal)
    assert refused < 3
