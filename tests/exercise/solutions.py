"""A right solution of every exercise, in the words of one who was given its statement."""

import numpy as np

from nnmpi.comm.collective import Step
from nnmpi.schedule.schedule import Kind


def line_reduce(rank, size):
    steps = [] if rank == size - 1 else [Step(from_=rank + 1, recv=range(size), reduce=True)]
    return steps if rank == 0 else [*steps, Step(to=rank - 1, send=range(size))]


def line_broadcast(rank, size):
    steps = []
    for chunk in range(size + 1):
        comes = rank > 0 and chunk < size
        goes = rank < size - 1 and chunk > 0
        if comes or goes:
            to, send = (rank + 1, (chunk - 1,)) if goes else (None, ())
            from_, recv = (rank - 1, (chunk,)) if comes else (None, ())
            steps.append(Step(to, send, from_, recv))
    return steps


def star_all_reduce(rank, size):
    others = range(1, size)
    if rank:
        return [Step(to=0, send=range(size)), Step(from_=0, recv=range(size))]
    up = [Step(from_=other, recv=range(size), reduce=True) for other in others]
    return up + [Step(to=other, send=range(size)) for other in others]


def _around(rank, size, first, reduce):
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = [(rank - first - i) % size for i in range(size - 1)]
    return [Step(right, (chunk,), left, ((chunk - 1) % size,), reduce) for chunk in chunks]


def ring_reduce_scatter(rank, size):
    return _around(rank, size, 1, True)


def ring_all_gather(rank, size):
    return _around(rank, size, 0, False)


def ring_all_reduce(rank, size):
    return ring_reduce_scatter(rank, size) + ring_all_gather(rank, size)


def tree_scatter(rank, size):
    steps, distance = [], 1 << (size - 1).bit_length()
    while distance > 1:
        half = distance // 2
        if rank % distance == 0 and rank + half < size:
            steps.append(Step(to=rank + half, send=range(rank + half, min(rank + distance, size))))
        elif rank % distance == half:
            steps.append(Step(from_=rank - half, recv=range(rank, min(rank + half, size))))
        distance = half
    return steps


def tree_gather(rank, size):
    return [Step(each.from_, each.recv, each.to, each.send) for each in reversed(tree_scatter(rank, size))]


def tree_broadcast(rank, size):
    whole = [(each, range(size)) for each in tree_scatter(rank, size)]
    return [Step(s.to, all_ if s.send else (), s.from_, all_ if s.recv else ()) for s, all_ in whole]


def tree_reduce(rank, size):
    return [Step(s.from_, s.recv, s.to, s.send, reduce=bool(s.send)) for s in reversed(tree_broadcast(rank, size))]


def tree_all_reduce(rank, size):
    return tree_reduce(rank, size) + tree_broadcast(rank, size)


def _bits(size):
    return [1 << bit for bit in range(size.bit_length() - 1)]


def recursive_doubling(rank, size):
    return [Step(rank ^ bit, range(size), rank ^ bit, range(size), reduce=True) for bit in _bits(size)]


def all_gather_doubling(rank, size):
    def have(who, bit):
        return range(who // bit * bit, who // bit * bit + bit)

    return [Step(rank ^ bit, have(rank, bit), rank ^ bit, have(rank ^ bit, bit)) for bit in _bits(size)]


def reduce_scatter_halving(rank, size):
    return [Step(s.to, s.recv, s.from_, s.send, reduce=True) for s in reversed(all_gather_doubling(rank, size))]


def halving_doubling(rank, size):
    return reduce_scatter_halving(rank, size) + all_gather_doubling(rank, size)


def bruck_all_gather(rank, size):
    steps, have = [], 1
    while have < size:
        more = min(have, size - have)
        mine = tuple((rank + i) % size for i in range(more))
        theirs = tuple((rank + have + i) % size for i in range(more))
        steps.append(Step((rank - have) % size, mine, (rank + have) % size, theirs))
        have += more
    return steps


def neighbour_average(rank, size):
    right, left, whole = (rank + 1) % size, (rank - 1) % size, range(size)
    return [Step(right, whole, left, whole, True), Step(left, whole, right, whole, True)][: min(2, size - 1)]


def server_cost(N, M, alpha, beta):
    return 2 * (N - 1) * (alpha + M * beta)


def ring_cost(N, M, alpha, beta):
    return 2 * (N - 1) * (alpha + M / N * beta)


def tree_cost(N, M, alpha, beta):
    return 2 * (N - 1).bit_length() * (alpha + M * beta)


def all_gather_cost(N, M, alpha, beta):
    return (N - 1) * (alpha + M / N * beta)


def bucket_cost(N, M, alpha, beta, buckets):
    return buckets * ring_cost(N, M / buckets, alpha, beta)


def ring_tree_crossover(N, alpha, beta):
    log = N.bit_length() - 1
    return alpha * (N - 1 - log) / (beta * (log - (N - 1) / N))


def naive_pipeline(rank, ranks, microbatches):
    return [kind.at(rank, m) for m in range(microbatches) for kind in (Kind.F, Kind.B)]


def gpipe(rank, ranks, microbatches):
    return [kind.at(rank, m) for kind in (Kind.F, Kind.B) for m in range(microbatches)]


def one_f_one_b(rank, ranks, microbatches):
    ahead = min(ranks - 1 - rank, microbatches)
    rest = [one for m in range(microbatches) for one in (ahead + m, -1 - m)]
    program = [Kind.F.at(rank, m) for m in range(ahead)]
    return program + [Kind.F.at(rank, m) if m >= 0 else Kind.B.at(rank, -1 - m) for m in rest if m < microbatches]


def interleaved(rank, ranks, microbatches):
    rounds = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    stages = (rank, rank + ranks)
    forwards = [Kind.F.at(stage, m) for each in rounds for stage in stages for m in each]
    backwards = [Kind.B.at(stage, m) for each in rounds for stage in reversed(stages) for m in each]
    ahead = min(2 * (ranks - 1 - rank) + ranks, len(forwards))
    program = forwards[:ahead]
    for i, backward in enumerate(backwards):
        program += [*forwards[ahead + i : ahead + i + 1], backward]
    return program


def zero_bubble(rank, ranks, microbatches):
    program, later = [], []
    for one in one_f_one_b(rank, ranks, microbatches):
        if one.kind is Kind.F:
            program.append(one)
        else:
            program.append(Kind.I.at(rank, one.microbatch))
            later.append(Kind.W.at(rank, one.microbatch))
            if len(later) > rank:
                program.append(later.pop(0))
    return program + later


def inference_pipeline(rank, ranks, microbatches):
    rounds = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    return [Kind.F.at(stage, m) for each in rounds for stage in (rank, rank + ranks) for m in each]


def relu_gradient(grad, x):
    return grad * (x > 0)


def sigmoid_gradient(grad, x):
    y = 1 / (1 + np.exp(-x))
    return grad * y * (1 - y)


def linear_gradient(grad, x, w, b):
    return grad @ w.T, x.T @ grad, grad.sum(0)


def softmax_gradient(grad, x):
    y = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    return y * (grad - (grad * y).sum(1, keepdims=True))


def layer_norm_gradient(grad, x):
    centred = x - x.mean(1, keepdims=True)
    root = np.sqrt((centred**2).mean(1, keepdims=True))
    y = centred / root
    return (grad - grad.mean(1, keepdims=True) - y * (grad * y).mean(1, keepdims=True)) / root


def cross_entropy_gradient(grad, scores, labels):
    found = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    found[np.arange(len(labels)), labels] -= 1
    return grad * found


def _sum(group, array):
    flat = np.ascontiguousarray(array).ravel()
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


def plan_all_kept(layers):
    forward = " ".join(f"K{i} D{i}" if i else "K0" for i in range(layers))
    return forward + "".join(f" B{i}" for i in reversed(range(layers)))


def plan_half(layers):
    """Keep the second half, then go through the first one again."""
    half = range(layers // 2 or 0)
    plan = [word for i in half for word in [f"F{i}", f"D{i}"][: 1 + (i > 0)]]
    rest = range(len(half), layers)
    plan += [word for i in rest for word in [f"K{i}", f"D{i}"][: 1 + (i > 0)]]
    plan += [f"B{i}" for i in reversed(rest)]
    again = [word for i in half for word in [f"K{i}", f"D{i}"][: 1 + (i > 0)]]
    again += [f"D{len(half)}"] * (len(half) > 0)
    return " ".join([*plan, *again, *(f"B{i}" for i in reversed(half))])


def plan_least(layers):
    """For each layer, from the last to the first: go there from the batch, keep it, go back through it."""
    plan = []
    for layer in reversed(range(layers)):
        plan += [word for i in range(layer) for word in [f"F{i}", f"D{i}"][: 1 + (i > 0)]]
        plan += [f"K{layer}", *[f"D{layer}"] * (layer > 0), *[f"D{layer + 1}"] * (layer < layers - 1), f"B{layer}"]
    return " ".join(plan)
