"""Lesson 8: staleness. A rank that may use an older sum need not wait for a straggler.

    staleness 0     rank 0  | 0 |......| 1 |.| 2 |         rank 1 is slow in step 0: rank 0 waits
                    rank 1  | 0        | 1 |.| 2 |

    staleness 1     rank 0  | 0 | 1 |..| 2 |               rank 0 waits a step later, and less:
                    rank 1  | 0        | 1 | 2 |           step t's sum is used after step t + 1

A gradient of staleness s misses the last s updates in its weights. No rank can be more than s + 1
steps ahead of another. The result differs from synchronous training, but exactly: it equals a
serial run that applies its gradients s steps late.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base import clock
from nnmpi.base.command import program_words
from nnmpi.base.picture import Bar, Picture
from nnmpi.comm.machine import Machine

WIDTHS = (64, 48, 32, 24, 10)  # inputs of the four layers, and the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
SLOW_S = 0.004  # of computing in a step of one rank, in turn; the others take a quarter of it


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


def serial(staleness=0):
    """Return the weights after training on one rank, with gradients used `staleness` steps late."""
    weights, velocity, gradients = first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0), {}
    waiting = []
    for step in range(STEPS):
        x, labels = batch(step)
        scores, saved = forward(weights, x)
        _, grad = loss_and_gradient(scores, labels)
        backward(weights, saved, grad, gradients.__setitem__)
        waiting.append(dict(gradients))
        if len(waiting) > staleness:
            update(weights, velocity, waiting.pop(0))
    return weights


def train(group, staleness):
    """Return the weights after training on all ranks, and the times of this rank's waits."""
    weights, velocity = first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0)
    waiting, waits_s = [], [clock.now()]
    for step in range(STEPS):
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        scores, saved = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        for _ in range(20 if step % group.size == group.rank else 5):
            clock.sleep(SLOW_S / 20)  # who computes polls its messages, as in lesson 3
            for _, pending in waiting:
                pending.poll()
        gradients = {}
        backward(weights, saved, grad, gradients.__setitem__)
        flat = np.concatenate([gradients[layer].ravel() for layer in weights])
        pending = group.bind(flat, "ring", tag=step % (staleness + 1))  # one tag per sum in flight
        pending.start()
        waiting.append((flat, pending))
        if len(waiting) > staleness:
            flat, pending = waiting.pop(0)
            waits_s.append(clock.now())
            pending.wait()
            waits_s.append(clock.now())
            parts = np.split(flat, np.cumsum([w.size for w in weights.values()])[:-1])
            update(weights, velocity, {i: g.reshape(weights[i].shape) for i, g in enumerate(parts)})
    for _, pending in waiting:
        pending.wait()
    return weights, waits_s


def draw(name, times_by_rank):
    """Return the bars of each rank's computing and waiting."""
    bars = []
    for rank, times_s in enumerate(times_by_rank):
        for i, part in enumerate(pairwise(times_s)):
            begin, end = (1e3 * (time_s - times_s[0]) for time_s in part)
            kind = "waiting" if i % 2 else "computing"
            bars.append(Bar(f"{name}, rank {rank}", begin, end, kind))
    return bars


def main(group):
    """Train with each staleness; compare with a serial run whose gradients are as late."""
    bars = []
    for staleness in (0, 1, 3):
        expected, (trained, waits_s) = serial(staleness), train(group, staleness)
        for layer, w in trained.items():
            np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
        new = draw(f"staleness {staleness}", group.gather(waits_s))
        waited, bars = sum(bar.end - bar.begin for bar in new if bar.kind == "waiting"), bars + new
        x, labels = batch(0)
        loss, _ = loss_and_gradient(forward(trained, x)[0], labels)
        if group.is_root:
            print(f"staleness {staleness}: equal to a serial run with this delay;", end=" ")
            print(f"the ranks waited {waited:.0f} ms together, loss {loss / BATCH:.3f}")
    title = "Computing and waiting, with another straggler in each step"
    picture = Picture(title, "ms", bars)
    if group.is_root:
        print(f"\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        machine = Machine.uniform(1e-5, 1e-9)
        picture = nnmpi.simulate(main, ranks=given.simulate, machine=machine, cpu_factor=0)[0]
    else:
        picture = main(nnmpi.start())
