"""What is computed again, and what lies out of memory, in every layout: the bits of the run without
it.
"""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from nnmpi import Layout, models, simulate
from nnmpi.memory import RecomputedModel
from nnmpi.memory.optimal import swapping_plan
from nnmpi.memory.plan import Act
from nnmpi.nn.sharding import RING
from tests.equivalence.reference import Setup, differences, run
from tests.equivalence.rows import CNN, GPT
from tests.harness.refusals import usage_error
from tests.harness.slow import cases

LEAST = {"activation_memory": "least"}
STATE, ALL = {"offload_state": "optimizer"}, {"offload_state": "all"}
ROWS = (
    *(
        (GPT, Layout(pp=1, dp=dp, tp=tp, sp=sp, sp_attention=RING), [LEAST])
        for dp, tp, sp in ((3, 1, 1), (1, 2, 2))
    ),
    *((CNN, Layout(zero=stage, dp=3, unit_bytes=1), [LEAST]) for stage in (2, 3)),
    (GPT, Layout(pp=1, dp=1), [STATE]),
    (GPT, Layout(pp=1, dp=2), [STATE]),
    (GPT, Layout(pp=1, dp=1, tp=2), [STATE]),
    (GPT, Layout(pp=2, dp=1, split=(4, 4)), [STATE]),
    (GPT, Layout(zero=1, dp=3, unit_bytes=1), [STATE]),
    (GPT, Layout(zero=2, dp=3, unit_bytes=1), [LEAST, STATE]),
    (GPT, Layout(zero=3, dp=3, unit_bytes=1), [LEAST, STATE, ALL]),
)


def compare(setup, layout, folder, allreduce, *changes):
    """Train in a layout as it is, and with each of the changes."""
    ranks = prod(layout.shape)
    options = {"allreduce": allreduce, "fused_update": False, "replays": False}

    def train(**change):
        at = replace(layout, **change)
        return simulate(lambda group: run(setup, group, at, **options), ranks)[0]

    plain = train()
    for change in changes:
        offload = {} if change == LEAST else {"offload": str(folder)}
        assert not differences(train(**offload, **change), plain, setup, exact=True), change
        assert not list(folder.iterdir())  # the file has no name


@pytest.mark.host_only("the same strategies run on the double in tests/parallel")
@pytest.mark.parametrize(
    "setup, layout, changes",
    cases(ROWS, lambda _, layout, __: prod(layout.shape) < 4),
    ids=lambda item: item.model.__name__ if isinstance(item, Setup) else str(item),
)
def test_every_layout_gives_its_own_bits(setup, layout, changes, tmp_path):
    """Also where weights are gathered again, and where they stand once."""
    compare(setup, layout, tmp_path, "native", *changes)
    if layout.zero and LEAST in changes:
        compare(setup, layout, tmp_path, "shared", LEAST)


@pytest.mark.host_only("a device's activations go to the host")
def test_ranks_that_swap_give_the_same_bits(monkeypatch, tmp_path):
    """Each has a file of its own; they agree on what leaves."""
    plans = []

    def find(given, budget, bandwidth):
        plans.append(swapping_plan(given, given.least, 1e12))
        return plans[-1]

    monkeypatch.setattr("nnmpi.memory.recompute.swapping_plan", find)
    compare(GPT, Layout(pp=1, dp=1, tp=2), tmp_path, "native", {"activation_memory": 1})
    assert plans[0] == plans[1] and any(action.act is Act.OUT for action in plans[0])


@pytest.mark.simulated(max_size=4)
def test_a_limit_that_is_too_low_is_refused_on_all_ranks(group):
    """With the least that would do."""
    usage_error(
        "give at least [1-9]",
        lambda: run(GPT, group, Layout(pp=1, dp=group.size, activation_memory=1)),
    )


def test_a_model_that_a_strategy_runs_is_refused():
    """Unless the strategy is given."""
    model = models.mlp((8,), 3).initialize(seed=0)
    model.forward = model.forward
    usage_error(
        "has replaced this model's forward",
        lambda: RecomputedModel(model, None)(np.ones((2, 8), "float32")),
    )
