"""Convolution by cuDNN, and by im2col and cuBLAS: both give the host's numbers, forward and backward."""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from nnmpi.backend import cudnn
from nnmpi.backend.backend import Backend, numpy_backend
from tests.device.conv.cases import cudnn_double
from tests.gpu.conftest import is_stand_in
from tests.gpu.play import BF16, FLOAT32, FLOAT64, FP16, TF32, TOLERANCES, call, differences, dtypes, exact, precise
from tests.gpu.table import OPS, Check

CHECKS = [check for check in OPS if check.public in ("ops.conv2d", "ops.conv_relu", "ops.conv_relu_pool")]


@pytest.fixture(autouse=True)
def library(device: Backend) -> Iterator[None]:
    """On the stand-in, the double of cuDNN."""
    with cudnn_double() if is_stand_in(device) else nullcontext():
        yield


@pytest.mark.parametrize("mode", [FLOAT64, FLOAT32, TF32, BF16, FP16])
@pytest.mark.parametrize("algorithm", ["im2col", "cudnn"])
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_convolution_by_either_algorithm(device: Backend, check: Check, algorithm: str, mode: str) -> None:
    """cuDNN is skipped where it is not installed; what it cannot build falls back to im2col by itself."""
    if algorithm == "cudnn" and isinstance(cudnn.load(device.xp), str):
        pytest.skip(f"no cuDNN: {cudnn.load(device.xp)}")
    sample = exact(check.sample, mode)
    right = call(sample, numpy_backend(), [np.dtype(FLOAT64)] * len(sample.inputs))
    with precise(mode), cudnn.use_convolution(algorithm):
        found = call(sample, device, dtypes(sample, mode))
    assert not differences(found, right, TOLERANCES[mode])
