"""Lesson 6: ZeRO. Each rank takes some rows, as in lesson 2, but updates only its weight shard.

    gradients, concatenated        [ a | b | c ]   [ a | b | c ]   [ a | b | c ]
    reduce-scatter                 [ A |   |   ]   [   | B |   ]   [   |   | C ]   A: sum over ranks
    update, with a shard of state  [ A |   |   ]   [   | B |   ]   [   |   | C ]
    all-gather                     [ A | B | C ]   [ A | B | C ]   [ A | B | C ]    the new weights
                                   rank 0          rank 1          rank 2

An all-reduce is a reduce-scatter and an all-gather. ZeRO updates between the two: the messages are
the same, and the optimizer state (here the velocity) is stored once over all ranks.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base.command import program_words
from nnmpi.base.picture import Bar, Picture
from nnmpi.base.shard import split

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


def train(group):
    """Return the weights after training on all ranks, and this rank's velocity."""
    shapes = [w.shape for w in first_weights().values()]
    flat = np.concatenate([w.ravel() for w in first_weights().values()])
    ends = np.cumsum([n * m for n, m in shapes])
    views = np.split(flat, ends[:-1])
    weights = {layer: view.reshape(shapes[layer]) for layer, view in enumerate(views)}
    chunk = split(flat.size, group.size)[group.rank]
    shard = {0: flat[chunk.start : chunk.stop]}  # updated in place
    velocity, gradients = {0: np.zeros(len(chunk))}, {}  # 1/N of the state
    for step in range(STEPS):
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        scores, saved = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        backward(weights, saved, grad, gradients.__setitem__)
        sums = np.concatenate([gradients[layer].ravel() for layer in weights])
        group.reduce_scatter(sums, "ring")
        update(shard, velocity, {0: sums[chunk.start : chunk.stop]})
        group.all_gather(flat, "ring")
    return weights, velocity[0]


def draw(group, weights, velocity):
    """Return a picture of the bytes on each rank between steps, as replicas and with ZeRO."""
    n, bars = sum(w.nbytes for w in weights.values()), []
    for name, states in (("lesson 2", [n] * group.size), ("ZeRO", group.gather(velocity.nbytes))):
        for row, state in ((f"{name}, rank {rank}", state) for rank, state in enumerate(states)):
            bars += [
                Bar(row, 0, n, "weights", f"{n:,}"),
                Bar(row, n, n + state, "velocity", f"{state:,}"),
            ]
    return Picture("The optimizer state is stored once, not on each rank", "bytes", bars)


def main(group):
    """Train on all ranks and on one; raise AssertionError if the weights differ."""
    expected, (trained, velocity) = serial(), train(group)
    for layer, w in trained.items():
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
    picture = draw(group, trained, velocity)
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
