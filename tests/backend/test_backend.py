"""What a backend can do besides arithmetic: copies on streams, times, memory and its limit; on host
and device.
"""

import threading

import numpy as np
import pytest

from nnmpi import nn, optim
from nnmpi.backend.array import LINE_BYTES, empty, zeros
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.memory import host_memory
from tests.device.library import device_backend, load

pytestmark = pytest.mark.host_only("it asks for the host's backend and the device's by itself")

MIB = 2**20


@pytest.fixture
def pool(monkeypatch):
    """The double's memory pool, as nobody has used it."""
    pool = load().get_default_memory_pool()
    pool.free_all_blocks()
    monkeypatch.setattr(pool, "_limit", 0)
    return pool


@pytest.mark.host_only("the host's own backend")
def test_the_hosts_memory():
    """That of the process: it grows with what is used, and its peak stays."""
    backend = numpy_backend()
    assert (backend.is_device, backend.card, backend.reason) == (False, "", "")
    before = backend.memory()
    array = np.ones(256 * MIB, np.uint8)
    during = backend.memory()
    del array
    after = backend.memory()
    # meanwhile other tests' memory may be given back
    assert during.used_bytes >= before.used_bytes + 150 * MIB
    # the system counts them at different moments
    assert after.peak_bytes >= during.used_bytes - 4 * MIB
    assert (after.limit_bytes, after.pool_bytes) == (None, 0)
    backend.release_memory()
    backend.divide_memory(4)
    backend.use()
    assert backend.explain(MemoryError()) is None


def test_the_devices_memory(pool):
    """Of the pool: what is used, what it keeps, and the most it had, which giving back does not
    change.
    """
    backend = device_backend()
    before = backend.memory()
    array = backend.zeros(64 * MIB, np.uint8)
    during = backend.memory()
    assert during.used_bytes == before.used_bytes + 64 * MIB
    del array
    saved = backend.memory()
    assert (saved.used_bytes, saved.pool_bytes) == (before.used_bytes, during.pool_bytes)
    backend.release_memory()
    after = backend.memory()
    assert after.pool_bytes == after.used_bytes
    assert after.peak_bytes == during.peak_bytes >= during.used_bytes
    assert after.limit_bytes is None
    assert "no limit (none was set)" in str(after)


def test_a_peak_between_two_looks(pool):
    """Nobody looked while it was there; the pool has kept it."""
    backend = device_backend()
    backend.zeros(32 * MIB, np.uint8)
    assert backend.memory().peak_bytes >= 32 * MIB


def test_ranks_that_share_a_device(pool):
    """Each gets the same part of what is free, but for a tenth; said in words."""
    backend = device_backend()
    free, total = load().cuda.runtime.memGetInfo()
    backend.divide_memory(1)
    assert backend.memory().limit_bytes is None
    backend.divide_memory(4)
    use = backend.memory()
    assert use.limit_bytes == int(0.9 * (free + use.pool_bytes) / 4)
    assert "limit 3.6" in str(use) and "(90% of the " in str(use)
    assert "shared by 4 ranks on the device; CUPY_GPU_MEMORY_LIMIT sets another limit" in use.note
    with pytest.raises(MemoryError) as caught:
        backend.zeros(total // 4, np.uint8)
    explained = backend.explain(caught.value)
    assert "Fake device, device 0 has no room for 4 GiB more" in str(explained)
    assert "of its limit of 3.6 GiB (90% of" in str(explained)


def test_a_limit_of_the_users(pool):
    """CUPY_GPU_MEMORY_LIMIT stands, however many ranks share the device."""
    pool.set_limit(size=100 * MIB)
    backend = device_backend()
    backend.divide_memory(4)
    use = backend.memory()
    assert use.limit_bytes == 100 * MIB
    assert use.note == "CUPY_GPU_MEMORY_LIMIT or set_limit"


def test_which_card_it_is(monkeypatch):
    """Ranks that see other numbers for a card compare its address on the bus; threads are told
    which to use.
    """
    settings = load().cuda.runtime.settings()
    monkeypatch.setattr(settings, "devices", 2)
    monkeypatch.setattr(settings, "current", 0)
    backends = [device_backend(local_rank) for local_rank in range(4)]
    cards = [
        "0000:00:00.0 00000000000000000000000000000000",
        "0000:01:00.0 00000000000000000000000000000001",
    ]
    assert [backend.card for backend in backends] == cards * 2
    assert [backend.device for backend in backends[:2]] == [
        "Fake device, device 0",
        "Fake device, device 1",
    ]
    assert settings.current == 1
    properties = load().cuda.runtime.getDeviceProperties(0)
    for uuid, hexadecimal in ((b"\x01\x02", "0102"), (b"\x01" * 16 + b"rubbish", "01" * 16)):
        monkeypatch.setattr(
            load().cuda.runtime, "getDeviceProperties", lambda _, u=uuid: {**properties, "uuid": u}
        )
        assert backends[0].card == f"0000:00:00.0 {hexadecimal}"
    thread = threading.Thread(target=backends[2].use)
    thread.start()
    thread.join()
    assert settings.current == 0


def test_a_limit_for_this_run(pool):
    """The smaller one of it and of the part that a rank has anyway."""
    backend = device_backend()
    backend.limit_memory(200 * MIB)
    assert (backend.memory().limit_bytes, backend.memory().note) == (200 * MIB, "memory_limit")
    backend.limit_memory(300 * MIB)
    backend.divide_memory(4)
    assert backend.memory().limit_bytes == 200 * MIB
    with pytest.raises(MemoryError) as caught:
        backend.zeros(300 * MIB, np.uint8)
    words = str(backend.explain(caught.value))
    assert "of its limit of 200 MiB (memory_limit)" in words
    assert backend.explain(KeyError("x")) is None
    numpy_backend().limit_memory(1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_arrays_of_the_host_begin_at_a_cache_line(dtype):
    """Of any size, also without elements; a model's parameters, gradients and optimizer, too."""
    arrays = [empty(np, shape, dtype) for shape in ((), (0, 3), (5,), (33, 1025), (7,))]
    assert [array.shape for array in arrays] == [(), (0, 3), (5,), (33, 1025), (7,)]
    assert {array.dtype for array in arrays} == {np.dtype(dtype)}
    model = nn.Linear(33, 65).initialize(seed=0)
    state = optim.AdamW(model.storage).slots()
    arrays += [*model.storage.data, *model.storage.grads, *(a for b in state.values() for a in b)]
    assert all(array.flags.c_contiguous for array in arrays)
    assert {array.ctypes.data % LINE_BYTES for array in arrays if array.size} == {0}


def test_zeros_take_no_memory_before_they_are_used():
    """Gradients of a model that only predicts: 256 MiB that nobody writes to stay untouched."""
    before = host_memory().used_bytes
    array = zeros(np, (1 << 26,), "float32")
    assert host_memory().used_bytes - before < 64 * MIB
    assert array[::4096].sum() == 0 and zeros(np, 3, "float64").tolist() == [0, 0, 0]
