"""Lesson 6: ZeRO. Each rank takes some rows again, but updates only its own part of the weights.

    gradients, all layers in a row     [ a | b | c ]   [ a | b | c ]   [ a | b | c ]
    reduce-scatter                     [ A |   |   ]   [   | B |   ]   [   |   | C ]    A: the sum over the ranks
    update, with the state of it       [ A |   |   ]   [   | B |   ]   [   |   | C ]
    all-gather                         [ A | B | C ]   [ A | B | C ]   [ A | B | C ]    the new weights
                                       rank 0          rank 1          rank 2

An all-reduce is a reduce-scatter and an all-gather. The update goes between the two: the same
messages, and the optimizer's state (here the velocity) only once for all ranks together.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.command import program_words
from nnmpi.pages.picture import Bar, Picture
from nnmpi.shard import split

WIDTHS = (64, 48, 32, 24, 10)  # of what comes to the four layers, and of the scores
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
    """Return what these layers make of x, and what each of them keeps."""
    kept = {}
    for layer, w in weights.items():
        kept[layer] = x = np.maximum(x, 0, out=x) if layer > 0 else x
        x = x @ w
    return x, kept


def loss_and_gradient(scores, labels):
    """Return the sum of the rows' cross-entropies, and its gradient."""
    rows = np.arange(len(labels))
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    loss = -np.log(chances[rows, labels]).sum()
    chances[rows, labels] -= 1
    return loss, chances


def backward(weights, kept, grad, final):
    """Call final(layer, gradient) for each layer, the last one first; return the gradient of what
    came in.
    """
    for layer, w in reversed(weights.items()):
        gradient = kept[layer].T @ grad
        grad = grad @ w.T
        if layer > 0:
            grad *= kept[layer] > 0
        final(layer, gradient)
    return grad


def update(weights, velocity, gradients):
    """Change the weights by the mean gradient of the batch."""
    for layer, gradient in gradients.items():
        velocity[layer] = MOMENTUM * velocity[layer] + gradient / BATCH
        weights[layer] -= RATE * velocity[layer]


def serial():
    """Return the weights that training on one rank ends with."""
    weights, velocity, gradients = first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0), {}
    for step in range(STEPS):
        x, labels = batch(step)
        scores, kept = forward(weights, x)
        _, grad = loss_and_gradient(scores, labels)
        backward(weights, kept, grad, gradients.__setitem__)
        update(weights, velocity, gradients)
    return weights


def train(group):
    """Return the weights that training over the ranks ends with, and the velocity that this rank
    keeps.
    """
    shapes = [w.shape for w in first_weights().values()]
    flat = np.concatenate([w.ravel() for w in first_weights().values()])
    ends = np.cumsum([n * m for n, m in shapes])
    # views
    weights = {
        layer: part.reshape(shapes[layer]) for layer, part in enumerate(np.split(flat, ends[:-1]))
    }
    chunk = split(flat.size, group.size)[group.rank]
    own = {0: flat[chunk.start : chunk.stop]}  # what this rank updates, in place
    velocity, gradients = {0: np.zeros(len(chunk))}, {}  # an N-th of the state
    for step in range(STEPS):
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        scores, kept = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        backward(weights, kept, grad, gradients.__setitem__)
        sums = np.concatenate([gradients[layer].ravel() for layer in weights])
        group.reduce_scatter(sums, "ring")
        update(own, velocity, {0: sums[chunk.start : chunk.stop]})
        group.all_gather(flat, "ring")
    return weights, velocity[0]


def draw(group, weights, velocity):
    """Return the bytes that each rank keeps between two steps, as replicas and with ZeRO."""
    n, bars = sum(w.nbytes for w in weights.values()), []
    for name, states in (("lesson 2", [n] * group.size), ("ZeRO", group.gather(velocity.nbytes))):
        for row, state in ((f"{name}, rank {rank}", state) for rank, state in enumerate(states)):
            bars += [
                Bar(row, 0, n, "weights", f"{n:,}"),
                Bar(row, n, n + state, "velocity", f"{state:,}"),
            ]
    return Picture("The optimizer's state is there once, and not on each rank", "bytes", bars)


def main(group):
    """Train over the ranks and on one, and compare; an AssertionError ends the program if they
    differ.
    """
    wanted, (found, velocity) = serial(), train(group)
    for layer, w in found.items():
        np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12)
    picture = draw(group, found, velocity)
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
