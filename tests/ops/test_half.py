"""Operations in half precision: near float64, in the dtypes that are promised, and never by a
silent conversion.
"""

import operator

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, ops, tensor
from nnmpi.backend.precision import bfloat16, is_floating
from nnmpi.base.errors import DtypeError, UsageError
from nnmpi.ops.linear import linear_part

LOW = {"bf16": bfloat16(), "fp16": np.dtype(np.float16)}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
FLOAT32 = np.dtype(np.float32)
draw = np.random.default_rng(3)


def values(*sizes):
    """Return numbers between -2 and 2 that bfloat16 holds exactly, none near 0, where ReLU has its
    kink.
    """
    numbers = draw.integers(8, 64, sizes) / 32 * draw.choice([-1, 1], sizes)
    return numbers.astype(np.float64)


X, ROWS = values(6, 5), values(2, 3, 5)
W, B = values(5, 7), values(7)
S, T = values(5) ** 2, values(5)
LABELS = np.array([0, 3, 4, 1, 1, 2], np.uint8)
PLACES = np.array([[0, 5], [2, 2]], np.int32)
QKV, HEADS = values(2, 4, 12), values(2, 2, 4, 3)

# name: (function, inputs in half precision, parameters in float32, whether the result is of half
# precision)
CASES = {
    "linear": (ops.linear, [ROWS], [W, B], True),
    "linear of half precision alone": (ops.linear, [ROWS, W, B], [], True),
    "gelu": (ops.gelu, [X], [], True),
    "embedding": (lambda w: ops.embedding(w, PLACES), [], [X], True),
    "scaled attention": (
        ops.scaled_dot_product_attention,
        [HEADS, HEADS[::-1].copy(), HEADS * 0.5],
        [],
        True,
    ),
    "matmul with a parameter": (operator.matmul, [ROWS], [W], True),
    "layer_norm": (ops.layer_norm, [X], [S, T], True),
    "batch_norm": (lambda *a: ops.batch_norm(*a)[0], [X], [S, T], True),
    "cross_entropy": (lambda x: ops.cross_entropy(x, LABELS), [X], [], False),
    "mse": (lambda x: ops.mse(x, Tensor(np.zeros(x.shape, x.dtype))), [X], [], False),
    "sum": (lambda x: x.sum(axis=0), [X], [], False),
    "beside float32": (lambda a, b: a * b + b, [X], [S], False),
    "joined with float32": (lambda a, b: tensor.concatenate([a, b]), [X], [X[:2]], False),
}


def run(case, precision):
    """Return a case's result and its inputs after a backward pass; in float64 where no precision is
    given.
    """
    function, halves, parameters, _ = CASES[case]
    low, single = (np.dtype(np.float64),) * 2 if precision is None else (LOW[precision], FLOAT32)
    inputs = [Tensor(x.astype(low), requires_grad=True) for x in halves]
    inputs += [Tensor(x.astype(single), requires_grad=True) for x in parameters]
    with nnmpi.use_precision(precision or "float32"):
        y = function(*inputs)
        places = np.arange(y.size).reshape(y.shape)
        y.backward((-1.0) ** places * (places % 11 + 1) / 4)  # which half precision holds exactly
    return y, inputs


def check_near(found, wanted, precision, what):
    """Fail if an array is more than a few roundings of its largest value away."""
    error = np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    assert error <= 4 * ROUNDING[precision], (
        f"{what} is off by {error / ROUNDING[precision]:.2f} roundings"
    )


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_near_those_of_float64(case, precision):
    """And of the promised dtypes: results of half precision, an input's gradient as the input,
    losses float32.
    """
    y, inputs = run(case, precision)
    reference, exact = run(case, None)
    # on the host, bf16 rounds what products read: where parameters are float32, so is the result
    is_single = (
        precision == "bf16" and isinstance(y.data, np.ndarray) and inputs[-1].dtype == FLOAT32
    )
    rounds = case in ("linear", "embedding", "matmul with a parameter") and is_single
    assert y.dtype == (LOW[precision] if CASES[case][3] and not rounds else FLOAT32)
    check_near(y.data, reference.data, precision, "the result")
    for number, (x, expected) in enumerate(zip(inputs, exact, strict=True)):
        assert x.grad is not None and expected.grad is not None
        assert x.grad.dtype == x.dtype
        check_near(x.grad, expected.grad, precision, f"gradient {number}")


def test_a_sum_of_many_is_not_lost():
    """300 ones in bfloat16 would stop at 256, and 70000 are beyond float16: sums are float32's."""
    with nnmpi.use_precision("bf16"):
        assert Tensor(np.ones(300, LOW["bf16"])).sum().item() == 300
    with nnmpi.use_precision("fp16"):
        assert Tensor(np.ones(70000, np.float16)).sum().item() == 70000
    # without a mode nothing changes its dtype
    assert Tensor(np.ones(300, np.float16)).mean().dtype == np.float16


def test_rms_norm_of_squares_beyond_float16():
    layer = nnmpi.nn.RMSNorm(2).initialize()
    with nnmpi.use_precision("fp16"):
        y = layer(np.array([[300, -300]], np.float16))
    np.testing.assert_allclose(y.data, [[1, -1]])


def test_gradients_of_several_uses_are_added_where_they_belong():
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


LOWS = Tensor(np.ones((2, 2), np.float16))
SINGLES = Tensor(np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    "call",
    [
        lambda: LOWS + SINGLES,
        lambda: ops.linear(LOWS, SINGLES),
        lambda: operator.matmul(LOWS, SINGLES),
        lambda: ops.layer_norm(LOWS, SINGLES[0], SINGLES[0]),
        lambda: tensor.concatenate([LOWS, SINGLES]),
        lambda: ops.mse(LOWS, SINGLES),
    ],
)
def test_without_a_mode_dtypes_do_not_mix(call):
    """Nor do float16 and bfloat16 in either's mode."""
    with pytest.raises(DtypeError, match="float16"):
        call()
    with nnmpi.use_precision("bf16"), pytest.raises(DtypeError, match="float16"):
        call()
    with nnmpi.use_precision("fp16"):
        assert is_floating(call().dtype)


@pytest.mark.host_only("NumPy has no tf32")
def test_tf32_needs_a_device():
    with nnmpi.use_precision("tf32"):
        for call in (
            lambda: ops.linear(SINGLES, SINGLES),
            lambda: SINGLES @ SINGLES,
            lambda: ops.attention(WIDE, 1),
        ):
            with pytest.raises(
                UsageError, match="cannot be computed in tf32 by NumPy; use precision float32"
            ):
                call()


WIDE = Tensor(np.ones((1, 2, 3), np.float32))


def test_a_compiled_step_is_recorded_for_each_mode():
    """Its replay gives the bits of the step itself."""
    w = Tensor(W.astype(FLOAT32), requires_grad=True)

    def step(x):
        y = ops.gelu(ops.linear(x, w))
        return (y * 2 + y).sum()

    compiled = nnmpi.compile(step)
    x = X.astype(FLOAT32)
    for precision in ("float32", "bf16", "fp16", "float32", "bf16"):
        with nnmpi.use_precision(precision):
            assert compiled(x).item() == step(Tensor(x)).item()
            assert compiled(2 * x).item() == step(Tensor(2 * x)).item()
    assert compiled.recordings == 3


@pytest.mark.host_only("a device reads the weight in half precision, too")
def test_a_partial_sum_is_not_rounded():
    """Ranks add up such products, which half precision would round before."""
    x, w = Tensor(np.full((1, 3), 1.0009766, "float16")), Tensor(np.full((3, 2), 1.5, "float32"))
    with nnmpi.use_precision("fp16"):
        part, full = linear_part(x, w), ops.linear(x, w)
    assert part.dtype == "float32" and full.dtype == "float16"
    exact = x.numpy().astype("float32") @ w.numpy()
    np.testing.assert_array_equal(part.numpy(), exact)
    assert not np.array_equal(exact.astype("float16").astype("float32"), exact)
    np.testing.assert_array_equal(full.numpy(), exact.astype("float16"))
