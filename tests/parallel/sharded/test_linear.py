"""Sharded linear layers compute what whole ones do."""

import pytest

from nnmpi import models, nn
from nnmpi.comm.group import Group
from nnmpi.nn.sharding import Sharding
from tests.parallel.sharded.compare import check_equal

C, R = Sharding.COLUMN, Sharding.ROW


@pytest.mark.both_worlds
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("hidden", [(), (7,), (16, 12), (3, 2, 5)])
def test_mlp(group: Group, dtype: str, hidden: tuple[int, ...]) -> None:
    """Widths that divide nothing, and fewer features than ranks."""
    check_equal(group, lambda: models.mlp((2, 3), 3, hidden, "tanh"), (2, 3), dtype)


@pytest.mark.both_worlds
@pytest.mark.parametrize("table", [{"0": C}, {"0": R}, {"0": C, "2": C}, {"0": R, "2": R}, {"0": R, "2": C}, {"*": C}])
def test_any_table(group: Group, table: dict[str, Sharding]) -> None:
    """Where what comes to a layer does not lie as it needs it, an exchange comes before."""
    check_equal(
        group, lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3, bias=False)), (6,), "float64", table
    )
