"""cuBLAS's test, what happens where it fails, and how many calls and copies products take."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi.backend import cublas
from nnmpi.backend.cublas import Products
from nnmpi.backend.gemm import gemm, gemm_notice
from nnmpi.backend.precision import bfloat16
from nnmpi.errors import ShapeError, UsageError
from tests.device.library import load

BFLOAT16 = bfloat16()
HALF = np.array([0.5], "float32")
ROOT = Path(__file__).parents[2]


def bindings() -> Any:
    """Return the double of CuPy's bindings."""
    load()
    return importlib.import_module("cupy_backends.cuda.libs").cublas


def wrong(function: Callable[..., None], **changed: Any) -> Callable[..., None]:
    """Return a binding that gets these arguments wrong."""
    names = function.__doc__.partition("(")[2].rstrip(")").split(", ")  # type: ignore[union-attr]
    places = {name.rpartition(" ")[2]: i for i, name in enumerate(names)}

    def call(*args: Any) -> None:
        given = list(args)
        for name, change in changed.items():
            given[places[name]] = change(given[places[name]])
        function(*given)

    return call


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gemmEx", {"transa": lambda flag: 1 - flag}),
        ("gemmEx", {"transb": lambda flag: 1 - flag}),
        ("gemmEx", {"k": lambda k: k - 1}),
        ("gemmEx", {"beta": lambda beta: HALF.ctypes.data}),
        ("gemmEx", {"ldc": lambda lead: lead + 1}),
        ("gemmStridedBatchedEx", {"strideB": lambda stride: 0}),
        ("gemmStridedBatchedEx", {"batchCount": lambda count: count - 1}),
        ("gemmStridedBatchedEx", {"computeType": lambda kind: 77}),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_a_binding_that_is_wrong_is_not_used(
    name: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test notices, matmul computes instead, and a sentence says so."""
    monkeypatch.setattr(bindings(), name, wrong(getattr(bindings(), name), **changed))
    products = Products(load())
    for dtype in (BFLOAT16, np.dtype("float16")):
        a = load().asarray(np.arange(12).reshape(2, 2, 3).astype(dtype))
        out = load().zeros((2, 2, 2), "float32")
        products.multiply(a, a.swapaxes(1, 2), out, True, False)
        host = a.get().astype("float32")
        np.testing.assert_array_equal(out.get(), host @ host.swapaxes(1, 2))
    words = products.notice("bf16")
    assert words is not None
    assert words.startswith("cupy.matmul computes products of ")
    assert "bfloat16 to bfloat16, bfloat16 to float32" in words


def test_only_what_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 that is refused leaves the other kinds to cuBLAS."""

    def refuse(*args: Any) -> None:
        if args[-2] == 77:
            raise bindings().CUBLASError(15)
        real(*args)

    real = bindings().gemmEx
    monkeypatch.setattr(bindings(), "gemmEx", refuse)
    products = Products(load())
    assert products.notice("tf32") == (
        "cupy.matmul computes products of float32 to float32, without TF32: cuBLAS, called by nnmpi, failed its test "
        "(CUBLASError: CUBLAS_STATUS_NOT_SUPPORTED)"
    )
    assert products.notice("float32") is products.notice("bf16") is products.notice("fp16") is None


def test_bindings_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another CuPy may have none, or with other parameters."""
    monkeypatch.delattr(bindings(), "gemmEx")
    assert "AttributeError" in str(Products(load()).notice("float32"))
    monkeypatch.setattr(bindings(), "gemmEx", lambda handle: None, raising=False)
    assert "TypeError" in str(Products(load()).notice("float32"))
    libraries = importlib.import_module("cupy_backends.cuda.libs")
    monkeypatch.delattr(libraries, "cublas", raising=False)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.cublas", None)
    assert "ModuleNotFoundError" in str(Products(load()).notice("float32"))


def test_the_environment_can_say_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """NNMPI_GEMM=matmul; another word is refused."""
    monkeypatch.setenv("NNMPI_GEMM", "matmul")
    cublas.products_of.cache_clear()
    try:
        bindings().CALLS.clear()
        a = load().ones((2, 3), "float32")
        assert gemm(load(), a, a.T).get().tolist() == [[3, 3], [3, 3]]
        assert not bindings().CALLS
        assert gemm_notice(load(), "float32") == (
            "cupy.matmul computes products of float32 to float32: NNMPI_GEMM=matmul says so"
        )
        monkeypatch.setenv("NNMPI_GEMM", "yes")
        cublas.products_of.cache_clear()
        with pytest.raises(UsageError, match="NNMPI_GEMM=yes is unknown; choose cublas or matmul"):
            gemm(load(), a, a.T)
    finally:
        cublas.products_of.cache_clear()


def calls(a: Any, b: Any, **options: Any) -> list[dict[str, int]]:
    """Return the calls of cuBLAS that a product takes."""
    products = cublas.products_of(load())
    products.trouble((a.dtype, a.dtype, False))
    bindings().CALLS.clear()
    gemm(load(), a, b, **options)
    return [words for name, words in bindings().CALLS if name != "setMathMode"]


def test_how_many_calls_a_product_takes() -> None:
    """One wherever the stack is one, and few where it is heads of a batch."""
    xp = load()

    def ones(*shape: int) -> Any:
        return xp.ones(shape, BFLOAT16)

    (call,) = calls(ones(8, 5, 4), ones(4, 3))  # one matrix for all
    assert (call["n"], call["m"], call["k"]) == (40, 3, 4)
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

    assert len(calls(heads(2, 3, 4), heads(2, 3, 4).swapaxes(2, 3))) == 2  # two calls cost less than copies
    assert len(calls(heads(40, 30, 4), heads(40, 30, 4).swapaxes(2, 3))) == 1  # copies cost less than 30 calls


def test_sums_of_half_precision_stay_wide() -> None:
    """Also where somebody else has left the handle in another mode; wide results need no word about it."""
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
    kind = np.dtype("float32"), np.dtype("float32"), False
    huge = np.lib.stride_tricks.as_strided(np.ones(1, "float32"), (2**31, 1), (4, 4))
    with pytest.raises(ShapeError, match="takes no sizes above 2147483647"):
        Products(xp)._multiply_new(huge, np.ones((1, 1), "float32"), huge, False, kind)
    assert float(gemm(xp, tall, tall)[0, 0, 0]) == 1


def test_the_double_has_the_real_signatures() -> None:
    """As far as CuPy is installed: its compiled functions say theirs in the first line of their documentation."""
    names = ["gemmEx", "gemmStridedBatchedEx", "setMathMode", "getMathMode", "setPointerMode", "getPointerMode"]
    script = (
        "from nnmpi.backend.device import cublas_bindings\n"
        "c, handle = cublas_bindings()\n"
        f"for name in {names}: print(getattr(c, name).__doc__)\n"
        "print(sorted((k, v) for k, v in vars(c).items() if type(v) is int and ('_COMPUTE_' in k or '_OP_' in k)))\n"
        "print(handle.__doc__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if found.returncode:
        error = found.stderr.strip().splitlines()[-1]
        known = ("No module named 'cupy", "libcublas", "DynamicLibNotFound")  # the error's text may have many lines
        assert any(words in found.stderr for words in known), found.stderr
        pytest.skip(f"CuPy with its libraries is not installed: {error}")
    double = bindings()
    *signatures, constants, handle = found.stdout.splitlines()
    assert signatures == [getattr(double, name).__doc__ for name in names]
    own = [(k, v) for k, v in vars(double).items() if type(v) is int and ("_COMPUTE_" in k or "_OP_" in k)]
    assert constants == repr(sorted(own))
    assert handle == "get_cublas_handle() -> intptr_t"
