"""Which BLAS NumPy loaded, with how many threads, and whether OPENBLAS_CORETYPE slows it down.

OpenBLAS has code for many processors and chooses by itself, unless OPENBLAS_CORETYPE names one, as some machines do for
all their users. Code for AVX2 leaves half of an AVX-512 processor idle: on a Zen 5 core a product of matrices ran at
123 GF/s instead of 215 to 245. On Zen 4, whose AVX-512 is no wider inside, it costs nothing.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController, threadpool_info

from nnmpi.threads import user_chose_threads

VARIABLE = "OPENBLAS_CORETYPE"
_CPU_INFO = Path("/proc/cpuinfo")
AVX512 = frozenset(["avx512f", "avx512bw", "avx512dq", "avx512vl"])
AVX512_CORES = frozenset(["skylakex", "cooperlake", "sapphirerapids"])
ZEN4 = ("AuthenticAMD", "25")  # vendor and family with AVX-512 of half width (Zen 3 has none at all)


def find_older(environ: Mapping[str, str] = os.environ, cpu: Path = _CPU_INFO) -> str | None:
    """Return a sentence if the environment makes OpenBLAS run code for an older processor than this one; else None."""
    wanted, core = environ.get(VARIABLE), _core()
    processor = (read_cpu("vendor_id", cpu), read_cpu("cpu family", cpu))
    wide = set(read_cpu("flags", cpu).split()) >= AVX512 and processor != ZEN4
    if not wanted or not core or not wide or core.lower() in AVX512_CORES:
        return None
    return (
        f"OpenBLAS runs code for {core}, but the processor has AVX-512, which makes dense layers 1.3 to 2 times as "
        f"fast; {VARIABLE}={wanted} in the environment does that; unset it (before Python starts)"
    )


def _core() -> str:
    """Return OpenBLAS's name for the code that it runs; empty where there is no OpenBLAS."""
    return next((str(each["architecture"]) for each in threadpool_info() if each.get("internal_api") == "openblas"), "")


@cache
def loaded_pools() -> ThreadpoolController:
    """Return what sets the threads of the loaded libraries; looking for them takes 0.25 ms, so it is kept."""
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Compute with one BLAS thread inside the block, unless the environment sets another number."""
    return nullcontext() if user_chose_threads() else loaded_pools().limit(limits=1, user_api="blas")


def blas_pool(pools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return threadpoolctl's entry for the BLAS that NumPy loaded; the first one if there are several, {} for none."""
    found = [pool for pool in pools if pool.get("user_api") == "blas"]
    from_numpy = [pool for pool in found if "numpy" in str(pool.get("filepath", ""))]
    return next(iter(from_numpy or found), {})


def name_blas(pool: Mapping[str, Any]) -> str:
    """Return library, version and the kind of core that it computes for."""
    if not pool:
        return "unknown BLAS"
    core = f" ({pool['architecture']})" if pool.get("architecture") else ""
    return f"{pool['internal_api']} {pool.get('version') or ''}".rstrip() + core


def read_cpu(field: str, cpu: Path = _CPU_INFO) -> str:
    """Return what Linux says of the first processor under a name such as "model name"; nothing elsewhere."""
    try:
        lines = cpu.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return ""
    values = {name.strip(): " ".join(value.split()) for name, _, value in (line.partition(":") for line in lines)}
    return values.get(field, "")
