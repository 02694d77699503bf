"""How many calls of cuBLAS and how many copies products take, and what its handle is set to."""

import inspect
import re
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest

from nnmpi.backend import cublas
from nnmpi.backend.cublas import Products
from nnmpi.backend.gemm import gemm
from nnmpi.backend.precision import bfloat16
from nnmpi.base.errors import ShapeError
from tests.device.library import FOLDER, load

BFLOAT16 = bfloat16()
USED = [
    "create",
    "set_stream",
    "set_workspace",
    "set_math_mode",
    "gemm_ex",
    "gemm_strided_batched_ex",
]


def bindings():
    """Return the double of NVIDIA's bindings."""
    load()
    return import_module("nvmath.bindings.cublas")


def calls(a, b, **options):
    """Return the calls of cuBLAS that a product takes."""
    bindings().CALLS.clear()
    gemm(a, b, **options)
    return [words for _, words in bindings().CALLS]


def test_how_many_calls_a_product_takes(monkeypatch):
    """One wherever the stack is one, and few where it is heads of a batch."""
    xp = load()

    def ones(*shape):
        return xp.ones(shape, BFLOAT16)

    (call,) = calls(ones(8, 5, 4), ones(4, 3))  # one matrix for all
    assert (call["batch_count"], call["stride_a"]) == (8, 0)
    (call,) = calls(ones(8, 5, 4), ones(8, 4, 3))
    assert call["batch_count"] == 8
    (call,) = calls(ones(2, 3, 5, 4), ones(2, 3, 4, 3))
    assert call["batch_count"] == 6
    (call,) = calls(ones(1, 5, 4), ones(6, 4, 3))  # one left matrix for all
    assert (call["batch_count"], call["stride_b"]) == (6, 0)
    (call,) = calls(ones(4, 5).T, ones(6, 4).T)  # transposed by flag
    assert (call["transa"], call["transb"]) == (1, 1)
    (call,) = calls(ones(5, 9)[:, 2:6], ones(4, 7)[:, :3])
    assert (call["lda"], call["ldb"]) == (7, 9)

    def heads(batch, number, time):
        return ones(batch, time, number, 8).swapaxes(1, 2)

    # two calls cost less than copies
    assert len(calls(heads(2, 3, 4), heads(2, 3, 4).swapaxes(2, 3))) == 2
    # copies cost less than 30 calls, unless they are large: here 2 x 77 KB
    for limit, count in ((cublas.CALL_BYTES, 1), (2 * 76800 / 30 + 1, 1), (2 * 76800 / 30, 30)):
        monkeypatch.setattr(cublas, "CALL_BYTES", limit)
        assert len(calls(heads(40, 30, 4), heads(40, 30, 4).swapaxes(2, 3))) == count


def test_each_stream_has_a_workspace_of_the_default_pool():
    """Set again after each change of streams, allocated once, and freed with the stream."""
    xp, double = load(), bindings()
    products, one = Products(xp), xp.ones((4, 4), BFLOAT16)
    pool, streams = xp.get_default_memory_pool(), [xp.cuda.Stream.null, xp.cuda.Stream()]
    before, places = pool.used_bytes(), []
    for number in (0, 1, 0, 1, 0):
        with streams[number]:
            out = xp.empty((4, 4), BFLOAT16)
            products.multiply(one, one, out, False, False)
        assert float(out[0, 0]) == 4
        state = list(double.HANDLES.values())[-1]
        assert (state.stream, state.mode) == (streams[number].ptr, cublas.WIDE_SUMS)
        places.append(state.workspace[0])
    assert places[:3] == places[2:] and len(set(places)) == 2
    assert pool.used_bytes() == before + 2 * cublas.WORKSPACE_BYTES + 512  # of `out`
    streams.pop()
    assert pool.used_bytes() == before + cublas.WORKSPACE_BYTES + 512


def test_sizes_that_cublas_does_not_take():
    """It counts in 32 bits; said before anything is read."""
    xp = load()
    tall = xp.broadcast_to(xp.ones((1, 1), "float32"), (1, 1, 1))
    huge = np.lib.stride_tricks.as_strided(np.ones(1, "float32"), (2**31, 1), (4, 4))
    with pytest.raises(ShapeError, match="takes sizes up to 2147483647"):
        Products(xp).multiply(huge, np.ones((1, 1), "float32"), huge, False, False)
    assert float(gemm(tall, tall)[0, 0, 0]) == 1


def test_the_double_has_the_parameters_of_the_bindings():
    """As these declare them."""
    double = bindings()
    paths = [path for path in sys.path if Path(path or ".") != FOLDER]
    spec = PathFinder.find_spec("nvmath", paths)
    if spec is None:
        pytest.skip("nvmath-python is not installed")
    text = (Path(str(spec.origin)).parent / "bindings" / "cublas.pxd").read_text()
    for name in USED:
        (words,) = re.findall(rf"^cpdef (?:\w+ )?{name}\((.*)\)", text, re.MULTILINE)
        names = [word.split()[-1] for word in words.split(",") if word]
        assert list(inspect.signature(getattr(double, name)).parameters) == names
