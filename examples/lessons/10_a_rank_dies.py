"""Lesson 10: a rank that dies. The others cannot go on without it; all begin again from the last
checkpoint.

    start 1     step 0 1 2 3 | 4 5 6 x              rank 1 is killed in step 6, and the launcher ends the others
                        checkpoint 4                all that the next start needs: step, weights, velocities
    start 2                  | 4 5 6 7 | 8 9 ...    the same rows in the same order: the serial run's weights

A new file is renamed to the old one's name, which happens at once: whoever dies while writing
leaves the old one whole. Which rows come in a step depends on its number alone, so there is nothing
else to remember.
"""

import os
import tempfile
from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.comm.simulated.scheduler import Faults
from nnmpi.command import program_words
from nnmpi.errors import NnmpiError
from nnmpi.pages.picture import Bar, Picture

WIDTHS = (64, 48, 32, 24, 10)  # of what comes to the four layers, and of the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
# a checkpoint after so many steps; the step in which the last rank dies, if it is to
SAVED, DEATH = 4, 6
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


def save(file, step, weights, velocity):
    """Write what training needs to go on with a step; the file is the old one or the new one, never
    half of it.
    """
    with open(f"{file}.new", "wb") as out:
        np.savez(out, step, *weights.values(), *velocity.values())
        out.flush()
        os.fsync(out)  # on the disk before the name is
    os.replace(f"{file}.new", file)


def load(file):
    """Return the step to go on with, the weights and their velocities; those of a new training if
    there is no file.
    """
    if file is None or not os.path.exists(file):
        return 0, first_weights(), dict.fromkeys(range(len(WIDTHS) - 1), 0.0)
    with np.load(file) as found:
        step, *arrays = found.values()
    return (
        int(step),
        dict(enumerate(arrays[: len(arrays) // 2])),
        dict(enumerate(arrays[len(arrays) // 2 :])),
    )


def train(group, file=None, dies=False, begun=None):
    """Return the weights that training over the ranks ends with, and the step with which it
    began.
    """
    first, weights, velocity = load(file)
    for step in range(first, STEPS):
        if begun is not None:
            begun.append((group.rank, step))
        if dies and step == DEATH and group.rank == group.size - 1:
            os.kill(os.getpid(), 9)
        (x, labels), mine, gradients = batch(step), slice(group.rank, None, group.size), {}
        scores, kept = forward(weights, x[mine])
        _, grad = loss_and_gradient(scores, labels[mine])
        backward(weights, kept, grad, gradients.__setitem__)
        flat = np.concatenate([gradients[layer].ravel() for layer in weights])
        group.all_reduce(flat, "ring")
        parts = np.split(flat, np.cumsum([w.size for w in weights.values()])[:-1])
        update(
            weights,
            velocity,
            {layer: g.reshape(weights[layer].shape) for layer, g in enumerate(parts)},
        )
        if file and group.is_root and (step + 1) % SAVED == 0:
            save(file, step + 1, weights, velocity)
    return weights, first


def main(group, file=None, dies=False, begun=None):
    """Train over the ranks and on one, and compare; an AssertionError ends the program if they
    differ.
    """
    wanted, (found, first) = serial(), train(group, file, dies, begun)
    for layer, w in found.items():
        np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12)
    if group.is_root:
        print(
            f"begun with step {first}, equal to the serial run after {STEPS} steps, ranks:"
            f" {group.size}"
        )


def start_twice(ranks, file):
    """Start on ranks of this process; the last one is killed behind the first checkpoint; start
    again.
    """
    if ranks < 2:
        raise SystemExit(
            "a rank that dies alone leaves nobody who waits for it; give --simulate 2, or more"
        )
    call = 36 * (ranks - 1)  # a send, a receive or a wait: a ring has more of them with more ranks
    starts = [], []  # (rank, step) that began
    try:
        nnmpi.simulate(
            lambda group: main(group, file, begun=starts[0]),
            ranks=ranks,
            faults=Faults(kill={ranks - 1: call}),
        )
    except NnmpiError as error:
        print(error)
    nnmpi.simulate(lambda group: main(group, file, begun=starts[1]), ranks=ranks)
    first, bars = min(step for _, step in starts[1]), []
    for start, begun in enumerate(starts, 1):
        for rank, step in sorted(begun):
            last = start == 1 and (rank, step) == max(begun)
            kind = "killed" if last else "computed" if start > 1 or step < first else "lost"
            bars.append(Bar(f"start {start}, rank {rank}", step, step + 1, kind, str(step)))
    picture = Picture(
        f"What came after the checkpoint at step {first} is lost, and done again", "steps", bars
    )
    print(f"\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__, ("file", {"nargs": "?"}), ("--dies", {"action": "store_true"}))
    if given.simulate:
        with tempfile.TemporaryDirectory() as folder:
            picture = start_twice(given.simulate, f"{folder}/saved.npz")
    else:
        main(nnmpi.start(), given.file, given.dies)
