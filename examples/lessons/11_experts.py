"""Lesson 11: experts. A gate gives each row one of many layers; ranks share out the rows, and the
layers, too.

    rows of rank 0    a b c d        the gate says    a 2, b 0, c 2, d 1        experts 0 and 1 are on rank 0, 2 on 1
    rank 0 -> rank 1  a c            all-to-all: rows go to their experts ...
    rank 0 <- rank 1  a'  c'         ... and results come back

An expert sees the rows of all ranks, so its gradient is complete where it is, and nobody sums it.
"""

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.comm import collective
from nnmpi.comm.collective import Step
from nnmpi.comm.point_to_point import send_and_receive
from nnmpi.comm.prove import prove
from nnmpi.command import program_words
from nnmpi.pages.picture import Bar, Picture
from nnmpi.shard import split

PIXELS, EXPERTS, WIDTH, CLASSES = 64, 5, 24, 10
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
GATE, HEAD = "gate", "head"  # beside them the experts have numbers


def first_weights():
    """Return {layer: (in, out) matrix}, the same on every rank."""
    draw = np.random.default_rng(0)
    shapes = {
        GATE: (PIXELS, EXPERTS),
        HEAD: (WIDTH, CLASSES),
        **dict.fromkeys(range(EXPERTS), (PIXELS, WIDTH)),
    }
    return {layer: draw.normal(0, (2 / shape[0]) ** 0.5, shape) for layer, shape in shapes.items()}


def batch(step):
    """Return the images of a step, a row for each, and their labels."""
    rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(DIGITS)
    return DIGITS.x[rows].reshape(BATCH, -1) * DIGITS.scale, DIGITS.y[rows]


def softmax(scores):
    """Return the rows' probabilities."""
    chances = np.exp(scores - scores.max(1, keepdims=True))
    return chances / chances.sum(1, keepdims=True)


def update(weights, velocity, gradients):
    """Change the weights by the mean gradient of the batch."""
    for layer, gradient in gradients.items():
        velocity[layer] = MOMENTUM * velocity.get(layer, 0.0) + gradient / BATCH
        weights[layer] -= RATE * velocity[layer]


def gradients_of(weights, x, labels, journey):
    """Return {layer: gradient}: of the experts that are here for all rows, of the rest for this
    rank's.
    """
    chances = softmax(x @ weights[GATE])
    chosen, every = chances.argmax(1), np.arange(len(x))
    top = chances[every, chosen][:, None]
    here = journey.go(x, chosen)
    hidden = {e: np.maximum(rows @ weights[e], 0) for e, rows in here.items()}
    y = journey.come(hidden, chosen)
    grad = softmax((top * y) @ weights[HEAD])
    grad[every, labels] -= 1
    to_y = grad @ weights[HEAD].T
    back = journey.go(top * to_y, chosen)
    found = {e: rows.T @ (back[e] * (hidden[e] > 0)) for e, rows in here.items()}
    to_top = top * (to_y * y).sum(1, keepdims=True)
    to_gate = -chances * to_top
    to_gate[every, chosen] += to_top[:, 0]
    return found | {GATE: x.T @ to_gate, HEAD: (top * y).T @ grad}


class Nowhere:
    """The way of rows where all experts are here."""

    def go(self, rows, chosen):
        """Return {expert: its rows}."""
        return {e: rows[chosen == e] for e in range(EXPERTS)}

    def come(self, results, chosen):
        """Return what belongs to each row, of {expert: what belongs to its rows}."""
        order = np.argsort(chosen, kind="stable")
        return np.concatenate([*results.values()])[np.argsort(order)]


def serial():
    """Return the weights that training on one rank ends with."""
    weights, velocity = first_weights(), {}
    for step in range(STEPS):
        update(weights, velocity, gradients_of(weights, *batch(step), Nowhere()))
    return weights


def pairwise(rank, size):
    """Return this rank's steps; chunk s * size + r is what rank s has for rank r."""
    pairs = (((rank + i) % size, (rank - i) % size) for i in range(1, size))
    return tuple(
        Step(to, (rank * size + to,), source, (source * size + rank,)) for to, source in pairs
    )


class Journey:
    """The way of this rank's rows to their experts and back."""

    def __init__(self, group):
        self.group, self.owners = group, split(EXPERTS, group.size)

    def exchange(self, parts, shapes):
        """Send each rank a part, and return what comes from each, of these shapes."""
        came = {self.group.rank: parts[self.group.rank]}
        for step in pairwise(self.group.rank, self.group.size):
            came[step.from_] = np.empty(shapes[step.from_], parts[step.to].dtype)
            send_and_receive(
                self.group, [(step.to, parts[step.to])], [(step.from_, came[step.from_])]
            )
        return [came[rank] for rank in range(self.group.size)]

    def go(self, rows, chosen):
        """See `Nowhere`: first how many rows each expert gets, then the rows."""
        mine, size = self.owners[self.group.rank], self.group.size
        wanted = np.bincount(chosen, minlength=EXPERTS)
        counts = self.exchange([wanted[own] for own in self.owners], [(len(mine),)] * size)
        # of the rows that come
        self.experts = np.concatenate([np.repeat(mine, each) for each in counts])
        self.come_from, self.order = (
            [each.sum() for each in counts],
            np.argsort(chosen, kind="stable"),
        )
        self.go_to = [np.isin(chosen, own).sum() for own in self.owners]
        parts = np.split(rows[self.order], np.cumsum(self.go_to)[:-1])
        came = self.exchange(parts, [(n, rows.shape[1]) for n in self.come_from])
        return {e: np.concatenate(came)[self.experts == e] for e in mine}

    def come(self, results, chosen):
        """See `Nowhere`: the same way back."""
        together = np.empty((len(self.experts), WIDTH))
        for e, rows in results.items():
            together[self.experts == e] = rows
        parts = np.split(together, np.cumsum(self.come_from)[:-1])
        y = np.concatenate(self.exchange(parts, [(n, WIDTH) for n in self.go_to]))
        return y[np.argsort(self.order)]


def train(group):
    """Return the weights of the rank's own experts, and of the rest, that training ends with; and
    its journey.
    """
    weights, velocity, journey = first_weights(), {}, Journey(group)
    for step in range(STEPS):
        x, labels = (each[group.rank :: group.size] for each in batch(step))
        gradients = gradients_of(weights, x, labels, journey)
        for layer in (GATE, HEAD):  # an expert's is complete
            group.all_reduce(gradients[layer].reshape(-1))
        update(weights, velocity, gradients)
    return {layer: weights[layer] for layer in gradients}, journey


def draw(told):
    """Return how many rows each rank's experts had, of (rows of its own, of others), by rank, in
    the last step.
    """
    bars = []
    for row, (own, other) in enumerate(told):
        parts = (
            (0, own, "rows of its own", str(own)),
            (own, own + other, "rows of other ranks", str(other)),
        )
        bars += [Bar(f"rank {row}", *part) for part in parts]
    return Picture("An expert's rank computes with the rows of all ranks", "rows", bars)


def main(group):
    """Train over the ranks and on one, and compare; an AssertionError ends the program if they
    differ.
    """
    prove(pairwise, group.size, collective.ALL_TO_ALL)  # names rank, step and chunk of a mistake
    wanted, (found, journey) = serial(), train(group)
    for layer, w in found.items():
        np.testing.assert_allclose(w, wanted[layer], rtol=1e-9, atol=1e-12)
    picture = draw(
        group.gather([own := int(journey.come_from[group.rank]), len(journey.experts) - own])
    )
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
