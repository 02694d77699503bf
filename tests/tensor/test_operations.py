"""One table of all differentiable operations: gradients, dtypes, and that no operation is missing
from it.
"""

import inspect
import operator
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import nnmpi.ops
import nnmpi.tensor
from nnmpi import NnmpiError, Tensor, tensor
from nnmpi.base.errors import DtypeError
from nnmpi.ops.conv.convolution import Conv2dFunction
from nnmpi.ops.conv.depthwise import Depthwise
from nnmpi.ops.conv.im2col import Im2col
from nnmpi.tensor import check_gradients
from nnmpi.tensor.function import kind_of
from nnmpi.tensor.traits import Channels
from tests.ops.rows import OPS
from tests.tensor.rows import TENSOR
from tests.tensor.samples import EACH, OPERATIONS, SAMPLES
from tests.tensor.samples import ROWS as SAMPLE_ROWS

ROOT = Path(__file__).parents[2]
TABLE = [*SAMPLE_ROWS, *TENSOR, *OPS]
NAMES = [row.name for row in TABLE]
IN_OPS = {row.public for row in TABLE if row.public.startswith("ops.")}
WITHOUT_DERIVATIVE = {
    "tensor.check_gradients",
    "tensor.enable_grad",
    "tensor.no_grad",
    "tensor.grad_enabled",
}
OF_TWO = {
    *(f"tensor.{name}-both" for name in ("add", "subtract", "multiply", "divide", "power")),
    *(f"tensor.{name}-{kind}" for name in ("maximum", "minimum") for kind in ("both", "number")),
    *("tensor.matmul-all", "tensor.concatenate-any", "tensor.stack-any"),
}
OF_RANKS = {
    "ops.all_reduce",
    "ops.all_gather",
    "ops.reduce_scatter",
    "ops.all_to_all",
}  # see tests/ops/test_collectives


def tensors(inputs, dtype="float64"):
    """Return leaves that want gradients."""
    return [Tensor(x.astype(dtype), requires_grad=True) for x in inputs]


EACH_ROW = pytest.mark.parametrize("row", TABLE, ids=NAMES)


@EACH_ROW
def test_gradients(row):
    """Backward agrees with central differences for any shape, stride and broadcast."""

    @settings(max_examples=20)
    @given(row.cases)
    def agree(case):
        check_gradients(case.function, case.inputs, step=1e-5, rtol=1e-6, atol=1e-8)

    agree()


@EACH_ROW
def test_strides_do_not_matter(row):
    """Awkward strides give the values and gradients of a plain array, and nothing is read from
    between elements.
    """

    @settings(max_examples=10)
    @given(row.cases)
    def same(case):
        results = []
        for inputs in (
            case.inputs,
            [np.ascontiguousarray(x).reshape(x.shape) for x in case.inputs],
        ):
            leaves = [Tensor(x, requires_grad=True) for x in inputs]
            y = case.function(*leaves)
            y.backward(np.linspace(1, 2, y.size).reshape(y.shape))
            results.append([y.data, *[leaf.grad for leaf in leaves]])
        for ours, plain in zip(*results, strict=True):
            assert (ours is None) == (plain is None)
            if ours is not None:
                np.testing.assert_allclose(ours, plain, rtol=1e-12, atol=1e-12)

    same()


NEAR = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-12}  # of the largest element


# Parameters of linear layers are never of half precision: see test_half.
CROSSED = [
    (row, dtype)
    for row in TABLE
    for dtype in NEAR
    if dtype != "float16" or "ops.linear" not in row.public
]


@pytest.mark.host_only("values are compared with those of float64 in NumPy")
@pytest.mark.parametrize(
    "row, dtype", CROSSED, ids=[f"{row.name}-{dtype}" for row, dtype in CROSSED]
)
def test_the_dtype_stays(row, dtype):
    """Forward and backward, with the values of float64; sums and losses of float16 may be
    float32.
    """

    @settings(max_examples=5)
    @given(row.cases)
    def stays(case):
        leaves, wide = tensors(case.inputs, dtype), tensors(x.astype(dtype) for x in case.inputs)
        y, exact = case.function(*leaves), case.function(*wide)
        assert y.dtype == dtype or (dtype, y.dtype) == ("float16", np.float32)
        assert type(y.data) is type(leaves[0].data)
        y.backward(np.ones(y.shape, y.dtype))
        exact.backward(np.ones(y.shape))
        assert all(leaf.grad.dtype == dtype for leaf in leaves)
        for ours, theirs in [(y.data, exact.data), *zip(grads(leaves), grads(wide), strict=True)]:
            bound = NEAR[dtype] * max(1, abs(theirs).max(initial=0))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound, strict=False)
            assert ours.shape == theirs.shape

    stays()


def grads(leaves):
    """Return the gradients of leaves."""
    return [leaf.grad for leaf in leaves]


# an operation of nnmpi.tensor gets inputs that its function has checked: see tests/tensor/rows.py
CHECKED = [row for row in TABLE if row.name.startswith("tensor.") or row.public in IN_OPS]


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row.name)
def test_dtypes_do_not_mix(row):
    """One input of another dtype than the rest is refused, whichever it is."""

    @settings(max_examples=5)
    @given(row.cases)
    def refused(case):
        for odd in range(len(case.inputs) if len(case.inputs) > 1 else 0):
            leaves = tensors(case.inputs)
            leaves[odd] = Tensor(case.inputs[odd].astype("float32"))
            with pytest.raises(DtypeError, match="float32"):
                case.function(*leaves)

    refused()


@pytest.mark.parametrize(
    "row",
    [row for row in TABLE if row.public.startswith("ops.") or row.name in OF_TWO],
    ids=lambda row: row.name,
)
@pytest.mark.parametrize("odd", [[1.0, 2.0], None, "text", np.ones], ids=kind_of)
def test_what_is_no_tensor_is_refused(row, odd):
    """Whichever input it is; some inputs may be missing (None) or a list."""

    @settings(max_examples=3)
    @given(row.cases)
    def refused(case):
        for i in range(len(case.inputs)):
            inputs: list = tensors(case.inputs)
            inputs[i] = odd
            optional = odd is None or isinstance(odd, list)
            with (suppress if optional else pytest.raises)(NnmpiError):
                case.function(*inputs)

    refused()


def test_every_public_function_is_in_the_table():
    """A new operation without a sample or a row fails here."""
    public = {
        f"{package.__name__.partition('.')[2]}.{name}"
        for package in (nnmpi.tensor, nnmpi.ops)
        for name in package.__all__
        if inspect.isfunction(getattr(package, name))
    }
    assert public - WITHOUT_DERIVATIVE - OF_RANKS <= {row.public for row in TABLE}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_states_its_traits(name):
    """In its own class, with a sample, or the place of its tests if it cannot be called alone."""
    kind = OPERATIONS[name]
    assert "traits" in vars(kind), f"{name} states no traits: see nnmpi.tensor.traits"
    traits = kind.traits
    assert bool(traits.samples) != bool(traits.tested_in), f"{name} has no sample, or says twice"
    assert not traits.tested_in or (ROOT / traits.tested_in).exists()


def nodes_of(case, dtype="float64"):
    """Return the operations of a case."""
    y = case.function(*tensors(case.inputs, dtype))
    return [] if y.tape is None else y.tape.find().nodes


@pytest.mark.parametrize(("kind", "sample"), **EACH)
def test_a_sample_calls_its_operation(kind, sample):
    """And names are unique, since tests are called so."""
    assert [other.name for _, other in SAMPLES].count(sample.name) == 1

    @settings(max_examples=1)
    @given(next(row.cases for row in SAMPLE_ROWS if row.name == f"sample.{sample.name}"))
    def calls(case):
        assert kind in map(type, nodes_of(case))

    calls()


def test_the_tables_convolutions_take_both_algorithms():
    """Of NumPy for any sizes: see test_winograd_numpy and test_compiled_3x3 for the others."""
    seen = set()

    def run(row):
        @settings(max_examples=5)
        @given(row.cases)
        def collect(case):
            nodes = nodes_of(case)
            seen.update(type(x.algorithm) for x in nodes if isinstance(x, Conv2dFunction))

        collect()

    for row in OPS:
        if row.public == "ops.conv2d":
            run(row)
    assert {Im2col, Depthwise} <= seen


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]
BINARY += [tensor.maximum, tensor.minimum, lambda a, b: tensor.where(np.array([True, False]), a, b)]
NUMBERS = [2, 2.5, True, np.float64(2.5), np.int64(2), np.bool_(True)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__}")
def test_numbers_are_weak(dtype, number):
    """A number of any kind takes the tensor's dtype, on either side."""
    for function in BINARY:
        for swapped in (False, True):
            x = Tensor(np.array([1.5, 0.5], dtype), requires_grad=True)
            y = function(number, x) if swapped else function(x, number)
            y.sum().backward()
            assert y.dtype == dtype
            assert x.grad.dtype == dtype


@pytest.mark.parametrize("number", [np.float64(0.25), np.float32(0.25), np.int64(1)])
def test_options_are_weak(number):
    """NumPy's numbers as options change no dtype either."""
    x, item = (
        Tensor(np.ones((2, 2), np.float32), requires_grad=True),
        Tensor(np.ones(2, np.float32)),
    )
    results = [
        x.clip(low=number),
        x.clip(high=number),
        nnmpi.ops.leaky_relu(x, number),
        nnmpi.ops.batch_norm(x, item, item, number)[0],
        nnmpi.ops.layer_norm(x, item, item, number),
        x.pad([(1, 1), (0, 0)], number),
    ]
    if number < 1:
        results.append(nnmpi.ops.cross_entropy(x, [0, 1], label_smoothing=number))
        results.append(nnmpi.ops.dropout(x, number, (0, 0)))
    for y in results:
        assert y.dtype == np.float32
        y.sum().backward()
    assert x.grad.dtype == np.float32


INTEGERS = [Tensor.exp, Tensor.log, Tensor.sqrt, Tensor.sin, Tensor.cos, Tensor.tanh]
INTEGERS += [
    Tensor.mean,
    Tensor.var,
    *(getattr(nnmpi.ops, name) for name in ("relu", "leaky_relu", "sigmoid")),
]
INTEGERS += [getattr(nnmpi.ops, name) for name in ("silu", "gelu", "softmax", "log_softmax")]
INTEGERS += [lambda x: x / 2, lambda x: x**2, lambda x: x + 0.5, lambda x: x.clip(0.5)]
INTEGERS += [
    lambda x: nnmpi.ops.cross_entropy(x, [0, 1]),
    lambda x: nnmpi.ops.dropout(x, 0.5, (0, 0)),
]
INTEGERS += [lambda x: nnmpi.ops.mse(x, x), lambda x: nnmpi.ops.binary_cross_entropy(x, x)]
INTEGERS += [lambda x: nnmpi.ops.max_pool2d(x.reshape(1, 2, 2, 1), 2)]


@pytest.mark.parametrize("function", INTEGERS)
def test_integers_become_no_floats(function):
    """Where an integer's result would be another dtype, it is refused, and the dtype named."""
    with warnings.catch_warnings(), pytest.raises(DtypeError, match="int64"):
        function(Tensor(np.ones((2, 2), np.int64)))


def test_integers_stay_integers():
    """Where they need not change, they do not."""
    x = Tensor(np.arange(4))
    for y in (
        x + 1,
        2 - x,
        x * x,
        -x,
        abs(x),
        x.sum(),
        x.max(),
        x.reshape(2, 2),
        x[1:],
        x.clip(1, 2),
    ):
        assert y.dtype == np.int64


def test_booleans_become_no_integers():
    """A mask plus a number is not a mask."""
    with pytest.raises(DtypeError, match="bool"):
        Tensor(np.ones(2, bool)) + 1


def test_what_has_a_number_of_each_channel_says_where_pytorch_has_them():
    """Else the weights of linear layers behind it came from PyTorch in another order."""
    silent = {
        kind.__name__
        for kind, sample in SAMPLES
        if kind.traits.channels is Channels.KEPT
        and any(shape == sample.shapes[0][-1:] != (1,) for shape in (sample.shapes or ())[1:])
    }
    assert silent == {"LayerNormFunction"}  # whose axes `models.torch_order` follows
