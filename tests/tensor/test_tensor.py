"""The Tensor itself: what it is made of, its operators, and its words."""

import operator

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor
from nnmpi.backend.array import is_array
from nnmpi.base.errors import DtypeError, UsageError
from nnmpi.ops import max_pool3d
from nnmpi.tensor import concatenate, einsum
from tests.device.here import here
from tests.harness.refusals import refuses, usage_error


@pytest.mark.parametrize(
    "data, dtype",
    [
        (1.5, "float32"),
        ([1.0, 2.0], "float32"),
        ([[1, 2], [3, 4]], "int64"),
        (np.float64(1.5), "float64"),
        (np.ones(2), "float64"),
        (Tensor([1.0]), "float32"),
    ],
)
def test_made_of(data, dtype):
    """Python's floats become float32; what has a dtype keeps it. The values are an array in any
    case.
    """
    x = Tensor(data)
    assert x.dtype == dtype
    assert is_array(x.data) and not isinstance(x.data, np.generic)


def test_arrays_are_kept():
    """Not copied, unless a dtype is asked for that they have not."""
    array = Tensor(np.ones(2)).data
    assert Tensor(array).data is array
    assert Tensor(array, dtype="float64").data is array
    assert Tensor(array, dtype="float32").dtype == np.float32
    assert type(Tensor(np.ones(2).view(np.recarray)).data) is type(array)
    assert Tensor([1, 2], dtype="float64").dtype == np.float64
    assert Tensor([1, 2], dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.host_only("a device has no masked arrays")
def test_masked_arrays_are_refused():
    """Their values under the mask would count."""
    usage_error("gaps", lambda: Tensor(np.ma.ones(2)))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Tensor(["a"]), "<U1"),
        (lambda: Tensor([1j]), "complex128"),
        (lambda: Tensor([1, 2], requires_grad=True), "int64 can have no gradient"),
        (lambda: [setattr(x := Tensor([1]), "requires_grad", True), x * 2], "int64 can have no"),
        (lambda: Tensor(2**63, dtype="int64"), "not 9223372036854775808"),
        (lambda: Tensor([1.0]) + [1.0], "list cannot be combined with a tensor"),
        (lambda: Tensor([1.0]) - np.complex128(1j), "complex cannot be combined"),
        (lambda: Tensor([1.0]) + np.ones(1), "add of float32 and float64"),
        (lambda: Tensor([1.0]).astype("float33"), "'float33'"),
        (lambda: Tensor([1.0]).astype(None), "no dtype None"),
        (lambda: Tensor([1.0], dtype="float33"), "'float33'"),
        (lambda: Tensor([[1, 2], [3]]), r"in rows of one length, not \[\[1, 2\], \[3\]\]"),
        (lambda: Tensor([1]).pad([(1, 1)], 0.5), "pad of a int64 tensor and 0.5"),
        (lambda: Tensor([1.0]).pad([(1, 1)], "a"), "str cannot be combined"),
        (lambda: Tensor([1.0], requires_grad=True).astype("int32"), "cannot become int32"),
    ],
)
def test_refused_for_the_dtype(make, words):
    """The message names what was given."""
    refuses(DtypeError, words, make)


@pytest.mark.parametrize(
    "function",
    [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.matmul],
)
def test_operators(function):
    """Tensor with tensor, array and number, on both sides, are the array's."""
    a, b = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0], [7.0, 8.0]])
    pairs = [(Tensor(a), Tensor(b)), (Tensor(a), b), (a, Tensor(b))]
    numbers = [] if function is operator.matmul else [(Tensor(a), 2), (2.0, Tensor(b))]
    for left, right in pairs + numbers:
        result = function(left, right)
        assert type(result) is Tensor
        values = [x.data if isinstance(x, Tensor) else x for x in (left, right)]
        np.testing.assert_allclose(result.data, function(*values), rtol=1e-15)


@pytest.mark.parametrize("function", [operator.lt, operator.le, operator.gt, operator.ge])
def test_comparisons_give_plain_arrays(function):
    """They have no derivative."""
    a, b = here([1.0, 2.0, 3.0]), here([3.0, 2.0, 1.0])
    for left, right in (
        (Tensor(a), Tensor(b)),
        (Tensor(a), b),
        (a, Tensor(b)),
        (Tensor(a), 2.0),
        (2.0, Tensor(b)),
    ):
        values = [x.data if isinstance(x, Tensor) else x for x in (left, right)]
        result = function(left, right)
        assert type(result) is type(Tensor(a).data)
        np.testing.assert_array_equal(result, function(*values))


@pytest.mark.parametrize("other", [None, "a", np.ones(3)])
def test_what_does_not_compare(other):
    with pytest.raises(
        UsageError, match=r"a comparison of a tensor of shape \(2,\) needs a number"
    ):
        Tensor([1.0, 2.0]) < other  # noqa: B015
    usage_error("correction is 'a'", lambda: Tensor([1.0, 2.0]).var(correction="a"))


@pytest.mark.parametrize("other", [1, 2.0, np.ones(3), np.float32(1), Tensor([1.0, 1.0, 1.0])])
def test_equality_is_refused(other):
    """Identity would be False whatever the values are; as keys of sets and dictionaries tensors are
    themselves.
    """
    x = Tensor([1.0, 1.0, 1.0])
    for compare in (lambda: x == other, lambda: other == x, lambda: x != other):
        usage_error(r"compare x\.data", compare)
    assert len({x, Tensor([1.0]), x}) == 2


def test_methods_are_the_functions():
    """Every method gives what NumPy gives."""
    a = np.array([[1.0, 2.0, 4.0], [3.0, 0.5, 6.0]])
    x = Tensor(a)
    cases = [
        (x.sum(), a.sum()),
        (x.sum(0, keepdims=True), a.sum(0, keepdims=True)),
        (x.mean(axis=(0, 1)), a.mean()),
        (x.var(1, correction=1), a.var(1, ddof=1)),
        (x.max(-1), a.max(-1)),
        (x.min(0), a.min(0)),
        (x.exp(), np.exp(a)),
        (x.log(), np.log(a)),
        (x.sqrt(), np.sqrt(a)),
        (x.tanh(), np.tanh(a)),
        (x.clip(1, 3), a.clip(1, 3)),
        (x.astype("float32"), a.astype("float32")),
        (x.reshape(3, 2), a.reshape(3, 2)),
        (x.reshape((-1, 2)), a.reshape(3, 2)),
        (x[:0].reshape(0, -1), a[:0]),
        (x.transpose(0, 1), a.T),
        (x[None].transpose(-2, -1), a.T[None]),
        (x[None].permute(2, 0, 1), a.T[:, None]),
        (x.transpose(), a.T),
        (x[None].swapaxes(0, -1), a[None].swapaxes(0, -1)),
        (x.T, a.T),
        (x.flatten(0), a.reshape(-1)),
        (-x, -a),
        (abs(-x), a),
        (x[1, ::-1], a[1, ::-1]),
        (x[Tensor([1, 0])], a[[1, 0]]),
        (x[x > 2], a[a > 2]),
        (x[np.int64(1)], a[1]),
    ]
    for ours, expected in cases:
        np.testing.assert_allclose(ours.data, expected, rtol=1e-7, strict=True)
    assert x.argmax() == 5
    np.testing.assert_array_equal(x.argmax(1), [2, 2])


def test_iteration_ends():
    """Over rows, and unpacked; their gradients reach the whole."""
    x = Tensor(np.array([[1.0, 2.0], [3.0, 4.0]]), requires_grad=True)
    first, second = x
    (first * 2.0 + second * 3.0).sum().backward()
    np.testing.assert_array_equal(x.grad, [[2, 2], [3, 3]])
    assert len(list(x)) == 2
    with pytest.raises(TypeError, match="without axes"):  # as NumPy's, so that it reads lists
        list(Tensor(1.0))
    assert np.asarray([Tensor(1.0), Tensor(2.0)]).tolist() == [1.0, 2.0]


def test_an_array_on_the_left_computes_as_the_tensor_does():
    """A NumPy number does, too; each of the operators."""
    a, b = here([[3.0, 5.0]]), here([[1.0, 2.0]])
    x = Tensor(b, requires_grad=True)
    for name in ("add", "sub", "mul", "truediv", "pow"):
        compute = getattr(operator, name)
        result = compute(a, x)
        assert isinstance(result, Tensor) and result.requires_grad
        np.testing.assert_allclose(result.data, compute(a, b), rtol=1e-6)
        number = compute(np.float32(3.0), x)
        np.testing.assert_allclose(number.numpy(), compute(np.float32(3.0), Tensor(b).numpy()))
    np.testing.assert_array_equal((a @ x.T).data, a @ b.T)


@pytest.mark.parametrize(
    "call, words",
    [
        (np.exp, "write x.exp"),
        (lambda x: np.maximum(x, 0), r"write nnmpi.tensor.maximum\("),
        (lambda x: np.add(x, 1), r"write x \+ y"),
        (lambda x: np.add.reduce(x), r"numpy.add.reduce takes arrays"),
        (lambda x: operator.iadd(np.ones(2, np.float32), x), r"write x \+ y"),
        (lambda x: np.ones(2, np.float32) // x, "in nnmpi: there is none"),
        (np.mean, r"write x.mean\("),
    ],
)
def test_a_function_of_numpy_says_what_to_write(call, words):
    refuses((UsageError, TypeError), words, lambda: call(Tensor([1.0, 2.0], requires_grad=True)))


def test_operations_that_move_sort_and_name_axes_are_replayed():
    """Their order is that of each call's values, not of the recorded ones."""
    weight = Tensor(np.linspace(-1, 1, 12).reshape(3, 4), requires_grad=True)

    def step(x):
        weight.grad = None
        sums = einsum("ij,kj->ik", x, weight).cumsum(1)
        left, right = sums.sort(1, descending=True).split([1, 2], axis=1)
        y = concatenate([right.roll(1, 1), left.repeat(1, 2)], 1)
        (y * y).sum().backward()
        return y

    compiled = nnmpi.compile(step)
    for seed in range(6):
        x = Tensor(np.random.default_rng(seed).normal(size=(5, 4)))
        expected, grad = step(x).numpy().copy(), weight.grad.copy()
        np.testing.assert_array_equal(compiled(x).numpy(), expected)
        np.testing.assert_array_equal(weight.grad, grad)
    assert not compiled.refusal and compiled.recordings


@pytest.mark.parametrize(
    "call, right",
    [
        (lambda x: einsum("ij,jk", x), "name 2 tensors, but it got 1"),
        (lambda x: einsum("i", x), "do not fit a tensor of 2 axes"),
        (lambda x: einsum("ij,ij->ik", x, x), "has to name axes of the tensors"),
        (lambda x: einsum("i1", x), "are no letters"),
        (lambda x: einsum("ij,jk", x, x), "'j' is 3 and 2"),
        (lambda x: einsum(x, "ij"), "takes its subscripts first"),
        (lambda x: x.split([1, 3]), r"2 elements, into \[1, 3\] does not fit"),
        (lambda x: x.split(0), "at least 1"),
        (lambda x: x.roll((1, 2), 0), "2 shifts for 1 axes"),
        (lambda x: x.repeat(2), "a count of at least 0 for each axis"),
        (lambda x: x.sort(2), "does not fit an array of 2 dimensions"),
        (lambda x: x.sort(0, 1), "descending is True or False"),
        (lambda x: [*x.sort()], r"the positions are x\.argsort\(axis\)"),
        (lambda x: x.astype("int64").cumsum(0), "needs floating point"),
        (lambda x: x.clip(np.zeros(3, "f")), r"numbers; .* nnmpi\.tensor\.maximum\(x, low\)"),
        (lambda x: x.clip(0, x), "clip's bounds are numbers"),
        (lambda x: max_pool3d(x[None, ..., None, None], 2), r"width of volumes \(1, 2, 3, 1, 1\)"),
    ],
)
def test_what_they_refuse(call, right):
    refuses(nnmpi.NnmpiError, right, call, Tensor(np.ones((2, 3), np.float32)))


@pytest.mark.parametrize("subscripts", ["...,...->", "...i,...->i", "...i,...i->"])
def test_axes_in_front_that_are_summed_over_broadcast(subscripts):
    first, *others = subscripts.partition("->")[0].split(",")
    draw, shapes = np.random.default_rng(0), [(1, 4), (5, 1)]
    arrays = [
        draw.normal(size=(*shape, *(3,) * ("i" in term)))
        for term, shape in zip((first, *others), shapes, strict=True)
    ]
    x, y = (Tensor(array, requires_grad=True) for array in arrays)
    named = subscripts.replace("...", "ab", 1).replace("...", "cd", 1)  # of lengths 1 and 1
    expected = np.einsum(named, *arrays)
    result = einsum(subscripts, x, y)
    np.testing.assert_allclose(result.numpy(), expected)
    result.sum().backward()
    np.testing.assert_allclose((x.grad * x.data).sum(), expected.sum())


def test_sorting_puts_nan_last_and_keeps_the_order_of_equal_elements():
    x = Tensor(np.array([2.0, np.nan, 1.0, 2.0, 1.0]))
    assert x.argsort().tolist() == [2, 4, 0, 3, 1]
    assert x.argsort(descending=True).tolist() == [1, 0, 3, 2, 4]
    assert x.sort().numpy()[:4].tolist() == [1, 1, 2, 2]
    beside_infinity = Tensor(here(np.float32([np.nan, np.inf, np.nan, 1])))
    assert beside_infinity.argsort().tolist() == [3, 1, 0, 2]
    large = Tensor(here(2**60 + np.array([1, 0, 2])))  # alike in float64
    assert large.argsort().tolist() == [1, 0, 2]
    unsigned = Tensor(here(np.array([2**63 + 5, 2**63 + 4, 1], np.uint64)))  # beyond int64
    assert unsigned.argsort().tolist() == [2, 1, 0]
