"""Adam and AdamW against their formulas, written out for one number at a time as in the papers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.errors import UsageError
from nnmpi.optim.adam import Adam, AdamW
from nnmpi.optim.storage import Arrays


def by_hand(weight, grads, lr, betas, eps, decay, decoupled):
    """Return weight, m and v after one update per gradient, in Python floats."""
    beta1, beta2 = betas
    m = v = 0.0
    for t, grad in enumerate(grads, start=1):
        if decoupled:
            weight = weight - lr * decay * weight
        else:
            grad = grad + decay * weight
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        weight = weight - lr * m_hat / (math.sqrt(v_hat) + eps)
    return weight, m, v


@pytest.mark.parametrize("kind", [Adam, AdamW])
@given(
    weights=st.lists(st.floats(-2, 2), min_size=1, max_size=5),
    grads=st.lists(st.floats(-2, 2), min_size=1, max_size=20),
    lr=st.floats(0, 0.1),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)]),
    eps=st.sampled_from([1e-8, 1e-2]),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_follows_the_formulas(kind, weights, grads, lr, betas, eps, decay):
    data, grad = np.array(weights), np.zeros(len(weights))
    optimizer = kind(Arrays([data], [grad]), lr, betas, eps, decay)
    for value in grads:
        grad[...] = value
        optimizer.step()
    expected = np.array([by_hand(w, grads, lr, betas, eps, decay, kind is AdamW) for w in weights]).T
    # Where gradients almost cancel in m, m / sqrt(v) carries m's absolute error: hence the absolute tolerance.
    np.testing.assert_allclose(data, expected[0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(optimizer.slots()["m"][0], expected[1], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(optimizer.slots()["v"][0], expected[2], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("gradient", [1e-3, 1.0, -1e6])
def test_the_first_update_is_as_long_as_the_learning_rate(gradient):
    """The bias corrections cancel in the first update: it is lr, whatever the gradient's size, against its sign."""
    data = np.zeros(1)
    Adam(Arrays([data], [np.full(1, gradient)]), lr=0.25, eps=0).step()
    np.testing.assert_allclose(data, -math.copysign(0.25, gradient), rtol=1e-14)


def test_decoupled_decay_does_not_enter_the_state():
    """With a gradient of zero AdamW shrinks the weight by lr * decay, and Adam's m and v stay zero."""
    data = np.array([4.0])
    optimizer = AdamW(Arrays([data], [np.zeros(1)]), lr=0.5, weight_decay=0.5)
    optimizer.step()
    assert data[0] == 3.0
    assert not optimizer.slots()["m"][0].any()
    assert not optimizer.slots()["v"][0].any()


def test_default_decay():
    """AdamW decays by 0.01 unless told otherwise, Adam not at all."""
    storage = Arrays([np.zeros(1)], [np.zeros(1)])
    assert AdamW(storage).weight_decay == (0.01,)
    assert Adam(storage).weight_decay == (0.0,)


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"betas": (1.0, 0.999)}, r"betas\[0\] is 1.0; give a number of at least 0 and below 1"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
        ({"betas": (0.9, float("nan"))}, r"betas\[1\] is nan"),
        ({"eps": -1e-8}, "eps is -1e-08; give a finite number"),
        ({"eps": float("nan")}, "eps is nan"),
    ],
)
def test_refusals(kind, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        kind(Arrays([np.zeros(3)], [np.zeros(3)]), **options)
