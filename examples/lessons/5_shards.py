"""Lesson 5: sharded layers. Every rank has a shard of each layer, and sees the full batch.

                 layer 0: columns           layer 1: rows
    rank 0    x --- [ first columns ] --- a --- [ first rows ] --- partial sum --.
                                                                                 (+) -- on all ranks
    rank 1    x --- [ last columns  ] --- b --- [ last rows  ] --- partial sum --'

A rank's columns of layer 0 compute exactly the inputs of its rows of layer 1, and ReLU is
element-wise. So two layers need one sum forward, and one backward, for the gradient of x.
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


def shard(weights, group):
    """Return this rank's shard of each layer: columns of even layers, rows of odd ones."""
    shards = {}
    for layer, w in weights.items():
        mine = split(w.shape[1 - layer % 2], group.size)[group.rank]
        local = slice(mine.start, mine.stop)
        shards[layer] = w[local].copy() if layer % 2 else w[:, local].copy()
    return shards


def add_up(group, partial):
    """Return the sum over the ranks."""
    total = partial.ravel().copy()
    group.all_reduce(total, "ring")
    return total.reshape(partial.shape)


def train(group):
    """Return this rank's weights after training, and its saved inputs of the last step."""
    weights, gradients = shard(first_weights(), group), {}
    velocity = dict.fromkeys(weights, 0.0)
    for step in range(STEPS):
        x, labels = batch(step)
        saved = {}
        for layer, w in weights.items():
            x, inputs = forward({layer: w}, x)
            saved |= inputs
            x = add_up(group, x) if layer % 2 else x
        _, grad = loss_and_gradient(x, labels)
        for layer, w in reversed(weights.items()):
            grad = backward({layer: w}, saved, grad, gradients.__setitem__)
            grad = grad if layer % 2 else add_up(group, grad)
        update(weights, velocity, gradients)
    return weights, saved


def draw(group, weights, saved):
    """Return a picture of the bytes of weights and activations on each rank, and on one alone."""
    full, (x, _) = first_weights(), batch(0)
    parts = full, forward(full, x)[1], weights, saved
    alone, more_alone, *mine = (sum(array.nbytes for array in part.values()) for part in parts)
    bars = []
    for rank, (n, more) in enumerate([(alone, more_alone), *group.gather(mine)], -1):
        row = "one rank alone" if rank < 0 else f"rank {rank}"
        bars += [
            Bar(row, 0, n, "weights", f"{n:,}"),
            Bar(row, n, n + more, "activations", f"{more:,}"),
        ]
    return Picture(
        "Weights are sharded, and so are activations between columns and rows", "bytes", bars
    )


def main(group):
    """Train on all ranks and on one; raise AssertionError if the weights differ."""
    expected, (trained, saved) = shard(serial(), group), train(group)
    for layer, w in trained.items():
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
    picture = draw(group, trained, saved)
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
