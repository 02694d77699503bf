"""What the backend can do besides arithmetic, on the device: copies by itself, times, memory, and
its place.
"""

import numpy as np
import pytest

from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import bfloat16
from nnmpi.comm.buffers import put, room_for, to_host
from nnmpi.memory.store import HOST, Store
from tests.gpu.conftest import ON_A_CARD

ELEMENTS = 2**22 if ON_A_CARD else 2**12


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", bfloat16(), "int64", "uint8"], ids=str
)
def test_copies_there_and_back(device: Backend, dtype: object) -> None:
    """Through page-locked memory, whatever the elements mean, and behind what was computed
    before.
    """
    source = room_for(device.xp, ELEMENTS, dtype)  # type: ignore[arg-type]
    source[...] = (np.arange(ELEMENTS) % 101).astype(dtype)  # type: ignore[call-overload]
    array = device.zeros(ELEMENTS, dtype)
    for _ in range(20):
        array.fill(1)
    expected = source.copy()
    put(source, array)
    source[...] = 0  # it is there already
    np.testing.assert_array_equal(to_host(array), expected)


def test_a_store_waits_for_what_computes_and_what_computes_for_it(device: Backend) -> None:
    """They go on two streams, and one place is written to again and again."""
    store, memory = Store(HOST, device), device.zeros(ELEMENTS, "uint8")
    for number in range(1, 4):
        memory.fill(number)
        stored = store.send([memory])
        stored.wait()
        memory.fill(0)
        stored.fetch([memory])
        stored.wait()
        assert (to_host(memory) == number).all()


def test_pinned_memory_is_known_to_the_driver(real_device: Backend) -> None:
    """It is of the host, and locked: only then copies run by themselves."""
    runtime = real_device.xp.cuda.runtime
    attributes = runtime.pointerGetAttributes(room_for(real_device.xp, 1000, "float32").ctypes.data)
    assert attributes.type == runtime.memoryTypeHost


def test_memory_is_counted(device: Backend) -> None:
    """What arrays use, what the pool keeps when they are gone, and what is given back."""
    before = device.memory()
    array = device.zeros(2**22, "float32")
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
