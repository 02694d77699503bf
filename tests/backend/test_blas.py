"""Which BLAS NumPy loaded, and whether the environment makes it run code for an older processor."""

import pytest

from nnmpi.backend import blas
from nnmpi.backend.blas import AVX512, blas_pool, find_older, name_blas, read_cpu

WIDE = " ".join(sorted(AVX512))


@pytest.mark.parametrize(
    "core, vendor, family, flags, older",
    [
        ("Haswell", "AuthenticAMD", "26", WIDE, True),
        ("Haswell", "GenuineIntel", "6", WIDE, True),
        ("Haswell", "AuthenticAMD", "25", WIDE, False),  # Zen 4: AVX-512 is no wider there
        ("SkylakeX", "GenuineIntel", "6", WIDE, False),
        ("Haswell", "GenuineIntel", "6", "avx2 fma", False),
        ("", "GenuineIntel", "6", WIDE, False),  # another BLAS
    ],
)
def test_code_for_an_older_processor(core, vendor, family, flags, older, tmp_path, monkeypatch):
    """Said where the environment asks for it, with the remedy."""
    monkeypatch.setattr(blas, "_core", lambda: core)
    cpu = tmp_path / "cpuinfo"
    cpu.write_text(
        f"vendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: fpu {flags}\n\nvendor_id\t:"
        " no\n"
    )
    assert find_older({}, cpu) is None
    result = find_older({"OPENBLAS_CORETYPE": "Haswell"}, cpu)
    assert (result is not None) == older
    assert result is None or "unset it" in result
    assert read_cpu("cpu family", cpu) == family
    assert read_cpu("flags", tmp_path / "none") == ""


def test_the_blas_is_numpys_own():
    other = {"user_api": "blas", "internal_api": "mkl", "filepath": "/x/scipy/lib.so"}
    local = {
        "user_api": "blas",
        "internal_api": "openblas",
        "version": "0.3",
        "filepath": "/x/numpy.libs/lib.so",
    }
    assert blas_pool([{"user_api": "openmp", "filepath": "/x/numpy"}, other, local]) is local
    assert blas_pool([other]) is other
    assert name_blas(local | {"architecture": "Zen"}) == "openblas 0.3 (Zen)"
    assert name_blas(other) == "mkl"
    assert name_blas(blas_pool([])) == "unknown BLAS"
