"""How many calls of cuBLAS and how many copies products take."""

import importlib
from typing import Any

import numpy as np
import pytest

from nnmpi.backend import cublas
from nnmpi.backend.cublas import Products
from nnmpi.backend.gemm import gemm
from nnmpi.backend.precision import bfloat16
from nnmpi.base.errors import ShapeError
from tests.device.library import load

BFLOAT16 = bfloat16()
HALF = np.array([0.5], "float32")


def bindings() -> Any:
    """Return the double of CuPy's bindings."""
    load()
    return importlib.import_module("cupy_backends.cuda.libs").cublas


def calls(a: Any, b: Any, **options: Any) -> list[dict[str, int]]:
    """Return the calls of cuBLAS that a product takes."""
    bindings().CALLS.clear()
    gemm(load(), a, b, **options)
    return [words for name, words in bindings().CALLS if name != "setMathMode"]


def test_how_many_calls_a_product_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wherever the stack is one, and few where it is heads of a batch."""
    xp = load()

    def ones(*shape: int) -> Any:
        return xp.ones(shape, BFLOAT16)

    (call,) = calls(ones(8, 5, 4), ones(4, 3))  # one matrix for all
    assert (call["batchCount"], call["strideA"]) == (8, 0)
    (call,) = calls(ones(8, 5, 4), ones(8, 4, 3))
    assert call["batchCount"] == 8
    (call,) = calls(ones(2, 3, 5, 4), ones(2, 3, 4, 3))
    assert call["batchCount"] == 6
    (call,) = calls(ones(1, 5, 4), ones(6, 4, 3))  # one left matrix for all
    assert (call["batchCount"], call["strideB"]) == (6, 0)
    (call,) = calls(ones(4, 5).T, ones(6, 4).T)  # transposed by flag
    assert (call["transa"], call["transb"]) == (1, 1)
    (call,) = calls(ones(5, 9)[:, 2:6], ones(4, 7)[:, :3])
    assert (call["lda"], call["ldb"]) == (7, 9)

    def heads(batch: int, number: int, time: int) -> Any:
        return ones(batch, time, number, 8).swapaxes(1, 2)

    # two calls cost less than copies
    assert len(calls(heads(2, 3, 4), heads(2, 3, 4).swapaxes(2, 3))) == 2
    # copies cost less than 30 calls, unless they are large: here 2 x 77 KB
    for limit, count in ((cublas.CALL_BYTES, 1), (2 * 76800 / 30 + 1, 1), (2 * 76800 / 30, 30)):
        monkeypatch.setattr(cublas, "CALL_BYTES", limit)
        assert len(calls(heads(40, 30, 4), heads(40, 30, 4).swapaxes(2, 3))) == count


def test_sums_of_half_precision_stay_wide() -> None:
    """Also where somebody else has left the handle in another mode; wide results need no word about
    it.
    """
    xp, double = load(), bindings()
    handle = importlib.import_module("cupy.cuda.device").get_cublas_handle()
    low, wide = xp.ones((4, 4), BFLOAT16), xp.ones((4, 4), "float32")
    for a, out, mode in ((low, low.copy(), 16), (low, wide.copy(), 0), (wide, wide.copy(), 0)):
        gemm(xp, a, a, out)  # the first product of a kind is tested
        double.setMathMode(handle, 0)
        gemm(xp, a, a, out)
        assert double.getMathMode(handle) == mode
        assert float(out[0, 0]) == 4
    double.setMathMode(handle, 0)


def test_sizes_that_cublas_does_not_take() -> None:
    """It counts in 32 bits; said before anything is read."""
    xp = load()
    tall = xp.broadcast_to(xp.ones((1, 1), "float32"), (1, 1, 1))
    huge = np.lib.stride_tricks.as_strided(np.ones(1, "float32"), (2**31, 1), (4, 4))
    with pytest.raises(ShapeError, match="takes sizes up to 2147483647"):
        Products(xp).multiply(huge, np.ones((1, 1), "float32"), huge, False, False)
    assert float(gemm(xp, tall, tall)[0, 0, 0]) == 1
