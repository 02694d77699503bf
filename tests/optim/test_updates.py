"""SGD, Adam and AdamW against their formulas, written out for one number at a time; and compiled
ones.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi import jit, optim
from nnmpi.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Arrays, Lion, RMSprop
from nnmpi.optim.updates import OPTIMIZERS
from tests.optim.test_optimizer import CASES

WEIGHTS, GRADS = (
    st.lists(st.floats(-2, 2), min_size=1, max_size=5),
    st.lists(st.floats(-2, 2), min_size=1, max_size=20),
)


def adam_by_hand(weight, grads, lr, betas, eps, decay, decoupled, amsgrad):
    """Return weight, m and v after one update per gradient, in Python floats."""
    beta1, beta2 = betas
    m = v = largest = 0.0
    for t, grad in enumerate(grads, start=1):
        if decoupled:
            weight = weight - lr * decay * weight
        else:
            grad = grad + decay * weight
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        largest = max(largest, v) if amsgrad else v
        m_hat = m / (1 - beta1**t)
        weight = weight - lr * m_hat / (math.sqrt(largest / (1 - beta2**t)) + eps)
    return weight, m, v


@pytest.mark.parametrize("kind", [Adam, AdamW])
@given(
    weights=WEIGHTS,
    grads=GRADS,
    amsgrad=st.booleans(),
    lr=st.floats(0, 0.1),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)]),
    eps=st.sampled_from([1e-8, 1e-2]),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_adam_follows_the_formulas(kind, weights, grads, amsgrad, lr, betas, eps, decay):
    data, grad = np.array(weights), np.zeros(len(weights))
    optimizer = kind(Arrays([data], [grad]), lr, betas, eps, decay, amsgrad)
    for value in grads:
        grad[...] = value
        optimizer.step()
    expected = np.array(
        [adam_by_hand(w, grads, lr, betas, eps, decay, kind is AdamW, amsgrad) for w in weights]
    ).T
    # Where gradients almost cancel in m, m / sqrt(v) carries m's absolute error: hence the absolute
    # tolerance.
    np.testing.assert_allclose(data, expected[0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(optimizer.slots()["m"][0], expected[1], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(optimizer.slots()["v"][0], expected[2], rtol=1e-11, atol=1e-14)


def adaptive_by_hand(kind, weight, grads, lr, decay, momentum):
    """Return the weight after one update per gradient, in Python floats."""
    v = u = b = 0.0
    for grad in grads:
        grad = grad + decay * weight
        if kind is Adadelta:
            v = 0.9 * v + 0.1 * grad**2
            change = math.sqrt(u + 1e-2) / math.sqrt(v + 1e-2) * grad
            u = 0.9 * u + 0.1 * change**2
        else:
            v = v + grad**2 if kind is Adagrad else 0.99 * v + 0.01 * grad**2
            change = b = momentum * b + grad / (math.sqrt(v) + 1e-2)
        weight = weight - lr * change
    return weight


@pytest.mark.parametrize(
    "kind, momentum, slots",  # which are called so in checkpoints
    [
        (RMSprop, 0.0, "v"),
        (RMSprop, 0.9, "v momentum"),
        (Adagrad, 0.0, "s"),
        (Adadelta, 0.0, "v u"),
    ],
)
@given(weights=WEIGHTS, grads=GRADS, lr=st.floats(0, 0.1), decay=st.sampled_from([0.0, 0.5]))
def test_divided_gradients_follow_the_formulas(kind, momentum, slots, weights, grads, lr, decay):
    data, grad = np.array(weights), np.zeros(len(weights))
    more = {"momentum": momentum} if momentum else {}
    optimizer = kind(Arrays([data], [grad]), lr, eps=1e-2, weight_decay=decay, **more)
    for value in grads:
        grad[...] = value
        optimizer.step()
    assert " ".join(optimizer.slots()) == slots
    expected = [adaptive_by_hand(kind, w, grads, lr, decay, momentum) for w in weights]
    np.testing.assert_allclose(data, expected, rtol=1e-11, atol=1e-12)


def lion_by_hand(weight, grads, lr, betas, decay):
    """Return the weight and m after one update per gradient, in Python floats."""
    beta1, beta2 = betas
    m = 0.0
    for grad in grads:
        direction = beta1 * m + (1 - beta1) * grad
        sign = (direction > 0) - (direction < 0)
        weight = weight * (1 - lr * decay) - lr * sign
        m = beta2 * m + (1 - beta2) * grad
    return weight, m


@given(
    weights=WEIGHTS,
    grads=st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=20),
    lr=st.floats(0, 0.1),
    betas=st.sampled_from([(0.9, 0.99), (0.0, 0.5), (0.5, 0.0)]),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_lion_follows_the_formulas(weights, grads, lr, betas, decay):
    data, grad = np.array(weights), np.zeros(len(weights))
    optimizer = Lion(Arrays([data], [grad]), lr, betas, decay)
    for value in grads:
        grad[...] = value
        optimizer.step()
    expected = [lion_by_hand(weight, grads, lr, betas, decay) for weight in weights]
    np.testing.assert_allclose(data, [weight for weight, _ in expected], rtol=1e-12, atol=1e-14)
    assert list(optimizer.slots()) == ["m"]
    np.testing.assert_allclose(
        optimizer.slots()["m"][0], [m for _, m in expected], rtol=1e-12, atol=1e-14
    )


def test_default_decay():
    """AdamW decays by 0.01 unless told otherwise, Adam not at all."""
    storage = Arrays([np.zeros(1)], [np.zeros(1)])
    assert AdamW(storage).weight_decay == (0.01,)
    assert Adam(storage).weight_decay == (0.0,)


def sgd_by_hand(weight, grads, lr, momentum, nesterov, decay):
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
    weights=WEIGHTS,
    grads=GRADS,
    lr=st.floats(0, 0.5),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_sgd_follows_the_formulas(weights, grads, lr, momentum, nesterov, decay):
    nesterov = nesterov and momentum > 0
    data, grad = np.array(weights), np.zeros(len(weights))
    optimizer = SGD(Arrays([data], [grad]), lr, momentum, nesterov=nesterov, weight_decay=decay)
    for value in grads:
        grad[...] = value
        optimizer.step()
    expected = [sgd_by_hand(weight, grads, lr, momentum, nesterov, decay) for weight in weights]
    np.testing.assert_allclose(data, [weight for weight, _ in expected], rtol=1e-12, atol=1e-14)
    for (momenta,) in optimizer.slots().values():
        np.testing.assert_allclose(
            momenta, [velocity for _, velocity in expected], rtol=1e-12, atol=1e-14
        )


def train(make, dtype, shape):
    """Return the weights and the state after some updates."""
    rng = np.random.default_rng(0)
    data, grad = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    optimizer = make(Arrays([data], [grad]))
    for _ in range(3):
        grad[...] = rng.standard_normal(grad.shape)
        optimizer.step()
    return [data, *(array for arrays in optimizer.slots().values() for array in arrays)]


@pytest.mark.parametrize("name", CASES)
def test_compiled_as_the_plain_update(name):
    """Within rounding of float64, for more elements than a block has."""
    pytest.importorskip("numba")
    expected = train(CASES[name], np.float64, (70001,))
    with jit():
        result = train(CASES[name], np.float32, (70001,))
    plain = train(CASES[name], np.float32, (70001,))
    with jit():  # float64 is left to NumPy
        np.testing.assert_array_equal(train(CASES[name], np.float64, (70001,))[0], expected[0])
    for mine, theirs, wide in zip(result, plain, expected, strict=True):
        bound = 1e-5 * abs(wide).max()  # Adam's first updates divide numbers near 0 by one another
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=bound)
        assert abs(mine - wide).max() <= 2 * abs(theirs - wide).max() + 1e-7


def test_every_named_optimizer_is_offered_to_programs():
    """One that its module's `__all__` forgot would be an --optimizer alone."""
    offered = {getattr(optim, name) for name in optim.__all__}
    assert {row.kind for row in OPTIMIZERS.values()} <= offered
