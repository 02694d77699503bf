"""The fused update against a shared sum and an ordinary update: the same bits, whatever optimizer,
groups and nodes.
"""

import time

import numpy as np
import pytest

from nnmpi.base.errors import UsageError
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.node_sum import SharedSum
from nnmpi.nn import Linear, Parameter, Sequential
from nnmpi.optim import Optimizer, clip_by_global_norm, updates
from nnmpi.parallel.fused import FusedUpdate
from nnmpi.tensor import FlatStorage
from tests.comm.memory import shared_memory

pytestmark = pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")

LENGTHS = (40_003, 5, 0, 300)
GROUPS = ("weights", "biases", "weights", "biases")
CASES = [
    *((name, {"lr": 0.01}) for name in updates.NAMES if updates.is_elementwise(name)),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": {"weights": 0.1}}),
    ("adam", {"lr": 0.01, "weight_decay": {"biases": 0.1}}),
]
EVERY = pytest.mark.parametrize("name, options", CASES, ids=str)
STEPS = 3


class Setting:
    """Two sets of the same parameters: one for the fused update, one for a shared sum and an
    ordinary update.
    """

    def __init__(self, group, memory, name, options, dtype):
        self.group, self.memory = group, memory
        values = {
            str(i): np.random.default_rng(n).normal(size=n).astype(dtype)
            for i, n in enumerate(LENGTHS)
        }
        self.plain, self.shared = (
            FlatStorage(
                {key: Parameter((n,)) for key, n in zip(values, LENGTHS, strict=True)},
                values,
                np.zeros,
                lambda key, _: GROUPS[int(key)],
            )
            for _ in range(2)
        )
        self.plain.move(grads=[memory.allocate(grad.size, dtype) for grad in self.plain.grads])
        self.optimizer = updates.build(name, self.plain, **options)
        self.fused_optimizer = updates.build(name, self.shared, **options)
        self.fused = FusedUpdate(self.shared, self.fused_optimizer, group, memory, block_bytes=4096)
        self._sums = [SharedSum(grad, memory, tag=1) for grad in self.plain.grads]

    def draw(self, turn):
        """Give both sets the same gradients, each rank its own."""
        draws = np.random.default_rng([turn, self.group.rank])
        for grad, other in zip(self.plain.grads, self.shared.grads, strict=True):
            grad[:] = other[:] = draws.normal(size=grad.size)
        for span in (*self.plain.spans, *self.shared.spans):
            span.parameter.grad = span.parameter.buffer

    def sum_gradients(self):
        """Sum the ordinary set's gradients over the ranks."""
        for item in self._sums:
            item.run()

    def update_both(self, turn):
        """Draw gradients, and update both sets from them."""
        self.draw(turn)
        self.sum_gradients()
        self.optimizer.step()
        self.fused.reduce()
        self.fused.update()

    def equal(self, close=False):
        """Whether parameters and state agree, by all bits or nearly."""
        compare = np.allclose if close else np.array_equal
        pairs = [*zip(self.plain.data, self.shared.data, strict=True)]
        for theirs, ours in zip(
            self.optimizer.slots().values(), self.fused_optimizer.slots().values(), strict=True
        ):
            pairs += zip(theirs, ours, strict=True)
        right = all(compare(theirs, ours) for theirs, ours in pairs)
        self.memory.barrier()
        return right


@pytest.mark.simulated
@EVERY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_and_state_have_the_bits_of_an_ordinary_update(group, name, options, dtype):
    memory = SharedMemory(group)
    setting, right = Setting(group, memory, name, options, dtype), []
    for turn in range(STEPS):
        setting.update_both(turn)
        right.append(setting.equal())
    memory.free()
    assert all(map(all, group.gather(right)))


@pytest.mark.both_worlds
def test_the_length_is_that_of_the_sum_and_clipping_the_same(group):
    memory = SharedMemory(group)
    setting, right = Setting(group, memory, "sgd", {"lr": 0.1}, "float64"), []
    for turn in range(STEPS):
        setting.draw(turn)
        setting.sum_gradients()
        norm = clip_by_global_norm(setting.plain.grads, 3.0)
        setting.optimizer.step()
        ours, _ = setting.fused.reduce()
        setting.fused.update(3.0 / (ours + 1e-6))
        right += [abs(ours - norm) < 1e-9 * norm, setting.equal(close=True)]
    lengths = group.gather(ours)
    memory.free()
    assert all(map(all, group.gather(right)))
    assert set(lengths) == {lengths[0]}


@pytest.mark.mpi
def test_a_slow_ranks_move_does_not_undo_what_others_write_into_the_state(group, monkeypatch):
    model = Sequential(Linear(7, 3)).initialize(seed=0)
    optimizer = updates.build("adam", model.storage, lr=0.1)
    real = Optimizer.move

    def slow(self, *args):
        if group.rank == group.size - 1:
            time.sleep(0.2)
        real(self, *args)

    monkeypatch.setattr(Optimizer, "move", slow)
    fused = FusedUpdate(model.storage, optimizer, group)
    for arrays in optimizer.slots().values():
        if group.rank == 0:
            arrays[0][...] = 5.0
    group.barrier()
    assert all(group.gather(all((arrays[0] == 5.0).all() for arrays in optimizer.slots().values())))
    fused.release()


@pytest.mark.simulated
def test_numbers_are_added_up_on_the_way(group):
    """The sums are those of the same step on every rank, and the length is not disturbed."""
    memory = SharedMemory(group)
    setting, result = Setting(group, memory, "sgd", {"lr": 0.1}, "float64"), []
    for turn in range(STEPS):
        setting.draw(turn)
        numbers = [turn + 0.1 * group.rank, float(group.rank == 0), *[1.0] * (5 * turn // 2)]
        result.append(setting.fused.reduce(numbers))
        setting.fused.update()
    lengths = [setting.fused.reduce()[0], setting.fused.reduce()[1]]
    everyone = group.gather(result)
    memory.free()
    expected = [
        [turn * group.size + 0.05 * group.size * (group.size - 1), 1.0] for turn in range(STEPS)
    ]
    assert all(theirs == everyone[0] for theirs in everyone)
    assert all(
        np.allclose(sums[:2], two) for (_, sums), two in zip(result, expected, strict=True)
    ), result
    assert [len(sums) for _, sums in result] == [2, 4, 7] and set(result[2][1][2:]) == {group.size}
    assert lengths[1] == []


@pytest.mark.simulated(min_size=2)
def test_several_nodes_are_refused(group):
    memory = shared_memory(group, nodes=list(range(group.size)))
    with pytest.raises(UsageError, match="for the ranks of one node"):
        Setting(group, memory, "sgd", {"lr": 0.1}, "float64")
    memory.free()
