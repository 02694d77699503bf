"""Functions written by users: what they may do, what they are told when they are wrong, and what
they cannot spoil.
"""

import threading

import numpy as np
import pytest

from nnmpi import Tensor, compile, no_grad
from nnmpi.base.errors import DtypeError, GraphError, ShapeError
from nnmpi.nn import Module, Parameter
from nnmpi.tensor import Function, enable_grad, grad_enabled
from tests.harness.refusals import refuses
from tests.tensor.graphs import leaf


class Square(Function):
    """The example at the head of function.py."""

    def forward(self, x):
        self.saved = (x,)
        return x * x

    def backward(self, grad):
        (x,) = self.saved
        return (2 * x * grad,)


class Passes(Function):
    """Any number of inputs, whose sum it is; backward returns what it is told to."""

    def __init__(self, backward):
        self.returned = backward

    def forward(self, *inputs):
        return sum(inputs[1:], inputs[0] * 1)

    def backward(self, grad):
        return self.returned(self, grad)


def test_a_function_enters_the_graph():
    """Among the engine's own operations, and twice."""
    x = leaf([1.0, -2.0])
    Square()(Square()(x * 3.0) + 1.0).sum().backward()
    np.testing.assert_allclose(x.grad, 2 * (9 * x.data**2 + 1) * 18 * x.data)


def test_inputs_may_be_tensors_arrays_and_values():
    """forward sees arrays and values, never tensors; only tensors that want one get a gradient."""
    seen = []

    class Scale(Function):
        def forward(self, x, factor, name, other):
            seen.extend((type(x), factor, name, type(other)))
            self.saved = (factor,)
            return x * factor

        def backward(self, grad):
            assert self.needs == (True, False, False, False)
            return grad * self.saved[0], None, None, None

    x = leaf([1.0, 2.0])
    Scale()(x, 3.0, "a name", Tensor(np.ones(2))).sum().backward()
    kind = type(x.data)
    assert seen == [kind, 3.0, "a name", kind]
    np.testing.assert_array_equal(x.grad, [3, 3])


def test_a_function_of_no_tensor_is_refused():
    """There is nothing to record, and no way to know the library."""
    refuses(GraphError, "at least one Tensor", lambda: Square()(np.ones(2)))


def test_a_function_object_is_one_application():
    """A second would overwrite what the first saved; without recording it may be used again."""
    square, x = Square(), leaf([1.0])
    square(x)
    refuses(GraphError, "this Square was applied before", square, x)
    again = Square()
    with no_grad():
        assert again(x).item() == again(x).item() == 1


@pytest.mark.parametrize(
    "backward, error, words",
    [
        (lambda grad: (grad[:1], None), ShapeError, r"a gradient of shape \(1,\) .* shape \(2,\)"),
        (
            lambda grad: (grad.astype("float64"), None),
            DtypeError,
            "a gradient of float64 .* float32",
        ),
        (lambda grad: (grad,), ShapeError, "1 gradients for 2 inputs"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(backward, error, words):
    """The Function and what differs are named, for leaves and for results alike."""
    for x in (leaf([1.0, 2.0], "float32"), leaf([1.0, 2.0], "float32") * 2.0):
        y = Passes(lambda self, grad: backward(grad))(x, Tensor([1.0, 1.0]))
        with pytest.raises(error, match=f"Passes.backward returned {words}"):
            y.sum().backward()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("make", [lambda x: 3.0, lambda x: [1.0], lambda x: "x", Tensor])
def test_what_is_no_array_is_refused(make, recorded):
    """From forward, in the place of a gradient, and in the place of all of them; when a step is
    recorded, too.
    """

    class Returns(Passes):
        def forward(self, x):
            return make(x)

    for of, words in (
        (
            lambda: Returns(None),
            "Returns.forward returned an instance of [a-zA-Z]+; return an array",
        ),
        (
            lambda: Passes(lambda self, grad: (make(grad),)),
            "Passes.backward returned an instance of [a-zA-Z]+ for an input",
        ),
        (
            lambda: Passes(lambda self, grad: make(grad)),
            "Passes.backward returned an instance of [a-zA-Z]+(; return a tu| for an)",
        ),
    ):
        x = leaf([1.0, 2.0])

        def step(of=of, x=x):
            of()(x).sum().backward()

        refuses((DtypeError, GraphError), words, lambda: (compile(step) if recorded else step)())


def test_none_is_no_gradient():
    """What is below gets none, and may be reached another way."""
    x = leaf([1.0, 2.0])
    h = x * 3.0
    (Passes(lambda self, grad: (None,))(h) + h).sum().backward()
    np.testing.assert_array_equal(x.grad, [3, 3])
    z = leaf([1.0])
    Passes(lambda self, grad: (None,))(z).backward()
    assert z.grad is None


# ---------------------------------------------------------------- arrays that are shared
def test_the_same_array_returned_twice():
    """Neither input's further uses write to the other's gradient."""
    a, b = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    h, k = a * 1.0, b * 1.0
    y = Passes(lambda self, grad: (grad, grad))(h, k)
    (y + h * 10.0 + k * 100.0 + h).sum().backward()
    np.testing.assert_array_equal(a.grad, [12, 12])
    np.testing.assert_array_equal(b.grad, [101, 101])


def test_the_seed_is_never_written_to():
    """Not by accumulation, and not by a leaf that takes it over."""
    seed = np.ones(2)
    seed.flags.writeable = False
    x = leaf([1.0, 2.0])
    h = x + 0.0
    y = h + h
    y.backward(seed, retain_graph=True)
    y.backward(seed)
    assert x.grad is not seed
    np.testing.assert_array_equal(x.grad, [4, 4])


# ---------------------------------------------------------------- gradients in place
class Weighted(Function):
    """x * w with w's gradient computed where it belongs, if there is such a place."""

    def forward(self, x, w):
        self.saved = (x, w)
        return x * w

    def backward(self, grad):
        x, w = self.saved
        place = self.into(1)
        return grad * w, grad * x if place is None else np.multiply(grad, x, out=place)


class Holder(Module):
    """One parameter of two elements, all ones."""

    def __init__(self):
        self.weight = Parameter((2,), lambda generator, shape: np.ones(shape))


@pytest.fixture
def weight():
    """Return a parameter in flat storage."""
    return Holder().initialize(dtype="float64").weight


def test_a_gradient_computed_in_place(weight):
    """The array that into() gave is the gradient, and lies in the flat storage."""
    x = leaf([2.0, 3.0])
    weight.buffer[...] = np.nan
    Weighted()(x, weight).sum().backward()
    assert weight.grad is weight.buffer
    np.testing.assert_array_equal(weight.grad, [2, 3])


def test_in_place_only_for_the_first_use(weight):
    """Further uses, and further passes, add to it; so do both where it stands at two inputs of one
    operation.
    """
    x = leaf([2.0, 3.0])
    for times in (1, 2):
        (Weighted()(x, weight) + Weighted()(x * 10.0, weight)).sum().backward()
        np.testing.assert_array_equal(weight.grad, times * 11 * x.data)
        assert weight.grad is weight.buffer
    Weighted()(weight, weight).backward(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(weight.grad, [46, 70])


# no_grad and enable_grad: blocks that nest, end, and belong to their thread.


def test_modes_nest():
    """Each ends where it ends, also by an exception."""
    x = leaf([1.0])
    assert grad_enabled()
    with no_grad():
        assert not (x * 2.0).requires_grad
        with enable_grad():
            assert (x * 2.0).requires_grad
            with pytest.raises(ZeroDivisionError), no_grad():
                raise ZeroDivisionError
            assert grad_enabled()
        assert not grad_enabled()
    assert (x * 2.0).requires_grad


def test_a_block_belongs_to_its_thread():
    """Another thread records while this one does not, and the other way round."""
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        seen.append(grad_enabled())
        with no_grad():
            inside.set()
            leave.wait(20)

    with no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(20)
    assert grad_enabled()
    leave.set()
    thread.join()
    assert seen == [True]
