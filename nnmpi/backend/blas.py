"""Which processor's code NumPy's OpenBLAS runs: whether an older one's, and how to run that for AVX2.

OpenBLAS has code for many processors and chooses by itself, unless OPENBLAS_CORETYPE names one, as some machines do for
all their users. Code for Haswell leaves half of an AVX-512 processor idle: on a Zen 5 core a product of matrices ran at
123 GF/s instead of 215 to 245, and a training step of dense layers took 1.8 to 2 times as long; on a core of an Intel
Xeon (Sapphire Rapids or later) the product ran at 96 instead of 130. A Zen 4 core computes with half of such a vector
at a time, and there Haswell's code is the faster one: 107 to 111 against 95 to 106. Steps of dense layers are 3 to 9 %
shorter with it and those of a CNN, with smaller products, 16 % longer (docs/speed.md). So the train command takes it by
the model (`train.computing`): OpenBLAS can be told to choose again while it runs.

    python -c "from nnmpi.backend.blas import find_older; print(find_older() or 'nothing to say')"
"""

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

from threadpoolctl import ThreadpoolController, threadpool_info

from nnmpi.errors import UsageError

VARIABLE = "OPENBLAS_CORETYPE"
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Generation:
    """Processors with the same vector instructions.

    Attributes:
        name: of the instructions.
        flags: by which the kernel names them; a processor belongs here if it has all.
        cores: OpenBLAS's names, in lower case, for the code that uses no newer ones.
    """

    name: str
    flags: frozenset[str]
    cores: frozenset[str]


def _generation(name: str, flags: str, cores: str) -> Generation:
    return Generation(name, frozenset(flags.split()), frozenset(cores.split()))


# Oldest first. Only what decides the speed of products counts: Cooper Lake's and Sapphire Rapids' own code is for
# bfloat16, and in float32 the same as Skylake's.
GENERATIONS: dict[str, tuple[Generation, ...]] = {
    "x86": (
        _generation(
            "SSE",
            "",
            "katmai coppermine northwood prescott banias core2 penryn dunnington nehalem atom nano athlon opteron "
            "opteron_sse3 barcelona bobcat",
        ),
        _generation("AVX", "avx", "sandybridge bulldozer piledriver steamroller excavator"),
        _generation("AVX2", "avx2 fma", "haswell zen"),
        _generation("AVX-512", "avx512f avx512bw avx512dq avx512vl", "skylakex cooperlake sapphirerapids"),
    ),
    "arm": (
        _generation(
            "NEON",
            "",
            "armv8 cortexa53 cortexa55 cortexa57 cortexa72 cortexa73 cortexa76 falkor thunderx thunderx2t99 "
            "thunderx3t110 tsv110 emag8180 neoversen1 ft2000 vortex",
        ),
        _generation("SVE", "sve", "armv8sve neoversev1 neoversen2 a64fx"),
    ),
}
FAMILIES = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}
# Vendor and family of processors with AVX-512 that is no wider inside than AVX2: Zen 4 (Zen 3 has none at all).
HALF_WIDTH = (["AuthenticAMD"], ["25"])
AVX2_CORE = "Haswell"
# What it costs, where that was measured.
COST = {("AVX2", "AVX-512"): ", which makes dense layers 1.3 to 2 times as fast"}


def find_older(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a sentence if this process's OpenBLAS runs code for an older processor, with the remedy; else None.

    None too where that cannot be told: with another BLAS, an unknown processor, or no /proc/cpuinfo.
    """
    core, family = _core(), FAMILIES.get(platform.machine().lower())
    if not core or family is None:
        return None
    return compare(core, family, read_flags(), environ.get(VARIABLE))


def compare(core: str, family: str, flags: frozenset[str], wanted: str | None) -> str | None:
    """Return the sentence for code of a core on a processor with these flags; None if it is not older, or unknown.

    Args:
        core: OpenBLAS's name, such as "Haswell".
        family: a key of GENERATIONS.
        flags: the processor's, as the kernel names them; empty if unknown.
        wanted: what OPENBLAS_CORETYPE is; None if it is not set.
    """
    generations = GENERATIONS[family]
    runs = next((i for i, each in enumerate(generations) if core.lower() in each.cores), None)
    if runs is None or not flags:
        return None
    able = max(i for i, each in enumerate(generations) if each.flags <= flags)
    if able <= runs:
        return None
    old, new = generations[runs].name, generations[able].name
    if wanted:
        remedy = f"{VARIABLE}={wanted} in the environment does that; unset it (before Python starts)"
    else:
        remedy = "it chose so by itself; a newer NumPy may bring code for this processor"
    return f"OpenBLAS runs code for {core} ({old}), but the processor has {new}{COST.get((old, new), '')}; {remedy}"


def read_flags(path: Path = _CPU_INFO) -> frozenset[str]:
    """Return the first processor's instruction flags, empty where the system does not tell.

    Those of AVX-512 are left out where it is no faster than AVX2.
    """
    said = _processor(path)
    flags = frozenset(said.get("flags") or said.get("Features") or ())
    return frozenset(flag for flag in flags if not flag.startswith("avx512")) if _has_half_width(said) else flags


def _processor(path: Path) -> dict[str, list[str]]:
    """Return what the system says of the first processor; nothing where it does not tell."""
    try:
        first = path.read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): values.split() for name, _, values in (line.partition(":") for line in first.splitlines())}


def _has_half_width(said: Mapping[str, list[str]]) -> bool:
    return (said.get("vendor_id"), said.get("cpu family")) == HALF_WIDTH


def may_gain_by_avx2(environ: Mapping[str, str] = os.environ, path: Path = _CPU_INFO) -> bool:
    """Return whether OpenBLAS runs code for AVX-512 by its own choice, and that for AVX2 may be faster here."""
    return (
        VARIABLE not in environ
        and _has_half_width(_processor(path))
        and _openblas() is not None
        and _core().lower() in GENERATIONS["x86"][-1].cores
    )


@contextmanager
def avx2_code() -> Iterator[None]:
    """Let NumPy's OpenBLAS run its code for AVX2 inside the block, in the whole process.

    Nothing may multiply in another thread while the block begins or ends. Of blocks that overlap the last one's end
    counts.

    Raises:
        UsageError: where OpenBLAS or the processor cannot do that.
    """
    library = _openblas()
    if library is None or not GENERATIONS["x86"][2].flags <= read_flags():
        raise UsageError("NumPy's BLAS has no code for AVX2 that could be chosen here; choose numpy or mkl")
    with _avx2.lock:
        _avx2.blocks += 1
        if _avx2.blocks == 1:
            _choose(library, AVX2_CORE)
    try:
        yield
    finally:
        with _avx2.lock:
            _avx2.blocks -= 1
            if not _avx2.blocks:
                _choose(library, None)


_avx2 = SimpleNamespace(lock=Lock(), blocks=0)  # how many run now: simulated ranks are threads of one process


def _choose(library: ctypes.PyDLL, core: str | None) -> None:
    """Let OpenBLAS choose its code again, by a core's name, or as it did when it was loaded."""
    before = os.environ.get(VARIABLE)
    if core is not None:
        os.environ[VARIABLE] = core
    try:
        library.gotoblas_dynamic_quit()
        library.gotoblas_dynamic_init()
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def _core() -> str:
    """Return OpenBLAS's name for the code that it runs now; empty where there is no OpenBLAS."""
    return next((str(each["architecture"]) for each in threadpool_info() if each.get("internal_api") == "openblas"), "")


@cache
def _openblas() -> ctypes.PyDLL | None:
    """Return NumPy's OpenBLAS, if it has code for several processors; None for any other BLAS.

    Calls keep the interpreter's lock, so that no other thread of Python's multiplies while there is no code chosen.
    """
    for each in threadpool_info():
        if each.get("internal_api") == "openblas":
            try:
                library = ctypes.PyDLL(each["filepath"])
            except OSError:
                return None
            names = ("gotoblas_dynamic_quit", "gotoblas_dynamic_init", f"gotoblas_{AVX2_CORE.upper()}")
            return library if all(hasattr(library, name) for name in names) else None
    return None


@cache
def loaded_pools() -> ThreadpoolController:
    """Return what sets the numbers of threads of the libraries that are loaded; looking for them takes 0.25 ms.

    Whoever loads another one calls `loaded_pools.cache_clear`.
    """
    return ThreadpoolController()


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


def read_cpu(field: str) -> str:
    """Return what Linux says of the first processor under a name such as "model name"; nothing elsewhere."""
    return " ".join(_processor(_CPU_INFO).get(field, ()))
