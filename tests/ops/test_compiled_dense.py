"""Losses by compiled kernels: the plain ones in float64, and what is left to these."""

import numpy as np
import pytest

import nnmpi
from nnmpi.backend.kernels import jit
from nnmpi.errors import ShapeError
from nnmpi.ops.loss import cross_entropy
from nnmpi.tensor.tensor import Tensor

pytest.importorskip("numba")

pytestmark = pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")


def run(function, arrays, dtype, compiled):
    """Return the result and the gradients, of whole numbers times the result."""
    tensors = [Tensor(a.astype(dtype), requires_grad=True) for a in arrays]
    with jit(compiled):
        y = function(*tensors)
        y.backward((np.arange(y.size) % 7 - 3.0).reshape(y.shape).astype(dtype))
    return [y.data, *(t.grad for t in tensors)]


def compare(function, arrays, share=2e-6):
    """Compare with the plain operation in float64, within a share of the largest."""
    expected = run(function, arrays, np.float64, False)
    found = run(function, arrays, np.float32, True)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=share * abs(theirs).max(initial=1e-3))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7, 3), (2, 3, 40), (1, 1), (0, 4)])
def test_cross_entropy(reduction, shape, compiled_calls):
    """Each reduction; logits of more than two axes; no rows."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(shape, dtype=np.float32) * np.float32(5)
    labels = rng.integers(0, shape[-1], shape[:-1])
    compare(lambda x: cross_entropy(x, labels, reduction), [logits])
    assert compiled_calls == ["softmax_loss"]


def test_labels_out_of_range_are_refused():
    """Before a kernel could write elsewhere; in a step that is replayed too."""
    x, labels = Tensor(np.zeros((2, 3), np.float32), requires_grad=True), np.array([0, 1])
    with jit():
        with pytest.raises(ShapeError, match="label 3"):
            cross_entropy(x, np.array([0, 3]))
        step = nnmpi.compile(lambda x, labels: cross_entropy(x, labels))
        step(x.data, Tensor(labels))
        with pytest.raises(ShapeError, match="label -1"):
            step(x.data, Tensor(np.array([0, -1])))


@pytest.mark.parametrize("settings", [{"ignore_index": 2}, {"label_smoothing": 0.1}])
def test_other_losses_are_plain(settings, compiled_calls):
    """Ignored labels, smoothing, and labels of another dtype."""
    logits = np.random.default_rng(0).standard_normal((5, 3), dtype=np.float32)
    labels = np.array([0, 2, 1, 2, 0])
    compare(lambda x: cross_entropy(x, labels, **settings), [logits])
    compare(lambda x: cross_entropy(x, labels.astype(np.uint8)), [logits])
    assert compiled_calls == []
