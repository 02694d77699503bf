"""Long graphs and the memory of graphs: nothing recurses, and what is no longer needed is given
back at once.
"""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

from nnmpi.ops import linear
from nnmpi.tensor import Function, concatenate
from tests.tensor.graphs import chain, leaf


@pytest.fixture
def no_gc():
    """Leave all freeing to reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ---------------------------------------------------------------- long graphs


def test_a_long_graph_that_never_goes_backward_is_deleted(no_gc):
    """Freeing it walks no chain of references, which would overflow the stack."""
    y = chain(leaf(0.0), 100_000)
    first = weakref.ref(y.tape.nodes[0])
    del y
    assert first() is None


# ---------------------------------------------------------------- memory
ELEMENTS = 20_000
ARRAY_BYTES = 8 * ELEMENTS


@pytest.mark.host_only("tracemalloc, which counts the host's memory")
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


def test_nothing_needs_the_garbage_collector(no_gc):
    """There are no reference cycles: tensors, operations and arrays go with their last name,
    backward or not.
    """
    for backward in (False, True, True):
        gc.collect()  # what is compiled or imported at the first use leaves something behind
        x, w = leaf(np.ones((3, 3))), leaf(np.ones((3, 3)))
        h = linear(x, w).tanh()
        y = concatenate([h, h * 2.0]).sum()
        refs = [weakref.ref(thing) for thing in (x, w, h, y, h.data, *y.tape.nodes)]
        if backward:
            y.backward()
        del x, w, h, y
        assert [ref() for ref in refs] == [None] * len(refs)
    assert gc.collect() == 0
