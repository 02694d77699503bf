"""Losses: their definitions, their size limits and labels that count for nothing."""

import math
import warnings

import numpy as np
import pytest

from nnmpi import Tensor, nn, ops
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.ops import binary_cross_entropy, cross_entropy, mse

LOGITS = np.array([[1.0, 2.0, 0.5], [-1.0, 0.0, 3.0], [0.1, 0.2, 0.3]])
LABELS = np.array([2, 0, 1])


def run(loss, logits, *arguments, **options):
    """Return the value and the gradient of the logits."""
    x = Tensor(logits, requires_grad=True)
    y = loss(x, *arguments, **options)
    y.backward(np.ones(y.shape))
    return y.data, x.grad


def by_hand(row, label, smoothing=0.0):
    """Return one row's cross-entropy from its definition."""
    log_sum = math.log(sum(math.exp(v) for v in row))
    target = [smoothing / len(row) + (1 - smoothing) * (i == label) for i in range(len(row))]
    return sum(t * (log_sum - v) for t, v in zip(target, row, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_by_hand(smoothing):
    """Each reduction is what it says."""
    expected = [by_hand(row, label, smoothing) for row, label in zip(LOGITS, LABELS, strict=True)]
    for reduction, value in (
        ("none", expected),
        ("sum", sum(expected)),
        ("mean", sum(expected) / 3),
    ):
        np.testing.assert_allclose(
            run(cross_entropy, LOGITS, LABELS, reduction, None, smoothing)[0], value, rtol=1e-14
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_labels(reduction, smoothing):
    """They add nothing to value, count or gradient, whatever their logits are."""
    given = {"reduction": reduction, "label_smoothing": smoothing}
    labels = np.array([2, -7, 1])
    wild = LOGITS.copy()
    wild[1] = [np.nan, np.inf, -np.inf]
    with np.errstate(invalid="ignore"):
        value, grad = run(cross_entropy, wild, labels, ignore_index=-7, **given)
    saved, kept_grad = run(cross_entropy, LOGITS[[0, 2]], labels[[0, 2]], **given)
    np.testing.assert_allclose(value, saved, rtol=1e-15)
    np.testing.assert_allclose(grad[[0, 2]], kept_grad, rtol=1e-15)
    np.testing.assert_array_equal(grad[1], 0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_counts(reduction):
    """With all labels ignored, or no rows at all, the loss is 0 and not NaN."""
    value, grad = run(cross_entropy, LOGITS, np.full(3, -1), reduction, -1)
    assert value == 0
    np.testing.assert_array_equal(grad, np.zeros((3, 3)))
    value, grad = run(cross_entropy, np.zeros((0, 3)), np.zeros(0, int), reduction)
    assert value == 0
    assert grad.shape == (0, 3)
    for loss in (mse, binary_cross_entropy):
        assert run(loss, np.zeros((0, 3)), np.zeros((0, 3)), reduction)[0] == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_logits(dtype):
    """At 1e4 on either side the losses and gradients are finite and right."""
    big = np.array([[1e4, -1e4], [-1e4, 1e4]], dtype)
    value, grad = run(cross_entropy, big, [0, 0], "none")
    np.testing.assert_array_equal(value, [0, 2e4])
    np.testing.assert_array_equal(grad, [[0, 0], [-1, 1]])
    value, grad = run(binary_cross_entropy, big, np.array([[1, 1], [0, 0]], dtype), "none")
    np.testing.assert_array_equal(value, [[0, 1e4], [0, 1e4]])
    np.testing.assert_array_equal(grad, [[0, -1], [0, 1]])
    value, _ = run(cross_entropy, np.full((1, 2), 1e4, dtype), [0], "none")
    np.testing.assert_allclose(value, [math.log(2)], rtol=1e-6)


def test_labels_of_any_kind():
    """Lists, tensors and any integers; of a single row, a single number."""
    expected = run(cross_entropy, LOGITS, LABELS)[0]
    for labels in ([2, 0, 1], Tensor([2, 0, 1]), LABELS.astype("uint8"), LABELS.astype("int16")):
        assert run(cross_entropy, LOGITS, labels, ignore_index=-100)[0] == expected
    np.testing.assert_allclose(run(cross_entropy, LOGITS[0], 2)[0], by_hand(LOGITS[0], 2))


def test_squared_and_binary_errors_by_hand():
    """Each reduction is what it says."""
    x, t = LOGITS, 1 / (1 + LABELS[:, None] + np.arange(3))
    s = 1 / (1 + np.exp(-x))
    for loss, item in (
        (mse, (x - t) ** 2),
        (binary_cross_entropy, -t * np.log(s) - (1 - t) * np.log(1 - s)),
    ):
        for reduction, expected in (("none", item), ("sum", item.sum()), ("mean", item.mean())):
            np.testing.assert_allclose(run(loss, x, t, reduction)[0], expected, rtol=1e-12)
    target = Tensor(t, requires_grad=True)  # it alone
    mse(Tensor(x), target, "sum").backward()
    np.testing.assert_allclose(target.grad, 2 * (t - x), rtol=1e-12)


@pytest.mark.host_only("on a device they make the loss NaN")
def test_negative_labels_of_narrow_dtypes():
    """-1 is found also where, without its sign, it would be a class."""
    logits = np.zeros((2, 300), "float32")
    with pytest.raises(ShapeError, match="label -1 at row 1"):
        cross_entropy(Tensor(logits), np.array([127, -1], "int8"))
    assert cross_entropy(Tensor(logits), np.array([299, 200], "uint16")).item() == pytest.approx(
        math.log(300)
    )


def test_probabilities_in_the_place_of_logits_are_refused():
    """PyTorch's binary_cross_entropy takes them; also without gradients, and as a view."""
    y = np.ones((1, 2), "float32")
    for trained in (True, False):
        x = Tensor(np.array([[2.0, -1.0]], "float32"), requires_grad=trained)
        p = ops.sigmoid(x)
        for logits in (p, nn.Sigmoid()(x), p.reshape(2), p[:, 0], p.flatten(0)[:1]):
            with pytest.raises(UsageError, match="applies the sigmoid itself; give it the logits"):
                ops.binary_cross_entropy(logits, y.reshape(-1)[: logits.size].reshape(logits.shape))
        with pytest.warns(UserWarning, match="applies the softmax itself, .*; give it the logits"):
            ops.cross_entropy(ops.softmax(x).reshape(1, 2), np.array([1]))
        for loss, target in ((ops.nll, np.array([1])), (ops.kl_div, ops.softmax(x))):
            with pytest.raises(UsageError, match="takes logarithms .*; give it that of a log_soft"):
                loss(nn.Softmax()(x), target)
            assert loss(ops.log_softmax(x), target).item() > -1e-6
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ops.cross_entropy(ops.log_softmax(x), np.array([1]))
            ops.cross_entropy(2 * ops.softmax(x), np.array([1]))  # a temperature, say
    assert ops.binary_cross_entropy(x, y).item() == pytest.approx(0.7201, abs=1e-4)
    assert ops.kl_div(-x[0, 0], np.float32(1), "batchmean").item() == 2  # one number is a row
