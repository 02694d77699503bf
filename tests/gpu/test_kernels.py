"""Every kernel on the device, against float64: the tests of `tests/backend/cuda`, which there run on an emulator.

test     host array ---> upload ---> kernel on the device ---> download ---> the same host array     test goes on
"""

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import numpy as np
import pytest

from nnmpi.backend.backend import Backend
from nnmpi.backend.cuda.kernels import DeviceFunctions, DeviceKernels
from nnmpi.backend.kernels.lookup import kernels_for
from tests.backend.cuda import test_dense, test_images, test_rows, test_tables
from tests.backend.cuda.host import held
from tests.gpu.conftest import is_stand_in

MODULES = (test_dense, test_images, test_rows, test_tables)


class Remote:
    """The kernels of a device for arrays of the host, which are copied there and back in each call."""

    def __init__(self, kernels: DeviceFunctions, backend: Backend) -> None:
        self._kernels, self._backend = kernels, backend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

        def call(*args: Any, **named: Any) -> Any:
            there: dict[Any, tuple[Any, Any]] = {}
            result = kernel(
                *(self._upload(each, there) for each in args),
                **{key: self._upload(each, there) for key, each in named.items()},
            )
            for host, array in there.values():
                host[...] = self._backend.to_host(array)
            return held(self._backend.to_host(result)) if hasattr(result, "get") else result

        return call

    def _upload(self, value: Any, there: dict[Any, tuple[Any, Any]]) -> Any:
        """Return an array's copy on the device, the same one for the same memory; anything else as it is."""
        if not isinstance(value, np.ndarray):
            return value
        key = (value.ctypes.data, value.shape, value.strides, value.dtype)
        if key not in there:
            there[key] = (value, self._backend.xp.array(np.asarray(value), order="C"))
        return there[key][1]


@pytest.fixture(autouse=True)
def on_the_device(device: Backend, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the tests' `kernels()` be the device's; on the stand-in, whose kernels the emulator runs too, just some."""
    if is_stand_in(device) and "float32" not in request.node.name:
        pytest.skip("the stand-in runs kernels as tests/backend/cuda does: float32 is enough here")
    kernels = kernels_for(device.zeros(1, np.float32))
    assert isinstance(kernels, DeviceKernels), "device arrays are computed without kernels"
    for module in MODULES:
        monkeypatch.setattr(module, "kernels", lambda: Remote(kernels.functions, device))
    yield
    device.synchronize()  # an error of a kernel is that of the test that called it


def _tests(module: Any) -> dict[str, Any]:
    """Return a module's tests under names of their own; those that ask for the emulator's fixtures stay there."""
    prefix = module.__name__.rpartition("_")[2]
    return {
        f"test_{prefix}_{name.removeprefix('test_')}": value
        for name, value in vars(module).items()
        if name.startswith("test_") and callable(value) and "strict" not in signature(value).parameters
    }


for _module in MODULES:
    globals().update(_tests(_module))
