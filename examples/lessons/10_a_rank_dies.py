"""Lesson 10: a rank dies. The others cannot continue; all restart from the last checkpoint.

    start 1   step 0 1 2 3 | 4 5 6 x           rank 1 is killed in step 6; the launcher ends the job
                      checkpoint 4             step, weights, velocities: all that a start needs
    start 2                | 4 5 6 7 | 8 9 ... same rows, same order: the serial run's weights

The new file is renamed to the old one's name, which is atomic: a rank that dies while writing
leaves the old file intact. The rows of a step depend on its number alone, so there is no other
state.
"""

import os
import tempfile
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base.command import program_words
from nnmpi.base.errors import NnmpiError
from nnmpi.base.picture import Bar, Picture
from nnmpi.comm.simulated.scheduler import Faults

WIDTHS = (64, 48, 32, 24, 10)  # inputs of the four layers, and the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
SAVED, DEATH = 4, 6  # steps between checkpoints; the step in which --dies kills the last rank
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


def save(file, step, weights, velocity):
    """Write a checkpoint: the file is the old one or the new one, never half of it."""
    with open(f"{file}.new", "wb") as out:
        np.savez(out, step, *weights.values(), *velocity.values())
        out.flush()
        os.fsync(out)  # the data reach the disk before the name
    os.replace(f"{file}.new", file)


def load(file):
    """Return the next step, the weights and the velocities; the initial ones without a file."""
    if file is None or not os.path.exists(file):
        return 0, first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0)
    with np.load(file) as stored:
        step, *arrays = stored.values()
    n = len(arrays) // 2
    return int(step), dict(enumerate(arrays[:n])), dict(enumerate(arrays[n:]))


def train(group, file=None, dies=False, begun=None):
    """Return the weights after training on all ranks, and the first step of this start."""
    first, weights, velocity = load(file)
    for step in range(first, STEPS):
        if begun is not None:
            begun.append((group.rank, step))
        if dies and step == DEATH and group.rank == group.size - 1:
            os.kill(os.getpid(), 9)
        (x, labels), mine, gradients = batch(step), slice(group.rank, None, group.size), {}
        scores, saved = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        backward(weights, saved, grad, gradients.__setitem__)
        flat = np.concatenate([gradients[layer].ravel() for layer in weights])
        group.all_reduce(flat, "ring")
        parts = np.split(flat, np.cumsum([w.size for w in weights.values()])[:-1])
        update(weights, velocity, {i: g.reshape(weights[i].shape) for i, g in enumerate(parts)})
        if file and group.is_root and (step + 1) % SAVED == 0:
            save(file, step + 1, weights, velocity)
    return weights, first


def main(group, file=None, dies=False, begun=None):
    """Train on all ranks and on one; raise AssertionError if the weights differ."""
    expected, (trained, first) = serial(), train(group, file, dies, begun)
    for layer, w in trained.items():
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
    if group.is_root:
        print(f"begun with step {first}, equal to the serial run after {STEPS} steps,", end=" ")
        print(f"ranks: {group.size}")


def start_twice(ranks, file):
    """Run on simulated ranks, kill the last one after the first checkpoint, and run again."""
    if ranks < 2:
        why = "on one rank, no other rank would wait for the dead one"
        raise SystemExit(f"{why}; give --simulate 2, or more")
    call = 36 * (ranks - 1)  # sends, receives and waits: a ring has more of them with more ranks
    starts, faults = ([], []), Faults(kill={ranks - 1: call})  # starts: the (rank, step)s begun
    try:
        nnmpi.simulate(lambda group: main(group, file, begun=starts[0]), ranks=ranks, faults=faults)
    except NnmpiError as error:
        print(error)
    nnmpi.simulate(lambda group: main(group, file, begun=starts[1]), ranks=ranks)
    first, bars = min(step for _, step in starts[1]), []
    for start, begun in enumerate(starts, 1):
        for rank, step in sorted(begun):
            last = start == 1 and (rank, step) == max(begun)
            kind = "killed" if last else "computed" if start > 1 or step < first else "lost"
            bars.append(Bar(f"start {start}, rank {rank}", step, step + 1, kind, str(step)))
    title = f"Steps after the checkpoint at step {first} are lost, and repeated"
    picture = Picture(title, "steps", bars)
    print(f"\n{picture}")
    return picture


@dataclass(frozen=True)
class Start:
    """The start."""

    simulate: int | None = None
    """Run on this many ranks of this process."""
    file: str | None = None
    """The checkpoint's file (default: no checkpoint)."""
    dies: bool = False
    """Kill the last rank."""


if __name__ == "__main__":
    given = program_words(__doc__, Start)
    if given.simulate:
        with tempfile.TemporaryDirectory() as folder:
            picture = start_twice(given.simulate, f"{folder}/saved.npz")
    else:
        main(nnmpi.start(), given.file, given.dies)
