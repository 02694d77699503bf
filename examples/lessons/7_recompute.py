"""Lesson 7: a recomputation plan. What layers keep is dropped, and computed again when it is
needed.

    F forward, nothing stays    K forward, and what came is kept    D what comes to a layer goes    B backward

    all is kept     K0 K1 D1 K2 D2 K3 D3 B3 B2 B1 B0               layers 1 to 3 keep what came at the same time
    PLAN            F0 F1 D1 K2 D2 K3 D3 B3 B2 F0 K1 D1 B1 K0 B0   at most two of them do; layer 0 runs three times
                    forward            |back  |again    |back

Both are lists of actions. Backward walks from the end: what the first layers keep is needed last,
so it may be computed late. The rest is lesson 6: the plan is a matter of one rank.
"""

from itertools import pairwise

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.command import program_words
from nnmpi.memory.plan import Act, parse_plan
from nnmpi.pages.picture import Bar, Picture
from nnmpi.shard import split

WIDTHS = (64, 48, 32, 24, 10)  # of what comes to the four layers, and of the scores
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
ALL_KEPT = "K0 K1 D1 K2 D2 K3 D3 B3 B2 B1 B0"
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


def run_plan(plan, weights, x, labels, final):
    """Do what a plan says for one batch; return the most bytes that lay around between two
    actions.
    """
    # values: what comes to a layer; those behind the last are the scores
    values, kept, most = {0: x}, {}, 0
    for action in parse_plan(plan):
        layer = action.layer
        weight = {layer: weights.get(layer)}
        if action.act is Act.DROP:
            del values[layer]
        elif action.act is Act.BACKWARD:
            if layer == len(weights) - 1:
                _, grad = loss_and_gradient(values.pop(layer + 1), labels)
            grad = backward(weight, {layer: kept.pop(layer)}, grad, final)
        else:
            values[layer + 1], keeps = forward(weight, values[layer])
            if action.act is Act.KEEP:
                kept |= keeps
        arrays = {id(array): array.nbytes for i, array in [*values.items(), *kept.items()] if i > 0}
        # ReLU is done in place, so a value may be what is kept
        most = max(most, sum(arrays.values()))
    assert not kept, f"the plan leaves behind what layers {list(kept)} keep"
    return most


def draw(name, plan):
    """Return what each layer does in a plan, and how long it keeps what came."""
    kinds, since = {Act.BACKWARD: "backward", Act.DROP: ""}, {}
    bars = [Bar(f"{name}, layer {layer}", 0, 0) for layer in range(len(WIDTHS) - 1)]
    for at, (act, layer) in enumerate((action.act, action.layer) for action in parse_plan(plan)):
        row = f"{name}, layer {layer}"
        if act is Act.BACKWARD:
            bars.append(Bar(row, since.pop(layer), at, "kept"))
        bars.append(Bar(row, at, at + 1, kinds.get(act, "forward"), act.value))
        since |= {layer: at + 1} if act is Act.KEEP else {}
    return bars


def train(group, plan):
    """Return the weights that training over the ranks ends with, and the most bytes that a plan
    had.
    """
    shapes = [w.shape for w in first_weights().values()]
    flat = np.concatenate([w.ravel() for w in first_weights().values()])
    ends = np.cumsum([n * m for n, m in shapes])
    # views
    weights = {
        layer: part.reshape(shapes[layer]) for layer, part in enumerate(np.split(flat, ends[:-1]))
    }
    chunk = split(flat.size, group.size)[group.rank]
    own = {0: flat[chunk.start : chunk.stop]}  # what this rank updates, in place
    velocity, gradients = {0: np.zeros(len(chunk))}, {}  # an N-th of the state
    for step in range(STEPS):
        x, labels = batch(step)
        mine = slice(group.rank, None, group.size)
        most = run_plan(plan, weights, x[mine], labels[mine], gradients.__setitem__)
        sums = np.concatenate([gradients[layer].ravel() for layer in weights])
        group.reduce_scatter(sums, "ring")
        update(own, velocity, {0: sums[chunk.start : chunk.stop]})
        group.all_gather(flat, "ring")
    return weights, most


def main(group):
    """Train by both plans and on one rank, and compare; an AssertionError ends the program if they
    differ.
    """
    wanted = serial()
    (kept, most), (found, least) = train(group, ALL_KEPT), train(group, PLAN)
    for layer, w in found.items():
        # to the bit: the same numbers are computed again
        np.testing.assert_array_equal(w, kept[layer])
        np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12)
    assert least < most
    title = f"What layers keep, and for how long: at most {most:,} bytes, and {least:,} by the plan"
    picture = Picture(title, "actions", draw("all kept", ALL_KEPT) + draw("plan", PLAN))
    if group.is_root:
        print(
            f"equal to the serial run after {STEPS} steps, ranks: {group.size}: {least} bytes"
            f" instead of {most}"
        )
        print(f"\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
