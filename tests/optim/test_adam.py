"""Adam and AdamW against their formulas, written out for one number at a time as in the papers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_default_decay():
    """AdamW decays by 0.01 unless told otherwise, Adam not at all."""
    storage = Arrays([np.zeros(1)], [np.zeros(1)])
    assert AdamW(storage).weight_decay == (0.01,)
    assert Adam(storage).weight_decay == (0.0,)
