"""Every operation gives on the device what it gives on the host, forward and backward, in every precision."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from nnmpi.backend.backend import Backend, numpy_backend
from tests.gpu.play import FLOAT64, MODES, TOLERANCES, call, differences, dtypes, exact, precise
from tests.gpu.table import TABLE, Sample
from tests.ops.rows import OPS
from tests.tensor.draws import Row
from tests.tensor.rows import TENSOR


def apart(sample: Sample, device: Backend, mode: str, least: float = 0.0) -> list[str]:
    """Compare a call with NumPy's in float64 on the same inputs, rounded to what the precision has."""
    sample = exact(sample, mode)
    right = call(sample, numpy_backend(), [np.dtype(FLOAT64)] * len(sample.inputs))
    with precise(mode):
        found = call(sample, device, dtypes(sample, mode))
    return differences(found, right, TOLERANCES[mode], least)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sample", TABLE, ids=lambda sample: f"{sample.public}-{sample.way}")
def test_operation_is_the_hosts(device: Backend, sample: Sample, mode: str) -> None:
    assert not apart(sample, device, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", TENSOR, ids=lambda row: row.name)
def test_what_has_no_kernel_is_the_hosts(device: Backend, row: Row, mode: str) -> None:
    """Of the library's functions alone: any shape, stride and broadcast."""

    @settings(max_examples=10)
    @given(row.cases)
    def same(case: Any) -> None:
        assert not apart(Sample(row.public, "drawn", case.function, case.inputs), device, mode, least=1.0)

    same()


def test_every_operation_with_a_kernel_is_in_the_table() -> None:
    """And in the host's is every operation there is, see `tests.tensor.test_operations`."""
    found = {sample.public for sample in TABLE} | {f"ops.{each}" for each in ("conv2d", "conv_relu", "conv_relu_pool")}
    assert {row.public for row in OPS} <= found
