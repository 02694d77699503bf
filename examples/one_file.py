"""Data, pipeline and tensor parallelism with ZeRO, in one file: equal to the serial run.

    python examples/one_file.py                     8 simulated ranks in one process, no MPI needed
    python examples/one_file.py --dp 3 --pp 2       any layout: the ranks are dp x pp x tp
    mpirun -n 8 python examples/one_file.py         the same program on MPI

    a batch     five layers:   in   block   block   block   out                       (dp 2, pp 2, tp 2)

    rows 0-23   .-- stage 0 ---------------.  activations    .-- stage 1 --------.
                | rank 0: left halves      |  ------------>  | rank 2            |    replica 0
                | rank 1: right halves     |  <------------  | rank 3            |
                '--------------------------'  gradients      '-------------------'
                     ^ rings: each gradient becomes its sum over the replicas ^
                     v        each rank updates its part, all get all parts   v
    rows 24-46  .-- stage 0 ---------------.                 .-- stage 1 --------.
                | ranks 4 and 5            |  <----------->  | ranks 6 and 7     |    replica 1
                '--------------------------'                 '-------------------'

The parts, in the order in which they are read:

    tape        a Tensor remembers its parents; `backward` walks back through them
    messages    an Axis of the mesh sends, receives and counts bytes
    ring        reduce-scatter, all-gather, and the all-reduce that is both
    layers      a block whose first matrix is cut by columns and whose second is cut by rows
    pipeline    1F1B: the order of forward and backward passes of a stage
    ZeRO        the optimizer's state, and the update, of a part of the weights on each replica
    train       all of it, and beside it the serial run in eight lines

NumPy computes and nnmpi carries messages; everything else is written out here. The package does the
same with more layers, schedules and collectives, overlapped and checked: `python -m nnmpi.train
--dp 2 --pp 2 --tp 2 --zero 1`.
"""

import argparse
from itertools import accumulate

import numpy as np

import nnmpi

# of a sample; between blocks; within one; of labels
FEATURES, WIDTH, HIDDEN, CLASSES = 20, 16, 45, 5
BATCH, MICROBATCHES, STEPS, RATE = 47, 4, 20, 0.01


# ---- the tape ------------------------------------------------------------------------------------


class Tensor:
    """An array, what it was computed from, and the function that takes its gradient to the parents'
    gradients.
    """

    def __init__(self, data, parents=(), pull=None):
        self.data, self.parents, self.pull, self.grad = data, parents, pull, None

    def backward(self, grad):
        """Add to the gradient of everything that this was computed from, starting with its own."""
        order, seen = [], set()

        def visit(tensor):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                for parent in tensor.parents:
                    visit(parent)
                order.append(tensor)

        visit(self)
        self.grad = grad
        for tensor in reversed(order):  # a tensor comes after all that was computed from it
            if tensor.pull is not None:
                for parent, part in zip(tensor.parents, tensor.pull(tensor.grad), strict=True):
                    parent.grad = part if parent.grad is None else parent.grad + part


def matmul(x, w):
    """Return x @ w."""
    return Tensor(x.data @ w.data, (x, w), lambda g: (g @ w.data.T, x.data.T @ g))


def add(a, b):
    """Return a + b; b may be a row that is added to each row of a."""
    return Tensor(a.data + b.data, (a, b), lambda g: (g, g if b.data.ndim == 2 else g.sum(0)))


def relu(x):
    """Return x where it is positive, else 0."""
    return Tensor(np.maximum(x.data, 0), (x,), lambda g: (g * (x.data > 0),))


def cross_entropy(scores, labels, rows):
    """Return the sum of -log(chance of the label), divided by the rows of the whole batch.

    So the losses of microbatches and replicas add up to the batch's, and so do their gradients.
    """
    each = np.arange(len(labels))
    chances = np.exp(scores.data - scores.data.max(1, keepdims=True, initial=-np.inf))
    chances /= chances.sum(1, keepdims=True)
    loss = -np.log(chances[each, labels]).sum() / rows
    chances[each, labels] -= 1
    return Tensor(loss, (scores,), lambda g: (g * chances / rows,))


# ---- messages ------------------------------------------------------------------------------------


class Axis:
    """This rank among the ranks along one axis of the mesh, numbered from 0; `sent` counts
    bytes.
    """

    def __init__(self, comm):
        self.comm, self.rank, self.size, self.sent, self.leaving = comm, comm.rank, comm.size, 0, []

    def send(self, array, to):
        """Start to send an array, which must stay as it is until `finish`."""
        array = np.ascontiguousarray(array)
        self.sent += array.nbytes
        self.leaving.append(self.comm.isend(array, to, 0))

    def receive(self, shape, source):
        """Return the next array that a rank sends."""
        array = np.empty(shape)
        self.comm.wait_all([self.comm.irecv(array, source, 0)])
        return array

    def finish(self):
        """Wait until everything has left."""
        self.comm.wait_all(self.leaving)
        self.leaving = []

    def pass_on(self, array, shape):
        """Send an array to the next rank of the ring; return the one that comes from the rank
        before.
        """
        self.send(array, (self.rank + 1) % self.size)
        came = self.receive(shape, (self.rank - 1) % self.size)
        self.finish()
        return came


# ---- the ring ------------------------------------------------------------------------------------


def reduce_scatter(chunks, axis):
    """Let chunk r on rank r become the sum over all ranks: it goes once around, and each rank adds
    its own.
    """
    for i in range(axis.size - 1):
        out = (axis.rank - 1 - i) % axis.size
        chunks[out - 1] += axis.pass_on(chunks[out], chunks[out - 1].shape)


def all_gather(chunks, axis):
    """Let every rank have every chunk, where rank r begins with chunk r."""
    for i in range(axis.size - 1):
        out = (axis.rank - i) % axis.size
        chunks[out - 1][:] = axis.pass_on(chunks[out], chunks[out - 1].shape)


def all_reduce(array, axis):
    """Return the sum of an array over the ranks. Each sends about twice its bytes, however many
    ranks there are.
    """
    total = array.flatten()
    chunks = np.array_split(total, axis.size)  # views
    reduce_scatter(chunks, axis)
    all_gather(chunks, axis)
    return total.reshape(array.shape)


# ---- layers --------------------------------------------------------------------------------------


class Parameter(Tensor):
    """The part of a weight that this rank has: full[region]."""

    def __init__(self, full, region=()):
        super().__init__(full[region].copy())
        self.region = region


def normal(seed, rows, columns):
    """Return first weights, the same on every rank."""
    return np.random.default_rng(seed).normal(0, rows**-0.5, (rows, columns))


class Linear:
    """x @ w + b, whole on every rank of the tensor axis."""

    def __init__(self, seed, inputs, outputs):
        self.parameters = (
            Parameter(normal([seed, 0], inputs, outputs)),
            Parameter(np.zeros(outputs)),
        )

    def __call__(self, x):
        w, b = self.parameters
        return add(matmul(x, w), b)


class Block:
    """x + relu(x @ w1 + b1) @ w2 + b2, its hidden units shared out over the tensor axis (Shoeybi et
    al., 2019).

    x --enter--> x @ [w1: own columns] --> relu --> @ [w2: own rows] --leave--> + b2 + x
        |                                                              |
        backward: sum of the ranks' gradients of x                     forward: sum of the ranks' products
    """

    def __init__(self, seed, tensor):
        self.tensor = tensor
        own = np.array_split(np.arange(HIDDEN), tensor.size)[tensor.rank]
        w1, w2 = normal([seed, 0], WIDTH, HIDDEN), normal([seed, 1], HIDDEN, WIDTH)
        b1, b2 = np.zeros(HIDDEN), np.zeros(WIDTH)
        parts = (w1, (slice(None), own)), (b1, (own,)), (w2, (own,)), (b2, ())
        self.parameters = tuple(Parameter(full, region) for full, region in parts)

    def __call__(self, x):
        w1, b1, w2, b2 = self.parameters
        entered = Tensor(x.data, (x,), lambda g: (all_reduce(g, self.tensor),))
        product = matmul(relu(add(matmul(entered, w1), b1)), w2)
        whole = Tensor(all_reduce(product.data, self.tensor), (product,), lambda g: (g,))
        return add(add(whole, b2), x)


def make_layers(tensor):
    """Return the model's layers with this rank's parts of the weights."""
    return [
        Linear(0, FEATURES, WIDTH),
        *(Block(seed, tensor) for seed in (1, 2, 3)),
        Linear(4, WIDTH, CLASSES),
    ]


def forward(layers, x):
    """Return what the layers make of x."""
    for layer in layers:
        x = layer(x)
    return x


# ---- the pipeline --------------------------------------------------------------------------------


def one_f_one_b(stage, stages, microbatches):
    """Return the order of a stage's passes: some forwards, then one forward and one backward in
    turns, then the rest.

    So a stage holds the activations of at most `stages - stage` microbatches (Narayanan et al.,
    2019):

        stage 0    F0 F1 .  B0 F2 B1 F3 B2 .  B3
        stage 1    .  F0 B0 F1 B1 F2 B2 F3 B3 .
    """
    ahead = min(stages - 1 - stage, microbatches)
    kinds = "F" * ahead + "FB" * (microbatches - ahead) + "B" * ahead
    return list(zip(kinds, (kinds[:i].count(kind) for i, kind in enumerate(kinds)), strict=True))


def run_stage(layers, stages, inputs, labels):
    """Take a replica's microbatches through this rank's stage; return the loss and the most
    microbatches held.
    """
    first, last, held, loss, most = stages.rank == 0, stages.rank == stages.size - 1, {}, 0.0, 0
    for kind, m in one_f_one_b(stages.rank, stages.size, len(inputs)):
        shape = len(inputs[m]), WIDTH
        if kind == "F":
            x = Tensor(inputs[m] if first else stages.receive(shape, stages.rank - 1))
            y = forward(layers, x)
            if last:
                y = cross_entropy(y, labels[m], BATCH)
                loss += y.data
            else:
                stages.send(y.data, stages.rank + 1)
            held[m] = x, y
            most = max(most, len(held))
        else:
            x, y = held.pop(m)
            y.backward(1.0 if last else stages.receive(shape, stages.rank + 1))
            if not first:
                stages.send(x.grad, stages.rank - 1)
    stages.finish()
    return loss, most


# ---- ZeRO ----------------------------------------------------------------------------------------


class Zero:
    """Adam whose moments are shared out: each replica keeps, and updates, one part (Rajbhandari et
    al., 2020).

    gradients, in a row     [ a | b ]  [ a | b ]     reduce-scatter: the sum of part r at replica r
    update                  [ A |   ]  [   | B ]     with moments of that part alone
    weights                 [ A | B ]  [ A | B ]     all-gather
    """

    def __init__(self, parameters, replicas):
        self.parameters, self.replicas, self.steps = parameters, replicas, 0
        self.weights = np.concatenate([each.data.ravel() for each in parameters])
        ends = accumulate(each.data.size for each in parameters)
        for each, end in zip(parameters, ends, strict=True):  # from now on a view
            each.data = self.weights[end - each.data.size : end].reshape(each.data.shape)
        self.own = np.array_split(self.weights, replicas.size)[replicas.rank]
        self.moments = np.zeros((2, self.own.size))

    def step(self):
        """Sum the gradients over the replicas, and update (Kingma and Ba, 2015)."""
        chunks = np.array_split(
            np.concatenate([each.grad.ravel() for each in self.parameters]), self.replicas.size
        )
        reduce_scatter(chunks, self.replicas)
        grad, self.steps = chunks[self.replicas.rank], self.steps + 1
        for moment, value, decay in zip(
            self.moments, (grad, grad * grad), (0.9, 0.999), strict=True
        ):
            moment += (1 - decay) * (value - moment)
        mean, square = (
            self.moments[0] / (1 - 0.9**self.steps),
            self.moments[1] / (1 - 0.999**self.steps),
        )
        self.own -= RATE * mean / (square**0.5 + 1e-8)
        all_gather(np.array_split(self.weights, self.replicas.size), self.replicas)
        for each in self.parameters:
            each.grad = None


# ---- training ------------------------------------------------------------------------------------


def batch(step):
    """Return a batch: random points, labelled by a random matrix."""
    x = np.random.default_rng([9, step]).normal(size=(BATCH, FEATURES))
    return x, (x @ normal(8, FEATURES, CLASSES)).argmax(1)


def serial(comm):
    """Return the layers that training on one rank ends with, and the losses."""
    alone, losses = Axis(comm.split(comm.rank, 0)), []  # a communicator of this rank
    layers = make_layers(alone)
    optimizer = Zero([each for layer in layers for each in layer.parameters], alone)
    for step in range(STEPS):
        x, labels = batch(step)
        loss = cross_entropy(forward(layers, Tensor(x)), labels, BATCH)
        loss.backward(1.0)
        optimizer.step()
        losses.append(loss.data)
    return layers, losses


def train(group, dp, pp, tp):
    """Train on dp x pp x tp ranks; compare with the serial run; return a line on this rank, and its
    losses.
    """
    d, p, t = np.unravel_index(group.rank, (dp, pp, tp))
    replicas, stages, tensor = (  # the ranks that differ from this one in a single coordinate
        Axis(group.comm.split(int(color), group.rank))
        for color in (p * tp + t, d * tp + t, d * pp + p)
    )
    own = np.array_split(np.arange(5), pp)[p]
    layers = [make_layers(tensor)[i] for i in own]
    parameters = [each for layer in layers for each in layer.parameters]
    optimizer, losses, most = Zero(parameters, replicas), [], 0
    for step in range(STEPS):
        x, labels = (np.array_split(each, dp)[d] for each in batch(step))
        loss, held = run_stage(
            layers, stages, np.array_split(x, MICROBATCHES), np.array_split(labels, MICROBATCHES)
        )
        optimizer.step()
        losses.append(all_reduce(np.array([loss]), replicas)[0])
        most = max(most, held)

    wanted, wanted_losses = serial(group.comm)
    for layer, i in zip(layers, own, strict=True):
        for found, full in zip(layer.parameters, wanted[i].parameters, strict=True):
            np.testing.assert_allclose(found.data, full.data[found.region], rtol=1e-8, atol=1e-11)
    if p == pp - 1:
        np.testing.assert_allclose(losses, wanted_losses, rtol=1e-8)

    sent = " ".join(f"{axis.sent / STEPS:9,.0f}" for axis in (replicas, stages, tensor))
    where, layer_range = f"{group.rank:4}   {d} {p} {t}", f"{own[0]}-{own[-1]}"
    line = (
        f"{where}   {layer_range:>6} {optimizer.weights.size:8} {optimizer.moments.size:7} {most:6}"
        f"   {sent}"
    )
    return line, losses


def main(group, dp=2, pp=2, tp=2):
    """Train, and print what each rank held and sent; an AssertionError says that a weight
    differs.
    """
    lines, losses = zip(*group.gather(train(group, dp, pp, tp)), strict=True)
    if group.is_root:
        print("                  numbers held                bytes sent in a step, by axis")
        print(
            "rank   d p t   layers  weights moments in flight      data  pipeline    tensor",
            *lines,
            sep="\n",
        )
        print(
            f"dp {dp} x pp {pp} x tp {tp}: equal to the serial run after {STEPS} steps, in every"
            " weight"
        )
        print(f"loss {losses[-1][0]:.3f} in the first step, {losses[-1][-1]:.3f} in the last")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}", type=int)
    given = {axis: size for axis, size in vars(parser.parse_args()).items() if size is not None}
    layout = dict.fromkeys(("dp", "pp", "tp"), 1 if given else 2) | given
    if min(layout.values()) < 1 or layout["pp"] > 5:
        parser.error("a layout has one rank or more along each axis, and at most 5 stages")
    group, ranks = nnmpi.start(), int(np.prod(list(layout.values())))
    if group.size == 1:
        nnmpi.simulate(lambda simulated: main(simulated, **layout), ranks=ranks)
    elif group.size == ranks:
        main(group, **layout)
    else:
        raise SystemExit(
            f"this layout needs mpirun -n {ranks}, not {group.size}" if group.is_root else 1
        )
