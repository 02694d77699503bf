"""Every operation gives on the device what it gives on the host, forward and backward, in every precision."""

import inspect

import numpy as np
import pytest

import nnmpi.ops
import nnmpi.tensor
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.tensor import arithmetic, elementwise, index, reduce, shape
from tests.gpu.play import FLOAT64, MODES, TOLERANCES, call, differences, dtypes, exact, precise
from tests.gpu.table import TABLE, Check

# astype says its dtype itself; the power of broadcast numbers multiplies logarithms
WITHOUT_DERIVATIVE = {
    "tensor.check_gradients",
    "tensor.enable_grad",
    "tensor.no_grad",
    "tensor.recording",
    "tensor.whole",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", TABLE, ids=[check.name for check in TABLE])
def test_operation_is_the_hosts(device: Backend, check: Check, mode: str) -> None:
    """Compared with NumPy in float64 on the same inputs, rounded to what the precision has."""
    sample = exact(check.sample, mode)
    right = call(sample, numpy_backend(), [np.dtype(FLOAT64)] * len(sample.inputs))
    with precise(mode):
        found = call(sample, device, dtypes(sample, mode))
    assert not differences(found, right, TOLERANCES[mode])


def test_every_public_operation_is_in_the_table() -> None:
    """Of nnmpi.tensor and nnmpi.ops, and of the families behind the operators and methods of a Tensor."""
    public = {
        f"{package.__name__.partition('.')[2]}.{name}"
        for package in (nnmpi.tensor, nnmpi.ops)
        for name in package.__all__
        if inspect.isfunction(getattr(package, name))
    }
    for family in (arithmetic, elementwise, index, reduce, shape):
        public |= {
            f"tensor.{name}"
            for name, value in vars(family).items()
            if inspect.isfunction(value) and value.__module__ == family.__name__ and not name.startswith("_")
        }
    assert public - WITHOUT_DERIVATIVE - {"tensor.argmax"} <= {check.public for check in TABLE}


def test_names_are_unique() -> None:
    """Two rows of one name would hide one another in a report."""
    assert len({check.name for check in TABLE}) == len(TABLE)
