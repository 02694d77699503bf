"""Captured streams and graphs: the doubles of a device do and refuse what a card does and refuses.

That is CUDA's documentation's word, and CuPy's own doing: no card has run these tests yet.
"""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from nnmpi import Tensor, ops
from nnmpi.backend.gemm import gemm
from tests.gpu.conftest import DEVICE
from tests.harness.refusals import refuses

UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT = (
    900,
    901,
    904,
    905,
    906,
    907,
)
# Where launched work is done only when somebody waits for it, and what it has not written is NaN.
LATE = DEVICE in (None, "lazy")


class Play:
    """A stream that captures, with a pool for what a graph computes in.

    Args:
        device: the device.
    """

    def __init__(self, device):
        self.xp = device.xp
        self.cuda = cuda = device.xp.cuda
        self.stream, self.other = (cuda.Stream(non_blocking=True) for _ in range(2))
        self.pool = cuda.MemoryPool(device.xp.get_default_memory_pool().malloc)
        self.x = device.asarray(np.arange(6.0).reshape(2, 3))
        cuda.get_current_stream().synchronize()

    def capture(self, function):
        """Return the graph of a function's work, and its result."""
        with self.stream, self.cuda.using_allocator(self.pool.malloc):
            self.stream.begin_capture(self.cuda.runtime.streamCaptureModeRelaxed)
            try:
                result = function()
            finally:
                graph = self.stream.end_capture()
        return graph, result

    def launch(self, graph):
        """Launch a graph and wait for it."""
        graph.launch(self.stream)
        self.stream.synchronize()

    def forked(self, waits=True, joins=True):
        """Return 8 x, computed in two streams."""
        xp, stream, other = self.xp, self.stream, self.other
        doubled = self.x * 2
        other.wait_event(stream.record())
        doubled += self.x
        if waits:
            other.wait_event(stream.record())
        with other:
            more = doubled + self.x
        if joins:
            stream.wait_event(other.record())
        return xp.add(more, more)


@pytest.fixture
def play(device):
    """What the tests play with."""
    return Play(device)


def step(play):
    """Compute by functions, in place, in views, by a product, a sort and nnmpi's kernels."""
    xp, x = play.xp, play.x
    y = gemm(x, x.T)
    y += 1
    y[0, 1:] = xp.exp(y[1, 1:] * -0.125)
    back = xp.argsort(-x[1])
    y[1][1:] -= 0.5
    row = y.T.reshape(-1)[1:3]  # of a copy
    row[...] = x[0, :2]
    y.reshape(-1)[::2] *= row.sum()
    soft = ops.softmax(Tensor(x))
    halves = xp.split(xp.take(x, back, axis=1), 3, axis=1)
    wide = xp.ascontiguousarray(xp.broadcast_to(x[0, :1] + 1, (3,)))
    total = xp.empty(2)
    xp.add.reduce(y, axis=1, out=total)
    return y, wide, total, y.sum(axis=0), back, xp.concatenate(halves[::-1], axis=0), soft.data, x.T


def test_a_graph_computes_what_the_arrays_hold_when_it_is_launched(play):
    """As the same calls do without a capture; nothing is computed before."""
    graph, results = play.capture(partial(step, play))
    assert not play.stream.is_capturing()
    if LATE:
        assert np.isnan(results[0].get()).all() and np.isnan(results[1].get()).all()
    graph.upload(play.stream)
    for _ in range(3):
        play.x *= -1.5
        expected = [item.get() for item in step(play)]
        play.launch(graph)
        for result, item in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result.get(), item)


def test_launches_come_in_order(play):
    """Of one graph and of several, on the stream that captured them and on another."""
    xp, x = play.xp, play.x
    twice, _ = play.capture(lambda: xp.multiply(x, 2, out=x))
    more, _ = play.capture(lambda: xp.add(x, 1, out=x))
    start = x.get()
    with play.other:
        for graph in (twice, more, twice, more):
            graph.launch()
        result = x - 3
    play.other.synchronize()
    np.testing.assert_array_equal(result.get(), 4 * start)


def test_numbers_of_the_host_are_those_of_the_capture(play):
    """They are parameters of kernels: what changes between launches must be on the device."""
    rates = {"host": 2.0, "device": play.xp.full((), 2.0)}
    graph, (host, device) = play.capture(lambda: (play.x * rates["host"], play.x * rates["device"]))
    rates["host"] = 5.0
    rates["device"].fill(5.0)
    play.cuda.get_current_stream().synchronize()
    play.launch(graph)
    np.testing.assert_array_equal(host.get(), 2 * play.x.get())
    np.testing.assert_array_equal(device.get(), 5 * play.x.get())


def test_a_launch_is_waited_for(play):
    """By the host or by an event; who does not wait sees what was there before."""
    graph, y = play.capture(lambda: play.x + 1)
    graph.launch(play.stream)
    if LATE:
        assert np.isnan(y.get()).all()  # the default stream waits for no non-blocking one
    play.other.wait_event(play.stream.record())
    with play.other:
        z = y * 2
    play.other.synchronize()
    np.testing.assert_array_equal(z.get(), 2 * (play.x.get() + 1))


# ---------------------------------------------------------------- two streams


def test_a_stream_takes_part_by_an_event(play):
    """And is joined by another one."""
    graph, y = play.capture(play.forked)
    assert not play.other.is_capturing()
    play.launch(graph)
    np.testing.assert_array_equal(y.get(), 8 * play.x.get())


@pytest.mark.skipif(DEVICE != "race", reason="a card's streams may come in order by chance")
def test_a_wait_that_is_left_out_in_a_capture_shows(play):
    """Where the streams of a graph come as late as they may."""
    graph, y = play.capture(partial(play.forked, waits=False))
    play.launch(graph)
    assert not np.array_equal(y.get(), 8 * play.x.get())


def test_a_stream_that_is_not_joined(play):
    """There is no graph; both streams can be used again."""
    with pytest.raises(play.cuda.runtime.CUDARuntimeError) as caught:
        play.capture(partial(play.forked, joins=False))
    assert caught.value.status == UNJOINED
    test_a_stream_takes_part_by_an_event(play)


# ---------------------------------------------------------------- what is refused


def test_transfers_are_refused(play):
    """By CuPy itself, so that the capture goes on."""
    xp, x = play.xp, play.x

    def set_some():
        x[x > 1] = 0

    refused = {
        "D2H": [x.get, lambda: float(x[0, 0]), lambda: x[x > 1], lambda: xp.nonzero(x), set_some],
        "H2D": [lambda: xp.asarray([1.0]), lambda: x.set(np.ones((2, 3))), lambda: x[:, [0, 2]]],
    }
    if DEVICE is not None:
        refused["cuBLAS"] = [lambda: xp.matmul(x, x.T), lambda: xp.einsum("ij,ij->i", x, x)]

    def compute():
        for words, functions in refused.items():
            for function in functions:
                refuses((RuntimeError, NotImplementedError), words, function)
        assert play.stream.is_capturing()
        return x + xp.asarray(1.0)

    graph, y = play.capture(compute)
    play.launch(graph)
    np.testing.assert_array_equal(y.get(), x.get() + 1)


def waits(play):
    """Yield the errors of what cannot be in a graph, and what it is."""
    outside = play.cuda.get_current_stream().record()
    yield UNSUPPORTED, play.stream.synchronize
    yield ISOLATION, lambda: play.stream.wait_event(outside)
    yield CAPTURED_EVENT, lambda: play.stream.record().synchronize()


def test_waits_spoil_a_capture(play):
    """Each is refused, and then there is no graph."""
    error = play.cuda.runtime.CUDARuntimeError
    for status, function in waits(play):
        seen = []

        def compute(function=function, seen=seen):
            with pytest.raises(error) as caught:
                function()
            seen.append(caught.value.status)
            refuses(RuntimeError, "invalidated", play.stream.is_capturing)

        with pytest.raises(error) as caught:
            play.capture(compute)
        assert [*seen, caught.value.status] == [status, INVALIDATED]
    graph, y = play.capture(lambda: play.x * 2)
    play.launch(graph)
    np.testing.assert_array_equal(y.get(), 2 * play.x.get())


def test_the_default_stream_and_captures(play):
    """It captures nothing, is used beside a capture, and waits for no blocking stream that does."""
    default, error = play.cuda.Stream.null, play.cuda.runtime.CUDARuntimeError
    refuses(RuntimeError, "default", default.begin_capture)

    def beside():
        with default:
            return play.x + 1

    _, y = play.capture(beside)
    default.synchronize()
    np.testing.assert_array_equal(y.get(), play.x.get() + 1)
    play.stream = play.cuda.Stream()
    seen = []

    def wait():
        with pytest.raises(error) as caught:
            default.synchronize()
        seen.append(caught.value.status)

    with pytest.raises(error) as caught:
        play.capture(wait)
    assert [*seen, caught.value.status] == [IMPLICIT, INVALIDATED]


# ---------------------------------------------------------------- memory


def test_memory_is_used_again_inside_a_capture(play):
    """A long chain takes the memory of a few arrays, and computes right."""

    def chain():
        y = play.x
        for _ in range(20):
            y = y + 1
        return y

    graph, y = play.capture(chain)
    assert play.pool.total_bytes() <= 4 * 512
    play.launch(graph)
    np.testing.assert_array_equal(y.get(), play.x.get() + 20)


def test_memory_that_is_given_anew_is_not_written_before_its_turn(play):
    """A launch has still to read what a capture has freed."""
    first, given = play.capture(lambda: play.x * 7)
    play.launch(first)
    held = [given]
    del given

    def compute():
        y = held.pop() - 1
        return play.xp.empty(y.shape), y

    second, (_, y) = play.capture(compute)
    play.launch(second)
    np.testing.assert_array_equal(y.get(), 7 * play.x.get() - 1)


def test_graphs_share_a_pool(play):
    """The second computes in the memory that the first one has freed, and leaves what is kept."""
    first, kept = play.capture(lambda: play.x * 2)
    total = play.pool.total_bytes()
    second, other = play.capture(lambda: play.x * 3 + 1)
    assert play.pool.total_bytes() <= total + 2 * 512
    total = play.pool.total_bytes()
    del other
    third, other = play.capture(lambda: play.x * 5 - 1)
    assert play.pool.total_bytes() == total
    for graph in (first, third, second, third):
        play.launch(graph)
    np.testing.assert_array_equal(kept.get(), 2 * play.x.get())
    np.testing.assert_array_equal(other.get(), 5 * play.x.get() - 1)


# In a process of its own: after such an error a device cannot be used any more.
GIVEN_BACK = """
from nnmpi.backend.device import select
from tests.device.library import device_backend
from tests.gpu.test_capture import DEVICE, Play
play = Play(device_backend() if DEVICE is None else select("cupy"))
graph, y = play.capture(lambda: play.x + 1)
play.launch(graph)
del y
play.launch(graph)
play.pool.free_all_blocks()
play.xp.get_default_memory_pool().free_all_blocks()
print("launched")
play.launch(graph)
"""


@pytest.mark.skipif(DEVICE == "card", reason="a card may not notice")
def test_memory_that_is_given_back():
    """A graph keeps no memory: the doubles stop it where the memory may be somebody else's."""
    ending = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True)
    assert ending.stdout == "launched\n", ending.stderr
    assert "cudaErrorIllegalAddress" in ending.stderr
