"""The error function against the standard library's."""

import math

import numpy as np
import pytest

from nnmpi.backend.kernels.dense import erf

POINTS = np.concatenate([np.linspace(-7, 7, 20_001), [0.0, 1e-300, 1e-8, 30, 1e3, np.inf, -np.inf]])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-15), ("float32", 1e-6)])
def test_erf(dtype, tolerance):
    """To 1e-15 in float64, 1e-6 in float32, in the dtype of x; odd, and exact at its ends."""
    x = POINTS.astype(dtype)
    y = erf(x)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, [math.erf(v) for v in x.tolist()], rtol=0, atol=tolerance)
    np.testing.assert_array_equal(erf(-x), -y)
    assert (abs(y) <= 1).all()
    assert erf(np.array([0.0, np.inf, -np.inf], dtype)).tolist() == [0, 1, -1]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_erf_of_huge_numbers(dtype):
    """Their square is beyond the range, the function is 1."""
    x = np.array([1e30, -1e30, np.finfo(dtype).max], dtype)
    np.testing.assert_array_equal(erf(x), [1, -1, 1])


def test_erf_of_nan():
    """Is NaN."""
    np.testing.assert_array_equal(np.isnan(erf(np.array([np.nan, 1.0]))), [True, False])


def test_erf_of_any_shape():
    """Also of a single number and of none."""
    for shape in ((), (0,), (2, 0, 3), (2, 3)):
        assert erf(np.full(shape, 0.5)).shape == shape
