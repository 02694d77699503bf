"""Lesson 5: sharded layers. Every rank has a part of each layer, and all see the whole batch.

                 layer 0: columns           layer 1: rows
    rank 0    x --- [ first columns ] --- a --- [ first rows ] --- partial sum --.
                                                                                 (+) --- the same on every rank
    rank 1    x --- [ last columns  ] --- b --- [ last rows  ] --- partial sum --'

A rank's columns of layer 0 give just the numbers that its rows of layer 1 need, and ReLU works on
each number alone: so two layers need one sum forward, and one backward, where the gradient of x is
a partial sum, too.
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


def shard(weights, group):
    """Return this rank's part of each layer: columns of those with even numbers, rows of the
    others.
    """
    parts = {}
    for layer, w in weights.items():
        mine = split(w.shape[1 - layer % 2], group.size)[group.rank]
        cut = slice(mine.start, mine.stop)
        parts[layer] = w[cut].copy() if layer % 2 else w[:, cut].copy()
    return parts


def add_up(group, partial):
    """Return the sum over the ranks."""
    whole = partial.ravel().copy()
    group.all_reduce(whole, "ring")
    return whole.reshape(partial.shape)


def train(group):
    """Return the weights that this rank ends with, and what its layers kept in the last step."""
    weights, velocity, gradients = (
        shard(first_weights(), group),
        dict.fromkeys(range(len(WIDTHS) - 1), 0.0),
        {},
    )
    for step in range(STEPS):
        x, labels = batch(step)
        kept = {}
        for layer, w in weights.items():
            x, keeps = forward({layer: w}, x)
            kept |= keeps
            x = add_up(group, x) if layer % 2 else x
        _, grad = loss_and_gradient(x, labels)
        for layer, w in reversed(weights.items()):
            grad = backward({layer: w}, kept, grad, gradients.__setitem__)
            grad = grad if layer % 2 else add_up(group, grad)
        update(weights, velocity, gradients)
    return weights, kept


def draw(group, weights, kept):
    """Return the bytes of weights and activations that each rank has, beside those of one rank
    alone.
    """
    whole, (x, _) = first_weights(), batch(0)
    parts = whole, forward(whole, x)[1], weights, kept
    alone, more_alone, *mine = (sum(array.nbytes for array in part.values()) for part in parts)
    bars = []
    for rank, (n, more) in enumerate([(alone, more_alone), *group.gather(mine)], -1):
        row = "one rank alone" if rank < 0 else f"rank {rank}"
        bars += [
            Bar(row, 0, n, "weights", f"{n:,}"),
            Bar(row, n, n + more, "activations", f"{more:,}"),
        ]
    return Picture(
        "Weights are shared out, and the activations between columns and rows", "bytes", bars
    )


def main(group):
    """Train over the ranks and on one, and compare; an AssertionError ends the program if they
    differ.
    """
    wanted, (found, kept) = shard(serial(), group), train(group)
    for layer, w in found.items():
        np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12)
    picture = draw(group, found, kept)
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
