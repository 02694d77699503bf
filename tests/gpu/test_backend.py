"""What the backend can do besides arithmetic, on the device: copies by itself, times, memory, and its place."""

import numpy as np
import pytest

from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import bfloat16

ELEMENTS = 2**22


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", bfloat16(), "int64", "uint8"], ids=str)
def test_copies_there_and_back(device: Backend, dtype: object) -> None:
    """On a stream of their own, behind what fills the array, whatever the elements mean."""
    source, back = device.empty_pinned(ELEMENTS, dtype), device.empty_pinned(ELEMENTS, dtype)
    source[...] = (np.arange(ELEMENTS) % 101).astype(dtype)  # type: ignore[call-overload]
    back.fill(0)
    array = device.zeros(ELEMENTS, dtype)
    ready = device.new_event()
    ready.record()
    stream = device.new_stream()
    stream.wait(ready)
    device.from_host_async(source, array, stream)
    device.to_host_async(array, back, stream)
    stream.synchronize()
    np.testing.assert_array_equal(back, source)
    np.testing.assert_array_equal(device.to_host(array), source)


def test_a_stream_waits_for_an_event(device: Backend) -> None:
    """Of the current stream's work: without it the copy would find what was there before."""
    array = device.zeros(ELEMENTS, "float32")
    host = device.empty_pinned(ELEMENTS, "float32")
    stream, ready = device.new_stream(), device.new_event()
    for value in range(1, 6):
        for _ in range(20):
            array.fill(-1)
        array.fill(value)
        ready.record()
        stream.wait(ready)
        device.to_host_async(array, host, stream)
        stream.synchronize()
        assert (host == value).all()


def test_pinned_memory_is_known_to_the_driver(real_device: Backend) -> None:
    """It is of the host, and locked: only then copies run by themselves."""
    runtime = real_device.xp.cuda.runtime
    attributes = runtime.pointerGetAttributes(real_device.empty_pinned(1000, "float32").ctypes.data)
    assert attributes.type == runtime.memoryTypeHost


def test_events_measure_the_device(real_device: Backend) -> None:
    """A thousand passes over 64 MiB take some time, none of it negative, and twice as many take longer."""
    array = real_device.zeros(2**24, "float32")
    seconds = []
    for passes in (100, 1000):
        begin, end = real_device.new_event(), real_device.new_event()
        begin.record()
        for _ in range(passes):
            array.fill(1)
        end.record()
        seconds.append(real_device.elapsed_s(begin, end))
    assert 0 < seconds[0] < seconds[1]


def test_memory_is_counted(device: Backend) -> None:
    """What arrays use, what the pool keeps when they are gone, and what is given back."""
    device.reset_peak()
    before = device.memory()
    array = device.zeros(ELEMENTS, "float32")
    during = device.memory()
    assert during.used_bytes >= before.used_bytes + array.nbytes
    del array
    after = device.memory()
    assert after.used_bytes == before.used_bytes
    assert after.peak_bytes >= during.used_bytes
    device.release_memory()
    assert device.memory().pool_bytes < during.pool_bytes


def test_the_card_has_an_address(device: Backend) -> None:
    """By which ranks of a node find out that they share it."""
    assert device.card.count(":") == 2
    assert device.is_device
    device.use()
