"""Lesson 3: buckets and overlap. A layer's sum starts while earlier layers still compute.

    backward      | layer 3 | layer 2 | layer 1 | layer 0 |
    first sum               start . . . poll . . . . . . . wait  layers 3 and 2, when both are final
    second sum                                  start . .  wait  layer 1
    third sum                                             start  layer 0

A gradient is final long before the backward pass ends. A bucket collects gradients until their
message is long enough to be worth its latency. Messages progress whenever a rank polls them.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base import clock
from nnmpi.base.command import program_words
from nnmpi.base.picture import Bar, Picture
from nnmpi.comm.collective import Step
from nnmpi.comm.machine import Machine

WIDTHS = (64, 48, 32, 24, 10)  # inputs of the four layers, and the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
BUCKET = 1000  # numbers: a bucket of this size is sent
LAYER_S = 0.004  # added to each layer's backward pass, to make the overlap visible


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
    probabilities = np.exp(scores - scores.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    loss = -np.log(probabilities[np.arange(len(labels)), labels]).sum()
    return loss, probabilities - np.eye(WIDTHS[-1])[labels]


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


class Buckets:
    """Sums gradients over the ranks while the backward pass computes others."""

    def __init__(self, group, bucket):
        self.group, self.bucket, self.open, self.flying, self.bars = group, bucket, {}, [], []

    def final(self, layer, gradient):
        """Add a gradient to the open bucket; start its sum if it is full; poll the earlier sums."""
        begin_s = clock.now()
        for _ in range(20):
            clock.sleep(LAYER_S / 20)
            for _, _, pending in self.flying:
                pending.poll()
        self.bars.append((begin_s, clock.now(), "backward", f"layer {layer}"))
        self.open |= {layer: gradient}
        if layer == 0 or sum(g.size for g in self.open.values()) >= self.bucket:
            flat = np.concatenate([g.ravel() for g in self.open.values()])
            pending = self.group.bind(
                flat, ring, tag=len(self.flying)
            )  # sums in flight differ in tag
            pending.start()
            self.flying.append((self.open, flat, pending))
            self.open = {}

    def finish(self):
        """Wait for all sums; return {layer: sum over the ranks}."""
        sums, begin_s = {}, clock.now()
        for gradients, flat, pending in self.flying:
            pending.wait()
            parts = np.split(flat, np.cumsum([g.size for g in gradients.values()])[:-1])
            for (layer, gradient), part in zip(gradients.items(), parts, strict=True):
                sums[layer] = part.reshape(gradient.shape)
        self.flying.clear()
        self.bars.append((begin_s, clock.now(), "waiting", ""))
        return sums


def train(group, bucket):
    """Return the weights after training on all ranks, and the bars of the last step."""
    weights, velocity = first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0)
    buckets = Buckets(group, bucket)
    for step in range(STEPS):
        buckets.bars.clear()
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        scores, saved = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        backward(weights, saved, grad, buckets.final)
        update(weights, velocity, buckets.finish())
    return weights, buckets.bars


def draw(without, overlapped):
    """Return a picture of the last step, with one sum at its end and with buckets."""
    rows = {"one sum": without, "buckets": overlapped}
    exposed, left = (1e3 * (bars[-1][1] - bars[-1][0]) for bars in rows.values())
    hidden = f"{exposed - left:.1f} ms" if exposed > left else "nothing on this machine now"
    title = (
        f"Exposed: {exposed:.1f} ms with one sum, {left:.1f} ms with buckets, which hide {hidden}"
    )
    drawn = [
        Bar(row, 1e3 * (begin - bars[0][0]), 1e3 * (end - bars[0][0]), *names)
        for row, bars in rows.items()
        for begin, end, *names in bars
    ]
    return Picture(title, "ms", drawn)


def main(group):
    """Train on all ranks and on one; raise AssertionError if the weights differ."""
    expected, (trained, overlapped) = serial(), train(group, BUCKET)
    _, without = train(group, float("inf"))
    for layer, w in trained.items():
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
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
