"""What the kernels' table needs of CuPy, on the host: arrays with an address, and the emulator of kernels."""

import platform
import shutil
from functools import cache
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from nnmpi.backend.cuda.kernels import DeviceFunctions
from tests.device.fake.emulator import RawModule

F32, F64, F16, BF16 = (np.dtype(each) for each in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16))
DTYPES = pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=lambda each: each.name)

needs_emulator = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="the emulator needs g++ on x86-64"
)

# How far a result may be from one computed in float64 and rounded: a unit in the last place of its dtype, and a little.
EPSILON = {F32: 2.0**-23, F64: 2.0**-52, F16: 2.0**-10, BF16: 2.0**-7}


class HostArray(np.ndarray):
    """NumPy's array with the attributes by which an array on a device is known."""

    @property
    def data(self):
        """Its memory; `ptr` is the address."""
        return SimpleNamespace(ptr=self.ctypes.data)


def held(values, dtype=None):
    """Return a copy of the values as an array of the device's."""
    return np.array(values, dtype=dtype, order="C", ndmin=0, copy=True).view(HostArray)


@cache
def kernels():
    """The table over the emulator."""
    return DeviceFunctions(
        SimpleNamespace(
            RawModule=RawModule,
            empty=lambda shape, dtype: (
                np.full(shape, 0x7F, "uint8").view(HostArray)
                if np.dtype(dtype) == np.uint8
                else np.full(shape, np.nan, dtype).view(HostArray)
            ),
            argsort=lambda x: np.argsort(np.asarray(x), kind="stable").view(HostArray),
        )
    )


def draw(*shape, dtype=F32, seed=0, scale=1.0):
    """Return normally distributed numbers, rounded to the dtype."""
    return held(np.random.default_rng([seed, *shape]).standard_normal(shape) * scale, dtype)


def wide(x):
    """Return an array as float64 of NumPy's."""
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return np.asarray(x).astype(np.float64)


def blank(shape, dtype):
    """Return an array of NaN, or of the largest number."""
    dtype = np.dtype(dtype)
    return held(np.full(shape, np.iinfo(dtype).max if dtype.kind in "iu" else np.nan, dtype))


def parameters_of(dtype):
    """The dtypes that parameters may have beside activations of this one."""
    return [dtype] if dtype in (F32, F64) else [dtype, F32]


def sums_of(dtype):
    """The dtype in which is computed."""
    return F64 if dtype == F64 else F32


def close(found, expected, terms=1.0, size=None):
    """Compare with numbers computed in float64.

    Args:
        terms: how many roundings of the dtype in which is computed may have added up.
        size: of the numbers that were added; by default the result's own.
    """
    expected = np.asarray(expected, np.float64)
    tolerance = EPSILON[found.dtype] * np.abs(expected) + terms * EPSILON[sums_of(found.dtype)] * (
        np.abs(expected) if size is None else size
    )
    wrong = ~(np.abs(wide(found) - expected) <= tolerance)
    wrong &= ~((wide(found) == expected) | (np.isnan(wide(found)) & np.isnan(expected)))
    tiny = np.abs(wide(found) - expected) <= (6e-8 if found.dtype == F16 else 1e-37)  # below the normal numbers
    wrong &= ~tiny
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, first {wide(found)[wrong][0]} not {expected[wrong][0]}"
