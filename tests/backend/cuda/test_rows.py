"""Softmax, cross-entropy and layer normalization on the emulator: each against float64."""

import numpy as np
import pytest

from tests.backend.cuda.host import (
    DTYPES,
    F32,
    F64,
    blank,
    close,
    draw,
    held,
    kernels,
    needs_emulator,
    parameters_of,
    sums_of,
    wide,
)

pytestmark = [needs_emulator, pytest.mark.usefixtures("strict")]

LENGTHS = pytest.mark.parametrize("n", [1, 7, 8, 33, 200, 1024, 1025, 8200])


def probabilities(scores):
    """Softmax of rows in float64; a row of nothing but -inf is 0."""
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=-1, keepdims=True)


@DTYPES
@LENGTHS
def test_softmax(dtype, n):
    """Forward, in place too, and the gradient; large scores of either sign."""
    x, grad = draw(5, n, dtype=dtype, scale=8), draw(5, n, dtype=dtype, seed=1)
    x[1] += 500
    x[2] -= 500
    expected = probabilities(wide(x) * 0.5)
    y = blank(x.shape, dtype)
    kernels().softmax(x, 0.5, False, y)
    close(y, expected, 300 if dtype == F32 else 20, expected.max(axis=1, keepdims=True))
    kernels().softmax(x, 0.5, False, x)
    np.testing.assert_array_equal(x, y)
    share, above = wide(y), wide(grad)
    result = 0.5 * share * (above - (share * above).sum(axis=1, keepdims=True))
    kernels().softmax_grad(grad, y, 0.5, False, grad)
    close(grad, result, 20, np.abs(above).max(initial=0))


@DTYPES
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (6, 6), (40, 40), (3, 50), (20, 1100), (9, 4)])
def test_causal_softmax(dtype, queries, keys):
    """What a query does not see is 0, and not read: it may be NaN."""
    x, grad = draw(2, 3, queries, keys, dtype=dtype), draw(2, 3, queries, keys, dtype=dtype, seed=1)
    hidden = np.arange(keys) > np.arange(queries)[:, None] + keys - queries
    x[..., hidden] = np.nan
    grad[..., hidden] = np.nan
    scores = np.where(hidden, -np.inf, wide(x) / 3)
    seen = ~hidden.all(axis=1)
    expected = np.zeros(x.shape)
    expected[:, :, seen] = probabilities(scores[:, :, seen])
    y, out = blank(x.shape, dtype), blank(x.shape, dtype)
    kernels().softmax(x, 1 / 3, True, y)
    close(y, expected, 20, 1)
    kernels().softmax_grad(grad, y, 1 / 3, True, out)
    above, share = np.where(hidden, 0, wide(grad)), wide(y)
    close(out, share * (above - (share * above).sum(axis=-1, keepdims=True)) / 3, 20, np.abs(above).max())


@pytest.mark.parametrize("n", [8, 2000])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_softmax_shows_what_is_not_finite(n, bad):
    """A row with a NaN or infinity is NaN, wherever it stands; scores of -inf count for nothing."""
    x = held(np.zeros((n, n), np.float32)) if n == 8 else held(np.zeros((3, n), np.float32))
    x[np.arange(len(x)), np.arange(len(x)) * (n - 1) // (len(x) - 1)] = bad
    y = blank(x.shape, F32)
    kernels().softmax(x, 1.0, False, y)
    assert np.isnan(y).any(axis=1).all()
    x[...] = 0
    x[:, : n // 2] = -np.inf
    kernels().softmax(x, 1.0, False, y)
    np.testing.assert_array_equal(y, np.where(np.arange(n) < n // 2, 0, 1 / (n - n // 2)).astype(np.float32) + 0 * y)


@DTYPES
@pytest.mark.parametrize("classes", [1, 2, 10, 16, 77, 1000, 3000])
@pytest.mark.parametrize(("ignore", "smoothing"), [(None, 0.0), (1, 0.1)])
def test_cross_entropy(dtype, classes, ignore, smoothing):
    """Losses and gradients, in the logits' dtype and in float32; the gradient may take the logits' place."""
    logits = draw(9, classes, dtype=dtype, scale=4)
    logits[1] += 100
    logits[2] -= 100
    labels = np.arange(9) % classes
    shifted = wide(logits) - wide(logits).max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, keepdims=True)
    target = np.full((9, classes), smoothing / classes)
    target[np.arange(9), labels] += 1 - smoothing
    losses, gradient = (target * (np.log(sums) - shifted)).sum(axis=1), np.exp(shifted) / sums - target
    if ignore is not None:
        losses[labels == ignore], gradient[labels == ignore] = 0, 0
    for kind in ("int64", "uint8", "int16") if classes <= 77 else ("int32", "uint16"):
        for place in dict.fromkeys([dtype, sums_of(dtype)]):
            found, result = blank(9, sums_of(dtype)), blank(logits.shape, place)
            kernels().softmax_loss(logits, held(labels, kind), found, result, ignore, smoothing)
            close(found, losses, 20, 1 + np.abs(shifted).max())
            close(result, gradient, 100, 1)
    found = blank(9, sums_of(dtype))
    kernels().softmax_loss(logits, held(labels, "uint32"), found, logits, ignore, smoothing)
    close(found, losses, 20, 1 + np.abs(shifted).max())
    close(logits, gradient, 100, 1)


@pytest.mark.parametrize("classes", [10, 2000])
@pytest.mark.parametrize("kind", ["int8", "int64", "uint64"])
def test_labels_out_of_range(classes, kind):
    """They give NaN, and nothing beside the logits is read (guard pages would show it)."""
    wrong = {"int8": -1, "int64": 2**40, "uint64": 2**63 + 5}[kind]
    logits, losses, gradient = draw(3, classes), blank(3, F32), blank((3, classes), F32)
    kernels().softmax_loss(logits, held([1, wrong, 2], kind), losses, gradient)
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
    np.testing.assert_array_equal(np.isnan(gradient), np.array([[False], [True], [False]]) & np.ones(classes, bool))


@DTYPES
@LENGTHS
def test_layer_norm(dtype, n):
    """Forward and backward, by what was normalized and by the means; one row is constant, and one far from 0."""
    x, grad = draw(6, n, dtype=dtype), draw(6, n, dtype=dtype, seed=1)
    x[1], x[2] = 3, x[2] + 100
    v, wider = wide(x), sums_of(dtype)
    centred = v - v.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    reach = np.abs(v).max(axis=1, keepdims=True) * factor + 1
    for parameters in parameters_of(dtype):
        scale, shift = draw(n, dtype=parameters, seed=2), draw(n, dtype=parameters, seed=3)
        y, normal, inverse, mean = blank(x.shape, dtype), blank(x.shape, dtype), blank(6, wider), blank(6, wider)
        kernels().layer_norm(x, scale, shift, 1e-5, y, normal, inverse)
        close(normal, centred * factor, 10, reach)
        close(y, centred * factor * wide(scale) + wide(shift), 10, reach * 3)
        again = blank(x.shape, dtype)
        kernels().layer_norm(x, scale, shift, 1e-5, again, None, inverse, mean)
        np.testing.assert_array_equal(again, y)
        close(mean, v.mean(axis=1), 10, np.abs(v).max())
        close(inverse, factor[:, 0], 20)
        for kept, middle in ((normal, None), (x, mean)):
            unit = wide(normal) if middle is None else centred * factor
            inner = wide(grad) * wide(scale)
            along = (inner * unit).mean(axis=1, keepdims=True)
            results = [blank(x.shape, dtype), blank(n, parameters), blank(n, parameters)]
            kernels().layer_norm_grad(grad, kept, inverse, scale, *results, mean=middle)
            size = factor * (np.abs(inner).max() + reach * np.abs(along).max()) * (1 if middle is None else reach)
            close(results[0], (inner - inner.mean(axis=1, keepdims=True) - unit * along) * factor, 20, size)
            close(results[1], (wide(grad) * unit).sum(axis=0), 20, np.abs(wide(grad)).sum(axis=0) * reach.max())
            close(results[2], wide(grad).sum(axis=0), 10, np.abs(wide(grad)).sum(axis=0))


@pytest.mark.parametrize("n", [40, 2000])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_infinite_variance_is_nan(dtype, n):
    """Where squares overflow: not zeros, which would hide that a run diverges."""
    x, ones = draw(3, n, dtype=dtype), held(np.ones(n), dtype)
    x[1, 7] = 1e30 if dtype == F32 else 1e200
    y, inverse, mean, to_x = blank(x.shape, dtype), blank(3, dtype), blank(3, dtype), blank(x.shape, dtype)
    kernels().layer_norm(x, ones, ones, 1e-5, y, None, inverse, mean)
    kernels().layer_norm_grad(x, x, inverse, ones, to_x, None, None, mean=mean)
    for found in (y, to_x):
        np.testing.assert_array_equal(np.isnan(found), np.array([[False], [True], [False]]) & np.ones(n, bool))


def test_gradients_that_nobody_wants():
    """Each has its place or none."""
    x, scale = draw(6, 40), draw(40)
    inverse, normal = held(np.ones(6, np.float32)), x
    whole = [blank((6, 40), F32), blank(40, F32), blank(40, F32)]
    kernels().layer_norm_grad(x, normal, inverse, scale, *whole)
    for left_out in range(3):
        some = [None if i == left_out else np.full_like(each, np.nan) for i, each in enumerate(whole)]
        kernels().layer_norm_grad(x, normal, inverse, scale, *some)
        for i, each in enumerate(some):
            assert each is None or (each == whole[i]).all()


def test_many_rows_make_several_blocks():
    """The parameters' gradients are the same each time, and right."""
    grad, normal = draw(3000, 24), draw(3000, 24, seed=1)
    inverse, scale = held(np.ones(3000, np.float32)), draw(24)
    found = []
    for _ in range(2):
        to_scale, to_shift = blank(24, F32), blank(24, F32)
        kernels().layer_norm_grad(grad, normal, inverse, scale, None, to_scale, to_shift)
        close(to_scale, (wide(grad) * wide(normal)).sum(axis=0), 20, 3000)
        close(to_shift, wide(grad).sum(axis=0), 20, 3000)
        found.append((to_scale, to_shift))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_nothing_at_all(shape):
    """No rows or no columns: nothing is launched, but sums over no rows are 0."""
    x, y = blank(shape, F64), blank(shape, F64)
    kernels().softmax(x, 1.0, False, y)
    kernels().softmax_loss(x, held(np.zeros(shape[0], np.int64)), blank(shape[0], F64), y)
    scale = blank(shape[1], F64)
    kernels().layer_norm(x, scale, scale, 1e-5, y, None, blank(shape[0], F64))
    to_scale, to_shift = blank(shape[1], F64), blank(shape[1], F64)
    kernels().layer_norm_grad(x, x, blank(shape[0], F64), scale, y, to_scale, to_shift)
    assert (to_scale == 0).all()
    assert (to_shift == 0).all()
