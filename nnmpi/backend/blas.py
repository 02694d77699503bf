"""The BLAS in use, its threads, and OPENBLAS_CORETYPE, which may slow NumPy's down.

OpenBLAS has code for many processors and detects the right one, unless OPENBLAS_CORETYPE names
another, as some machines do for all their users. Code for AVX2 leaves half of an AVX-512 processor
idle: on a Zen 5 core a matrix product ran at 123 GF/s instead of 215 to 245. On Zen 4 it costs
nothing, since the units of its AVX-512 are as wide as those of AVX2.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController, threadpool_info

from nnmpi.base.launcher import user_chose_threads

VARIABLE = "OPENBLAS_CORETYPE"
_CPU_INFO = Path("/proc/cpuinfo")
AVX512 = frozenset(["avx512f", "avx512bw", "avx512dq", "avx512vl"])
AVX512_CORES = frozenset(["skylakex", "cooperlake", "sapphirerapids"])
# vendor and family with AVX-512 in units of half the width (Zen 3, of this family too, has none)
ZEN4 = ("AuthenticAMD", "25")


def find_older(environ: Mapping[str, str] = os.environ, cpu: Path = _CPU_INFO) -> str | None:
    """Return a sentence if the environment makes OpenBLAS run code for an older processor."""
    expected, core = environ.get(VARIABLE), _core()
    processor = (read_cpu("vendor_id", cpu), read_cpu("cpu family", cpu))
    wide = set(read_cpu("flags", cpu).split()) >= AVX512 and processor != ZEN4
    if not expected or not core or not wide or core.lower() in AVX512_CORES:
        return None
    return (
        f"OpenBLAS runs code for {core}, but the processor has AVX-512, which makes dense layers"
        f" 1.3 to 2 times as fast; {VARIABLE}={expected} in the environment does that; unset it"
        " (before Python starts)"
    )


def has_small_products() -> bool:
    """True if OpenBLAS has special code for small products: for AVX-512, on one or two threads."""
    pool = _avx512_pool()
    return pool is not None and pool.num_threads <= 2


def blas_threads() -> int:
    """Return how many threads NumPy's BLAS uses now; 1 if nobody knows."""
    pool = _numpy_pool()
    return 1 if pool is None else pool.num_threads or 1


@cache
def _numpy_pool() -> Any:
    """Return threadpoolctl's handle of NumPy's BLAS, or of the first one; None without any."""
    pools = loaded_pools().select(user_api="blas").lib_controllers
    return next((pool for pool in pools if "numpy" in pool.filepath), next(iter(pools), None))


@cache
def _avx512_pool() -> Any:
    """Return threadpoolctl's handle of NumPy's OpenBLAS if it runs code for AVX-512, else None."""
    pools = loaded_pools().select(internal_api="openblas").lib_controllers
    pool = next((pool for pool in pools if "numpy" in pool.filepath), None)
    return pool if pool and str(pool.architecture).lower() in AVX512_CORES else None


def _core() -> str:
    """Return OpenBLAS's name for the code that it runs; empty without OpenBLAS."""
    return next(
        (
            str(item["architecture"])
            for item in threadpool_info()
            if item.get("internal_api") == "openblas"
        ),
        "",
    )


@cache
def loaded_pools() -> ThreadpoolController:
    """Return the thread-pool controller, cached: finding the libraries takes 0.25 ms."""
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Compute with one BLAS thread inside the block, unless the environment sets another number."""
    return (
        nullcontext() if user_chose_threads() else loaded_pools().limit(limits=1, user_api="blas")
    )


def blas_pool(pools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return threadpoolctl's entry for NumPy's BLAS, else the first BLAS, else {}."""
    result = [pool for pool in pools if pool.get("user_api") == "blas"]
    from_numpy = [pool for pool in result if "numpy" in str(pool.get("filepath", ""))]
    return next(iter(from_numpy or result), {})


def name_blas(pool: Mapping[str, Any]) -> str:
    """Return the library, its version and the processor that its code is for, as text."""
    if not pool:
        return "unknown BLAS"
    core = f" ({pool['architecture']})" if pool.get("architecture") else ""
    return f"{pool['internal_api']} {pool.get('version') or ''}".rstrip() + core


def read_cpu(field: str, cpu: Path = _CPU_INFO) -> str:
    """Return a field of /proc/cpuinfo for the first processor; "" on other systems."""
    try:
        lines = cpu.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return ""
    values = {
        name.strip(): " ".join(value.split())
        for name, _, value in (line.partition(":") for line in lines)
    }
    return values.get(field, "")


@cache
def is_intel() -> bool:
    """True on Intel's processors."""
    return read_cpu("vendor_id") == "GenuineIntel"
