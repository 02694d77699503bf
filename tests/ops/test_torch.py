"""The same numbers as PyTorch, forward and backward in float64, for everything that has an argument to get wrong."""

import numpy as np
import pytest

from nnmpi import ops
from nnmpi.nn.mode import training
from nnmpi.nn.norm import BatchNorm
from nnmpi.tensor import index
from nnmpi.tensor.tensor import Tensor

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # the arrays are small, and other tests want the cores
functional = torch.nn.functional


def images(array):
    """Return images (batch, height, width, channels) as PyTorch wants them: (batch, channels, height, width)."""
    return np.ascontiguousarray(array.transpose(0, 3, 1, 2))


def kernels(array):
    """Return kernels (kh, kw, in, out) as PyTorch wants them: (out, in, kh, kw)."""
    return np.ascontiguousarray(array.transpose(3, 2, 0, 1))


def same(array):
    """Return the array as it is."""
    return array


def compare(ours, theirs, inputs, layouts, out=same, rtol=1e-12):
    """Compare results and gradients of two functions at inputs; layouts and out turn ours into PyTorch's arrays."""
    leaves = [Tensor(x, requires_grad=True) for x in inputs]
    others = [torch.tensor(layout(x), requires_grad=True) for x, layout in zip(inputs, layouts, strict=True)]
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


CONVOLUTIONS = [
    # sizes (n, h, w, in, out), kernel, stride, padding, dilation, groups
    ((2, 7, 8, 3, 4), (3, 3), 1, 0, 1, 1),
    ((2, 7, 8, 3, 4), (3, 3), 1, 1, 1, 1),
    ((2, 7, 8, 3, 4), (3, 3), 2, 1, 1, 1),
    ((2, 7, 8, 4, 6), (3, 2), (2, 1), (0, 1), 1, 2),
    ((2, 9, 8, 4, 4), (3, 3), 1, 2, 2, 4),
    ((2, 9, 9, 2, 3), (2, 3), (3, 2), (1, 2), (2, 1), 1),
    ((2, 5, 5, 3, 4), (1, 1), 1, 0, 1, 1),
    ((2, 5, 5, 3, 4), (1, 1), 2, 0, 1, 1),
    ((2, 5, 5, 3, 4), (1, 1), 1, 1, 1, 1),
    ((1, 4, 5, 1, 2), (4, 5), 1, 0, 1, 1),
    ((1, 3, 3, 2, 2), (5, 5), 1, 2, 1, 1),
    ((1, 6, 6, 1, 1), (2, 2), 1, 3, 1, 1),
    ((3, 1, 1, 4, 4), (3, 3), 1, 1, 1, 2),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_conv2d(case, bias, normal):
    """Stride, padding, dilation, groups; rows and columns alike and different; pixels and whole images as kernels."""
    (n, h, w, c, o), kernel, stride, padding, dilation, groups = case
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    inputs = [normal(n, h, w, c), normal(*kernel, c // groups, o), normal(o)]
    layouts = [images, kernels, same]
    count = 3 if bias else 2
    compare(
        lambda *args: ops.conv2d(*args, **options),
        lambda *args: functional.conv2d(*args, **options),
        inputs[:count],
        layouts[:count],
        images,
        rtol=1e-10,
    )


@pytest.mark.parametrize(
    "options",
    [
        (2, 2, 0),
        (3, 1, 1),
        (3, 2, 1),
        (2, 3, 0),
        ((3, 2), (1, 2), (1, 0)),
        ((2, 4), (2, 1), (1, 2)),
        (5, 5, 2),
        (1, 2, 0),
    ],
)
def test_pools(options, normal):
    """Windows that overlap, touch and leave gaps; borders, which count for nothing and for zero."""
    compare(
        lambda x: ops.max_pool2d(x, *options),
        lambda x: functional.max_pool2d(x, *options),
        [normal(2, 7, 6, 3)],
        [images],
        images,
    )
    compare(
        lambda x: ops.avg_pool2d(x, *options),
        lambda x: functional.avg_pool2d(x, *options),
        [normal(2, 7, 6, 3)],
        [images],
        images,
    )


@pytest.mark.parametrize("shape", [(6, 4), (2, 5, 3, 4)])
@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_batch_norm(shape, momentum, normal):
    """Three batches in training, running statistics after each, then evaluation, with its gradients."""
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
            np.testing.assert_allclose(getattr(layer, name).grad, getattr(reference, name).grad.numpy(), rtol=1e-10)
        np.testing.assert_allclose(layer.running_mean.data, reference.running_mean.numpy(), rtol=1e-12)
        np.testing.assert_allclose(layer.running_variance.data, reference.running_var.numpy(), rtol=1e-12)


@pytest.mark.parametrize("features", [(5,), (3, 5)])
def test_layer_norm(features, normal):
    """Over the last axis, and over the last two."""
    compare(
        lambda *args: ops.layer_norm(*args, eps=1e-4),
        lambda x, scale, shift: functional.layer_norm(x, features, scale, shift, 1e-4),
        [normal(2, 4, *features), normal(*features), normal(*features)],
        [same] * 3,
        rtol=1e-10,
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
        y = functional.cross_entropy(x.reshape(-1, 5), torch.tensor(labels.ravel()), **options, **ignored)
        return y.reshape(leading) if reduction == "none" else y

    compare(lambda x: ops.cross_entropy(x, labels, **options, **ignored), theirs, [normal(*leading, 5)], [same])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_errors(reduction, normal):
    """Squared, absolute and Huber's error and binary cross-entropy, with gradients of both operands."""
    inputs = [normal(3, 4), np.random.default_rng(3).uniform(0, 1, (3, 4))]
    compare(
        lambda x, t: ops.mae(x, t, reduction),
        lambda x, t: functional.l1_loss(x, t, reduction=reduction),
        inputs,
        [same] * 2,
    )
    for delta in (0.3, 1.0):
        compare(
            lambda x, t, delta=delta: ops.huber(x, t, reduction, delta),
            lambda x, t, delta=delta: functional.huber_loss(x, t, reduction=reduction, delta=delta),
            inputs,
            [same] * 2,
        )
    compare(
        lambda x, t: ops.mse(x, t, reduction),
        lambda x, t: functional.mse_loss(x, t, reduction=reduction),
        inputs,
        [same] * 2,
    )
    compare(
        lambda x, t: ops.binary_cross_entropy(x, t, reduction),
        lambda x, t: functional.binary_cross_entropy_with_logits(x, t, reduction=reduction),
        inputs,
        [same] * 2,
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ops.relu, functional.relu),
        (lambda x: ops.leaky_relu(x, 0.2), lambda x: functional.leaky_relu(x, 0.2)),
        (ops.gelu, functional.gelu),
        (lambda x: ops.gelu(x, "tanh"), lambda x: functional.gelu(x, approximate="tanh")),
        (ops.silu, functional.silu),
        (ops.sigmoid, torch.sigmoid),
        (ops.tanh, torch.tanh),
        (ops.softmax, lambda x: torch.softmax(x, -1)),
        (lambda x: ops.softmax(x, 0), lambda x: torch.softmax(x, 0)),
        (lambda x: ops.log_softmax(x, 1), lambda x: torch.log_softmax(x, 1)),
        (lambda x: x.var(1, correction=1), lambda x: x.var(1, correction=1)),
        (lambda x: x.max(2), lambda x: x.amax(2)),
        (lambda x: (x * x + 1) ** 0.5, lambda x: (x * x + 1) ** 0.5),
    ],
)
def test_elementwise_and_softmax(ours, theirs, normal):
    """Values from the middle to the tails."""
    compare(ours, theirs, [normal(3, 4, 5) * 4], [same])


@pytest.mark.parametrize("indices", [[0, 0, 0], [[3, 1], [1, 1]]])
def test_embedding(indices, normal):
    """Rows picked several times."""
    compare(
        lambda table: ops.embedding(table, indices),
        lambda table: functional.embedding(torch.tensor(indices), table),
        [normal(4, 3)],
        [same],
    )


@pytest.mark.parametrize(
    "key",
    [
        (slice(1, 3), slice(None, None, 2)),
        (Ellipsis, 1),
        (None, 2),
        np.array([0, 2, 2, -1]),
        (np.array([0, 2, 2]), np.array([1, 1, 1])),
        (slice(None), np.array([[0, 0], [1, 4]])),
        (np.array([0, 1]), slice(None), np.array([2, 2])),
    ],
)
def test_indexing(key, normal):
    """Slices, new axes, and integer arrays that name places twice."""

    def plain(part):
        return torch.tensor(part) if isinstance(part, np.ndarray) else part

    theirs = tuple(plain(part) for part in key) if isinstance(key, tuple) else plain(key)
    compare(lambda x: x[key], lambda x: x[theirs], [normal(4, 5, 3)], [same])


def test_masks_and_gather(normal):
    """A boolean mask, and picking along an axis."""
    x = normal(4, 5)
    mask, places = x > 0, np.array([[0, 0, 3], [1, 4, 4], [2, 2, 2], [0, 1, 2]])
    compare(lambda t: t[mask], lambda t: t[torch.tensor(mask)], [x], [same])
    compare(
        lambda t: index.take_along_axis(t, places, 1), lambda t: torch.gather(t, 1, torch.tensor(places)), [x], [same]
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((4, 1, 2, 3), (5, 3, 2)), ((3,), (4, 3, 2)), ((2, 0), (0, 3))],
)
def test_matmul(a, b, normal):
    """Vectors, matrices, stacks that broadcast, and an inner size of 0."""
    compare(lambda x, y: x @ y, lambda x, y: x @ y, [normal(*a), normal(*b)], [same] * 2)
