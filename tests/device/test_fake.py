"""The double of CuPy: as strict as CuPy, with its names and parameters, and honest about memory and copies."""

import gc
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.device import library
from tests.device.survey import SNAPSHOT

pytestmark = pytest.mark.host_only("the tests of the double itself")


@pytest.fixture
def cupy() -> Any:
    """The double."""
    return library.load()


@pytest.fixture
def pool(cupy: Any) -> Iterator[Any]:
    """Its memory pool, whose limit is put back."""
    pool = cupy.get_default_memory_pool()
    before = pool.get_limit()
    yield pool
    pool.set_limit(size=before)


def test_the_snapshot_is_the_installed_cupys() -> None:
    """Where there is one, of the version that was surveyed."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    script = str(Path(__file__).with_name("survey.py"))
    ran = subprocess.run(
        [sys.executable, script, "--print"], env=library.real_environment(), capture_output=True, text=True
    )
    if "No module named 'cupy'" in ran.stderr:
        pytest.skip("cupy is not installed")
    assert ran.returncode == 0, ran.stderr
    version = next(line for line in SNAPSHOT.read_text().splitlines() if '"version"' in line)
    if version not in ran.stdout.splitlines():
        pytest.skip(f"the installed cupy is another version than the snapshot's {version.strip()}")
    assert ran.stdout == SNAPSHOT.read_text()


REFUSED = {
    "a NumPy array beside it": (lambda cupy, a: a + np.ones(3), TypeError, "Unsupported type"),
    "beside a NumPy array": (lambda cupy, a: np.ones(3) + a, TypeError, "Unsupported type"),
    "a NumPy array in a function": (lambda cupy, a: cupy.sum(np.ones(3)), TypeError, "Unsupported type"),
    "becoming one": (lambda cupy, a: np.asarray(a), TypeError, "Implicit conversion"),
    "a NumPy array in its place": (lambda cupy, a: a.__setitem__(..., np.ones(3)), TypeError, "Unsupported type"),
    "a result on the host": (lambda cupy, a: cupy.add(a, a, out=np.ones(3)), TypeError, "Output arguments"),
    "a result of another shape": (lambda cupy, a: cupy.add(a, a, out=cupy.ones((2, 3))), ValueError, "shape"),
    "a list": (lambda cupy, a: cupy.sum([1.0, 2.0]), TypeError, "Unsupported type"),
    "an unknown name": (lambda cupy, a: cupy.vecdot(a, a), AttributeError, "vecdot"),
    "an unknown method": (lambda cupy, a: a.to_device("cpu"), AttributeError, "to_device"),
    "where=": (lambda cupy, a: cupy.sum(a, where=a > 0), TypeError, "where"),
    "initial=": (lambda cupy, a: a.max(initial=0.0), TypeError, "initial"),
    "a mode of take": (lambda cupy, a: cupy.take(a, cupy.asarray([0]), mode="clip"), TypeError, "mode"),
    "the largest by a ufunc": (lambda cupy, a: cupy.maximum.reduce(a), NotImplementedError, "reduce"),
    "atomics of int64": (lambda cupy, a: cupy.add.at(cupy.arange(3), cupy.asarray([0]), 1), TypeError, "int64"),
    "an index outside": (lambda cupy, a: a[cupy.asarray([3])], IndexError, "out of bounds"),
    "one place written twice": (lambda cupy, a: a.__setitem__(cupy.asarray([0, 0]), 1.0), IndexError, "twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cupy_refuses(cupy: Any, name: str) -> None:
    attempt, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        attempt(cupy, cupy.ones(3))


def test_batches_of_bfloat16_are_refused(cupy: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    low = cupy.ones((2, 3, 3)).astype(ml_dtypes.bfloat16)
    assert (low[0] @ low[0]).dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="bfloat16"):
        low @ low


def test_reductions_stay_on_the_device(cupy: Any) -> None:
    a = cupy.ones((2, 3))
    for result in (a.sum(), cupy.max(a), cupy.add.reduce(a, axis=(0, 1)), a.mean()):
        assert isinstance(result, cupy.ndarray) and result.shape == ()


def test_results_lie_in_c_order(cupy: Any) -> None:
    """Unlike NumPy's, whatever the inputs were."""
    a = cupy.ones((2, 3)).T
    assert not a.flags.c_contiguous
    assert (a + 1).flags.c_contiguous and cupy.exp(a).flags.c_contiguous
    assert a.base is not None and (a + 1).base is None


def test_addresses_are_real(cupy: Any) -> None:
    a = cupy.asarray(np.arange(6.0).reshape(2, 3))
    part = a[1, 1:]
    assert part.data.ptr == a.data.ptr + 4 * 8
    assert part.__cuda_array_interface__["data"][0] == part.data.ptr
    other = cupy.ndarray((2,), np.float64, part.data)
    other[0] = 9
    assert a.get()[1, 1] == 9


def test_memory_is_counted_and_limited(cupy: Any, pool: Any) -> None:
    gc.collect()  # what earlier tests have left must not go in between
    before = pool.used_bytes()
    a = cupy.zeros(1000)
    view = a[10:]
    assert pool.used_bytes() - before == 8192
    del a
    assert pool.used_bytes() - before == 8192  # the view has it
    del view
    assert pool.used_bytes() == before
    pool.set_limit(size=before + 4096)
    pool.free_all_blocks()  # else what is kept serves, as CuPy's
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Out of memory allocating 8,192 bytes"):
        cupy.zeros(1000)
    pool.free_all_blocks()
    assert pool.total_bytes() == pool.used_bytes() == before


def test_new_memory_holds_rubbish(cupy: Any) -> None:
    assert np.isnan(cupy.empty(3).get()).all()
    assert (cupy.empty(3, np.int32).get() == -1).all()


def test_copies_arrive_when_they_are_waited_for(cupy: Any) -> None:
    cupyx = importlib.import_module("cupyx")
    stream = cupy.cuda.Stream(non_blocking=True)
    a, host = cupy.ones(3), cupyx.empty_pinned(3)
    a.get(out=host, stream=stream, blocking=False)
    assert np.isnan(host).all()
    stream.synchronize()
    assert (host == 1).all()
    host[...] = 5
    a.set(host, stream=stream)
    assert (a.get() == 1).all()  # nobody has waited
    event = stream.record()
    cupy.cuda.get_current_stream().wait_event(event)
    assert (a.get() == 5).all()


def test_a_copy_of_what_is_overwritten_without_waiting_is_wrong(cupy: Any) -> None:
    """As it would be on a device; in one stream things happen in order."""
    cupyx = importlib.import_module("cupyx")
    stream, a, host = cupy.cuda.Stream(non_blocking=True), cupy.ones(3), cupyx.empty_pinned(3)
    a.get(out=host, stream=stream, blocking=False)
    a += 1
    stream.synchronize()
    assert (host == 2).all()
    a.get(out=host, blocking=False)
    a += 1
    cupy.cuda.get_current_stream().synchronize()
    assert (host == 2).all()


def test_hidden_synchronization_is_counted(cupy: Any) -> None:
    sync = importlib.import_module("cupy._sync")
    a = cupy.ones(3)
    before = sync.COUNTS["float"]
    assert float(a.sum()) == 3.0 and sync.COUNTS["float"] == before + 1
    for attempt in (lambda: float(a.sum()), lambda: bool(a.any()), lambda: a.get(), lambda: a[a > 0]):
        with sync.no_synchronize(), pytest.raises(sync.HiddenSynchronization):
            attempt()
    with sync.no_synchronize():
        assert (a + a).shape == (3,)


def test_there_may_be_more_devices_or_none(cupy: Any) -> None:
    settings = cupy.cuda.runtime.settings()
    before = settings.devices, settings.hidden
    try:
        settings.hidden = False
        for settings.devices in (0, 3):
            assert cupy.cuda.is_available() == (settings.devices > 0)
            if settings.devices:
                assert library.device_backend(4).device.endswith("device 1")
    finally:
        settings.devices, settings.hidden = before
        cupy.cuda.runtime.setDevice(0)
