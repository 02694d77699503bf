"""Every operation gives on the device what it gives on the host, forward and backward, in every precision."""

import numpy as np
import pytest

from nnmpi.backend.backend import Backend, numpy_backend
from tests.gpu.play import FLOAT64, MODES, TOLERANCES, call, differences, dtypes, exact, precise
from tests.gpu.table import TABLE, Check
from tests.ops.rows import OPS
from tests.tensor.rows import TENSOR


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", TABLE, ids=[check.name for check in TABLE])
def test_operation_is_the_hosts(device: Backend, check: Check, mode: str) -> None:
    """Compared with NumPy in float64 on the same inputs, rounded to what the precision has."""
    sample = exact(check.sample, mode)
    right = call(sample, numpy_backend(), [np.dtype(FLOAT64)] * len(sample.inputs))
    with precise(mode):
        found = call(sample, device, dtypes(sample, mode))
    assert not differences(found, right, TOLERANCES[mode])


def test_every_operation_of_the_hosts_table_is_in_the_table() -> None:
    """And in that one is every operation there is, see `tests.tensor.test_operations`."""
    assert {row.public for row in [*TENSOR, *OPS]} - {"tensor.whole"} <= {check.public for check in TABLE}


def test_names_are_unique() -> None:
    """Two rows of one name would hide one another in a report."""
    assert len({check.name for check in TABLE}) == len(TABLE)
