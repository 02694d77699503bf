"""no_grad and enable_grad: blocks that nest, end, and belong to their thread."""

import threading

import numpy as np
import pytest

from nnmpi.tensor.function import enable_grad, no_grad, recording
from nnmpi.tensor.tensor import Tensor


def leaf(values, dtype="float64"):
    """Return a leaf that wants a gradient."""
    return Tensor(np.array(values, dtype), requires_grad=True)


def chain(x, length):
    """Return x + 1 + 1 ..., `length` operations long."""
    for _ in range(length):
        x = x + 1.0
    return x


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
