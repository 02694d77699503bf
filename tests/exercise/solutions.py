"""A right solution of every exercise: the package's own where there is one, else that of one who was given it."""

from functools import partial

import numpy as np

from nnmpi.comm.algorithms import bruck, gossip, halving, pairwise, ring, tree
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES
from nnmpi.comm.collective import Step
from nnmpi.schedule import schedules

star_all_reduce, tree_all_reduce, tree_broadcast = tree.star, tree.tree, tree.tree_broadcast
tree_reduce, ring_all_reduce, ring_all_gather = tree.tree_reduce, ring.ring, ring.ring_all_gather
ring_reduce_scatter, bruck_all_gather = ring.ring_reduce_scatter, bruck.bruck_all_gather
halving_doubling, neighbour_average = halving.halving_doubling, gossip.gossip
server_cost, ring_cost, tree_cost = (ALGORITHMS[name].seconds for name in ("ps", "ring", "tree"))
all_gather_cost = COLLECTIVES["all-gather", "ring"].seconds
naive_pipeline, gpipe, one_f_one_b = schedules.naive, schedules.gpipe, schedules.one_f_one_b
interleaved, inference_pipeline = (partial(each, virtual=2) for each in (schedules.interleaved, schedules.inference))
zero_bubble = schedules.zero_bubble


def line_reduce(rank, size):
    steps = [] if rank == size - 1 else [Step(from_=rank + 1, recv=range(size), reduce=True)]
    return steps if rank == 0 else [*steps, Step(to=rank - 1, send=range(size))]


def _bits(size):
    return [1 << bit for bit in range(size.bit_length() - 1)]


def all_gather_doubling(rank, size):
    def have(who, bit):
        return range(who // bit * bit, who // bit * bit + bit)

    return [Step(rank ^ bit, have(rank, bit), rank ^ bit, have(rank ^ bit, bit)) for bit in _bits(size)]


def reduce_scatter_halving(rank, size):
    return [Step(s.to, s.recv, s.from_, s.send, reduce=True) for s in reversed(all_gather_doubling(rank, size))]


def bucket_cost(N, M, alpha, beta, buckets):
    return buckets * ring_cost(N, M / buckets, alpha, beta)


def ring_tree_crossover(N, alpha, beta):
    log = N.bit_length() - 1
    return alpha * (N - 1 - log) / (beta * (log - (N - 1) / N))


def _sum(group, array):
    flat = np.array(array, float).ravel()
    group.all_reduce(flat)
    return flat.reshape(np.shape(array))


def row_linear(group, x, w):
    return _sum(group, x @ w)


def column_gradient(group, grad, w):
    return _sum(group, grad @ w.T)


def sharded_pair(group, x, a, b):
    return _sum(group, np.maximum(x @ a, 0) @ b)


def global_mean(group, loss_sum, samples):
    total, count = _sum(group, np.array([loss_sum, samples]))
    return total / count


def zero_update(group, weights, gradient, mine, rate):
    group.reduce_scatter(gradient)
    weights[mine] -= rate * gradient[mine]
    group.all_gather(weights)


def ssp_rule(steps, worker, bound):
    return steps[worker] - min(steps) <= bound


def gradient_staleness(events):
    updates, read, found = 0, {}, []
    for what, worker in events:
        if what == "read":
            read[worker] = updates
        else:
            found.append(updates - read[worker])
            updates += 1
    return found


all_to_all = pairwise.pairwise


def data_split(rows, rank, size):
    short, more = divmod(rows, size)
    start = rank * short + min(rank, more)
    return start, start + short + (rank < more)


def gradient_mean(group, gradient, rows):
    both = _sum(group, np.append(gradient, rows))
    return both[:-1] / both[-1]


def grid_split(group, tp, x):
    replica = group.split(group.rank // tp, group.rank)
    shards = group.split(group.rank % tp, group.rank)
    return _sum(replica, x), np.concatenate(shards.all_gather_v(x, [len(x)] * shards.size))


def gathered_linear(group, x, w, columns):
    parts = group.all_gather_v(np.ascontiguousarray((x @ w).T).ravel(), [n * len(x) for n in columns])
    return np.concatenate([part.reshape(-1, len(x)) for part in parts]).T


def gathered_gradient(group, x, w, grad, mine):
    return column_gradient(group, grad[:, mine], w), x.T @ grad[:, mine]


def pair_gradient(group, x, a, b, grad):
    middle = x @ a
    back = grad @ b.T * (middle > 0)
    return _sum(group, back @ a.T), x.T @ back, np.maximum(middle, 0).T @ grad


def zero3_partition(group, w):
    flat = np.append(w, np.zeros(-w.size % group.size))
    return np.split(flat, group.size)[group.rank]


def _gather(group, part, shape):
    whole = np.zeros(len(part) * group.size)
    whole[group.rank * len(part) :][: len(part)] = part
    group.all_gather(whole)
    return whole[: shape[0] * shape[1]].reshape(shape)


def zero3_forward(group, x, parts, shapes):
    x = np.maximum(x @ _gather(group, parts[0], shapes[0]), 0)
    return x @ _gather(group, parts[1], shapes[1])


def _scatter(group, gradient):
    flat = np.append(gradient, np.zeros(-gradient.size % group.size))
    group.reduce_scatter(flat)
    return np.split(flat, group.size)[group.rank]


def zero3_backward(group, inputs, grad, parts, shapes):
    last = _scatter(group, inputs[1].T @ grad)
    grad = grad @ _gather(group, parts[1], shapes[1]).T * (inputs[1] > 0)
    first = _scatter(group, inputs[0].T @ grad)
    return grad @ _gather(group, parts[0], shapes[0]).T, first, last


def sharded_adam(group, weights, gradient, m, v, mine, step):
    group.reduce_scatter(gradient)
    own = gradient[mine]
    m[:] = 0.9 * m + 0.1 * own
    v[:] = 0.999 * v + 0.001 * own**2
    weights[mine] -= 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    group.all_gather(weights)


def expert_parallel(group, x, chosen, experts, owner):
    where = np.array(owner)[chosen]
    mine = [np.flatnonzero(where == rank) for rank in range(group.size)]
    came = group.all_to_all([np.column_stack([x[rows], np.array(chosen)[rows]]) for rows in mine])
    back = group.all_to_all(
        [np.array([row[:-1] @ experts[int(row[-1])] for row in part]).reshape(-1, x.shape[1]) for part in came]
    )
    y = np.empty_like(x)
    y[np.concatenate(mine)] = np.concatenate(back)
    return y


def overlap(backward):
    for layer in reversed(range(backward.layers)):
        backward.start(backward.gradient(layer))
    return backward.finish()[::-1]


def gpipe_clock(stages, microbatches):
    return [[(k - s, s) for s in range(stages) if 0 <= k - s < microbatches] for k in range(stages + microbatches - 1)]
