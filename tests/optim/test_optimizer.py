"""What every optimizer promises, whichever it is: one list of cases goes through all of it."""

import tracemalloc
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from nnmpi import models
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Arrays, Optimizer, RMSprop
from nnmpi.optim import optimizer as module
from nnmpi.optim.updates import OPTIMIZERS
from tests.harness.refusals import refuses, usage_error

# Each with its defaults, and some with options.
CASES = {
    **{
        name: partial(row.kind, lr=0.01) for name, row in OPTIMIZERS.items() if row.kind.elementwise
    },
    "sgd-decay": lambda storage: SGD(storage, 0.1, weight_decay=0.3),
    "momentum": lambda storage: SGD(storage, 0.1, momentum=0.9),
    "nesterov-decay": lambda storage: SGD(
        storage, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam-decay": lambda storage: Adam(storage, 0.1, betas=(0.5, 0.7), eps=0.1, weight_decay=0.3),
    "adamw-decay": lambda storage: AdamW(storage, 0.01, weight_decay=0.1),
    "amsgrad": lambda storage: Adam(storage, 0.01, amsgrad=True),
    "rmsprop-alpha": lambda storage: RMSprop(storage, 0.01, alpha=0.7),
    "rmsprop-momentum": lambda storage: RMSprop(
        storage, 0.01, eps=0.1, momentum=0.9, weight_decay=0.3
    ),
    "adagrad-decay": lambda storage: Adagrad(storage, 0.1, eps=1e-3, weight_decay=0.1),
    "adadelta-decay": lambda storage: Adadelta(storage, 0.5, eps=1e-3, weight_decay=0.3),
}
SHAPES = [(), (0,), (7,), (40, 13), (3, 5, 50)]

every_optimizer = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


def values(shapes, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def train(optimizer, steps, seed=1):
    """Do some updates with gradients that depend on the step number alone."""
    for _ in range(steps):
        grads = optimizer.storage.grads
        for grad, new in zip(
            grads, values([g.shape for g in grads], seed=seed + optimizer.steps), strict=True
        ):
            grad[...] = new
        optimizer.step()


def trained(make, data, steps=5):
    storage = Arrays(data, [np.zeros(array.shape, array.dtype) for array in data])
    train(make(storage), steps)
    return storage.data


@every_optimizer
def test_block_size_does_not_change_a_bit(make, monkeypatch):
    """Cut into blocks of 8 elements, every shape gets the same bits as in one piece."""
    full = trained(make, values(SHAPES))
    monkeypatch.setattr(module, "HOST_BLOCK_BYTES", 64)
    for first, other in zip(full, trained(make, values(SHAPES)), strict=True):
        np.testing.assert_array_equal(first, other)


@every_optimizer
def test_a_step_allocates_blocks_and_leaves_gradients_alone(make):
    """Three updates of 2.4 MB need four temporary arrays of a block's size at most; the gradients'
    bits are the same afterwards.
    """
    data, grads = values([200_000, 100_000]), values([200_000, 100_000], seed=1)
    saved = [grad.copy() for grad in grads]
    optimizer = make(Arrays(data, grads))
    optimizer.step()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3):
            optimizer.step()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 4096 + 4 * module.HOST_BLOCK_BYTES
    for grad, copy in zip(grads, saved, strict=True):
        np.testing.assert_array_equal(grad, copy)


@every_optimizer
def test_a_loaded_state_continues_bit_for_bit(make):
    """Five updates, state copied into a fresh optimizer, five more: the same bits as ten
    updates.
    """
    expected = trained(make, values(SHAPES), steps=10)

    first = make(Arrays(values(SHAPES), values(SHAPES)))
    train(first, 5)
    second = make(Arrays([array.copy() for array in first.storage.data], values(SHAPES)))
    for name, slot in second.slots().items():
        for array, saved in zip(slot, first.slots()[name], strict=True):
            array[...] = saved
    second.steps = first.steps
    train(second, 5)

    assert second.steps == 10
    for item, other in zip(expected, second.storage.data, strict=True):
        np.testing.assert_array_equal(item, other)


@pytest.mark.parametrize("which", ["data", "grads"])
def test_replaced_arrays_are_noticed(which):
    """Updating arrays that the model no longer uses would look like a model that does not learn."""
    storage = Arrays(values([3]), values([3]))
    optimizer = SGD(storage, 0.1)
    getattr(storage, which)[0] = np.zeros(3)
    usage_error("the storage's arrays were replaced", optimizer.step)


def test_weight_decay_by_group():
    """A group has the decay given for it, and groups left out have none."""
    data = [np.ones(2) for _ in range(3)]
    storage = Arrays(data, [np.zeros(2) for _ in range(3)], ["weights", "biases", "weights"])
    optimizer = SGD(storage, lr=0.5, weight_decay={"weights": 0.25})
    assert optimizer.weight_decay == (0.25, 0.0, 0.25)
    optimizer.step()
    np.testing.assert_array_equal(data, [[0.875, 0.875], [1, 1], [0.875, 0.875]])


@pytest.mark.parametrize("kind", [row.kind for row in OPTIMIZERS.values() if row.kind.elementwise])
def test_groups_have_rates_of_their_own(kind):
    """Each is updated as by an optimizer of its own; a schedule's rate is the largest one's."""
    data, rates = values([5, 4, 3]), {"body": 0.125, "head": 0.5}
    storage = Arrays([item.copy() for item in data], values([5, 4, 3]), ["body", "head", "body"])
    together = kind(storage, rates)
    parts = zip(data, storage.grads, storage.groups, strict=True)
    alone = [kind(Arrays([item], [grad]), rates[group]) for item, grad, group in parts]
    assert together.lr == 0.5
    for factor in (1, 0.5):
        together.lr = 0.5 * factor
        together.step()
        for entry, group in zip(alone, storage.groups, strict=True):
            entry.lr = rates[group] * factor
            entry.step()
    for first, other in zip(storage.data, data, strict=True):
        np.testing.assert_array_equal(first, other)


class Moving(Arrays):
    """A storage whose arrays can be replaced."""

    def move(self, data, grads):
        """Take other arrays."""
        self.data, self.grads, self.moves = data, grads, self.moves + 1


def test_an_optimizer_follows_a_storage_that_moves():
    storage, plain = Moving(values([3]), values([3])), Arrays(values([3]), values([3]))
    moved, saved = SGD(storage, 0.1, momentum=0.9), SGD(plain, 0.1, momentum=0.9)
    moved.step()
    saved.step()
    storage.move([storage.data[0].copy()], [storage.grads[0].copy()])
    moved.step()
    saved.step()
    np.testing.assert_array_equal(storage.data[0], plain.data[0])
    storage.move([np.zeros(4)], [np.zeros(4)])
    refuses(ShapeError, "arrays have changed from", moved.step)


@every_optimizer
def test_other_arrays_share_the_state(make):
    """Updates in turn, of two storages with one state: the bits of updates of one."""
    expected, storage = (
        make(Arrays(values(SHAPES), values(SHAPES))),
        Arrays(values(SHAPES), values(SHAPES)),
    )
    first = make(storage)
    expected.step()
    first.step()
    other = first.over(Arrays([array.copy() for array in storage.data], storage.grads))
    assert type(other) is type(first)
    for item in (expected, other):
        item.step()
    for mine, theirs in zip(other.storage.data, expected.storage.data, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    refuses(
        ShapeError, "arrays have changed from", lambda: first.over(Arrays(values([3]), values([3])))
    )


def test_parts_of_the_buffers_are_updated_alone(monkeypatch):
    """Two halves, one after the other, are a whole update; what is frozen stays."""
    monkeypatch.setattr("nnmpi.optim.optimizer.HOST_BLOCK_BYTES", 16)
    storage, plain = Arrays(values([9]), values([9])), Arrays(values([9]), values([9]))
    halves, full = SGD(storage, 0.1), SGD(plain, 0.1)
    first, second = halves.cut([slice(0, 4)]), halves.cut([slice(4, 9)])
    assert [block.data.size for block in second] == [2, 2, 1]
    full.step()
    halves.update(first)
    np.testing.assert_array_equal(storage.data[0][:4], plain.data[0][:4])
    assert not np.array_equal(storage.data[0][4:], plain.data[0][4:])
    saved = storage.data[0][4:6].copy()
    halves.update(second, [(0, slice(4, 6))])
    np.testing.assert_array_equal(storage.data[0][6:], plain.data[0][6:])
    np.testing.assert_array_equal(storage.data[0][4:6], saved)


@pytest.mark.parametrize("shared", [False, True])
def test_processes_that_train_apart_are_warned(shared, monkeypatch):
    """Two ranks that only call loss.backward() and step(): their weights drift apart, and nothing
    else says so.
    """
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    storage = models.mlp((5,), 3, hidden=()).initialize().storage
    storage.distributed = shared  # as a strategy does
    optimizer = SGD(storage, lr=0.1)
    with (
        nullcontext(())
        if shared
        else pytest.warns(
            UserWarning, match=r"2 processes .* set model\.storage\.distributed = True$"
        )
    ) as text:
        optimizer.step()
    assert all(item.filename == __file__ for item in text)
    optimizer.step()


class Signed(Optimizer):
    """The least of an optimizer: the sign of the gradient, and a count in its state."""

    def __init__(self, storage, lr, weight_decay=0.0):
        super().__init__(storage, lr, weight_decay, slots=("count",))

    def update_block(self, block, lr):
        block.data -= lr * np.sign(block.grad)
        (count,) = block.slots
        count += 1


def test_an_optimizer_of_ones_own_updates_blocks():
    """With the rate of each group; a block's arrays are written, not replaced."""
    data, grads = [np.zeros(3), np.zeros(2)], [np.array([1.0, -2.0, 0.0]), np.ones(2)]
    optimizer = Signed(Arrays(data, grads, ["a", "b"]), lr={"a": 0.5, "b": 0.25})
    optimizer.step()
    np.testing.assert_array_equal(data[0], [-0.5, 0.5, 0])
    np.testing.assert_array_equal(data[1], [-0.25, -0.25])
    assert [slot.tolist() for slot in optimizer.slots()["count"]] == [[1] * 3, [1] * 2]
    (block, *_) = optimizer.cut()
    with pytest.raises(UsageError, match=r"write into it: block.data\[...\] = values"):
        block.data = block.data - 1

    class Empty(Optimizer):
        def __init__(self, storage):
            super().__init__(storage, 0.1, 0.0, slots=())

    refuses(
        NotImplementedError,
        r"Empty defines no formula, and no update_block\(block, lr\)",
        lambda: Empty(Arrays(data, grads)).step(),
    )
