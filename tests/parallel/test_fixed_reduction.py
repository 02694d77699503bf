"""Sums in a fixed order, on a model: the same bits however microbatches are dealt to replicas, statistics too."""

import numpy as np
import pytest

from nnmpi import models, nn
from nnmpi.backend.array import Array
from nnmpi.backend.record import numpy_backend
from nnmpi.comm.group import Group
from nnmpi.errors import UsageError
from nnmpi.ops.loss import cross_entropy
from nnmpi.parallel.fixed_reduction import FixedReduction
from nnmpi.shard import part


def train(group: Group, microbatches: int, reverse: bool = False) -> tuple[list[Array], dict[str, Array], float]:
    """Return gradients, running statistics and loss of microbatches that are dealt to the group's ranks."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((microbatches, 3, 8, 8, 1)).astype(np.float32)
    y = rng.integers(10, size=(microbatches, 3))
    model = models.resnet((8, 8, 1), 10).initialize(seed=2)
    fixed = FixedReduction(model, group, [range(len(model.storage.spans))], numpy_backend())
    fixed.begin(microbatches)
    losses, mine = {}, list(part(microbatches, group.size, group.rank))
    for m in reversed(mine) if reverse else mine:
        fixed.microbatch = m
        with nn.training():
            loss = cross_entropy(model(x[m]), y[m], reduction="sum")
        loss.backward()
        fixed.add(0, m)
        losses[m] = loss.item()
    fixed.finish()
    total = fixed.sum_numbers(losses, group)
    fixed.release()
    state = {name: value for name, value in model.state().items() if "running" in name}
    return [np.array(grad) for grad in model.storage.grads], state, total


@pytest.mark.simulated
@pytest.mark.parametrize("microbatches", [1, 3, 5, 8])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_bits_do_not_depend_on_the_ranks(group: Group, microbatches: int, reverse: bool) -> None:
    alone = group.split(group.rank)
    grads, state, total = train(group, microbatches, reverse)
    expected, expected_state, expected_total = train(alone, microbatches)
    right = [np.array_equal(a, b) for a, b in zip(grads, expected, strict=True)]
    right += [np.array_equal(state[name], value) for name, value in expected_state.items()]
    assert all(group.gather(bool(all(right)) and total == expected_total))


def test_a_batch_norm_in_two_places_is_refused(group: Group) -> None:
    """Only one of its two statistics would be taken in."""
    norm = nn.BatchNorm(2)
    model = nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2), norm).initialize()
    fixed = FixedReduction(model, group, [range(len(model.storage.spans))], numpy_backend())
    fixed.begin(1)
    with nn.training(), pytest.raises(UsageError, match="normalizes twice in one microbatch"):
        model(np.ones((3, 2), np.float32))
    fixed.release()
