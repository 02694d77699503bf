"""A recorded step gives, bit for bit, what the eager one gives."""

import numpy as np

import nnmpi
from nnmpi.backend.array import namespace
from nnmpi.comm.buffers import to_host
from tests.nn.tally import Tally


def check_replays(function, leaves, values, tolerance=0):
    """Record a function of leaves, forward and backward, and compare its replays with it, for each
    list of arrays.
    """

    recorded = Tally()  # what the step itself counts, a compiled step would record anew

    def step():
        y = function(*leaves)
        y.backward(np.linspace(1, 2, y.size, dtype=y.dtype).reshape(y.shape))
        return y

    def record():
        recorded()
        return step()

    def run(function):
        for leaf in leaves:
            leaf.grad = None  # not by the step: each replay finds what the recording found
        result = [function().data, *[leaf.grad for leaf in leaves]]
        return [None if item is None else np.array(to_host(item)) for item in result]

    compiled = nnmpi.compile(record)
    run(compiled)
    run(compiled)  # is compared; a device captures it
    for arrays in values:
        for leaf, array in zip(leaves, arrays, strict=True):
            leaf.data[...] = namespace(leaf.data).asarray(array)
        for replayed, eager in zip(run(compiled), run(step), strict=True):
            assert (replayed is None) == (eager is None)
            if eager is not None:
                np.testing.assert_allclose(replayed, eager, tolerance, tolerance)
    audits = [number for number in range(3, 3 + len(values)) if number & (number - 1) == 0]
    is_compared = type(leaves[0].data) is np.ndarray
    assert recorded.call_count == 2 + len(audits) * is_compared
    assert not compiled.refusal
