"""Lesson 8: who waits for whom. A rank that need not have the newest sum need not wait for a slow
one.

    staleness 0     rank 0  | 0 |......| 1 |.| 2 |         rank 1 is slow in step 0: rank 0 waits in step 0
                    rank 1  | 0        | 1 |.| 2 |

    staleness 1     rank 0  | 0 | 1 |..| 2 |               it waits a step later, and less: the sum of step t
                    rank 1  | 0        | 1 | 2 |           is used after step t + 1

A gradient that is used s steps late was made with weights that s updates are missing in: its
staleness is s. No rank can be more than s + 1 steps ahead of another. What is learned is no longer
the same; but it is known exactly, so it can be proved: it is the serial run whose gradients are
used as late.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import clock, data
from nnmpi.comm.machine import Machine
from nnmpi.command import program_words
from nnmpi.pages.picture import Bar, Picture

WIDTHS = (64, 48, 32, 24, 10)  # of what comes to the four layers, and of the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
SLOW_S = 0.004  # what a step takes longer on one rank, another one each time


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


def serial(staleness=0):
    """Return the weights that training on one rank ends with, when gradients are used so many steps
    late.
    """
    weights, velocity, gradients, waiting = (
        first_weights(),
        dict.fromkeys(range(len(WIDTHS) - 1), 0.0),
        {},
        [],
    )
    for step in range(STEPS):
        x, labels = batch(step)
        scores, kept = forward(weights, x)
        _, grad = loss_and_gradient(scores, labels)
        backward(weights, kept, grad, gradients.__setitem__)
        waiting.append(dict(gradients))
        if len(waiting) > staleness:
            update(weights, velocity, waiting.pop(0))
    return weights


def train(group, staleness):
    """Return the weights that training over the ranks ends with, and when this rank began and ended
    to wait.
    """
    weights, velocity, waiting, waits_s = (
        first_weights(),
        dict.fromkeys(range(len(WIDTHS) - 1), 0.0),
        [],
        [clock.now()],
    )
    for step in range(STEPS):
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        scores, kept = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        for _ in range(20 * (step % group.size == group.rank)):
            # the slow one looks after its messages, as in lesson 3
            clock.sleep(SLOW_S / 20)
            for _, pending in waiting:
                pending.poll()
        gradients = {}
        backward(weights, kept, grad, gradients.__setitem__)
        flat = np.concatenate([gradients[layer].ravel() for layer in weights])
        # a tag for each sum under way
        pending = group.bind(flat, "ring", tag=step % (staleness + 1))
        pending.start()
        waiting.append((flat, pending))
        if len(waiting) > staleness:
            flat, pending = waiting.pop(0)
            waits_s.append(clock.now())
            pending.wait()
            waits_s.append(clock.now())
            parts = np.split(flat, np.cumsum([w.size for w in weights.values()])[:-1])
            update(
                weights,
                velocity,
                {layer: g.reshape(weights[layer].shape) for layer, g in enumerate(parts)},
            )
    for _, pending in waiting:
        pending.wait()
    return weights, waits_s


def draw(name, everyones):
    """Return when each rank computed and waited."""
    bars = []
    for rank, times_s in enumerate(everyones):
        for i, part in enumerate(pairwise(times_s)):
            begin, end = (1e3 * (time_s - times_s[0]) for time_s in part)
            bars.append(
                Bar(f"{name}, rank {rank}", begin, end, "waiting" if i % 2 else "computing")
            )
    return bars


def main(group):
    """Train with each staleness and compare with a serial run whose gradients are as late."""
    bars = []
    for staleness in (0, 1, 3):
        wanted, (found, waits_s) = serial(staleness), train(group, staleness)
        for layer, w in found.items():
            np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12)
        new = draw(f"staleness {staleness}", group.gather(waits_s))
        waited, bars = sum(bar.end - bar.begin for bar in new if bar.kind == "waiting"), bars + new
        x, labels = batch(0)
        loss, _ = loss_and_gradient(forward(found, x)[0], labels)
        if group.is_root:
            print(
                f"staleness {staleness}: equal to the serial run as late; in all the ranks waited"
                f" {waited:.0f} ms",
                end="",
            )
            print(f", loss {loss / BATCH:.3f}")
    picture = Picture(
        "Who computes and who waits, where another rank is slow in each step", "ms", bars
    )
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
