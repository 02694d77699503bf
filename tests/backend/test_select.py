"""Choosing a backend by name, with and without a device, and what a backend can do."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from nnmpi.backend.array import is_array, mixed_error, namespace
from nnmpi.backend.device import select
from nnmpi.base.errors import DeviceError
from tests.harness.refusals import refuses, usage_error


@pytest.fixture(autouse=True)
def bindings(monkeypatch):
    """NVIDIA's bindings, which no product here calls."""
    monkeypatch.setitem(sys.modules, "nvmath.bindings.cublas", ModuleType("cublas"))


def fake_cupy(devices):
    """Return a module that says of itself what cupy says on a machine with that many devices."""
    cupy = ModuleType("cupy")
    cupy.used = []
    cupy.waited = []
    cupy.ones = lambda *_: SimpleNamespace(get=lambda: None)
    cupy.asnumpy = lambda array: np.asarray(array.host)
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            getDeviceCount=lambda: devices,
            getDeviceProperties=lambda number: {"name": f"model {number}".encode()},
        ),
        Device=lambda number: SimpleNamespace(use=lambda: cupy.used.append(number)),
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: cupy.waited.append(True)),
    )
    return cupy


def test_numpy():
    """On the host."""
    backend = select("numpy")
    assert (backend.name, backend.xp, backend.device) == ("numpy", np, "CPU")
    array = np.ones(2)
    assert backend.to_host(array) is array
    assert backend.asarray(array) is array
    backend.synchronize()
    zeros = backend.zeros((2, 3), "float32")
    assert (zeros.shape, zeros.dtype, zeros.flags.c_contiguous, zeros.any()) == (
        (2, 3),
        np.float32,
        True,
        False,
    )
    assert backend.asarray([1, 2], "float64").dtype == np.float64


def test_an_unknown_name():
    """The choices are listed."""
    usage_error("backend 'torch' is unknown; choose one of auto, numpy, cupy", select, "torch")


def test_cupy_that_is_not_installed(monkeypatch):
    """One sentence that says what to install; auto takes NumPy."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    refuses(
        DeviceError,
        r"backend cupy cannot be used: cupy cannot be imported .* install 'cupy-cuda12x\[ctk\]'",
        select,
        "cupy",
    )
    assert select("auto").name == select().name == "numpy"


def test_bindings_of_cublas_that_are_not_installed(monkeypatch):
    """One sentence that says what to install, before anything is computed."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(1))
    monkeypatch.setitem(sys.modules, "nvmath.bindings.cublas", None)
    words = "backend cupy cannot be used: matrix products need .* pip install nvmath-python"
    refuses(DeviceError, words, select, "cupy")
    assert select("auto").reason.startswith("auto chose numpy: matrix products need")


def test_cupy_with_devices(monkeypatch):
    """Ranks of a node take its devices in turn; auto takes the device."""
    cupy = fake_cupy(2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name, local_rank, number in (("cupy", 0, 0), ("cupy", 3, 1), ("auto", 1, 1)):
        backend = select(name, local_rank)
        assert (backend.name, backend.xp, backend.device) == (
            "cupy",
            cupy,
            f"model {number}, device {number}",
        )
        assert cupy.used[-1] == number
    host = np.ones(2)
    assert backend.to_host(host) is host
    np.testing.assert_array_equal(backend.to_host(SimpleNamespace(host=[1, 2])), [1, 2])
    backend.synchronize()
    assert cupy.waited == [True]


def test_auto_takes_numpy_where_the_device_cannot_be_used(monkeypatch):
    """A device that is there and fails at the first kernel: cupy is refused, auto says why it did
    not take it.
    """
    cupy = fake_cupy(1)

    def fail(*_):
        raise RuntimeError('Failure finding "libnvrtc.so"')

    cupy.ones = fail
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    refuses(DeviceError, "backend cupy cannot use device 0: .*libnvrtc", select, "cupy")
    backend = select("auto")
    assert backend.name == "numpy"
    assert backend.reason.startswith("auto chose numpy: backend cupy cannot use device 0: ")


def test_what_auto_says(monkeypatch):
    """Which backend, and why; nothing is said of one that was asked for by name."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(1))
    assert select("auto").reason == "auto chose cupy: model 0, device 0 can be used"
    assert select("cupy").reason == select("numpy").reason == ""
    monkeypatch.setitem(sys.modules, "cupy", None)
    reason = select("auto").reason
    assert reason.startswith("auto chose numpy: cupy cannot be imported (")
    assert "install" not in reason


def test_the_namespace_of_an_array():
    """NumPy's, its subclasses' and its scalars', or what the array names."""
    assert namespace(np.ones(2)) is namespace(np.float32(1)) is namespace(np.ma.ones(2)) is np
    library = ModuleType("library")

    class Other:
        __module__ = "cupy"

        def __array_namespace__(self, api_version=None):
            return library

    assert namespace(Other()) is library
    assert is_array(Other())
    assert is_array(np.ones(2))
    assert not is_array(1.0)
    assert not is_array([1.0])
    assert not is_array(np.float32(1))
    assert mixed_error([np.ones(2), np.float64(3)]) is None  # no device's, whatever it is
