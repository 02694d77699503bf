"""The planner's activations are the ledger's, with what replays hold."""

import numpy as np
import pytest

from nnmpi import simulate
from nnmpi.comm.machine import Machine
from nnmpi.data import Dataset
from nnmpi.lab.planner import profile
from nnmpi.lab.planner.network import PlannedNetwork
from nnmpi.lab.planner.price import Candidate, Profile
from nnmpi.lab.planner.profile import ready
from nnmpi.memory.fitting import peak_of_stages
from nnmpi.memory.ledger import ACTIVATIONS
from nnmpi.nn.chain import open_chain
from tests.lab.test_planner import made_up, quick, workload

__all__ = ["quick"]


@pytest.fixture(autouse=True)
def recorded(quick, monkeypatch):
    """Let as many steps pass as a recording takes."""
    monkeypatch.setattr(profile, "WARM_UP_STEPS", 3)


@pytest.mark.parametrize(
    "one",
    [
        Candidate(),
        Candidate(dp=2, recompute=True),
        Candidate(dp=2, zero=2, recompute=True),
        Candidate(dp=2, zero=3),
        Candidate(tp=2),
        Candidate(pp=2, pipeline="gpipe", microbatches=4),
        Candidate(pp=2, pipeline="zero-bubble", microbatches=4, recompute=True),
        Candidate(pp=2, pipeline="zb-v", virtual_stages=2, microbatches=2),
        Candidate(dp=2, pp=2, zero=2, microbatches=2),
    ],
    ids=str,
)
def test_activations_are_those_of_the_ledger(one):
    """In every kind of layout, with what recordings hold; those of each stage."""
    table = Dataset("table", np.ones((512, 8), np.float32), np.zeros(512, np.int64), 8)
    work = workload(512, table, model="mlp", hidden=[64, 64, 64])
    machine = Machine.uniform(0.0, 0.0)
    layers = made_up(2).layers[: len(open_chain(work.build()))]
    times = Profile({}, {}, layers, 16)
    priced = work.pricer(times, PlannedNetwork("", machine, one.ranks))
    options = one.options()
    if one.pp > 1:
        options["split"] = tuple(map(len, priced.shapes.cuts(one.pp, one.virtual_stages)))

    def run(group):
        with ready(work, options, group) as (worker, batches):
            for _ in range(profile.RECORDED_STEPS):
                worker.step(next(batches), lr=0.0)
            return worker.arrangement.mesh.pp.rank, worker.ledger.report().peaks[ACTIVATIONS]

    counted = simulate(run, one.ranks, cpu_factor=0.0)
    for stage, memory in enumerate(priced.memory_of_ranks(one)):
        most = max(nbytes for place, nbytes in counted if place == stage)
        # between two stages of a rank a recording has a copy more
        assert memory[ACTIVATIONS] == pytest.approx(most, rel=0.05 * one.virtual_stages)


@pytest.mark.host_only("it counts what NumPy's kernels take")
def test_the_second_half_of_a_backward_is_counted():
    """The gradient of a weight, which is added to an earlier microbatch's, is most of it."""
    table = Dataset("table", np.ones((32, 64), np.float32), np.zeros(32, np.int64), 8)
    work = workload(32, table, model="mlp", hidden=[128, 128])
    options = Candidate(pp=2, pipeline="zero-bubble", microbatches=4).options()

    def run(group):
        with ready(work, options, group) as (worker, batches):
            for _ in range(profile.RECORDED_STEPS):
                worker.step(next(batches), lr=0.0)
            executor = worker.passes.executor
            counted = peak_of_stages(executor.costs, executor.schedule_for(4), executor.rank)
            return counted, worker.passes.replay.held_bytes

    counted, recorded = max(simulate(run, 2, cpu_factor=0.0))
    assert counted == pytest.approx(recorded, rel=0.2) and recorded > 4 * 128 * 128
