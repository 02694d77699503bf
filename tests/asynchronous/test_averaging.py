"""Local SGD and gossip: the synchronous run where they average at once, the known mixing where they
do not.
"""

import hashlib
import time
from functools import partial

import numpy as np
import pytest

from nnmpi import nn, ops, optim
from nnmpi.asynchronous.averaging import Gossip, LocalSGD
from nnmpi.asynchronous.slowmo import SlowMo
from nnmpi.backend.array import namespace
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.shard import split
from tests.device.library import device_backend

SGD = {
    "plain": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(
        optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay={"weights": 0.01}
    ),
}
ADAM = partial(optim.Adam, lr=0.01)


def network(backend=None, hidden=7):
    """Return a small network in double precision, in two flat buffers."""
    model = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    return model.initialize(
        seed=0,
        dtype="float64",
        backend=backend,
        group=lambda name, _: "weights" if name.endswith("weight") else "rest",
    )


def batch(step, rows):
    """Return a batch that is the same on all ranks."""
    generator = np.random.default_rng([7, step])
    return generator.standard_normal((rows, 5)), generator.integers(0, 3, rows)


def update(model, optimizer, x, y):
    """Do one update with the mean gradient of these rows, or with that of no rows, which is
    zero.
    """
    model.zero_grad()
    if len(y):
        xp = namespace(model.storage.data[0])
        with nn.training():
            loss = ops.cross_entropy(model(xp.asarray(x)), xp.asarray(y), reduction="sum")
        loss.backward(np.full(loss.shape, 1 / len(y)))
    optimizer.step()


def serial(make, rows, steps):
    """Return what training on whole batches gives."""
    model = network()
    optimizer = make(model.storage)
    for step in range(steps):
        update(model, optimizer, *batch(step, rows))
    return model, optimizer


def of(rows, *arrays):
    """Return these rows of arrays."""
    return [array[rows.start : rows.stop] for array in arrays]


def train(averaging, model, parts, steps, first=0):
    """Let this rank do steps on its part of each batch."""
    local = parts[averaging.group.rank]
    for step in range(first, first + steps):
        x, y = batch(step, parts[-1].stop)
        update(model, averaging.optimizer, *of(local, x, y))
        averaging.after_step(step, len(local))


def flat(arrays):
    """Return all values as one host array."""
    return np.concatenate(
        [array.get() if hasattr(array, "get") else array.copy() for array in arrays]
    )


def values_of(model):
    return flat(model.storage.data)


def scatter(averaging):
    """Give each rank other weights, and return those of all ranks."""
    everyones = [
        [
            np.random.default_rng([rank, i]).standard_normal(a.size)
            for i, a in enumerate(averaging.storage.data)
        ]
        for rank in range(averaging.group.size)
    ]
    for array, values in zip(averaging.storage.data, everyones[averaging.group.rank], strict=True):
        array[...] = namespace(array).asarray(values)
    return [np.concatenate(values) for values in everyones]


def same_bits(group, arrays):
    """Return whether all ranks have the same bits."""
    return len(set(group.gather(hashlib.blake2b(flat(arrays).tobytes()).hexdigest()))) == 1


def everywhere(group, right):
    """Fail unless all of these hold on all ranks."""
    assert all(group.gather(bool(all(right)))), right


def mixing(size):
    """Return the matrix by which a step of gossip multiplies the ranks' weights."""
    eye = np.eye(size)
    if size == 2:
        return (eye + eye[[1, 0]]) / 2
    return eye / 2 + np.roll(eye, 1, axis=0) / 4 + np.roll(eye, -1, axis=0) / 4


def close(ours, theirs):
    """Return whether two arrays are the same but for rounding."""
    return bool(np.allclose(ours, theirs, rtol=1e-10, atol=1e-12))


UP_TO_8 = pytest.mark.simulated(max_size=8)


@UP_TO_8
@pytest.mark.parametrize("kind", SGD)
def test_averaging_after_every_step_is_the_synchronous_run(group, kind):
    """Also the state, once the ranks have met; and that leaves the weights alone, which are equal
    already.
    """
    rows, steps = 4 * group.size, 5
    model = network()
    local = LocalSGD(group, model.storage, SGD[kind](model.storage), every=1)
    train(local, model, list(split(rows, group.size)), steps)
    before = values_of(model)
    disagreement = local.synchronize()
    full, optimizer = serial(SGD[kind], rows, steps)
    right = [
        close(before, values_of(full)),
        bool(np.array_equal(before, values_of(model))),
        disagreement == 0,
        all(
            close(flat(ours), flat(optimizer.slots()[name]))
            for name, ours in local.optimizer.slots().items()
        ),
        local.optimizer.steps == steps,
    ]
    everywhere(group, right)
    local.release()


@UP_TO_8
@pytest.mark.parametrize("kind", [LocalSGD, SlowMo])
def test_the_outer_momentum_after_every_step_is_that_of_the_synchronous_run(group, kind):
    """DiLoCo and SlowMo with SGD within and a step between two averages: rates multiply; rate 1
    without momentum keeps nothing.
    """
    rows, steps = 4 * group.size, 6
    model = network()
    outer = kind(group, model.storage, optim.SGD(model.storage, lr=0.2), 1, 0.5, 0.9)
    train(outer, model, list(split(rows, group.size)), steps)
    sgd = partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=kind is LocalSGD)
    full, _ = serial(sgd, rows, steps)
    plain = LocalSGD(group, network().storage, optim.SGD(network().storage, lr=0.1), 1, 1.0, 0.0)
    right = [close(values_of(model), values_of(full)), not plain.storage.extra_slots]
    everywhere(group, right)
    for item in (outer, plain):
        item.release()
    assert not outer.storage.extra_slots  # another strategy finds the optimizer's own state


@UP_TO_8
def test_slowmo_is_the_paper_s_algorithm(group):
    """Algorithm 1 by hand: N workers in one process, two averages of three steps each at another
    rate, with the workers' own momentum kept; rows in uneven parts, all of which are in the mean.
    """
    parts, every, slow_lr, beta = list(split(4 * group.size + 3, group.size)), 3, 0.8, 0.6
    model, rates = network(), (0.1, 0.05)
    slow = SlowMo(group, model.storage, SGD["momentum"](model.storage), every, slow_lr, beta)
    workers = [network() for _ in parts]
    sgd = [SGD["momentum"](worker.storage) for worker in workers]
    x, u = values_of(model), 0.0
    for outer, slow.optimizer.lr in enumerate(rates):
        train(slow, model, parts, every, outer * every)
        for step in range(outer * every, (outer + 1) * every):
            rows, labels = batch(step, parts[-1].stop)
            for worker, optimizer, mine in zip(workers, sgd, parts, strict=True):
                optimizer.lr = rates[outer]
                update(worker, optimizer, *of(mine, rows, labels))
        shares = [len(mine) / parts[-1].stop for mine in parts]
        mean = sum(share * flat(w.storage.data) for share, w in zip(shares, workers, strict=True))
        u = beta * u + (x - mean) / rates[outer]
        x = x - slow_lr * rates[outer] * u
        for worker in workers:
            start = 0
            for array in worker.storage.data:
                array[...] = x[start : start + array.size]
                start += array.size
    right = [close(values_of(model), x), same_bits(group, model.storage.data)]
    everywhere(group, right)
    slow.release()


@pytest.mark.simulated(min_size=2)
def test_an_average_of_local_steps_is_that_of_runs_alone(group):
    """Three own steps with Adam, weighted by all rows of the three; ages and messages are
    counted.
    """
    rows, parts = 13, list(split(13, group.size))
    model = network()
    local = LocalSGD(group, model.storage, ADAM(model.storage), every=3)
    local.begin()
    ages = []
    for step in range(3):
        ages.append(local.steps_since_average(step))
        train(local, model, parts, 1, step)
    alone = []
    for mine in parts:
        other = network()
        optimizer = ADAM(other.storage)
        for step in range(3):
            update(other, optimizer, *of(mine, *batch(step, rows)))
        alone.append(flat(other.storage.data) * (len(mine) / rows))
    right = [
        close(values_of(model), sum(alone)),
        same_bits(group, model.storage.data),
        ages == [0, 1, 2],
    ]
    steps = 2 * (group.size - 1)  # as on a ring
    sent = (2 * steps, sum(steps * array.nbytes // group.size for array in model.storage.data))
    right += [(local.messages, local.bytes) == sent]
    train(local, model, parts, 1, 3)
    right += [not same_bits(group, model.storage.data), local.steps_since_average(4) == 1]
    local.synchronize()
    right += [local.steps_since_average(4) == 0, (local.messages, local.bytes) == sent]
    local.begin()
    right += [(local.messages, local.bytes) == (0, 0)]
    everywhere(group, right)
    local.release()


@UP_TO_8
@pytest.mark.parametrize("rows", ["equal", "unequal", "none"])
def test_a_synchronization_makes_one_of_all(group, rows):
    """Weights weighted by rows and state plainly, the same bits everywhere; and how far apart they
    were.
    """
    mine = {
        "equal": [4] * group.size,
        "unequal": list(range(group.size)),
        "none": [0] * group.size,
    }[rows]
    model = network()
    local = LocalSGD(group, model.storage, ADAM(model.storage), every=100)
    local.after_step(0, mine[group.rank])
    values = scatter(local)
    slots = local.optimizer.slots()
    for arrays in slots.values():
        for array in arrays:
            array[...] = group.rank
    local.optimizer.steps = 5 + group.rank
    disagreement = local.synchronize()
    shares = np.array(mine) / sum(mine) if sum(mine) else np.full(group.size, 1 / group.size)
    mean = sum(share * value for share, value in zip(shares, values, strict=True))
    squares = np.mean([np.sum((value - mean) ** 2) for value in values])
    met = values_of(model)
    right = [
        close(met, mean),
        abs(disagreement - np.sqrt(squares) / np.linalg.norm(mean)) < 1e-10,
        same_bits(
            group, [array for arrays in slots.values() for array in arrays] + model.storage.data
        ),
        all(close(flat(arrays), (group.size - 1) / 2) for arrays in slots.values()),
        local.optimizer.steps == 5 + group.size - 1,
        # again: nothing changes
        local.synchronize() == 0 and bool(np.array_equal(met, values_of(model))),
    ]
    everywhere(group, right)
    assert group.gather(disagreement) == [disagreement] * group.size
    local.release()


@pytest.mark.both_worlds(min_size=2, max_size=8)
def test_gossip_mixes_as_its_matrix_says_and_meets_at_the_mean(group):
    """Step by step, with a storage that moves; the mean stays, and the ranks come together as fast
    as they should.
    """
    model = network()
    gossip = Gossip(group, model.storage, ADAM(model.storage))
    values = np.array(scatter(gossip))
    mean, right, matrix = values.mean(axis=0), [], mixing(group.size)
    rate = 0.0 if group.size == 2 else np.cos(np.pi / group.size) ** 2
    start = distance = np.linalg.norm(values - mean)
    for step in range(4):
        model.storage.move(data=[array.copy() for array in model.storage.data])
        values = matrix @ values
        gossip.after_step(step, rows=3)
        everyones = np.array(group.gather(values_of(model).tolist()))
        before, distance = distance, np.linalg.norm(everyones - mean)
        right += [close(everyones, values), close(everyones.mean(axis=0), mean)]
        right += [distance <= rate * before + 1e-12 * start]
    sent, buffers = 4 * min(2, group.size - 1), len(model.storage.data)
    nbytes = sum(array.nbytes for array in model.storage.data)
    right += [
        gossip.messages == sent * buffers,
        gossip.bytes == sent * nbytes,
        gossip.steps_since_average(4) == 4,
    ]
    slots = gossip.optimizer.slots()["v"]
    slots[0][...] = group.rank
    gossip.synchronize()
    right += [close(values_of(model), mean), close(slots[0], (group.size - 1) / 2)]
    right += [same_bits(group, model.storage.data), gossip.steps_since_average(4) == 0]
    everywhere(group, right)
    gossip.release()


def all_kinds(group, storage):
    """Return one of each kind that works with so many ranks."""
    kinds = [LocalSGD(group, storage, ADAM(storage), every=2)]
    if group.size > 1:
        kinds.append(Gossip(group, storage, ADAM(storage)))
    return kinds


@UP_TO_8
def test_frozen_parameters_keep_their_bits(group):
    """Though sums and quotients of equal numbers need not be these numbers, for 3 ranks say."""
    for number in range(min(group.size, 2)):
        model = network()
        frozen = model.storage.spans[0].parameter
        frozen.data[...] = np.random.default_rng(3).standard_normal(frozen.shape) / 3
        before = frozen.data.copy()
        averaging = all_kinds(group, model.storage)
        frozen.requires_grad = False
        train(averaging[number], model, list(split(13, group.size)), 5)
        averaging[number].synchronize()
        moved = model.storage.spans[2].parameter.data
        right = [
            bool(np.array_equal(frozen.data, before)),
            not np.array_equal(moved, network()[2].weight.data),
        ]
        for item in averaging:
            item.release()
        everywhere(group, right)


@pytest.mark.mpi
def test_device_arrays_go_through_the_host(group):
    """The same numbers; a NumPy array that meets a device array would raise."""
    for number in range(min(group.size, 2)):
        result = []
        for backend in (numpy_backend(), device_backend()):
            model = network(backend)
            averaging = all_kinds(group, model.storage)
            train(averaging[number], model, list(split(13, group.size)), 5)
            before = values_of(model)
            disagreement = averaging[number].synchronize()
            result.append([before, values_of(model), np.array(disagreement)])
            for item in averaging:
                item.release()
        assert all(group.gather(all(map(close, *result))))


@pytest.mark.mpi(min_size=2)
def test_waiting_for_a_late_rank_leaves_the_core_alone(group):
    model, late_s = network(), 0.3
    for averaging in all_kinds(group, model.storage):
        group.barrier()
        began = time.process_time()
        if group.is_root:
            time.sleep(late_s)
        averaging.after_step(1, 1)
        used = group.gather(time.process_time() - began)
        assert max(used) < 0.6 * late_s, used
        averaging.release()


@pytest.mark.simulated(min_size=2, max_size=3)
def test_gossip_binds_its_messages_once(group, monkeypatch):
    """Not in each step, which would make a scratch array as long as the model."""
    model = nn.Linear(3, 2).initialize(seed=0)
    mixing = Gossip(group, model.storage, optim.SGD(model.storage, lr=0.1))
    bound = []
    old = mixing.group.bind
    monkeypatch.setattr(mixing.group, "bind", lambda *args: bound.append("") or old(*args))
    counts = []
    for step in range(4):
        mixing.after_step(step, 1)
        counts.append(len(bound))
    mixing.release()
    assert counts == [counts[0]] * 4 and counts[0] > 0
