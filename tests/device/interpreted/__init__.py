"""An H100 that is interpreted: the real CuPy and the real NVRTC, whose PTX runs on the host, one
instruction at a time.

    CuPy's wheel -> NVRTC's wheel -> PTX -> read.cpp, work.cpp, run.cpp
         its run-time library, cuBLAS and NVIDIA's driver are device.cpp and blas.cpp

NNMPI_TEST_GPU says how (see device.cpp). In "lazy" and "race" work on streams comes as late, or as
early, as CUDA's rules allow, so that a wait which is left out shows. In "exact" each array is an
allocation of its own, threads come in reverse order, and a kernel is stopped that reads or writes
one byte beyond an array, or in one that is gone.

Needs x86-64 Linux, g++ with binutils, and nnmpi[compiler]. Nothing is known of speed, of what ptxas
makes of PTX, of CUB's and Thrust's compiled kernels (CuPy's own ones run in the place of the
first), cuDNN and NCCL. Functions that CUDA approximates are exact.
"""

import ctypes
import importlib
import importlib.util
import os
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from .build import DRIVER, PRODUCTS, UNUSED, build

MODES = ("lazy", "race", "exact")


def load():
    """Let the real CuPy of this process find the interpreted device; before anybody imports it."""
    bindings = Path(str(importlib.util.find_spec("cupy_backends").origin)).parent / "cuda"  # type: ignore[union-attr]
    (runtime,), (cublas,) = bindings.glob("api/runtime*.so"), bindings.glob("libs/cublas*.so")
    folder = build(runtime, cublas)
    os.environ["CUPY_COMPILE_WITH_PTX"] = "1"
    # what a card's CuPy must not find
    os.environ["CUPY_CACHE_DIR"] = str(folder.parent / "compiled")
    os.environ["CUPY_ACCELERATORS"] = ""
    driver = ctypes.CDLL(str(folder / DRIVER), ctypes.RTLD_GLOBAL)
    for name in (PRODUCTS, UNUSED):
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    if driver.device_attach(str(runtime).encode()):
        raise RuntimeError(f"the functions of {runtime} cannot be replaced")
    cupy = importlib.import_module("cupy")
    importlib.import_module("cupy.cuda.thrust").argsort = partial(_argsort, driver)
    if os.environ["NNMPI_TEST_GPU"] == "exact":
        cupy.cuda.set_allocator(None)


def enqueued():
    """Return how many kernels, products, copies and fills have been put into streams so far."""
    return ctypes.CDLL(None).device_enqueued()


def _argsort(driver, dtype, places, data, keys, shape):
    """Sort along the last axis as Thrust does, whose kernels CuPy brings compiled: stable, and the
    values too.
    """
    stream = importlib.import_module("cupy").cuda.get_current_stream().ptr
    given = (
        ctypes.c_char(np.dtype(dtype).kind.encode()),
        np.dtype(dtype).itemsize,
        ctypes.c_void_p(data),
    )
    sizes = (ctypes.c_size_t(item) for item in (prod(shape[:-1]), shape[-1]))
    if driver.device_sort(*given, ctypes.c_void_p(places), *sizes, ctypes.c_void_p(stream)):
        raise RuntimeError("the stream's capture is not valid any more")
