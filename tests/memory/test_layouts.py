"""A limit of the activations' memory in every layout: the run without it, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from nnmpi import models
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.layout import Layout
from nnmpi.errors import UsageError
from nnmpi.memory.plan import Act
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.memory.swapping import swapping_plan
from nnmpi.parallel.sequence.group import RING
from tests.parallel import test_zero
from tests.parallel.test_sequence import train

LAYOUTS = (
    Layout(pp=1),
    Layout(pp=1, dp=3),
    Layout(pp=1, tp=2),
    Layout(pp=1, tp=2, sp=2),
    Layout(pp=1, sp=3, sp_attention=RING),
)


@pytest.mark.host_only("the same strategies run on the double in tests/parallel")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"dp {layout.dp} tp {layout.tp} sp {layout.sp}")
def test_every_layout_gives_its_own_bits(layout):
    ranks = (layout.dp or 1) * (layout.tp or 1) * layout.sp
    plain = simulate(lambda group: train(group, layout), ranks)
    found = simulate(lambda group: train(group, replace(layout, activation_memory="least")), ranks)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.host_only("a device's activations go to the host")
@pytest.mark.parametrize("layout", (Layout(pp=1, dp=2), Layout(pp=1, tp=2)), ids=lambda layout: f"tp {layout.tp}")
def test_ranks_that_swap_give_the_same_bits(layout, monkeypatch, tmp_path):
    """Each has a file of its own; they agree on what leaves."""
    plans = []

    def find(given, budget, bandwidth):
        plans.append(swapping_plan(given, given.least, 1e12))
        return plans[-1]

    monkeypatch.setattr("nnmpi.memory.recompute.swapping_plan", find)
    plain = simulate(lambda group: train(group, layout), 2)
    swapping = replace(layout, activation_memory=1, offload=str(tmp_path))
    found = simulate(lambda group: train(group, swapping), 2)
    assert plans[0] == plans[1] and any(action.act is Act.OUT for action in plans[0])
    for ours, theirs in zip(found, plain, strict=True):
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.simulated
def test_a_limit_that_is_too_low_is_refused_on_all_ranks(group):
    """With the least that would do."""
    with pytest.raises(UsageError, match="give at least [1-9]"):
        train(group, Layout(pp=1, dp=group.size, activation_memory=1))


@pytest.mark.host_only("the same strategies run on the double in tests/parallel")
@pytest.mark.parametrize("name", ["gpt", "cnn"])
@pytest.mark.parametrize("allreduce", ["shared", "native"])
def test_shared_out_weights_come_again(name, allreduce):
    """In stages 2 and 3 of ZeRO, with units that are gathered or stand once: the bits of the ordinary run."""
    for stage in (2, 3):
        layout = Layout(zero=stage, unit_bytes=1)
        plain = simulate(lambda group, at=layout: test_zero.train(group, name, at, 2, allreduce), 3)[0]
        limited = replace(layout, activation_memory="least")
        found = simulate(lambda group, at=limited: test_zero.train(group, name, at, 2, allreduce), 3)[0]
        for key, value in plain.items():
            np.testing.assert_array_equal(found[key], value, err_msg=f"{stage} {key}")


def test_a_model_that_a_strategy_runs_is_refused():
    """Unless the strategy is given."""
    model = models.mlp((8,), 3).initialize(seed=0)
    model.forward = model.forward
    with pytest.raises(UsageError, match="a strategy has taken over"):
        RecomputedModel(model, None)(np.ones((2, 8), "float32"))
