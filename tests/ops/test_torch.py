"""The same numbers as PyTorch, forward and backward in float64, for everything that has an argument
to get wrong.
"""

import numpy as np
import pytest

from nnmpi import ops
from nnmpi.nn.mode import training
from nnmpi.nn.norm import BatchNorm
from nnmpi.tensor.tensor import Tensor

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # the arrays are small, and other tests want the cores
functional = torch.nn.functional


def images(array):
    """Return images (batch, height, width, channels) as PyTorch wants them: (batch, channels,
    height, width).
    """
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2))


def same(array):
    """Return the array as it is."""
    return array


def compare(ours, theirs, inputs, layouts, out=same, rtol=1e-12):
    """Compare results and gradients of two functions at inputs; layouts and out turn ours into
    PyTorch's arrays.
    """
    leaves = [Tensor(x, requires_grad=True) for x in inputs]
    others = [
        torch.tensor(layout(x), requires_grad=True)
        for x, layout in zip(inputs, layouts, strict=True)
    ]
    y, expected = ours(*leaves), theirs(*others)
    np.testing.assert_allclose(out(y.data), expected.detach().numpy(), rtol=rtol, atol=1e-12)
    grad = np.random.default_rng(1).standard_normal(y.shape)
    y.backward(grad)
    expected.backward(torch.tensor(out(grad)))
    for leaf, other, layout in zip(leaves, others, layouts, strict=True):
        np.testing.assert_allclose(layout(leaf.grad), other.grad.numpy(), rtol=rtol, atol=1e-12)


@pytest.fixture
def normal():
    """Return a function that draws normal arrays."""
    rng = np.random.default_rng(0)
    return lambda *shape: rng.standard_normal(shape)


@pytest.mark.parametrize("shape", [(6, 4), (2, 5, 3, 4)])
@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_batch_norm(shape, momentum, normal):
    """Three batches in training, running statistics after each, then evaluation, with its
    gradients.
    """
    layer = BatchNorm(4, 1e-3, momentum).initialize(dtype="float64")
    theirs = torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d
    reference = theirs(4, momentum=momentum, eps=1e-3, dtype=torch.float64)
    layout = images if len(shape) == 4 else same
    for values, parameter in ((normal(4), "weight"), (normal(4), "bias")):
        getattr(layer, parameter).data[...] = values
        getattr(reference, parameter).data[...] = torch.tensor(values)
    for step in range(4):
        x = normal(*shape) * 3 + 1
        if step == 3:
            reference.eval()
            compare(layer, reference, [x], [layout], layout)
        else:
            with training():
                compare(layer, reference, [x], [layout], layout, rtol=1e-10)
        for name in ("weight", "bias"):
            np.testing.assert_allclose(
                getattr(layer, name).grad, getattr(reference, name).grad.numpy(), rtol=1e-10
            )
        np.testing.assert_allclose(
            layer.running_mean.data, reference.running_mean.numpy(), rtol=1e-12
        )
        np.testing.assert_allclose(
            layer.running_variance.data, reference.running_var.numpy(), rtol=1e-12
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore", [None, 2, -1])
@pytest.mark.parametrize("leading", [(7,), (3, 4)])
def test_cross_entropy(reduction, smoothing, ignore, leading, normal):
    """Smoothing and ignored labels together, for rows and for sequences."""
    labels = np.random.default_rng(2).integers(0, 5, leading)
    if ignore == -1:
        labels.flat[[0, -1]] = -1
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ignored = {} if ignore is None else {"ignore_index": ignore}

    def theirs(x):
        y = functional.cross_entropy(
            x.reshape(-1, 5), torch.tensor(labels.ravel()), **options, **ignored
        )
        return y.reshape(leading) if reduction == "none" else y

    compare(
        lambda x: ops.cross_entropy(x, labels, **options, **ignored),
        theirs,
        [normal(*leading, 5)],
        [same],
    )
