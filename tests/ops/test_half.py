"""Operations in half precision: near float64, in the dtypes that are promised, and never by a silent conversion."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import ops
from nnmpi.backend.precision import bfloat16, is_floating, is_low
from nnmpi.errors import DtypeError, UsageError
from nnmpi.nn.norm import BatchNorm
from nnmpi.tensor import arithmetic, elementwise, index, reduce, shape
from nnmpi.tensor.matmul import matmul
from nnmpi.tensor.tensor import Tensor

LOW = {"bf16": bfloat16(), "fp16": np.dtype(np.float16)}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
FLOAT32 = np.dtype(np.float32)
draw = np.random.default_rng(3)


def values(*sizes: int) -> Any:
    """Return numbers between -2 and 2 that bfloat16 holds exactly, none near 0, where ReLU has its kink."""
    numbers = draw.integers(8, 64, sizes) / 32 * draw.choice([-1, 1], sizes)
    return numbers.astype(np.float64)


X, ROWS = values(6, 5), values(2, 3, 5)
W, B = values(5, 7), values(7)
S, T = values(5) ** 2, values(5)
LABELS = np.array([0, 3, 4, 1, 1, 2], np.uint8)
PLACES = np.array([[0, 5], [2, 2]], np.int32)
MASK = draw.integers(0, 2, (6, 5)).astype(bool)
QKV, HEADS = values(2, 4, 12), values(2, 2, 4, 3)

# name: (function, inputs in half precision, parameters in float32, whether the result is of half precision)
CASES: dict[str, tuple[Callable[..., Tensor], list[Any], list[Any], bool]] = {
    "linear": (ops.linear, [ROWS], [W, B], True),
    "linear without bias": (ops.linear, [X], [W], True),
    "linear_relu": (ops.linear_relu, [X], [W, B], True),
    "linear_gelu": (ops.linear_gelu, [X], [W, B], True),
    "linear_gelu, tanh": (lambda *a: ops.linear_gelu(*a, "tanh"), [X], [W, B], True),
    "embedding": (lambda w: ops.embedding(w, PLACES), [], [X], True),
    "attention": (lambda x: ops.attention(x, 2, causal=True), [QKV], [], True),
    "scaled attention": (ops.scaled_dot_product_attention, [HEADS, HEADS[::-1].copy(), HEADS * 0.5], [], True),
    "matmul": (matmul, [X, X.T.copy()], [], True),
    "matmul of a vector": (matmul, [X, S], [], True),
    "matmul with a parameter": (matmul, [ROWS], [W], True),
    "layer_norm": (ops.layer_norm, [X], [S, T], True),
    "batch_norm": (lambda *a: ops.batch_norm(*a)[0], [X], [S, T], True),
    "gelu": (ops.gelu, [X], [], True),
    "relu": (ops.relu, [X], [], True),
    "leaky_relu": (ops.leaky_relu, [X], [], True),
    "silu": (ops.silu, [X], [], True),
    "sigmoid": (ops.sigmoid, [X], [], True),
    "tanh": (elementwise.tanh, [X], [], True),
    "softmax": (ops.softmax, [X], [], True),
    "log_softmax": (lambda x: ops.log_softmax(x, 0), [X], [], True),
    "dropout": (lambda x: ops.dropout(x, 0.4, (1, 2), 3), [X], [], True),
    "cross_entropy": (lambda x: ops.cross_entropy(x, LABELS), [X], [], False),
    "cross_entropy, smoothed": (lambda x: ops.cross_entropy(x, LABELS, "sum", 1, 0.1), [X], [], False),
    "mse": (lambda x: ops.mse(x, Tensor(np.zeros(x.shape, x.dtype))), [X], [], False),
    "binary_cross_entropy": (
        lambda x: ops.binary_cross_entropy(x, Tensor(MASK.astype(x.dtype)), "none"),
        [X],
        [],
        False,
    ),
    "sum": (lambda x: x.sum(axis=0), [X], [], False),
    "mean": (lambda x: x.mean(axis=1), [X], [], False),
    "var": (lambda x: x.var(axis=1), [X], [], False),
    "max": (lambda x: reduce.largest(x, 0), [X], [], True),
    "two tensors": (lambda a, b: a * b + a - b, [X, X[::-1].copy()], [], True),
    "broadcast": (lambda a, b: a * b, [X, S], [], True),
    "numbers": (lambda a: 2 - a * 3.5 + a / 4, [X], [], True),
    "division": (arithmetic.divide, [X, X[::-1].copy()], [], True),
    "power": (lambda a: a**2, [X], [], True),
    "where": (lambda a, b: arithmetic.where(MASK, a, b), [X, X[::-1].copy()], [], True),
    "beside float32": (lambda a, b: a * b + b, [X], [S], False),
    "joined with float32": (lambda a, b: shape.concatenate([a, b]), [X], [X[:2]], False),
    "picked twice": (lambda a: a[np.array([0, 2, 2])], [X], [], True),
    "taken along an axis": (lambda a: index.take_along_axis(a, LABELS[:, None] % 5, 1), [X], [], True),
    "negated and clipped": (lambda a: (-abs(a)).clip(-1.6, 0), [X], [], True),
}


def run(case: str, precision: str | None) -> tuple[Tensor, list[Tensor]]:
    """Return a case's result and its inputs after a backward pass; in float64 where no precision is given."""
    function, halves, parameters, _ = CASES[case]
    low, single = (np.dtype(np.float64),) * 2 if precision is None else (LOW[precision], FLOAT32)
    inputs = [Tensor(x.astype(low), requires_grad=True) for x in halves]
    inputs += [Tensor(x.astype(single), requires_grad=True) for x in parameters]
    with nnmpi.use_precision(precision or "float32"):
        y = function(*inputs)
        places = np.arange(y.size).reshape(y.shape)
        y.backward((-1.0) ** places * (places % 11 + 1) / 4)  # which half precision holds exactly
    return y, inputs


def check_near(found: Any, wanted: Any, precision: str, what: str) -> None:
    """Fail if an array is more than a few roundings of its largest value away."""
    error = np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    assert error <= 4 * ROUNDING[precision], f"{what} is off by {error / ROUNDING[precision]:.2f} roundings"


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_near_those_of_float64(case: str, precision: str) -> None:
    """And of the promised dtypes: results of half precision, an input's gradient as the input, losses float32."""
    y, inputs = run(case, precision)
    reference, exact = run(case, None)
    assert y.dtype == (LOW[precision] if CASES[case][3] else FLOAT32)
    check_near(y.data, reference.data, precision, "the result")
    for number, (x, wanted) in enumerate(zip(inputs, exact, strict=True)):
        assert x.grad is not None and wanted.grad is not None
        assert x.grad.dtype == x.dtype
        check_near(x.grad, wanted.grad, precision, f"gradient {number}")


@pytest.mark.parametrize("precision", LOW)
def test_float32_is_rounded_where_a_product_reads_it(precision: str) -> None:
    """What comes in as float32 gets a float32 gradient, through the same rounding."""
    with nnmpi.use_precision(precision):
        x, w = Tensor(X.astype(FLOAT32), requires_grad=True), Tensor(W.astype(FLOAT32), requires_grad=True)
        y = ops.linear(x, w)
        y.sum().backward()
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (LOW[precision], FLOAT32, FLOAT32)


def test_a_sum_of_many_is_not_lost() -> None:
    """300 ones in bfloat16 would stop at 256, and 70000 are beyond float16: sums are float32's."""
    with nnmpi.use_precision("bf16"):
        assert Tensor(np.ones(300, LOW["bf16"])).sum().item() == 300
    with nnmpi.use_precision("fp16"):
        assert Tensor(np.ones(70000, np.float16)).sum().item() == 70000
    assert Tensor(np.ones(300, np.float16)).mean().dtype == np.float16  # without a mode nothing changes its dtype


@pytest.mark.parametrize("precision", LOW)
def test_rows_picked_often_are_not_lost(precision: str) -> None:
    """The gradient of a table that is itself of half precision: 3000 uses of a row in a sum of 16 bits stop at 2048."""
    table = Tensor(np.ones((2, 3), LOW[precision]), requires_grad=True)
    with nnmpi.use_precision(precision):
        ops.embedding(table, np.zeros(3000, int)).backward(np.ones((3000, 3), LOW[precision]))
    assert table.grad is not None and table.grad.dtype == LOW[precision]
    np.testing.assert_allclose(np.asarray(table.grad, np.float64), [[3000] * 3, [0] * 3], rtol=4e-3)


@pytest.mark.parametrize("precision", LOW)
def test_scores_may_be_larger_than_their_dtype_holds(precision: str) -> None:
    """Products of queries and keys beyond float16, and powers of them, which show what bfloat16 rounds away."""
    generator = np.random.default_rng(0)
    packed = generator.standard_normal((1, 8, 3 * 64)) * 0.5
    packed[..., :128] += 33  # of |q| and |k|: the scores are 70,000 / 8
    packed = packed.astype(LOW[precision])
    found = []
    for mode, dtype in ((precision, LOW[precision]), ("float32", np.float64)):
        x = Tensor(packed.astype(dtype), requires_grad=True)
        with nnmpi.use_precision(mode):
            y = ops.attention(x, 1, causal=True)
            y.backward(np.ones(y.shape, y.dtype))
        found.append([np.asarray(each, np.float64) for each in (y.data, x.grad)])
    for ours, exact in zip(*found, strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, exact, rtol=0, atol=0.05 * np.abs(exact).max())


def test_gradients_of_several_uses_are_added_where_they_belong() -> None:
    """A weight used twice, and then in a second pass, is summed in float32, in its flat storage."""
    model = nnmpi.nn.Sequential(nnmpi.nn.Linear(5, 5, bias=False)).initialize(seed=1)
    weight = model.parameters()[0]
    with nnmpi.use_precision("bf16"):
        single = []
        for part in (X[:2], X[2:]):
            model.zero_grad()
            ops.linear(Tensor(part.astype(LOW["bf16"])), weight).sum().backward()
            single.append(np.array(weight.grad))
        model.zero_grad()
        for part in (X[:2], X[2:]):
            ops.linear(Tensor(part.astype(LOW["bf16"])), weight).sum().backward()
        assert weight.grad is weight.buffer
        np.testing.assert_allclose(weight.grad, single[0] + single[1], rtol=1e-6)
        model.zero_grad()
        y = ops.linear(Tensor(X[:2].astype(LOW["bf16"])), weight)
        ops.linear(y, weight).sum().backward()
        assert weight.grad is weight.buffer
        twice = np.array(weight.grad)
    w = np.array(weight.data, np.float64)
    exact = X[:2].T @ (np.ones((2, 5)) @ w.T) + (X[:2] @ w).T @ np.ones((2, 5))
    check_near(twice, exact, "bf16", "the gradient")


@pytest.mark.parametrize("precision", LOW)
def test_batch_norm_evaluates_in_the_dtype_of_its_input(precision: str) -> None:
    layer = BatchNorm(5).initialize(seed=0)
    with nnmpi.use_precision(precision):
        assert layer(Tensor(X.astype(LOW[precision]))).dtype == LOW[precision]
    assert layer.running_mean.data.dtype == FLOAT32


LOWS = Tensor(np.ones((2, 2), np.float16))
SINGLES = Tensor(np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    "call",
    [
        lambda: LOWS + SINGLES,
        lambda: ops.linear(LOWS, SINGLES),
        lambda: matmul(LOWS, SINGLES),
        lambda: ops.layer_norm(LOWS, SINGLES[0], SINGLES[0]),
        lambda: shape.concatenate([LOWS, SINGLES]),
        lambda: ops.mse(LOWS, SINGLES),
    ],
)
def test_without_a_mode_dtypes_do_not_mix(call: Callable[[], Tensor]) -> None:
    """Nor do float16 and bfloat16 in either's mode."""
    with pytest.raises(DtypeError, match="float16"):
        call()
    with nnmpi.use_precision("bf16"), pytest.raises(DtypeError, match="float16"):
        call()
    with nnmpi.use_precision("fp16"):
        assert is_floating(call().dtype)


@pytest.mark.host_only("NumPy has no tf32")
def test_tf32_needs_a_device() -> None:
    with nnmpi.use_precision("tf32"):
        for call in (lambda: ops.linear(SINGLES, SINGLES), lambda: SINGLES @ SINGLES, lambda: ops.attention(WIDE, 1)):
            with pytest.raises(UsageError, match="cannot be computed in tf32 by NumPy; use precision float32"):
                call()


WIDE = Tensor(np.ones((1, 2, 3), np.float32))


def test_modes_are_named() -> None:
    words = "precision 'half' is unknown; choose one of float32, tf32, bf16, fp16"
    with pytest.raises(UsageError, match=words), nnmpi.use_precision("half"):
        pass


def test_a_compiled_step_is_recorded_for_each_mode() -> None:
    """Its replay gives the bits of the step itself."""
    w = Tensor(W.astype(FLOAT32), requires_grad=True)

    def step(x: Tensor) -> Tensor:
        y = ops.linear_gelu(x, w)
        z: Tensor = (y * 2 + y).sum()
        return z

    compiled = nnmpi.compile(step)
    x = X.astype(FLOAT32)
    for precision in ("float32", "bf16", "fp16", "float32", "bf16"):
        with nnmpi.use_precision(precision):
            assert compiled(x).item() == step(Tensor(x)).item()
            assert compiled(2 * x).item() == step(Tensor(2 * x)).item()
    assert compiled.recordings == 3


def test_what_counts_as_half() -> None:
    assert not any(is_low(np.dtype(name)) for name in ("int16", "uint16", "float32", "float64"))
    assert is_low(np.dtype(np.float16))
    assert is_low(bfloat16()) and is_floating(bfloat16())
    assert not is_floating(np.dtype(np.int16))
    assert Tensor(np.ones(2, bfloat16()), requires_grad=True).astype("float32").dtype == np.float32
    assert Tensor([1.0]).astype("bfloat16").dtype == bfloat16()
