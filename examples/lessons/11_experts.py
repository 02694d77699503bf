"""Lesson 11: experts. A gate routes each row to one of many layers; rows and layers are sharded.

    rows of rank 0    a b c d       gate: a 2, b 0, c 2, d 1    experts 0, 1 on rank 0; 2 on rank 1
    rank 0 -> rank 1  a c           all-to-all: rows go to their experts ...
    rank 0 <- rank 1  a'  c'        ... and results come back

An expert sees the rows of all ranks, so its gradient is complete on its rank and needs no sum.
"""

import numpy as np

import nnmpi
from nnmpi import data
from nnmpi.base.command import program_words
from nnmpi.base.picture import Bar, Picture
from nnmpi.base.shard import split
from nnmpi.comm import collective
from nnmpi.comm.collective import Step
from nnmpi.comm.point_to_point import send_and_receive
from nnmpi.comm.prove import prove

PIXELS, EXPERTS, WIDTH, CLASSES = 64, 5, 24, 10
STEPS, BATCH, RATE, MOMENTUM = 12, 64, 0.05, 0.9
DIGITS, _ = data.load("digits")  # 8 x 8 images
GATE, HEAD = "gate", "head"  # the other layers, experts, have numbers


def first_weights():
    """Return {layer: (in, out) matrix}, the same on every rank."""
    draw = np.random.default_rng(0)
    shapes = {GATE: (PIXELS, EXPERTS), HEAD: (WIDTH, CLASSES)}
    shapes |= dict.fromkeys(range(EXPERTS), (PIXELS, WIDTH))
    return {layer: draw.normal(0, (2 / shape[0]) ** 0.5, shape) for layer, shape in shapes.items()}


def batch(step):
    """Return the images of a step, a row for each, and their labels."""
    rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(DIGITS)
    return DIGITS.x[rows].reshape(BATCH, -1) * DIGITS.scale, DIGITS.y[rows]


def softmax(scores):
    """Return the rows' probabilities."""
    probabilities = np.exp(scores - scores.max(1, keepdims=True))
    return probabilities / probabilities.sum(1, keepdims=True)


def update(weights, velocity, gradients):
    """Update the weights with the mean gradient of the batch."""
    for layer, gradient in gradients.items():
        velocity[layer] = MOMENTUM * velocity.get(layer, 0.0) + gradient / BATCH
        weights[layer] -= RATE * velocity[layer]


def gradients_of(weights, x, labels, journey):
    """Return {layer: gradient}: of local experts over all rows, of the rest over this rank's."""
    probabilities = softmax(x @ weights[GATE])
    chosen, every = probabilities.argmax(1), np.arange(len(x))
    top = probabilities[every, chosen][:, None]
    arrived = journey.go(x, chosen)
    hidden = {e: np.maximum(rows @ weights[e], 0) for e, rows in arrived.items()}
    y = journey.come(hidden, chosen)
    grad = softmax((top * y) @ weights[HEAD])
    grad[every, labels] -= 1
    to_y = grad @ weights[HEAD].T
    back = journey.go(top * to_y, chosen)
    gradients = {e: rows.T @ (back[e] * (hidden[e] > 0)) for e, rows in arrived.items()}
    to_top = top * (to_y * y).sum(1, keepdims=True)
    to_gate = -probabilities * to_top
    to_gate[every, chosen] += to_top[:, 0]
    return gradients | {GATE: x.T @ to_gate, HEAD: (top * y).T @ grad}


class Nowhere:
    """Routing of rows when all experts are on one rank."""

    def go(self, rows, chosen):
        """Return {expert: its rows}."""
        return {e: rows[chosen == e] for e in range(EXPERTS)}

    def come(self, results, chosen):
        """Return the result of each row, from {expert: results of its rows}."""
        order = np.argsort(chosen, kind="stable")
        return np.concatenate([*results.values()])[np.argsort(order)]


def serial():
    """Return the weights after training on one rank."""
    weights, velocity = first_weights(), {}
    for step in range(STEPS):
        update(weights, velocity, gradients_of(weights, *batch(step), Nowhere()))
    return weights


def pairwise(rank, size):
    """Return this rank's steps; chunk s * size + r goes from rank s to rank r."""
    pairs = (((rank + i) % size, (rank - i) % size) for i in range(1, size))
    return tuple(
        Step(to, (rank * size + to,), source, (source * size + rank,)) for to, source in pairs
    )


class Journey:
    """Routing of this rank's rows to their experts on all ranks, and back."""

    def __init__(self, group):
        self.group, self.owners = group, split(EXPERTS, group.size)

    def exchange(self, parts, shapes):
        """Send a part to each rank; return the parts received, of these shapes, by rank."""
        received = [np.empty(shape, parts[0].dtype) for shape in shapes]
        received[self.group.rank] = parts[self.group.rank]
        for step in pairwise(self.group.rank, self.group.size):
            to, source = step.to, step.from_
            send_and_receive(self.group, [(to, parts[to])], [(source, received[source])])
        return received

    def go(self, rows, chosen):
        """See `Nowhere`: exchange the number of rows of each expert, then the rows."""
        mine, size = self.owners[self.group.rank], self.group.size
        sizes = np.bincount(chosen, minlength=EXPERTS)
        counts = self.exchange([sizes[experts] for experts in self.owners], [(len(mine),)] * size)
        self.experts = np.concatenate([np.repeat(mine, n) for n in counts])  # of received rows
        self.come_from = [n.sum() for n in counts]
        self.order = np.argsort(chosen, kind="stable")
        self.go_to = [np.isin(chosen, experts).sum() for experts in self.owners]
        parts = np.split(rows[self.order], np.cumsum(self.go_to)[:-1])
        received = self.exchange(parts, [(n, rows.shape[1]) for n in self.come_from])
        return {e: np.concatenate(received)[self.experts == e] for e in mine}

    def come(self, results, chosen):
        """See `Nowhere`: the same messages in reverse."""
        together = np.empty((len(self.experts), WIDTH))
        for e, rows in results.items():
            together[self.experts == e] = rows
        parts = np.split(together, np.cumsum(self.come_from)[:-1])
        y = np.concatenate(self.exchange(parts, [(n, WIDTH) for n in self.go_to]))
        return y[np.argsort(self.order)]


def train(group):
    """Return the weights of the local experts and the other layers after training; the routing."""
    weights, velocity, journey = first_weights(), {}, Journey(group)
    for step in range(STEPS):
        x, labels = (array[group.rank :: group.size] for array in batch(step))
        gradients = gradients_of(weights, x, labels, journey)
        for layer in (GATE, HEAD):  # an expert's gradient is complete
            group.all_reduce(gradients[layer].reshape(-1))
        update(weights, velocity, gradients)
    return {layer: weights[layer] for layer in gradients}, journey


def draw(counts):
    """Return a picture of the rows of local experts, by rank: (its own rows, other ranks' rows)."""
    bars = []
    for row, (local, other) in enumerate(counts):
        bars.append(Bar(f"rank {row}", 0, local, "rows of its own", str(local)))
        bars.append(Bar(f"rank {row}", local, local + other, "rows of other ranks", str(other)))
    return Picture("An expert's rank computes with the rows of all ranks", "rows", bars)


def main(group):
    """Train on all ranks and on one; raise AssertionError if the weights differ."""
    prove(pairwise, group.size, collective.ALL_TO_ALL)  # names rank, step and chunk of a mistake
    expected, (trained, journey) = serial(), train(group)
    for layer, w in trained.items():
        np.testing.assert_allclose(w, expected[layer], 1e-9, 1e-12, err_msg=f"layer {layer}")
    local = int(journey.come_from[group.rank])
    picture = draw(group.gather([local, len(journey.experts) - local]))
    if group.is_root:
        print(f"equal to the serial run after {STEPS} steps, ranks: {group.size}\n\n{picture}")
    return picture


if __name__ == "__main__":
    given = program_words(__doc__)
    if given.simulate:
        picture = nnmpi.simulate(main, ranks=given.simulate)[0]
    else:
        picture = main(nnmpi.start())
