"""Data, pipeline and tensor parallelism with ZeRO, in one file: equal to the serial run.

    python examples/one_file.py                     8 simulated ranks in one process, no MPI needed
    python examples/one_file.py --dp 3 --pp 2       any layout: the ranks are dp x pp x tp
    mpirun -n 8 python examples/one_file.py         the same program on MPI

    a batch     five layers:   in   block   block   block   out                   (dp 2, pp 2, tp 2)

    rows 0-23   .-- stage 0 ---------------.  activations    .-- stage 1 --------.
                | rank 0: left halves      |  ------------>  | rank 2            |    replica 0
                | rank 1: right halves     |  <------------  | rank 3            |
                '--------------------------'  gradients      '-------------------'
                     ^ rings: each gradient becomes its sum over the replicas ^
                     v       each rank updates its shard, then all gather     v
    rows 24-46  .-- stage 0 ---------------.                 .-- stage 1 --------.
                | ranks 4 and 5            |  <----------->  | ranks 6 and 7     |    replica 1
                '--------------------------'                 '-------------------'

The parts, in reading order:

    tape        a Tensor records its parents; `backward` walks back through them
    messages    an Axis of the mesh sends, receives and counts bytes
    ring        reduce-scatter, all-gather, and the all-reduce made of both
    layers      a block with its first matrix sharded by columns, its second by rows
    pipeline    1F1B: the order of a stage's forward and backward passes
    ZeRO        each replica holds the optimizer state of one shard of the weights, and updates it
    train       all of it, compared with a serial run of eight lines

NumPy computes and nnmpi carries messages; everything else is written out here. The package does it
with more layers, overlap and checks: `nnmpi train --dp 2 --pp 2 --tp 2 --zero 1`.
"""

import argparse
from itertools import accumulate

import numpy as np

import nnmpi

# features of a sample, between blocks and inside a block; number of labels
FEATURES, WIDTH, HIDDEN, CLASSES = 20, 16, 45, 5
BATCH, MICROBATCHES, STEPS, RATE = 47, 4, 20, 0.01


# ---- the tape ------------------------------------------------------------------------------------


class Tensor:
    """An array, its parents, and a function from its gradient to the parents' gradients."""

    def __init__(self, data, parents=(), pull=None):
        self.data, self.parents, self.pull, self.grad = data, parents, pull, None

    def backward(self, grad):
        """Set the gradient of this tensor and of all tensors it was computed from."""
        order, seen = [], set()

        def visit(tensor):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                for parent in tensor.parents:
                    visit(parent)
                order.append(tensor)

        visit(self)
        self.grad = grad
        for tensor in reversed(order):  # a tensor comes after all its consumers
            if tensor.pull is not None:
                for parent, part in zip(tensor.parents, tensor.pull(tensor.grad), strict=True):
                    parent.grad = part if parent.grad is None else parent.grad + part


def matmul(x, w):
    """Return x @ w."""
    return Tensor(x.data @ w.data, (x, w), lambda g: (g @ w.data.T, x.data.T @ g))


def add(a, b):
    """Return a + b; b may be one row, added to each row of a."""
    return Tensor(a.data + b.data, (a, b), lambda g: (g, g if b.data.ndim == 2 else g.sum(0)))


def relu(x):
    """Return x where it is positive, else 0."""
    return Tensor(np.maximum(x.data, 0), (x,), lambda g: (g * (x.data > 0),))


def cross_entropy(scores, labels, rows):
    """Return the summed cross-entropy, divided by the rows of the global batch.

    Losses and gradients of microbatches and replicas then add up to those of the batch.
    """
    row = np.arange(len(labels))
    chances = np.exp(scores.data - scores.data.max(1, keepdims=True, initial=-np.inf))
    chances /= chances.sum(1, keepdims=True)
    loss = -np.log(chances[row, labels]).sum() / rows
    chances[row, labels] -= 1
    return Tensor(loss, (scores,), lambda g: (g * chances / rows,))


# ---- messages ------------------------------------------------------------------------------------


class Axis:
    """The ranks along one axis of the mesh, numbered from 0; `sent` counts bytes."""

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent, self.requests = 0, []

    def send(self, array, to):
        """Start sending an array, which must not change until `finish`."""
        array = np.ascontiguousarray(array)
        self.sent += array.nbytes
        self.requests.append(self.comm.isend(array, to, 0))

    def receive(self, shape, source):
        """Return the next array from a rank."""
        array = np.empty(shape)
        self.comm.wait_all([self.comm.irecv(array, source, 0)])
        return array

    def finish(self):
        """Wait until all sends are complete."""
        self.comm.wait_all(self.requests)
        self.requests = []

    def pass_on(self, array, shape):
        """Send an array to the next rank of the ring; return the previous rank's."""
        self.send(array, (self.rank + 1) % self.size)
        received = self.receive(shape, (self.rank - 1) % self.size)
        self.finish()
        return received


# ---- the ring ------------------------------------------------------------------------------------


def reduce_scatter(chunks, axis):
    """Make chunk r on rank r the sum over all ranks: each rank adds to it on its way around."""
    for i in range(axis.size - 1):
        out = (axis.rank - 1 - i) % axis.size
        chunks[out - 1] += axis.pass_on(chunks[out], chunks[out - 1].shape)


def all_gather(chunks, axis):
    """Copy chunk r of each rank r to all ranks."""
    for i in range(axis.size - 1):
        out = (axis.rank - i) % axis.size
        chunks[out - 1][:] = axis.pass_on(chunks[out], chunks[out - 1].shape)


def all_reduce(array, axis):
    """Return the sum of an array over the ranks; each sends twice its bytes at most."""
    total = array.flatten()
    chunks = np.array_split(total, axis.size)  # views
    reduce_scatter(chunks, axis)
    all_gather(chunks, axis)
    return total.reshape(array.shape)


# ---- layers --------------------------------------------------------------------------------------


class Parameter(Tensor):
    """This rank's shard of a weight: full[region]."""

    def __init__(self, full, region=()):
        super().__init__(full[region].copy())
        self.region = region


def normal(seed, rows, columns):
    """Return initial weights, the same on every rank."""
    return np.random.default_rng(seed).normal(0, rows**-0.5, (rows, columns))


class Linear:
    """x @ w + b, replicated along the tensor axis."""

    def __init__(self, seed, inputs, outputs):
        w, b = normal([seed, 0], inputs, outputs), np.zeros(outputs)
        self.parameters = Parameter(w), Parameter(b)

    def __call__(self, x):
        return add(matmul(x, self.parameters[0]), self.parameters[1])


class Block:
    """x + relu(x @ w1 + b1) @ w2 + b2, with sharded hidden units (Shoeybi et al., 2019).

    x --enter--> x @ [w1: local columns] --> relu --> @ [w2: local rows] --leave--> + b2 + x
        |                                                               |
        backward: all-reduce of the gradients                           forward: of the products
    """

    def __init__(self, seed, tensor):
        self.tensor = tensor
        local = np.array_split(np.arange(HIDDEN), tensor.size)[tensor.rank]
        w1, w2 = normal([seed, 0], WIDTH, HIDDEN), normal([seed, 1], HIDDEN, WIDTH)
        b1, b2 = np.zeros(HIDDEN), np.zeros(WIDTH)
        shards = (w1, (slice(None), local)), (b1, (local,)), (w2, (local,)), (b2, ())
        self.parameters = tuple(Parameter(full, region) for full, region in shards)

    def __call__(self, x):
        w1, b1, w2, b2 = self.parameters
        entered = Tensor(x.data, (x,), lambda g: (all_reduce(g, self.tensor),))
        product = matmul(relu(add(matmul(entered, w1), b1)), w2)
        total = Tensor(all_reduce(product.data, self.tensor), (product,), lambda g: (g,))
        return add(add(total, b2), x)


def make_layers(tensor):
    """Return the model's layers, with this rank's shards of the weights."""
    blocks = [Block(seed, tensor) for seed in (1, 2, 3)]
    return [Linear(0, FEATURES, WIDTH), *blocks, Linear(4, WIDTH, CLASSES)]


def forward(layers, x):
    """Return the output of the layers for input x."""
    for layer in layers:
        x = layer(x)
    return x


# ---- the pipeline --------------------------------------------------------------------------------


def one_f_one_b(stage, stages, microbatches):
    """Return the order of a stage's passes (Narayanan et al., 2019).

    After a warm-up it alternates forward and backward, so it holds the activations of at most
    `stages - stage` microbatches:

        stage 0    F0 F1 .  B0 F2 B1 F3 B2 .  B3
        stage 1    .  F0 B0 F1 B1 F2 B2 F3 B3 .
    """
    ahead = min(stages - 1 - stage, microbatches)
    kinds = "F" * ahead + "FB" * (microbatches - ahead) + "B" * ahead
    return list(zip(kinds, (kinds[:i].count(kind) for i, kind in enumerate(kinds)), strict=True))


def run_stage(layers, stages, inputs, labels):
    """Run a replica's microbatches on this stage; return the loss and the most in flight."""
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
    """Adam with sharded moments: each replica updates its shard (Rajbhandari et al., 2020).

    flat gradients      [ a | b ]  [ a | b ]     reduce-scatter: shard r is summed on replica r
    update              [ A |   ]  [   | B ]     with the moments of that shard alone
    weights             [ A | B ]  [ A | B ]     all-gather
    """

    def __init__(self, parameters, replicas):
        self.parameters, self.replicas, self.steps = parameters, replicas, 0
        self.weights = np.concatenate([p.data.ravel() for p in parameters])
        ends = accumulate(p.data.size for p in parameters)
        for p, end in zip(parameters, ends, strict=True):  # views: updates write to the layers
            p.data = self.weights[end - p.data.size : end].reshape(p.data.shape)
        self.shard = np.array_split(self.weights, replicas.size)[replicas.rank]
        self.mean, self.square = np.zeros((2, self.shard.size))

    def step(self):
        """Sum the gradients over the replicas, and update (Kingma and Ba, 2015)."""
        flat = np.concatenate([p.grad.ravel() for p in self.parameters])
        chunks = np.array_split(flat, self.replicas.size)
        reduce_scatter(chunks, self.replicas)
        grad, self.steps = chunks[self.replicas.rank], self.steps + 1
        self.mean += 0.1 * (grad - self.mean)
        self.square += 0.001 * (grad * grad - self.square)
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        self.shard -= RATE * mean / (square**0.5 + 1e-8)
        all_gather(np.array_split(self.weights, self.replicas.size), self.replicas)
        for p in self.parameters:
            p.grad = None


# ---- training ------------------------------------------------------------------------------------


def batch(step):
    """Return a global batch: random points, labelled by a random matrix."""
    x = np.random.default_rng([9, step]).normal(size=(BATCH, FEATURES))
    return x, (x @ normal(8, FEATURES, CLASSES)).argmax(1)


def serial(comm):
    """Return the layers and the losses of training on one rank."""
    alone, losses = Axis(comm.split(comm.rank, 0)), []  # a communicator of this rank alone
    layers = make_layers(alone)
    optimizer = Zero([p for layer in layers for p in layer.parameters], alone)
    for step in range(STEPS):
        x, labels = batch(step)
        loss = cross_entropy(forward(layers, Tensor(x)), labels, BATCH)
        loss.backward(1.0)
        optimizer.step()
        losses.append(loss.data)
    return layers, losses


def train(group, dp, pp, tp):
    """Train on dp x pp x tp ranks, compare with the serial run; return a report and the losses."""
    d, p, t = np.unravel_index(group.rank, (dp, pp, tp))
    colors = p * tp + t, d * tp + t, d * pp + p  # an axis: the ranks that differ in one coordinate
    replicas, stages, tensor = (Axis(group.comm.split(int(c), group.rank)) for c in colors)
    local = np.array_split(np.arange(5), pp)[p]
    layers = [make_layers(tensor)[i] for i in local]
    optimizer, losses = Zero([w for layer in layers for w in layer.parameters], replicas), []
    for step in range(STEPS):
        rows = (np.array_split(array, dp)[d] for array in batch(step))
        x, labels = (np.array_split(array, MICROBATCHES) for array in rows)
        loss, most = run_stage(layers, stages, x, labels)  # `most` is the same in every step
        optimizer.step()
        losses.append(all_reduce(np.array([loss]), replicas)[0])

    expected, expected_losses = serial(group.comm)
    for layer, i in zip(layers, local, strict=True):
        for shard, full in zip(layer.parameters, expected[i].parameters, strict=True):
            np.testing.assert_allclose(shard.data, full.data[shard.region], rtol=1e-8, atol=1e-11)
    if p == pp - 1:
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-8)

    weights, moments = optimizer.weights.size, 2 * optimizer.shard.size
    line = f"{group.rank:4}   {d} {p} {t}   {f'{local[0]}-{local[-1]}':>6} {weights:8} {moments:7}"
    sent = " ".join(f"{axis.sent / STEPS:9,.0f}" for axis in (replicas, stages, tensor))
    return f"{line} {most:6}   {sent}", losses


def main(group, dp=2, pp=2, tp=2):
    """Train, and print what each rank held and sent; raise AssertionError if a weight differs."""
    lines, losses = zip(*group.gather(train(group, dp, pp, tp)), strict=True)
    if group.is_root:
        print("                  numbers held                bytes sent in a step, by axis")
        print("rank   d p t   layers  weights moments in flight      data  pipeline    tensor")
        print(*lines, sep="\n")
        print(f"dp {dp} x pp {pp} x tp {tp}:", end=" ")
        print(f"equal to the serial run after {STEPS} steps, in every weight")
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
        text = f"this layout needs mpirun -n {ranks}, not {group.size}"
        raise SystemExit(text if group.is_root else 1)
