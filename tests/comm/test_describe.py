"""The words for headers."""

import pytest

from nnmpi.comm import describe as words
from nnmpi.comm.describe import blas_pool, describe, name_blas
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.mpi_world import name_library


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\n", "Open MPI 5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri\nMPICH ABI: 18:2:6\n", "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS\n", "Intel(R) MPI Library 2021.11 for Linux* OS"),
    ],
)
def test_the_library_in_short(version: str, expected: str) -> None:
    assert name_library(version) == expected


def test_the_blas_is_numpys_own() -> None:
    other = {"user_api": "blas", "internal_api": "mkl", "filepath": "/x/scipy/lib.so"}
    own = {"user_api": "blas", "internal_api": "openblas", "version": "0.3", "filepath": "/x/numpy.libs/lib.so"}
    assert blas_pool([{"user_api": "openmp", "filepath": "/x/numpy"}, other, own]) is own
    assert blas_pool([other]) is other
    assert name_blas(own | {"architecture": "Zen"}) == "openblas 0.3 (Zen)"
    assert name_blas(other) == "mkl"
    assert name_blas(blas_pool([])) == "unknown BLAS"


@pytest.mark.mpi
def test_an_older_core_is_pointed_out(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "find_older", lambda: "it is old")
    assert describe(group).warnings == ("it is old",)
    monkeypatch.setattr(words, "find_older", lambda: None)
    assert describe(group).warnings == ()


@pytest.mark.mpi
def test_all_ranks_are_on_this_machine(group: Group) -> None:
    found = describe(group)
    assert (found.ranks, found.nodes) == (group.size, 1)
    assert found.threads >= 1
    assert found.mpi.split()[-1][0].isdigit()
    assert len(set(group.gather(found.mpi))) == 1
