"""How device arrays travel between ranks, through host memory or by an MPI that takes them."""

import numpy as np
import pytest

from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import bfloat16
from nnmpi.comm.group import Group
from nnmpi.errors import NnmpiError
from tests.gpu.test_ranks import ALGORITHMS

# Empty, odd, several pages, and more than a piece of what is staged.
LENGTHS = (0, 1, 1001, 70_001, 3_000_001)


@pytest.mark.mpi
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce(group: Group, device: Backend, algorithm: str, length: int) -> None:
    """Whole numbers, whose sum every order of adding gives exactly; twice, as buffers are used again."""
    for turn in range(2):
        host = np.arange(length, dtype=np.float32) % 1000 + group.rank + turn
        array = device.asarray(host)
        group.all_reduce(array, algorithm)
        expected = group.size * (np.arange(length) % 1000 + turn) + sum(range(group.size))
        assert np.array_equal(device.to_host(array), expected)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["float64", "float16", "bfloat16", "int32"])
def test_all_reduce_of_other_dtypes(group: Group, device: Backend, kind: str) -> None:
    """Half precision is added up in float32."""
    dtype = bfloat16() if kind == "bfloat16" else np.dtype(kind)
    array = device.asarray((np.arange(1000) % 60 + group.rank).astype(dtype))
    group.all_reduce(array, "ring")
    expected = (group.size * (np.arange(1000) % 60) + sum(range(group.size))).astype(dtype)
    assert np.array_equal(device.to_host(array).astype(np.float64), expected.astype(np.float64))


@pytest.mark.mpi
def test_ranks_share_the_card(group: Group, device: Backend) -> None:
    """Each has a part of the memory that is free, and can use it."""
    limit = device.memory().limit_bytes
    device.share(group.size)
    try:
        everyones = group.gather(device.memory().limit_bytes or 0)
        assert group.size == 1 or limit or (min(everyones) > 0 and sum(everyones) < 2**48)
        assert float(device.xp.ones(1 << 20, dtype=np.float32).sum()) == 1 << 20
    finally:
        if not limit:
            device.xp.get_default_memory_pool().set_limit(size=0)


@pytest.mark.mpi
def test_different_lengths_are_refused(group: Group, device: Backend) -> None:
    """As for host arrays, in a sentence and on all ranks."""
    if group.size == 1:
        pytest.skip("one rank has nobody to differ from")
    with pytest.raises(NnmpiError, match="differ|rank"):
        group.all_reduce(device.zeros(10 + group.rank, np.float32), "ring")
