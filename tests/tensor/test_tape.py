"""The tape: long graphs, graphs that meet, graphs used up, and memory that is given back at once."""

import gc
import threading
import tracemalloc
import weakref

import numpy as np
import pytest

from nnmpi.errors import GraphError, ShapeError
from nnmpi.ops.linear import linear
from nnmpi.tensor.elementwise import Tanh
from nnmpi.tensor.function import Function, enable_grad, no_grad, recording
from nnmpi.tensor.shape import concatenate
from nnmpi.tensor.tape import Tape, join
from nnmpi.tensor.tensor import Tensor


def leaf(values, dtype="float64"):
    """Return a leaf that wants a gradient."""
    return Tensor(np.array(values, dtype), requires_grad=True)


def chain(x, length):
    """Return x + 1 + 1 ..., `length` operations long."""
    for _ in range(length):
        x = x + 1.0
    return x


@pytest.fixture
def no_gc():
    """Leave all freeing to reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ---------------------------------------------------------------- long graphs
def test_a_chain_of_a_million_operations(no_gc):
    """Nothing recurses: forward, backward, and the graph's end."""
    x = leaf(2.0)
    y = x
    for _ in range(1_000_000):
        y = -y
    first = weakref.ref(y.tape.nodes[0])
    y.backward()
    assert (y.item(), x.grad) == (2, 1)
    assert first() is None


def test_a_long_graph_that_never_goes_backward_is_deleted(no_gc):
    """Freeing it walks no chain of references, which would overflow the stack."""
    y = chain(leaf(0.0), 200_000)
    first = weakref.ref(y.tape.nodes[0])
    del y
    assert first() is None


def test_a_long_graph_is_deleted_when_only_its_tape_goes_first(no_gc):
    """The order in which the last tensor lets go of tape and operation does not matter."""
    y = chain(leaf(0.0), 200_000)
    first = weakref.ref(y.tape.nodes[0])
    y.tape = None
    del y
    assert first() is None


def test_a_chain_of_a_hundred_thousand_sums(no_gc):
    """The same with an operation of two operands, which saves something."""
    x = leaf(0.0)
    y = chain(x, 100_000)
    y.backward()
    assert (y.item(), x.grad) == (100_000, 1)


def test_a_wide_graph_of_many_graphs(no_gc):
    """As many tapes, joined one after another, in either order of the operands."""
    leaves = [leaf(float(i)) for i in range(20_000)]
    left, right = leaf(0.0), leaf(0.0)
    for x in leaves:
        left, right = left + x * 2.0, x * 3.0 + right
    y = left + right
    y.backward()
    assert {float(x.grad) for x in leaves} == {5.0}


def test_pairwise_sums_join_tapes_in_a_tree():
    """Joined tapes find their end however deep the joins are."""
    layer = leaves = [leaf(float(i)) * 1.0 for i in range(2**12)]
    while len(layer) > 1:
        layer = [a + b for a, b in zip(layer[::2], layer[1::2], strict=True)]
    assert leaves[0].tape.find() is layer[0].tape.find()
    layer[0].backward()
    assert layer[0].item() == sum(range(2**12))


def test_joining_copies_each_operation_a_few_times_only():
    """The shorter tape goes to the longer one: the work of n joins is n log n."""
    tape = Tape()
    tape.nodes = [None] * 1000
    nodes = tape.nodes
    for _ in range(10):
        small = Tape()
        small.nodes = [None]
        assert join(small, tape) is tape
        assert small.find() is tape
        assert small.nodes == []
    assert tape.nodes is nodes
    assert len(nodes) == 1010


# ---------------------------------------------------------------- shapes of graphs
def test_a_diamond():
    """Two ways from x to y: the gradients add up."""
    x = leaf([2.0, 3.0])
    a = x * x
    y = (a * 3.0 + a.exp()).sum()
    y.backward()
    np.testing.assert_allclose(x.grad, (3 + np.exp(x.data**2)) * 2 * x.data)


def test_a_tensor_used_many_times():
    """A thousand uses, directly and further on."""
    x = leaf([1.0, -1.0])
    h = x * 2.0
    y = Tensor(np.zeros(2))
    for _ in range(1000):
        y = y + h + x
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [3000, 3000])


def test_a_deep_diamond_is_walked_once():
    """A graph with 2 ** 200 paths takes 200 steps, since each operation goes backward once."""
    x = leaf(1.0)
    y = x
    for _ in range(200):
        y = y + y
    y.backward()
    assert x.grad == 2.0**200


def test_graphs_that_meet():
    """Two graphs grown apart, used together, and each used again after they met."""
    x, z = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    a, b = (x * 2.0) * x, z * 3.0
    c = a * b
    d = a + c + b
    d.sum().backward()
    np.testing.assert_allclose(x.grad, 4 * x.data * (1 + 3 * z.data))
    np.testing.assert_allclose(z.grad, 3 * (2 * x.data**2 + 1))


def test_a_part_of_a_graph():
    """Backward from the middle reaches what is below it and leaves the rest as it was."""
    x = leaf([1.0, 2.0])
    a = x * x
    b = a * 5.0
    other = x * 7.0
    a.sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data)
    other.sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data + 7)
    with pytest.raises(GraphError, match="used up by an earlier backward pass"):
        b.sum().backward()


def test_backward_of_a_leaf():
    """A leaf's own gradient is what it is given, added up."""
    x, seed = leaf([1.0, 2.0]), np.array([3.0, 4.0])
    x.backward(seed)
    x.backward(seed)
    np.testing.assert_array_equal(x.grad, [6, 8])
    np.testing.assert_array_equal(seed, [3, 4])


def test_inputs_that_need_no_gradient_get_none():
    """Neither plain tensors nor arrays nor numbers."""
    x, plain = leaf([1.0, 2.0]), Tensor(np.array([5.0, 6.0]))
    ((x * plain + np.array([1.0, 1.0])) * 2.0).sum().backward()
    np.testing.assert_array_equal(x.grad, [10, 12])
    assert plain.grad is None


# ---------------------------------------------------------------- once, or more than once
def test_a_second_backward_is_refused():
    """What the graph saved is gone."""
    x = leaf([1.0, 2.0])
    y = (x * x).sum()
    y.backward()
    with pytest.raises(GraphError, match="retain_graph=True"):
        y.backward()
    np.testing.assert_array_equal(x.grad, [2, 4])


def test_retain_graph_lets_backward_run_twice():
    """Gradients double; a third pass that does not retain ends it."""
    x = leaf([1.0, 2.0])
    h = x * x
    y = (h * h + h).sum()
    y.backward(retain_graph=True)
    once = x.grad.copy()
    y.backward(retain_graph=True)
    np.testing.assert_array_equal(x.grad, 2 * once)
    y.backward()
    np.testing.assert_array_equal(x.grad, 3 * once)
    with pytest.raises(GraphError):
        y.backward()


def test_two_losses_on_one_trunk():
    """With the trunk retained both reach it; without, the second is refused instead of losing its gradient."""
    x = leaf([1.0, 2.0])
    h = x * 3.0
    one, two = h.sum(), (h * h).sum()
    one.backward(retain_graph=True)
    two.backward()
    np.testing.assert_array_equal(x.grad, 3 + 18 * x.data)

    h = x * 3.0
    one, two = h.sum(), (h * h).sum()
    one.backward()
    with pytest.raises(GraphError, match="used up"):
        two.backward()


def test_operations_on_a_used_up_tensor_are_refused_in_backward():
    """A graph built on a tensor whose own graph is gone has no way down."""
    x = leaf([1.0, 2.0])
    h = x * 3.0
    h.sum().backward()
    with pytest.raises(GraphError, match="compute the loss again"):
        (h * 2.0).sum().backward()


def test_an_exception_in_backward_leaves_no_gradients_behind():
    """The next pass over what is left starts clean."""

    class Fails(Function):
        def forward(self, x):
            return x * 1.0

        def backward(self, grad):
            raise ArithmeticError("on purpose")

    x = leaf([1.0, 2.0])
    a = x * 2.0
    b = Fails()(a)
    c = (a + b).sum()
    with pytest.raises(ArithmeticError):
        c.backward()
    x.grad = None
    a.sum().backward()
    np.testing.assert_array_equal(x.grad, [2, 2])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Tensor([1.0]).backward(), GraphError, "depends on nothing that needs a gradient"),
        (lambda: leaf([1.0, 2.0]).backward(), ShapeError, r"shape \(2,\) needs grad"),
        (lambda: leaf([1.0, 2.0]).backward(np.ones(3)), ShapeError, r"\(2,\) got a gradient of shape \(3,\)"),
        (lambda: leaf(1.0).detach().backward(), GraphError, "detached"),
    ],
)
def test_backward_that_makes_no_sense(make, error, words):
    """Each says what is missing."""
    with pytest.raises(error, match=words):
        make()


def test_backward_of_one_element_needs_no_seed():
    """Whatever axes it has; a seed may be a tensor or a list, and becomes the tensor's dtype."""
    for shape in ((), (1,), (1, 1)):
        x = leaf(np.full(shape, 2.0), "float32")
        (x * x).backward()
        assert x.grad == 4
    x = leaf([1.0, 2.0], "float32")
    (x * 2.0).backward([1, 2])
    (x * 2.0).backward(Tensor([1.0, 2.0]))
    np.testing.assert_array_equal(x.grad, [4, 8])
    assert x.grad.dtype == np.float32


# ---------------------------------------------------------------- memory
ELEMENTS = 20_000
ARRAY_BYTES = 8 * ELEMENTS


@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.parametrize("saves", [True, False])
def test_backward_needs_no_more_memory_the_longer_the_chain(length, saves):
    """Beside what forward saved, a pass holds the gradient that comes and the one that goes."""
    x = leaf(np.zeros(ELEMENTS))
    y = x
    tracemalloc.start()
    for _ in range(length):
        y = y.tanh() if saves else -y
    before, _ = tracemalloc.get_traced_memory()
    assert before > (length if saves else 1) * ARRAY_BYTES
    tracemalloc.reset_peak()
    y.backward(np.ones(ELEMENTS))
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < 5.5 * ARRAY_BYTES
    assert after < 4 * ARRAY_BYTES  # the result, the leaf's gradient, and little else


def test_saved_arrays_are_freed_while_backward_runs(no_gc):
    """When the first operation goes backward, what the later ones saved is gone already."""
    seen = []

    class Probe(Function):
        def forward(self, x):
            return x * 1.0

        def backward(self, grad):
            seen.append(sum(saved() is not None for saved in alive))
            return (grad,)

    h = Probe()(leaf(np.zeros(10)))
    alive = []
    for _ in range(20):
        h = h.tanh()
        alive.append(weakref.ref(h.data))
    h.sum().backward()
    del h
    assert seen == [1]  # the last one's values, which `h` still names
    assert all(saved() is None for saved in alive)


def test_gradients_of_operations_are_freed(no_gc):
    """No operation keeps the gradient that went through it, retained or not."""
    for retain in (False, True):
        x = leaf(np.zeros(10))
        y = (x.tanh() + x.exp()).sum()
        nodes = list(y.tape.nodes)
        y.backward(retain_graph=retain)
        assert [node.grad for node in nodes] == [None] * 4
        assert all((node.saved == ()) != retain for node in nodes if isinstance(node, Tanh))


def test_nothing_needs_the_garbage_collector(no_gc):
    """There are no reference cycles: tensors, operations and arrays go with their last name, backward or not."""
    for backward in (False, True):
        x, w = leaf(np.ones((3, 3))), leaf(np.ones((3, 3)))
        h = linear(x, w).tanh()
        y = concatenate([h, h * 2.0]).sum()
        refs = [weakref.ref(thing) for thing in (x, w, h, y, h.data, *y.tape.nodes)]
        if backward:
            y.backward()
        del x, w, h, y
        assert [ref() for ref in refs] == [None] * len(refs)
    assert gc.collect() == 0


def test_results_that_need_no_gradient_hold_nothing(no_gc):
    """Neither under no_grad nor on plain tensors: an input dies before the result."""
    with no_grad():
        x = leaf(np.ones(3))
        y = x.tanh().exp()
    data = weakref.ref(x.data)
    del x
    assert data() is None
    assert (y.requires_grad, y.node, y.tape) == (False, None, None)
    plain = Tensor(np.ones(3)).tanh()
    assert plain.node is None


# ---------------------------------------------------------------- modes
def test_modes_nest():
    """Each ends where it ends, also by an exception."""
    x = leaf([1.0])
    assert recording()
    with no_grad():
        assert not (x * 2.0).requires_grad
        with enable_grad():
            assert (x * 2.0).requires_grad
            with pytest.raises(ZeroDivisionError), no_grad():
                raise ZeroDivisionError
            assert recording()
        assert not recording()
    assert (x * 2.0).requires_grad


def test_no_grad_decorates_a_function():
    """Each call is a block of its own."""

    @no_grad()
    def evaluate():
        return recording()

    assert (evaluate(), evaluate(), recording()) == (False, False, True)


def test_a_block_belongs_to_its_thread():
    """Another thread records while this one does not, and the other way round."""
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        seen.append(recording())
        with no_grad():
            inside.set()
            leave.wait(20)

    with no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(20)
    assert recording()
    leave.set()
    thread.join()
    assert seen == [True]


def test_threads_grow_graphs_of_their_own():
    """Graphs of several threads, on leaves of their own, do not meet."""
    results = {}

    def work(number):
        x = leaf([float(number)])
        y = chain(x, 200) * x
        y.backward()
        results[number] = float(x.grad[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: 2.0 * number + 200 for number in range(8)}


def test_a_detached_tensor_ends_the_graph():
    """It shares the values; what comes after does not reach back."""
    x = leaf([2.0, 3.0])
    h = x * x
    cut = h.detach()
    assert cut.data is h.data
    (cut * x).sum().backward()
    np.testing.assert_array_equal(x.grad, h.data)
