"""What the backend can do besides arithmetic, on the device: copies by itself, times, memory, and
its place.
"""

import math

import numpy as np
import pytest

from nnmpi.backend.precision import bfloat16
from nnmpi.comm.buffers import put, room_for, to_host
from nnmpi.memory.store import HOST, Store
from nnmpi.optim.clip import add_squares, global_norm
from tests.gpu.conftest import ON_A_CARD, is_stand_in

ELEMENTS = 2**22 if ON_A_CARD else 2**12


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", bfloat16(), "int64", "uint8"], ids=str
)
def test_copies_there_and_back(device, dtype):
    """Through page-locked memory, whatever the elements mean, and behind what was computed
    before.
    """
    source = room_for(device.xp, ELEMENTS, dtype)
    source[...] = (np.arange(ELEMENTS) % 101).astype(dtype)
    array = device.zeros(ELEMENTS, dtype)
    for _ in range(20):
        array.fill(1)
    expected = source.copy()
    put(source, array)
    source[...] = 0  # it is there already
    np.testing.assert_array_equal(to_host(array), expected)


def test_a_store_waits_for_what_computes_and_what_computes_for_it(device):
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


def test_pinned_memory_is_known_to_the_driver(real_device):
    """It is of the host, and locked: only then copies run by themselves."""
    runtime = real_device.xp.cuda.runtime
    attributes = runtime.pointerGetAttributes(room_for(real_device.xp, 1000, "float32").ctypes.data)
    assert attributes.type == runtime.memoryTypeHost


def test_memory_is_counted(device):
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


def test_the_card_has_an_address(device):
    """By which ranks of a node find out that they share it."""
    assert device.card.count(":") == 2
    assert device.is_device
    device.use()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [(), (0,), (1,), (3, 0, 5), (4096, 7), (2049, 70001)])
def test_a_gradients_norm(device, dtype, sizes):
    """In float64 on a device: large and small numbers neither overflow nor underflow there."""
    random = np.random.default_rng(0)
    grads = [random.standard_normal(size).astype(dtype) for size in sizes]
    expected = math.sqrt(math.fsum(float(x) ** 2 for grad in grads for x in grad))
    tolerance = 1e-7 if is_stand_in(device) else 1e-14
    for factor in (1.0, 2.0**70, 2.0**-70):
        there = [device.asarray(grad * grad.dtype.type(factor)) for grad in grads]
        assert global_norm(there) == pytest.approx(factor * expected, rel=tolerance, abs=0)
        if factor == 1 or not is_stand_in(device):  # which has no kernel, but a dot of float32
            total = device.zeros(1, "float64")
            add_squares(there, total)
            norm = math.sqrt(device.to_host(total)[0])
            assert norm == pytest.approx(factor * expected, rel=tolerance, abs=0)
    for wrong in (math.nan, math.inf):
        if any(sizes):
            there[-1][-1] = wrong
            assert not math.isfinite(global_norm(there))


def test_a_gradient_begins_anywhere(device):
    """The kernel reads 16 bytes at a time where it can."""
    flat = device.asarray(np.arange(1, 41, dtype="float32"))
    for first in range(5):
        assert global_norm([flat[first:]]) ** 2 == pytest.approx(
            sum(x * x for x in range(1 + first, 41)), rel=1e-14
        )
