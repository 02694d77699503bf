"""Lesson 9: ring attention. Every rank has some positions of each sequence; keys and values go
around.

    queries stay     keys and values                                  keys  a b c
    rank 0   a       a in hop 0, then c, then b, then home       queries a  0 2 1      the hop in which they meet
    rank 1   b       b           a       c                               b  1 0 2
    rank 2   c       c           b       a                               c  2 1 0

Softmax needs the sum over all keys before it divides. But it can be put together key by key: keep
the largest score so far and the sum, and where a larger score comes, make what was added up
smaller. So no rank has all pairs of scores.
"""

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.comm.point_to_point import Messages
from nnmpi.command import program_words
from nnmpi.pages.picture import Arrow, Bar, Picture
from nnmpi.shard import split

# a position is a row of the image: 8 pixels, and which row it is
POSITIONS, FEATURES, WIDTH, CLASSES = 8, 16, 24, 10
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images


def first_weights():
    """Return {layer: (in, out) matrix}, the same on every rank: of queries, keys, values and the
    classes' scores.
    """
    draw = np.random.default_rng(0)
    shapes = [(FEATURES, WIDTH)] * 3 + [(WIDTH, CLASSES)]
    return {i: draw.normal(0, shape[0] ** -0.5, shape) for i, shape in enumerate(shapes)}


def batch(step, positions=slice(None)):
    """Return some positions of a step's images, as sequences (batch, positions, features), and the
    labels.
    """
    rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(DIGITS)
    pixels = DIGITS.x[rows].reshape(BATCH, POSITIONS, -1) * DIGITS.scale
    return (
        np.concatenate([pixels, np.tile(np.eye(POSITIONS), (BATCH, 1, 1))], 2)[:, positions],
        DIGITS.y[rows],
    )


def gradient_of_loss(scores, labels):
    """Return the gradient of the sum of the rows' cross-entropies."""
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(len(labels)), labels] -= 1
    return chances


def update(weights, velocity, gradients):
    """Change the weights by the mean gradient of the batch."""
    for layer, gradient in gradients.items():
        velocity[layer] = MOMENTUM * velocity[layer] + gradient / BATCH
        weights[layer] -= RATE * velocity[layer]


def serial():
    """Return the weights that training on one rank ends with; all scores are there at once."""
    weights, velocity = first_weights(), dict.fromkeys(range(4), 0.0)
    for step in range(STEPS):
        x, labels = batch(step)
        q, k, v = (x @ weights[i] for i in range(3))
        scores = q @ k.swapaxes(1, 2) / WIDTH**0.5
        p = np.exp(scores - scores.max(2, keepdims=True))
        p /= p.sum(2, keepdims=True)
        seen = (p @ v).sum(1)
        grad = gradient_of_loss(seen @ weights[3], labels)
        to_y = np.repeat((grad @ weights[3].T)[:, None], POSITIONS, 1)
        to_p = to_y @ v.swapaxes(1, 2)
        to_scores = p * (to_p - (to_p * p).sum(2, keepdims=True)) / WIDTH**0.5
        grads = to_scores @ k, to_scores.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ to_y
        gradients = {i: np.tensordot(x, g, ((0, 1), (0, 1))) for i, g in enumerate(grads)}
        update(weights, velocity, gradients | {3: seen.T @ grad})
    return weights


class Ring:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, group):
        self.group, self.messages, self.lengths = (
            group,
            Messages(group),
            list(map(len, split(POSITIONS, group.size))),
        )

    def pass_on(self, hop, *arrays):
        """Send the arrays of a hop to the right, and return those of the next one, from the
        left.
        """
        rank, size = self.group.rank, self.group.size
        place = np.empty((len(arrays), BATCH, self.lengths[(rank - hop - 1) % size], WIDTH))
        self.messages.send(np.stack(arrays), (rank + 1) % size, hop)
        return self.messages.receive(place, (rank - 1) % size, hop).wait()

    def forward(self, q, k, v):
        """Return what the queries get, and the logarithms of the sums that their softmax divides
        by.
        """
        top, total, y = np.full((*q.shape[:2], 1), -np.inf), 0.0, 0.0
        for hop in range(self.group.size):
            scores = q @ k.swapaxes(1, 2) / WIDTH**0.5
            higher = np.maximum(top, scores.max(2, keepdims=True))
            fade, p = np.exp(top - higher), np.exp(scores - higher)
            top, total, y = higher, total * fade + p.sum(2, keepdims=True), y * fade + p @ v
            k, v = self.pass_on(hop, k, v)
        return y / total, top + np.log(total)

    def backward(self, q, k, v, y, logs, grad):
        """Return the gradients of q, k and v; those of k and v follow them around, and are whole
        when they are home.
        """
        to_q = to_k = to_v = 0.0
        for hop in range(self.group.size):
            p = np.exp(q @ k.swapaxes(1, 2) / WIDTH**0.5 - logs)
            to_scores = (
                p * (grad @ v.swapaxes(1, 2) - (grad * y).sum(2, keepdims=True)) / WIDTH**0.5
            )
            to_q += to_scores @ k
            k, v, to_k, to_v = self.pass_on(
                hop, k, v, to_k + to_scores.swapaxes(1, 2) @ q, to_v + p.swapaxes(1, 2) @ grad
            )
        return to_q, to_k, to_v


def add_up(group, partial):
    """Return the sum over the ranks."""
    whole = partial.ravel().copy()
    group.all_reduce(whole, "ring")
    return whole.reshape(partial.shape)


def train(group):
    """Return the weights that training over the ranks ends with."""
    weights, velocity, ring = first_weights(), dict.fromkeys(range(4), 0.0), Ring(group)
    mine = split(POSITIONS, group.size)[group.rank]
    for step in range(STEPS):
        x, labels = batch(step, slice(mine.start, mine.stop))
        q, k, v = (x @ weights[i] for i in range(3))
        y, logs = ring.forward(q, k, v)
        seen = add_up(group, y.sum(1))
        grad = gradient_of_loss(seen @ weights[3], labels)
        grads = ring.backward(
            q, k, v, y, logs, np.repeat((grad @ weights[3].T)[:, None], len(mine), 1)
        )
        gradients = add_up(group, np.stack([np.tensordot(x, g, ((0, 1), (0, 1))) for g in grads]))
        update(weights, velocity, dict(enumerate(gradients)) | {3: seen.T @ grad})
        ring.messages.drain()
    ring.messages.free()
    return weights


def draw(size):
    """Return whose keys and values each rank has in each hop, and where they go then."""
    at = [
        (rank, (rank - keys) % size, f"keys of {keys}")
        for rank in range(size)
        for keys in range(size)
    ]
    bars = [Bar(f"queries of {rank}", hop, hop + 1, keys, keys) for rank, hop, keys in at]
    arrows = [
        Arrow(f"queries of {rank}", hop + 0.75, f"queries of {(rank + 1) % size}", hop + 1.25)
        for rank, hop, _ in at
        if hop < size - 1
    ]
    return Picture("Queries stay, keys and values go around", "hops", bars, arrows)


def main(group):
    """Train over the ranks and on one, and compare; an AssertionError ends the program if they
    differ.
    """
    wanted = serial()
    for layer, w in train(group).items():
        np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12)
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
