"""Lesson 9: ring attention. Each rank has some positions of every sequence; keys and values rotate.

    queries stay     keys and values                                  keys  a b c
    rank 0   a       a in hop 0, then c, then b, then home       queries a  0 2 1      hop in which
    rank 1   b       b           a       c                               b  1 0 2      they meet
    rank 2   c       c           b       a                               c  2 1 0

Softmax divides by the sum over all keys, but it can be accumulated key by key: track the largest
score and the sum so far, and scale the sum down when a larger score arrives. So no rank holds the
scores of all pairs.
"""

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base.command import program_words
from nnmpi.base.errors import UsageError
from nnmpi.base.picture import Arrow, Bar, Picture
from nnmpi.base.shard import split
from nnmpi.comm.point_to_point import Messages

# a position is a row of the image: its 8 pixels, and its number as a one-hot vector
POSITIONS, FEATURES, WIDTH, CLASSES = 8, 16, 24, 10
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images


def first_weights():
    """Return the weights of queries, keys, values and scores, the same on every rank."""
    draw = np.random.default_rng(0)
    shapes = [(FEATURES, WIDTH)] * 3 + [(WIDTH, CLASSES)]
    return {i: draw.normal(0, shape[0] ** -0.5, shape) for i, shape in enumerate(shapes)}


def batch(step, positions=slice(None)):
    """Return positions of a step's images, (batch, positions, features), and the labels."""
    rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(DIGITS)
    pixels = DIGITS.x[rows].reshape(BATCH, POSITIONS, -1) * DIGITS.scale
    x = np.concatenate([pixels, np.tile(np.eye(POSITIONS), (BATCH, 1, 1))], 2)
    return x[:, positions], DIGITS.y[rows]


def gradient_of_loss(scores, labels):
    """Return the gradient of the sum of the rows' cross-entropies."""
    probabilities = np.exp(scores - scores.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    probabilities[np.arange(len(labels)), labels] -= 1
    return probabilities


def update(weights, velocity, gradients):
    """Update the weights with the mean gradient of the batch."""
    for layer, gradient in gradients.items():
        velocity[layer] = MOMENTUM * velocity[layer] + gradient / BATCH
        weights[layer] -= RATE * velocity[layer]


def serial():
    """Return the weights after training on one rank, which computes all scores at once."""
    weights, velocity = first_weights(), dict.fromkeys(range(4), 0.0)
    for step in range(STEPS):
        x, labels = batch(step)
        q, k, v = (x @ weights[i] for i in range(3))
        scores = q @ k.swapaxes(1, 2) / WIDTH**0.5
        p = np.exp(scores - scores.max(2, keepdims=True))
        p /= p.sum(2, keepdims=True)
        pooled = (p @ v).sum(1)
        grad = gradient_of_loss(pooled @ weights[3], labels)
        to_y = np.repeat((grad @ weights[3].T)[:, None], POSITIONS, 1)
        to_p = to_y @ v.swapaxes(1, 2)
        to_scores = p * (to_p - (to_p * p).sum(2, keepdims=True)) / WIDTH**0.5
        grads = to_scores @ k, to_scores.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ to_y
        gradients = {i: np.tensordot(x, g, ((0, 1), (0, 1))) for i, g in enumerate(grads)}
        update(weights, velocity, gradients | {3: pooled.T @ grad})
    return weights


class Ring:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, group):
        self.group, self.messages = group, Messages(group)
        self.lengths = [len(part) for part in split(POSITIONS, group.size)]

    def pass_on(self, hop, *arrays):
        """Send the arrays of a hop to the right; return the next hop's, from the left."""
        rank, size = self.group.rank, self.group.size
        buffer = np.empty((len(arrays), BATCH, self.lengths[(rank - hop - 1) % size], WIDTH))
        self.messages.send(np.stack(arrays), (rank + 1) % size, hop)
        return self.messages.receive(buffer, (rank - 1) % size, hop).wait()

    def forward(self, q, k, v):
        """Return the output, and the log of each softmax's denominator, which backward needs."""
        top, total, y = np.full((*q.shape[:2], 1), -np.inf), 0.0, 0.0
        for hop in range(self.group.size):
            scores = q @ k.swapaxes(1, 2) / WIDTH**0.5
            higher = np.maximum(top, scores.max(2, keepdims=True))
            fade, p = np.exp(top - higher), np.exp(scores - higher)
            top, total, y = higher, total * fade + p.sum(2, keepdims=True), y * fade + p @ v
            k, v = self.pass_on(hop, k, v)
        return y / total, top + np.log(total)

    def backward(self, q, k, v, y, logs, grad):
        """Return the gradients of q, k and v; those of k and v travel with them, home at last."""
        to_q = to_k = to_v = 0.0
        for hop in range(self.group.size):
            p = np.exp(q @ k.swapaxes(1, 2) / WIDTH**0.5 - logs)
            to_p = grad @ v.swapaxes(1, 2)
            to_scores = p * (to_p - (grad * y).sum(2, keepdims=True)) / WIDTH**0.5
            to_q += to_scores @ k
            to_k, to_v = to_k + to_scores.swapaxes(1, 2) @ q, to_v + p.swapaxes(1, 2) @ grad
            k, v, to_k, to_v = self.pass_on(hop, k, v, to_k, to_v)
        return to_q, to_k, to_v


def add_up(group, partial):
    """Return the sum over the ranks."""
    total = partial.ravel().copy()
    group.all_reduce(total, "ring")
    return total.reshape(partial.shape)


def train(group):
    """Return the weights after training on all ranks."""
    weights, velocity, ring = first_weights(), dict.fromkeys(range(4), 0.0), Ring(group)
    mine = split(POSITIONS, group.size)[group.rank]
    for step in range(STEPS):
        x, labels = batch(step, slice(mine.start, mine.stop))
        q, k, v = (x @ weights[i] for i in range(3))
        y, logs = ring.forward(q, k, v)
        pooled = add_up(group, y.sum(1))
        grad = gradient_of_loss(pooled @ weights[3], labels)
        to_y = np.repeat((grad @ weights[3].T)[:, None], len(mine), 1)
        grads = ring.backward(q, k, v, y, logs, to_y)
        gradients = add_up(group, np.stack([np.tensordot(x, g, ((0, 1), (0, 1))) for g in grads]))
        update(weights, velocity, dict(enumerate(gradients)) | {3: pooled.T @ grad})
        ring.messages.drain()
    ring.messages.free()
    return weights


def draw(size):
    """Return a picture of the keys and values on each rank in each hop, and of their moves."""
    pairs = [(rank, keys) for rank in range(size) for keys in range(size)]
    at = [(rank, (rank - keys) % size, f"keys of {keys}") for rank, keys in pairs]
    bars = [Bar(f"queries of {rank}", hop, hop + 1, keys, keys) for rank, hop, keys in at]
    arrows = [
        Arrow(f"queries of {rank}", hop + 0.75, f"queries of {(rank + 1) % size}", hop + 1.25)
        for rank, hop, _ in at
        if hop < size - 1
    ]
    return Picture("Queries stay, keys and values go around", "hops", bars, arrows)


def main(group):
    """Train on all ranks and on one; raise AssertionError if the weights differ."""
    if group.size > POSITIONS:
        raise UsageError(f"{group.size} ranks share {POSITIONS} positions; give at most as many")
    expected = serial()
    for layer, w in train(group).items():
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
