"""A limit of the activations' memory in every layout: the run without it, bit for bit."""

import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from nnmpi import models
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.layout import Layout
from nnmpi.data.loader import Loader
from nnmpi.errors import LayoutError, UsageError
from nnmpi.memory.ledger import ACTIVATIONS
from nnmpi.memory.optimal import OptimalPlans
from nnmpi.memory.plan import Act
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.memory.swapping import swapping_plan
from nnmpi.optim.adam import Adam
from nnmpi.parallel.sequence.group import RING
from nnmpi.planner.profile import Workload, ready_worker
from tests.harness.slow import cases
from tests.parallel import test_zero
from tests.parallel.test_sequence import train
from tests.planner.test_activations import MODELS, samples

LAYOUTS = (
    Layout(pp=1),
    Layout(pp=1, dp=3),
    Layout(pp=1, tp=2),
    Layout(pp=1, tp=2, sp=2),
    Layout(pp=1, sp=3, sp_attention=RING),
)


@pytest.mark.host_only("the same strategies run on the double in tests/parallel")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"dp {layout.dp} tp {layout.tp} sp {layout.sp}")
def test_every_layout_gives_its_own_bits(layout, monkeypatch):
    """By the plan of least memory; the budget is made to fit, as simulated messages are counted with their sender."""
    quickest = OptimalPlans.plan
    monkeypatch.setattr(OptimalPlans, "plan", lambda plans, budget: quickest(plans, plans.least))
    ranks = (layout.dp or 1) * (layout.tp or 1) * layout.sp
    plain = simulate(lambda group: train(group, layout), ranks)
    found = simulate(lambda group: train(group, replace(layout, activation_memory=1)), ranks)
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


def pipelined(group, name, layout, microbatches, batch=12):
    """Return a rank's weights after some steps, its most bytes of activations, and its plans."""
    data = samples(name)
    work = Workload(MODELS[name], Adam, lambda where: {}, data, batch, 2)
    worker = ready_worker(work, group, layout, 3, numpy_backend())
    where = worker.arrangement
    share = {"rank": where.data_rank, "world": where.data_ranks}
    for given in islice(Loader(data, batch, shuffle=False, microbatches=microbatches, workers=0, **share).epoch(0), 1):
        for _ in range(2):
            worker.step(given)
    weights = {span.parameter.name: span.parameter.data.copy() for span in worker.model.storage.spans}
    worker.release()
    return weights, worker.ledger.report().peaks[ACTIVATIONS], worker.runner._plans


PIPELINES = (
    ("mlp", Layout(1, 2, schedule="gpipe", split=(4, 4)), 4),
    ("gpt", Layout(1, 3, split=(2, 2, 3)), 6),
    ("gpt", Layout(1, 2, schedule="interleaved", virtual_stages=2, split=(2, 1, 2, 2)), 4),
    ("gpt", Layout(1, 2, schedule="naive", split=(3, 4)), 2),
    ("gpt", Layout(1, 2, sp=2, split=(4, 3)), 4),
    ("gpt", Layout(2, 2, split=(4, 3)), 3),
    ("cnn", Layout(1, 2, split=(5, 7)), 4),
    ("lstm", Layout(1, 2, schedule="zero-bubble", split=(4, 5)), 4),  # its results do not lie in rows
    ("resnet", Layout(1, 2, split=(10, 16)), 3),
)


QUICK = ("gpipe", "interleaved", "zero-bubble")  # and replicas, and sequences


@pytest.mark.parametrize(
    ("name", "layout", "microbatches"),
    cases(PIPELINES, lambda name, each, m: each.schedule in QUICK or each.dp > 1 or each.sp > 1),
    ids=[f"{name}-{each.schedule}, dp {each.dp}, pp {each.pp}, sp {each.sp}-{m}" for name, each, m in PIPELINES],
)
def test_a_pipeline_keeps_to_its_budget(name, layout, microbatches):
    """With all, the least and half: the weights' bits, and on each rank the bytes that were predicted."""
    ranks = layout.dp * layout.pp * layout.sp

    def train(budget):
        limited = replace(layout, activation_memory=budget)
        return simulate(lambda group: pipelined(group, name, limited, microbatches), ranks, cpu_factor=0.0)

    plain, kept = train(None), train(2**40)
    with pytest.raises(UsageError, match="give at least [1-9]") as refused:
        train(1)
    least = int(re.search("at least ([0-9]+)", str(refused.value))[1])
    most = max(plans.most for _, _, plans in kept)
    assert least < most
    for budget, found in ((most, kept), (least, train(least)), ((least + most) // 2, train((least + most) // 2))):
        for (weights, nbytes, plans), (ordinary, _, _) in zip(found, plain, strict=True):
            assert nbytes == plans.most <= budget
            for key, value in ordinary.items():
                np.testing.assert_array_equal(weights[key], value, err_msg=key)


def test_what_a_pipeline_cannot_limit_is_refused():
    """Schedules with several versions of the weights, sums in a fixed order, other recomputation, and cut shortcuts."""
    plain = Layout(1, 2, split=(3, 4), activation_memory=2**30)
    for more, match in (
        ({"schedule": "pipedream"}, "does not go with pipedream; give another schedule"),
        ({"reduction": "fixed"}, "does not go with reduction fixed"),
        ({"recompute": "always"}, "does not go with recompute always"),
        ({"offload": "/tmp"}, "does not go with offload of activations; give no offload, or pp 1"),
    ):
        layout = replace(plain, **more)
        with pytest.raises(LayoutError, match=match):
            simulate(lambda group, layout=layout: pipelined(group, "gpt", layout, 4), 2)
    with pytest.raises(UsageError, match="begins or ends within the shortcut of 3"):
        simulate(lambda group: pipelined(group, "resnet", replace(plain, split=(6, 20)), 3), 2)


@pytest.mark.host_only("the same strategies run on the double in tests/parallel")
@pytest.mark.parametrize("name", ["gpt", "cnn"])
@pytest.mark.parametrize("allreduce", ["shared", "native"])
def test_shared_out_weights_come_again(name, allreduce, monkeypatch):
    """In stages 2 and 3 of ZeRO, with units that are gathered or stand once: the bits of the ordinary run."""
    quickest = OptimalPlans.plan
    monkeypatch.setattr(OptimalPlans, "plan", lambda plans, budget: quickest(plans, plans.least))
    for stage in (2, 3):
        layout = Layout(zero=stage, unit_bytes=1)
        plain = simulate(lambda group, at=layout: test_zero.train(group, name, at, 2, allreduce), 3)[0]
        limited = replace(layout, activation_memory=1)
        found = simulate(lambda group, at=limited: test_zero.train(group, name, at, 2, allreduce), 3)[0]
        for key, value in plain.items():
            np.testing.assert_array_equal(found[key], value, err_msg=f"{stage} {key}")


def test_a_model_that_a_strategy_runs_is_refused():
    """Unless the strategy is given."""
    model = models.mlp((8,), 3).initialize(seed=0)
    model.forward = model.forward
    with pytest.raises(UsageError, match="a strategy has taken over"):
        RecomputedModel(model, None)(np.ones((2, 8), "float32"))
