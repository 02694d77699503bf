"""SGD against its formulas, written out for one number at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.errors import UsageError
from nnmpi.optim.sgd import SGD
from nnmpi.optim.storage import Arrays


def by_hand(weight, grads, lr, momentum, nesterov, decay):
    """Return the weight after one update per gradient, and the momentum, in Python floats."""
    velocity = 0.0
    for grad in grads:
        grad = grad + decay * weight
        if momentum == 0:
            weight = weight - lr * grad
        elif nesterov:
            velocity = momentum * velocity + grad
            weight = weight - lr * (grad + momentum * velocity)
        else:
            velocity = momentum * velocity + grad
            weight = weight - lr * velocity
    return weight, velocity


@given(
    weights=st.lists(st.floats(-2, 2), min_size=1, max_size=5),
    grads=st.lists(st.floats(-2, 2), min_size=1, max_size=20),
    lr=st.floats(0, 0.5),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_follows_the_formulas(weights, grads, lr, momentum, nesterov, decay):
    nesterov = nesterov and momentum > 0
    data, grad = np.array(weights), np.zeros(len(weights))
    optimizer = SGD(Arrays([data], [grad]), lr, momentum, nesterov=nesterov, weight_decay=decay)
    for value in grads:
        grad[...] = value
        optimizer.step()
    expected = [by_hand(weight, grads, lr, momentum, nesterov, decay) for weight in weights]
    np.testing.assert_allclose(data, [weight for weight, _ in expected], rtol=1e-12, atol=1e-14)
    for (momenta,) in optimizer.slots().values():
        np.testing.assert_allclose(momenta, [velocity for _, velocity in expected], rtol=1e-12, atol=1e-14)


def test_two_updates_worked_out_on_paper():
    """Numbers that are exact in binary: w = 1, gradients 1 and 2, lr 1/2, momentum 1/2, decay 1/2."""
    data, grad = np.array([1.0]), np.array([1.0])
    optimizer = SGD(Arrays([data], [grad]), lr=0.5, momentum=0.5, nesterov=True, weight_decay=0.5)
    optimizer.step()  # g = 1 + 0.5 = 1.5, b = 1.5, direction = 1.5 + 0.75 = 2.25, w = 1 - 1.125
    assert data[0] == -0.125
    grad[...] = 2
    optimizer.step()  # g = 2 - 0.0625 = 1.9375, b = 0.75 + 1.9375 = 2.6875, direction = 3.28125, w -= 1.640625
    assert data[0] == -1.765625
    assert optimizer.slots()["momentum"][0] == 2.6875
    assert optimizer.steps == 2


def test_without_momentum_there_is_no_state():
    assert SGD(Arrays([np.zeros(3)], [np.zeros(3)]), 0.1).slots() == {}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"momentum": 1.0}, "momentum is 1.0; give a number of at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"momentum": float("nan")}, "momentum is nan"),
        ({"nesterov": True}, "nesterov needs momentum, which is 0"),
    ],
)
def test_refusals(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        SGD(Arrays([np.zeros(3)], [np.zeros(3)]), 0.1, **options)
