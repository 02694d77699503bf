"""Lesson 7: a recomputation plan. Layers drop their saved inputs and compute them again later.

    F forward, nothing saved    K forward, input saved    D a layer's input is dropped    B backward

    all saved   K0 K1 D1 K2 D2 K3 D3 B3 B2 B1 B0                 layers 1 to 3 save inputs at once
    PLAN        F0 F1 D1 K2 D2 K3 D3 B3 B2 F0 K1 D1 B1 K0 D1 B0  at most two; layer 0 runs 3 times
                forward            |back  |again    |back

Both are lists of actions. The backward pass starts from the last layer: the inputs of the first
layers are needed last, so they may be computed late. The plan concerns one rank; the rest is
lesson 6.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base.command import program_words
from nnmpi.base.picture import Bar, Picture
from nnmpi.base.shard import split
from nnmpi.memory.plan import Act, parse_plan

WIDTHS = (64, 48, 32, 24, 10)  # inputs of the four layers, and the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
ALL_SAVED = "K0 K1 D1 K2 D2 K3 D3 B3 B2 B1 B0"
PLAN = "F0 F1 D1 K2 D2 K3 D3 B3 B2 F0 K1 D1 B1 K0 D1 B0"


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


def run_plan(plan, weights, x, labels, final):
    """Run a plan for one batch; return the peak bytes between two actions."""
    values, saved, most = {0: x}, {}, 0  # values: {layer: its input}; the last are the scores
    for action in parse_plan(plan):
        layer = action.layer
        weight = {layer: weights.get(layer)}
        if action.act is Act.DROP:
            del values[layer]
        elif action.act is Act.BACKWARD:
            if layer == len(weights) - 1:
                _, grad = loss_and_gradient(values.pop(layer + 1), labels)
            grad = backward(weight, {layer: saved.pop(layer)}, grad, final)
        else:
            values[layer + 1], inputs = forward(weight, values[layer])
            if action.act is Act.KEEP:
                saved |= inputs
        arrays = {
            id(array): array.nbytes for i, array in [*values.items(), *saved.items()] if i > 0
        }
        most = max(most, sum(arrays.values()))  # ReLU is in place: a value may be a saved input
    assert not saved, f"the plan never uses the saved inputs of layers {list(saved)}"
    return most


def draw(name, plan):
    """Return the bars of a plan: each layer's actions, and how long it saves its input."""
    kinds, since = {Act.BACKWARD: "backward", Act.DROP: ""}, {}
    bars = [Bar(f"{name}, layer {layer}", 0, 0) for layer in range(len(WIDTHS) - 1)]
    for at, (act, layer) in enumerate((action.act, action.layer) for action in parse_plan(plan)):
        row = f"{name}, layer {layer}"
        if act is Act.BACKWARD:
            bars.append(Bar(row, since.pop(layer), at, "saved"))
        bars.append(Bar(row, at, at + 1, kinds.get(act, "forward"), act.value))
        since |= {layer: at + 1} if act is Act.KEEP else {}
    return bars


def train(group, plan):
    """Return the weights after training on all ranks, and the peak bytes of a plan."""
    shapes = [w.shape for w in first_weights().values()]
    flat = np.concatenate([w.ravel() for w in first_weights().values()])
    ends = np.cumsum([n * m for n, m in shapes])
    views = np.split(flat, ends[:-1])
    weights = {layer: view.reshape(shapes[layer]) for layer, view in enumerate(views)}
    chunk = split(flat.size, group.size)[group.rank]
    shard = {0: flat[chunk.start : chunk.stop]}  # updated in place
    velocity, gradients = {0: np.zeros(len(chunk))}, {}  # 1/N of the state
    for step in range(STEPS):
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        most = run_plan(plan, weights, x[mine], labels[mine], gradients.__setitem__)
        sums = np.concatenate([gradients[layer].ravel() for layer in weights])
        group.reduce_scatter(sums, "ring")
        update(shard, velocity, {0: sums[chunk.start : chunk.stop]})
        group.all_gather(flat, "ring")
    return weights, most


def main(group):
    """Train by both plans and on one rank; raise AssertionError if the weights differ."""
    expected = serial()
    (saved, most), (trained, least) = train(group, ALL_SAVED), train(group, PLAN)
    for layer, w in trained.items():
        np.testing.assert_array_equal(w, saved[layer])  # recomputation repeats every bit
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
    assert least < most or not most  # a rank without samples saves nothing
    title = f"Saved inputs of the layers: at most {most:,} bytes, {least:,} by the plan"
    picture = Picture(title, "actions", draw("all saved", ALL_SAVED) + draw("plan", PLAN))
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}:", end=" ")
        print(f"{least} bytes instead of {most}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
