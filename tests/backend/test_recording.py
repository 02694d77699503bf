"""Recorded calls: what is noted, what is a view, and memory that is used again."""

import gc
from functools import partial

import numpy as np
import pytest

from nnmpi.backend.recording import MemoryPool, Recorder, alias, record_call, refuse
from nnmpi.base.errors import UsageError


@pytest.fixture
def recorder():
    return Recorder()


def replayed(recorder):
    for call in recorder.calls:
        call()


def test_results_are_computed_again_in_place(recorder):
    xp, x = recorder.module(np), np.arange(6.0).reshape(2, 3)
    with recorder.running():
        total = xp.add.reduce(xp.exp(xp.multiply(x, 2)), axis=1)
        best = xp.take(x, xp.argmax(x, axis=1), mode="clip")
        low = xp.minimum(x, 1)
        stacked = xp.concatenate([x, x])
        chosen = xp.where(x > 2, x, 0)
    for factor in (1, -3):
        x *= factor
        replayed(recorder)
        np.testing.assert_array_equal(total, np.exp(x * 2).sum(axis=1))
        np.testing.assert_array_equal(best, x.take(x.argmax(axis=1)))
        np.testing.assert_array_equal(low, np.minimum(x, 1))
        np.testing.assert_array_equal(stacked, np.concatenate([x, x]))
    # the condition was computed on the side, once
    assert chosen.tolist() == [[0, 0, 0], [-9, -12, -15]]


def test_views_need_no_call_and_copies_do(recorder):
    xp, x = recorder.module(np), np.arange(6.0).reshape(2, 3)
    flat = xp.reshape(x, (6,))
    assert recorder.calls == []
    copied = xp.reshape(x.T, (6,))
    assert len(recorder.calls) == 1
    x += 1
    replayed(recorder)
    np.testing.assert_array_equal(flat, x.reshape(6))
    np.testing.assert_array_equal(copied, x.T.reshape(6))


def test_what_is_filled_is_filled_again(recorder):
    xp = recorder.module(np)
    zeros, full, ones = xp.zeros(3), xp.full(2, 7.0), xp.ones(4)
    zeros += 1
    full += 1
    replayed(recorder)
    assert zeros.tolist() == [0, 0, 0]
    assert full.tolist() == [7, 7]
    with pytest.raises(ValueError, match="read-only"):
        ones += 1


def test_several_results_are_refused(recorder):
    with pytest.raises(UsageError, match="several arrays"):
        recorder.module(np).split(np.arange(4.0) * 1, 2)
    with pytest.raises(UsageError, match="several arrays"):
        recorder.module(np).divmod(np.arange(4.0), 2)


def test_what_is_performed_is_noted_as_a_whole(recorder):
    seen, xp = [], recorder.module(np)

    def work(x):
        record_call(seen.append, x)
        refuse("nothing is recorded in here, so this")
        return len(seen)

    with recorder.running():
        assert record_call(work, 5) == 1
        with pytest.raises(UsageError, match="reading values"):
            refuse("reading values")
    assert len(recorder.calls) == 1
    replayed(recorder)
    assert seen == [5, 5]
    assert record_call(work, 6) == 3
    assert len(recorder.calls) == 1
    assert xp.__name__ == "numpy"


def test_memory_is_used_again(recorder):
    """A chain of results needs two places, not one for each."""
    xp, x = recorder.module(np), np.arange(1000.0)
    y = x
    for _ in range(10):
        y = xp.add(y, 1)
    assert recorder.pool.size_bytes == 2 * 8000
    x *= 2
    y[...] = 0
    replayed(recorder)
    np.testing.assert_array_equal(y, x + 10)


def test_a_view_keeps_the_memory(recorder):
    pool = MemoryPool()
    full = pool.allocate((4, 256), np.dtype("float64"))
    assert full.ctypes.data % 64 == 0
    part = full[1:, ::2].T
    del full
    gc.collect()
    assert not pool.returned
    noted = alias(part)
    np.testing.assert_array_equal(noted.shape, part.shape)
    assert noted.ctypes.data == part.ctypes.data
    assert noted.strides == part.strides
    del part
    assert len(pool.returned) == 1  # the alias does not hold it
    again = pool.allocate((1000,), np.dtype("float64"))
    assert not pool.returned
    assert pool.size_bytes == 8192
    again[...] = 3
    assert noted[0, 0] == 3


def test_windows_do_not_keep_the_memory():
    """Between them and their array NumPy has an object that is no array."""
    pool = MemoryPool()
    full = pool.allocate((256,), np.dtype("float64"))
    noted = alias(np.lib.stride_tricks.sliding_window_view(full, 3)[::2])
    full[...] = np.arange(256)
    del full
    assert len(pool.returned) == 1
    assert noted[1].tolist() == [2, 3, 4]


def test_short_results_lie_in_parts_of_what_long_ones_had():
    pool, kind = MemoryPool(), np.dtype("float64")
    long = [pool.allocate((n,), kind) for n in (1000, 800)]
    places = [item.ctypes.data for item in long]
    long.clear()
    short = [pool.allocate((n,), kind) for n in (300, 600, 400)]  # each where the least is left
    assert [item.ctypes.data for item in short] == [places[1], places[0], places[0] + 4800]
    assert pool.size_bytes == 8000 + 6400
    short.clear()
    again = [pool.allocate((n,), kind) for n in (1000, 800)]  # the parts are one again
    assert [item.ctypes.data for item in again] == places
    assert pool.size_bytes == 8000 + 6400


def test_aliases_of_calls():
    pool = MemoryPool()
    a, b = (pool.allocate((200,), np.dtype("float64")) for _ in range(2))
    a[...] = 1
    call = alias(partial(partial(np.add, a), 2, out=b))
    other = alias(a.fill)
    keep = a.ctypes.data, b.ctypes.data
    del a, b
    assert len(pool.returned) == 2
    assert call().ctypes.data == keep[1]
    assert call()[0] == 3
    other(5)
    assert call()[0] == 7
    assert alias(print) is print
    assert alias("x") == "x"


def test_short_results_have_memory_of_their_own():
    pool = MemoryPool()
    assert pool.allocate((3,), np.dtype("float32")).base is None
    assert pool.allocate((0, 5), np.dtype("float32")).shape == (0, 5)
    assert pool.size_bytes == 0
