"""Lesson 3: buckets and overlap. A layer's sum begins while the layers before it are still
computed.

    backward      | layer 3 | layer 2 | layer 1 | layer 0 |
    first sum               begin . . . poll . . . . . . . wait     layers 3 and 2, once both are final
    second sum                                  begin . .  wait     layer 1
    third sum                                             begin     layer 0

A gradient is final long before the whole backward pass is over. A bucket is as many gradients as
make one message long enough to be worth its latency. Messages move on whenever somebody looks after
them: poll.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import clock, data
from nnmpi.comm.collective import Step
from nnmpi.comm.machine import Machine
from nnmpi.command import program_words
from nnmpi.pages.picture import Bar, Picture

WIDTHS = (64, 48, 32, 24, 10)  # of what comes to the four layers, and of the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
BUCKET = 1000  # numbers: a bucket with as many begins its way
LAYER_S = 0.004  # what the backward pass of a layer takes longer, so that it can be seen


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
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    loss = -np.log(chances[np.arange(len(labels)), labels]).sum()
    return loss, chances - np.eye(WIDTHS[-1])[labels]


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


def ring(rank, size):
    """Return this rank's steps: partial sums go around once, finished sums once more."""
    right, left, steps = (rank + 1) % size, (rank - 1) % size, []
    for i in range(2 * (size - 1)):
        out = (rank - 1 - i) % size
        steps.append(Step(right, (out,), left, ((out - 1) % size,), reduce=i < size - 1))
    return tuple(steps)


class Buckets:
    """Sums gradients over the ranks while others are still computed."""

    def __init__(self, group, bucket):
        self.group, self.bucket, self.open, self.flying, self.bars = group, bucket, {}, [], []

    def final(self, layer, gradient):
        """Take a gradient; begin the sum of the bucket that is full with it, and look after those
        under way.
        """
        begin_s = clock.now()
        for _ in range(20):
            clock.sleep(LAYER_S / 20)
            for _, _, pending in self.flying:
                pending.poll()
        self.bars.append((begin_s, clock.now(), "backward", f"layer {layer}"))
        self.open |= {layer: gradient}
        if layer == 0 or sum(g.size for g in self.open.values()) >= self.bucket:
            flat = np.concatenate([g.ravel() for g in self.open.values()])
            # a tag for each sum under way
            pending = self.group.bind(flat, ring, tag=len(self.flying))
            pending.start()
            self.flying.append((self.open, flat, pending))
            self.open = {}

    def finish(self):
        """Return {layer: sum over the ranks}, when all have come."""
        sums, begin_s = {}, clock.now()
        for gradients, flat, pending in self.flying:
            pending.wait()
            parts = np.split(flat, np.cumsum([g.size for g in gradients.values()])[:-1])
            sums |= {
                layer: g.reshape(gradients[layer].shape)
                for layer, g in zip(gradients, parts, strict=True)
            }
        self.flying.clear()
        self.bars.append((begin_s, clock.now(), "waiting", ""))
        return sums


def train(group, bucket):
    """Return the weights that training over the ranks ends with, and what the last step was made
    of.
    """
    weights, velocity = first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0)
    buckets = Buckets(group, bucket)
    for step in range(STEPS):
        buckets.bars.clear()
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        scores, kept = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        backward(weights, kept, grad, buckets.final)
        update(weights, velocity, buckets.finish())
    return weights, buckets.bars


def draw(without, overlapped):
    """Return the last step with one sum at its end and with buckets: what is no longer waited for
    is hidden.
    """
    rows = {"one sum": without, "buckets": overlapped}
    exposed, left = (1e3 * (bars[-1][1] - bars[-1][0]) for bars in rows.values())
    hidden = (
        f"which hide {exposed - left:.1f} ms"
        if exposed > left
        else "which hide nothing on this machine now"
    )
    title = f"Exposed: {exposed:.1f} ms with one sum, {left:.1f} ms with buckets, {hidden}"
    ms = [
        (row, *(1e3 * (t - bars[0][0]) for t in bar[:2]), *bar[2:])
        for row, bars in rows.items()
        for bar in bars
    ]
    return Picture(title, "ms", [Bar(*each) for each in ms])


def main(group):
    """Train over the ranks and on one, and compare; an AssertionError ends the program if they
    differ.
    """
    wanted, (found, overlapped), (_, without) = (
        serial(),
        train(group, BUCKET),
        train(group, float("inf")),
    )
    for layer, w in found.items():
        np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12)
    picture = draw(without, overlapped)
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        machine = Machine.uniform(1e-5, 1e-7)  # a slow network, so that there is something to hide
        picture = nnmpi.simulate(main, ranks=given.simulate, machine=machine, cpu_factor=0)[0]
    else:
        picture = main(nnmpi.start())
