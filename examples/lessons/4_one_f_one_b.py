"""Lesson 4: 1F1B. Each rank has some of the layers; a batch passes through in microbatches.

    rank 0   F0 F1 .  .  B0 F2 B1 F3 B2 .  B3      layers 0, 1     F0: forward on microbatch 0
    rank 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .  .       layers 2, 3     B0: backward

    forward    rank 0 --- output of layer 1 ------> rank 1
    backward   rank 0 <--- its gradient ----------- rank 1

A backward runs as soon as it can, so a rank saves the activations of few microbatches at a time.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base.command import program_words
from nnmpi.base.shard import split
from nnmpi.comm.point_to_point import Messages
from nnmpi.lab.render.schedules import picture as draw
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedule import Kind
from nnmpi.schedule.schedules import make
from nnmpi.schedule.simulate import even_costs, simulate_schedule

WIDTHS = (64, 48, 32, 24, 10)  # inputs of the four layers, and the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
MICROBATCHES = 4


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


def one_f_one_b(rank, ranks, microbatches):
    """Return a rank's passes: forwards to warm up, then one forward and one backward in turn."""
    ahead = min(ranks - 1 - rank, microbatches)
    program = [Kind.F.at(rank, m) for m in range(ahead)]
    for m in range(microbatches):
        program += [Kind.F.at(rank, ahead + m)] * (ahead + m < microbatches)
        program.append(Kind.B.at(rank, m))
    return program


def train(group):
    """Return the weights of this rank's layers."""
    rank, last, messages = group.rank, group.size - 1, Messages(group)
    layers = split(len(WIDTHS) - 1, group.size)[rank]
    weights = {layer: first_weights()[layer] for layer in layers}
    velocity = dict.fromkeys(layers, 0.0)
    parts = split(BATCH, MICROBATCHES)

    def receive(source, width, m):
        return messages.receive(np.empty((len(parts[m]), width)), source, m).wait()

    for step in range(STEPS):
        x, labels = batch(step)
        saved, grads, gradients = {}, {}, [{} for _ in parts]  # by microbatch
        for instruction in one_f_one_b(rank, group.size, MICROBATCHES):
            m = instruction.microbatch
            rows = slice(parts[m].start, parts[m].stop)
            if instruction.kind is Kind.F:
                out = x[rows] if rank == 0 else receive(rank - 1, WIDTHS[layers.start], m)
                out, saved[m] = forward(weights, out)
                if rank == last:
                    _, grads[m] = loss_and_gradient(out, labels[rows])
                else:
                    messages.send(out, rank + 1, m)
            else:
                grad = grads.pop(m) if rank == last else receive(rank + 1, WIDTHS[layers.stop], m)
                grad = backward(weights, saved.pop(m), grad, gradients[m].__setitem__)
                if rank > 0:
                    messages.send(grad, rank - 1, m)
        messages.drain()
        update(weights, velocity, {i: sum(part[i] for part in gradients) for i in layers})
    messages.free()
    return weights


def main(group):
    """Train on all ranks and on one; raise AssertionError if the weights differ."""
    schedule = lower(make(one_f_one_b, group.size, MICROBATCHES))
    check(schedule)  # names what is missing or too early
    picture = draw(schedule, simulate_schedule(schedule, even_costs(group.size, 1e-3)))
    expected, trained = serial(), train(group)
    for layer, w in trained.items():
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
