"""Which processor's code OpenBLAS runs: the warning about an older one's, and how that for AVX2 is chosen."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nnmpi.backend import blas
from nnmpi.backend.blas import (
    FAMILIES,
    GENERATIONS,
    blas_pool,
    compare,
    find_older,
    may_gain_by_avx2,
    name_blas,
    read_flags,
)
from nnmpi.backend.gemm import use_blas
from nnmpi.errors import UsageError

AVX2 = frozenset(["fpu", "sse2", "avx", "avx2", "fma", "bmi2"])
AVX512 = AVX2 | frozenset(["avx512f", "avx512bw", "avx512dq", "avx512vl"])
SVE = frozenset(["fp", "asimd", "sve"])


@pytest.mark.parametrize(
    ("core", "family", "flags", "old", "new"),
    [
        ("Haswell", "x86", AVX512, "Haswell (AVX2)", "AVX-512, which makes dense layers 1.3 to 2 times as fast;"),
        ("Zen", "x86", AVX512, "Zen (AVX2)", "AVX-512"),
        ("Prescott", "x86", AVX512, "Prescott (SSE)", "AVX-512;"),
        ("Nehalem", "x86", AVX2, "Nehalem (SSE)", "AVX2;"),
        ("Sandybridge", "x86", AVX2, "Sandybridge (AVX)", "AVX2;"),
        ("neoversen1", "arm", SVE, "neoversen1 (NEON)", "SVE;"),
    ],
)
def test_older_code_is_named_with_what_the_processor_has(
    core: str, family: str, flags: frozenset[str], old: str, new: str
) -> None:
    told = compare(core, family, flags, None)
    assert told is not None
    assert told.startswith(f"OpenBLAS runs code for {old}, but the processor has {new}")


@pytest.mark.parametrize(
    ("core", "family", "flags"),
    [
        ("Haswell", "x86", AVX2),
        ("SkylakeX", "x86", AVX512),
        ("Cooperlake", "x86", AVX512),
        ("SapphireRapids", "x86", AVX512),
        ("Zen", "x86", AVX2),
        ("Haswell", "x86", AVX2 | {"avx512f"}),  # of Xeon Phi: OpenBLAS has no code for it
        ("SkylakeX", "x86", AVX2),  # newer than it could run: none of our business
        ("Prescott", "x86", frozenset()),  # the system does not say
        ("of next year", "x86", AVX512),
        ("NEOVERSEV1", "arm", SVE),
        ("armv8", "arm", frozenset({"fp", "asimd"})),
    ],
)
def test_there_is_nothing_to_say_of_the_right_code_or_the_unknown(
    core: str, family: str, flags: frozenset[str]
) -> None:
    assert compare(core, family, flags, core) is None


def test_the_remedy_depends_on_who_chose() -> None:
    asked, own = compare("Haswell", "x86", AVX512, "Haswell"), compare("Haswell", "x86", AVX512, None)
    assert asked is not None and own is not None
    assert asked.endswith("OPENBLAS_CORETYPE=Haswell in the environment does that; unset it (before Python starts)")
    assert own.endswith("it chose so by itself; a newer NumPy may bring code for this processor")


def test_each_core_belongs_to_one_generation() -> None:
    for generations in GENERATIONS.values():
        cores = [core for each in generations for core in each.cores]
        assert len(cores) == len(set(cores))
        assert all(core == core.lower() for core in cores)
        assert not generations[0].flags
    assert set(FAMILIES.values()) == set(GENERATIONS)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2\nbugs\t\t: x\n\nprocessor\t: 1\nflags\t\t: fpu\n", {"fpu", "avx2"}),
        ("processor\t: 0\nFeatures\t: fp asimd sve\n", {"fp", "asimd", "sve"}),
        ("vendor: who\n", set()),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t\t: avx2 avx512f avx512bw\n", {"avx2"}),  # Zen 4
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nflags\t\t: avx2 avx512f\n", {"avx2", "avx512f"}),  # Zen 5
        ("vendor_id\t: GenuineIntel\ncpu family\t: 6\nflags\t\t: avx2 avx512f\n", {"avx2", "avx512f"}),
    ],
)
def test_flags_are_read(tmp_path: Path, text: str, flags: set[str]) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert read_flags(file) == flags
    assert read_flags(tmp_path / "absent") == frozenset()


@pytest.mark.skipif(not {"avx2", "fma"} <= read_flags(), reason="the processor has nothing newer than Sandy Bridge")
def test_the_running_library_is_asked() -> None:
    """NumPy's own OpenBLAS, told to be older than it could be."""
    code = "import numpy; from nnmpi.backend.blas import find_older; print(find_older())"
    environ = {**os.environ, "OPENBLAS_CORETYPE": "Sandybridge"}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    if "openblas" in ended.stdout.lower():  # else NumPy has another BLAS here
        assert "code for Sandybridge (AVX), but the processor has AVX" in ended.stdout
        assert "OPENBLAS_CORETYPE=Sandybridge" in ended.stdout
    without = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    ended = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "None"
    assert find_older({}) is None or "OPENBLAS_CORETYPE" in os.environ


ZEN_4 = (
    "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t\t: fpu avx avx2 fma avx512f avx512bw avx512dq avx512vl\n\n"
)
ZEN_5 = ZEN_4.replace(": 25", ": 26")
can_choose = pytest.mark.skipif(
    blas._openblas() is None or not GENERATIONS["x86"][2].flags <= read_flags(), reason="OpenBLAS cannot choose here"
)


@pytest.mark.host_only("it is NumPy's BLAS")
@can_choose
def test_code_for_avx2_runs_inside_the_block() -> None:
    """And what it chose itself behind it; of blocks that overlap, as those of simulated ranks, behind the last one."""
    library, a = blas._openblas(), np.random.default_rng(0).normal(size=(70, 70))
    assert library is not None
    library.gotoblas_corename.restype = ctypes.c_char_p
    before, product, environ = library.gotoblas_corename(), a @ a, dict(os.environ)
    first, second = use_blas("avx2"), use_blas("avx2")
    first.__enter__()
    second.__enter__()
    assert library.gotoblas_corename() == b"Haswell"
    np.testing.assert_allclose(a @ a, product, rtol=1e-10, atol=1e-12)
    first.__exit__(None, None, None)
    assert library.gotoblas_corename() == b"Haswell"
    second.__exit__(None, None, None)
    assert library.gotoblas_corename() == before
    assert dict(os.environ) == environ


def test_a_blas_that_cannot_choose_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_openblas", lambda: None)
    assert not may_gain_by_avx2({})
    with pytest.raises(UsageError, match="no code for AVX2 that could be chosen here"), use_blas("avx2"):
        pass


@pytest.mark.parametrize(
    ("said", "core", "environ", "may"),
    [
        (ZEN_4, "SkylakeX", {}, True),
        (ZEN_4, "Haswell", {}, False),
        (ZEN_4, "SkylakeX", {"OPENBLAS_CORETYPE": "SkylakeX"}, False),
        (ZEN_5, "SkylakeX", {}, False),
        ("", "SkylakeX", {}, False),
    ],
)
def test_where_code_for_avx2_may_be_faster(
    said: str, core: str, environ: dict[str, str], may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Zen 4, whose AVX-512 is no wider, if nobody has chosen."""
    monkeypatch.setattr(blas, "_openblas", lambda: object())
    monkeypatch.setattr(blas, "_core", lambda: core)
    (tmp_path / "cpuinfo").write_text(said)
    assert may_gain_by_avx2(environ, tmp_path / "cpuinfo") is may


def test_the_blas_is_numpys_own() -> None:
    other = {"user_api": "blas", "internal_api": "mkl", "filepath": "/x/scipy/lib.so"}
    own = {"user_api": "blas", "internal_api": "openblas", "version": "0.3", "filepath": "/x/numpy.libs/lib.so"}
    assert blas_pool([{"user_api": "openmp", "filepath": "/x/numpy"}, other, own]) is own
    assert blas_pool([other]) is other
    assert name_blas(own | {"architecture": "Zen"}) == "openblas 0.3 (Zen)"
    assert name_blas(other) == "mkl"
    assert name_blas(blas_pool([])) == "unknown BLAS"
