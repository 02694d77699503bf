"""Checks of tests/gpu, played where no card comes: a CuPy without NCCL, a pool that still holds free blocks."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nnmpi.errors import DeviceError
from tests.gpu import test_errors, test_libraries

pytestmark = pytest.mark.host_only("the devices here are planted")
MIB = 2**20


def test_nccl_is_left_out_where_cupy_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's module can be imported all the same, and says that it is empty."""
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["cupy.cuda.nccl"].available = False  # type: ignore[attr-defined]
    with pytest.raises(pytest.skip.Exception, match="NCCL is not installed"):
        test_libraries.test_nccl_with_nobody_else(SimpleNamespace())  # type: ignore[arg-type]


class Full:
    """A device whose pool keeps 100 MiB of free blocks, as it does beside what is in use."""

    FREE, USED = 100 * MIB, 28 * MIB

    def __init__(self) -> None:
        self.limit = 0
        self.xp = SimpleNamespace(get_default_memory_pool=lambda: self)

    def release_memory(self) -> None:
        """Give back nothing."""

    def get_limit(self) -> int:
        """Return the limit in bytes, 0 for none."""
        return self.limit

    def set_limit(self, size: int) -> None:
        """Set the limit in bytes."""
        self.limit = size

    def free_bytes(self) -> int:
        """Return what is kept."""
        return self.FREE

    def total_bytes(self) -> int:
        """Return what is used or kept."""
        return self.FREE + self.USED

    def zeros(self, elements: int, dtype: Any) -> Any:
        """Return an array from what is kept, whatever the limit; else what the limit allows."""
        size = elements * np.dtype(dtype).itemsize
        if size > self.FREE and self.limit and self.total_bytes() + size > self.limit:
            raise MemoryError(f"out of memory: {size / MIB:.1f} MiB")
        return np.zeros(min(elements, 8), dtype)

    def explain(self, error: BaseException) -> DeviceError:
        """Return the engine's sentence, in short."""
        return DeviceError(f"no room for {str(error).partition(': ')[2]}; make the batch smaller")


def test_out_of_memory_asks_for_more_than_is_kept() -> None:
    """A free block serves what fits into it below any limit; the limit is put back."""
    device = Full()
    test_errors.test_out_of_memory(device)  # type: ignore[arg-type]
    assert device.limit == 0
