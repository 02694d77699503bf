"""SGD against its formulas, written out for one number at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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
