"""The rule behind "auto": a function of two numbers, with its reason in words."""

import pytest

from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE
from nnmpi.comm.choose import choose


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
def test_short_messages_go_native_and_long_ones_do_not_go_back(size: int) -> None:
    names = [choose(2**power, size).algorithm for power in range(2, 31)]
    assert names[0] == NATIVE
    assert set(names) <= {NATIVE, *ALGORITHMS}
    assert sum(one != other for one, other in zip(names, names[1:], strict=False)) == (0 if size == 1 else 1)


def test_the_reason_names_the_numbers() -> None:
    assert "2 bytes" in choose(4, 2).reason
    assert "one rank" in choose(2**30, 1).reason
    assert choose(2**30, 2).algorithm == "ring"
    assert str(2**29) in choose(2**30, 2).reason
