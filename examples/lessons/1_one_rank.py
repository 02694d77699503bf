"""Lesson 1: one rank, by hand. The computation of a training step, in NumPy alone.

    forward     x --> [w0] -- ReLU --> [w1] -- ReLU --> [w2] -- ReLU --> [w3] --> scores --> loss
                      saves x          saves its x      ...
    backward          g0  <----------- g1  <----------- g2  <----------- g3  <-- scores' gradient
    update     w -= RATE * velocity    velocity = MOMENTUM * velocity + gradient

Each layer saves its input: its gradient is the input times the gradient of its output. All ranks do
the same work here; nothing is shared yet.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data, ops
from nnmpi.base.command import program_words

WIDTHS = (64, 48, 32, 24, 10)  # inputs of the four layers, and the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images


def first_weights():
    """Return {layer: (in, out) matrix}, the same on every rank."""
    draw = np.random.default_rng(0)
    return {i: draw.normal(0, (2 / n) ** 0.5, (n, m)) for i, (n, m) in enumerate(pairwise(WIDTHS))}


def batch(step):
    """Return the images of a step, a row for each, and their labels."""
    rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(DIGITS)
    return DIGITS.x[rows].reshape(BATCH, -1) * DIGITS.scale, DIGITS.y[rows]


def forward(weights, x):
    """Return the output of these layers, and {layer: its input}, which backward needs."""
    saved = {}
    for layer, w in weights.items():
        saved[layer] = x = np.maximum(x, 0, out=x) if layer > 0 else x
        x = x @ w
    return x, saved


def loss_and_gradient(scores, labels):
    """Return the sum of the rows' cross-entropies, and its gradient."""
    rows = np.arange(len(labels))
    probabilities = np.exp(scores - scores.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    loss = -np.log(probabilities[rows, labels]).sum()
    probabilities[rows, labels] -= 1
    return loss, probabilities


def backward(weights, saved, grad, final):
    """Call final(layer, gradient) from the last layer to the first; return the input's gradient."""
    for layer, w in reversed(weights.items()):
        gradient = saved[layer].T @ grad
        grad = grad @ w.T
        if layer > 0:
            grad *= saved[layer] > 0
        final(layer, gradient)
    return grad


def update(weights, velocity, gradients):
    """Update the weights with the mean gradient of the batch."""
    for layer, gradient in gradients.items():
        velocity[layer] = MOMENTUM * velocity[layer] + gradient / BATCH
        weights[layer] -= RATE * velocity[layer]


def serial():
    """Return the weights after training on one rank."""
    weights, velocity, gradients = first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0), {}
    for step in range(STEPS):
        x, labels = batch(step)
        scores, saved = forward(weights, x)
        _, grad = loss_and_gradient(scores, labels)
        backward(weights, saved, grad, gradients.__setitem__)
        update(weights, velocity, gradients)
    return weights


def train():
    """Return the weights after training with nnmpi's autograd."""
    weights, velocity = first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0)
    for step in range(STEPS):
        x, labels = batch(step)
        tensors = {layer: nnmpi.Tensor(w, requires_grad=True) for layer, w in weights.items()}
        out = nnmpi.Tensor(x)
        for layer, w in tensors.items():
            out = (ops.relu(out) if layer > 0 else out) @ w
        ops.cross_entropy(out, labels, reduction="sum").backward()
        update(weights, velocity, {layer: w.grad for layer, w in tensors.items()})
    return weights


def main(group):
    """Train both ways; raise AssertionError if the weights differ."""
    expected, trained = serial(), train()
    for layer, w in trained.items():
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
    if group.is_root:
        loss, _ = loss_and_gradient(forward(expected, batch(0)[0])[0], batch(0)[1])
        print(f"equal to nnmpi's engine after {STEPS} steps; loss {loss / BATCH:.3f}")


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        nnmpi.simulate(main, ranks=given.simulate)
    else:
        main(nnmpi.start())
