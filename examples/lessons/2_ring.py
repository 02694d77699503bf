"""Lesson 2: a ring all-reduce. Each rank takes some rows of a batch; a ring sums the gradients.

    rank 0 ---> rank 1 ---> rank 2 --->.     all gradients, concatenated, in 3 chunks
      ^                                |
      '--------------------------------'  rank 0    rank 1    rank 2
                                step 0    2 -->     0 -->     1 -->     send a chunk to the right
                                step 1    1' ->     2' ->     0' ->     and add the received one
                                step 2    0''->     1''->     2''->     chunk r is final on rank r:
                                step 3    2''->     0''->     1''->     final chunks go around

A loss is a sum over rows, so the gradient of the batch is the sum of the ranks' gradients.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base.command import program_words
from nnmpi.base.picture import Bar, Picture
from nnmpi.comm.algorithms.tree import star
from nnmpi.comm.collective import Step
from nnmpi.comm.prove import prove

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


def ring(rank, size):
    """Return this rank's steps: partial sums go around once, finished sums once more."""
    right, left, steps = (rank + 1) % size, (rank - 1) % size, []
    for i in range(2 * (size - 1)):
        out = (rank - 1 - i) % size
        steps.append(Step(right, (out,), left, ((out - 1) % size,), reduce=i < size - 1))
    return tuple(steps)


def train(group):
    """Return the weights after training on all ranks."""
    weights, velocity, gradients = first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0), {}
    for step in range(STEPS):
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        scores, saved = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        backward(weights, saved, grad, gradients.__setitem__)
        flat = np.concatenate([gradients[layer].ravel() for layer in weights])
        group.all_reduce(flat, ring)
        parts = np.split(flat, np.cumsum([w.size for w in weights.values()])[:-1])
        update(weights, velocity, {i: g.reshape(weights[i].shape) for i, g in enumerate(parts)})
    return weights


def draw(size):
    """Return the bytes each rank sends per sum, by the ring and with one rank as a server."""
    nbytes, bars = 8 * sum(n * m for n, m in pairwise(WIDTHS)), []
    for name, algorithm in (("ring", ring), ("server", star)):
        for rank in range(size):
            sent = nbytes * sum(len(step.send) for step in algorithm(rank, size)) // size
            bars.append(Bar(f"{name}, rank {rank}", 0, sent, "sent in a step", f"{sent:,}"))
    return Picture("A server's link carries what the ring spreads over all links", "bytes", bars)


def main(group):
    """Train on all ranks and on one; raise AssertionError if the weights differ."""
    prove(ring, group.size)  # names rank, step and chunk of a mistake
    expected, trained = serial(), train(group)
    for layer, w in trained.items():
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
    picture = draw(group.size)
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
