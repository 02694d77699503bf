"""What is predicted of a layout's activations is what the ledger of the real layout finds."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Batch, Loader
from nnmpi.errors import UsageError
from nnmpi.memory.ledger import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE
from nnmpi.models.cnn import cnn
from nnmpi.models.gpt import gpt
from nnmpi.models.lstm import lstm
from nnmpi.models.mlp import mlp
from nnmpi.models.resnet import resnet
from nnmpi.nn.chain import open_chain
from nnmpi.nn.module import Module
from nnmpi.optim.adam import Adam
from nnmpi.parallel.pipeline.profile import LayerProfile
from nnmpi.planner.activations import measure_whole
from nnmpi.planner.profile import Profile, StepCost, Workload, ready_worker
from nnmpi.planner.shapes import ModelShapes
from nnmpi.planner.space import Candidate

ROWS, TOKENS, CONTEXT, SIDE = 14, 12, 8, 16  # of 4 microbatches two have 4 rows, two 3
MODELS: dict[str, Callable[[], Module]] = {
    "gpt": lambda: gpt(TOKENS, CONTEXT, features=16, layers=3, heads=2),
    "lstm": lambda: lstm(TOKENS, features=8, layers=3),
    "mlp": lambda: mlp((SIDE, SIDE, 1), 10, (32, 16, 24)),
    "cnn": lambda: cnn((SIDE, SIDE, 1), 10, (24, 16)),
    "resnet": lambda: resnet((SIDE, SIDE, 1), 10, 4),
}


def samples(name: str) -> Dataset:
    random = np.random.default_rng(0)
    if name in ("gpt", "lstm"):
        tokens = random.integers(0, TOKENS, (ROWS, CONTEXT + 1))
        return Dataset("tokens", tokens[:, :-1], tokens[:, 1:], TOKENS)
    images = random.standard_normal((ROWS, SIDE, SIDE, 1), dtype=np.float32)
    return Dataset("images", images, random.integers(0, 10, ROWS), 10)


def planned(name: str) -> tuple[Workload, ModelShapes]:
    """Return a workload of a model, and its shapes, with times that nobody has measured."""
    build = MODELS[name]
    work = Workload(build, Adam, lambda where: {}, samples(name), ROWS, 2)
    layers = tuple(LayerProfile(str(i), 1e-6 * (1 + i % 3), 1) for i in range(len(open_chain(build()))))
    steps = {ROWS: StepCost(1e-3, 1e-4, 0, unrecorded_s=1e-3)}
    return work, ModelShapes(work, Profile({}, {(1, 1): steps}, {ROWS: layers}), numpy_backend())


def first_batch(work: Workload, group: Group, layout: Layout, microbatches: int) -> tuple[Worker, Batch]:
    """Return a worker of a layout, and its part of the first batch."""
    worker = ready_worker(work, group, layout, 4, numpy_backend())
    where = worker.arrangement
    assert where is not None
    mine = {"rank": where.data_rank, "world": where.data_ranks}
    loader = Loader(work.samples, ROWS, shuffle=False, microbatches=microbatches, workers=0, **mine)
    return worker, next(iter(loader.epoch(0)))


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("gpt", Candidate(pp=3, microbatches=6)),
        ("gpt", Candidate(pp=2, schedule="interleaved", virtual_stages=2, microbatches=4, recompute=True)),
        ("gpt", Candidate(dp=2, pp=2, microbatches=4, allreduce="ring")),
        ("lstm", Candidate(pp=2, schedule="zero-bubble", microbatches=4)),
        ("lstm", Candidate(pp=2, microbatches=4, recompute=True)),
        ("mlp", Candidate(pp=2, schedule="gpipe", microbatches=4)),
        ("mlp", Candidate(pp=3, schedule="zero-bubble", microbatches=4, recompute=True)),
        ("cnn", Candidate(pp=2, microbatches=4)),
        ("cnn", Candidate(pp=2, schedule="interleaved", virtual_stages=2, microbatches=4)),
        ("resnet", Candidate(pp=3, microbatches=6)),  # a kept value crosses a cut beside the activation
    ],
    ids=str,
)
def test_activations_are_at_least_those_of_the_ranks(name: str, one: Candidate) -> None:
    work, shapes = planned(name)
    split = [len(cut) for cut in shapes.part(one.tp, one.pp, one.virtual_stages).cuts]

    def held(group: Group) -> tuple[int, int]:
        layout = replace(one.layout(), split=split)
        worker = ready_worker(work, group, layout, 4, numpy_backend())
        where = worker.arrangement
        assert where is not None
        mine = {"rank": where.data_rank, "world": where.data_ranks}
        batch = next(
            iter(Loader(work.samples, ROWS, shuffle=False, microbatches=one.microbatches, workers=0, **mine).epoch(0))
        )
        for _ in range(4):  # one is counted, one recorded, one replayed, where they are
            worker.step(batch)
        assert (worker.runner.replays > 0) is (one.schedule != "zero-bubble" and not worker.backend.is_device)
        worker.release()
        return where.mesh.place.p, worker.ledger.report().peaks[ACTIVATIONS]

    found = simulate(held, one.ranks, cpu_factor=0.0)
    most = [max(nbytes for place, nbytes in found if place == rank) for rank in range(one.pp)]
    ratios = [ours / theirs for ours, theirs in zip(shapes.activations(one, one.rows(ROWS)), most, strict=True)]
    assert min(ratios) >= 1 and max(ratios) < 1.5  # each microbatch is taken for one of the longest


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("gpt", Candidate()),
        ("gpt", Candidate(dp=2, zero=3, allreduce="ring")),
        ("gpt", Candidate(tp=2)),
        ("gpt", Candidate(sp=2, zero=1, allreduce="ring")),
        ("cnn", Candidate(dp=2, zero=1)),
        ("resnet", Candidate(dp=2, allreduce="ring")),
    ],
    ids=str,
)
def test_the_least_budget_for_activations_is_that_of_the_ranks(name: str, one: Candidate) -> None:
    work, shapes = planned(name)
    rows = one.rows(ROWS)
    least = max(shapes.activations(replace(one, activation_memory=1), rows))
    most = max(shapes.activations(replace(one, activation_memory=sys.maxsize), rows))
    assert least < most
    again = shapes.again(replace(one, activation_memory=least), rows[0])
    assert max(again.bytes) == least and max(again.more) > 0
    split = [len(cut) for cut in shapes.part(one.tp, one.pp, one.virtual_stages).cuts] if one.pp > 1 else "auto"

    def held(group: Group, budget: int) -> int:
        more = {"sp": one.sp, "zero": one.zero, "activation_memory": budget}
        layout = Layout(one.dp, one.pp, one.tp, one.schedule, one.virtual_stages, split, **more)
        worker = ready_worker(work, group, layout, 4, numpy_backend())
        where = worker.arrangement
        assert where is not None
        mine = {"rank": where.data_rank, "world": where.data_ranks}
        batch = next(
            Loader(work.samples, ROWS, shuffle=False, microbatches=one.microbatches, workers=0, **mine).epoch(0)
        )
        for _ in range(3):
            worker.step(batch)
        worker.release()
        return worker.ledger.report().peaks[ACTIVATIONS]

    assert max(simulate(partial(held, budget=least), one.ranks, cpu_factor=0.0)) <= least
    with pytest.raises(UsageError, match=f"{least - 1} bytes are too few .* {least} are needed"):
        simulate(partial(held, budget=least - 1), one.ranks, cpu_factor=0.0)


@pytest.mark.host_only("passes on a device are not recorded: there recordings would keep more than a step takes")
def test_activations_of_a_whole_replica_are_those_of_recorded_steps() -> None:
    """Where steps are replayed, their memory is kept: it counts from the third step on."""
    work = Workload(MODELS["cnn"], Adam, lambda where: {}, samples("cnn"), ROWS, 2)

    def held(group: Group) -> list[int]:
        worker = ready_worker(work, group, None, ROWS, numpy_backend())
        batch = next(iter(Loader(work.samples, ROWS, shuffle=False, workers=0).epoch(0)))
        peaks = []
        for _ in range(5):
            worker.step(batch)
            peaks.append(worker.ledger.report().peaks[ACTIVATIONS])
        worker.release()
        return peaks

    peaks = simulate(held, 1, cpu_factor=0.0)[0]
    assert measure_whole(work, (1, 1), ROWS, numpy_backend()) == peaks[-1] > peaks[1]
    assert measure_whole(work, (1, 1), ROWS, numpy_backend(), recorded=False) == peaks[1]


@pytest.mark.host_only("passes on a device are not recorded")
@pytest.mark.parametrize("rows", [4, 5])  # a last batch of two rows, and of four
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_short_last_batch_takes_no_more(name: str, rows: int) -> None:
    """Its recording lies where that of the others does."""
    work = Workload(MODELS[name], Adam, lambda where: {}, samples(name), rows, 2)

    def held(group: Group) -> int:
        worker, epochs = ready_worker(work, group, None, rows, numpy_backend()), 4
        loader = Loader(work.samples, rows, shuffle=False, workers=0)
        replays = 0
        for number in range(epochs):
            for batch in loader.epoch(number):
                replays = worker.runner.replays
                worker.step(batch)
        assert name == "lstm" or worker.runner.replays > replays  # the last one, too
        worker.release()
        return worker.ledger.report().peaks[ACTIVATIONS]

    assert simulate(held, 1, cpu_factor=0.0) == [measure_whole(work, (1, 1), rows, numpy_backend())]


def test_branches_are_planned_as_they_are_dealt_out() -> None:
    def build() -> Module:
        towers = [nn.Sequential(nn.Linear(SIDE * SIDE, 8), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(nn.Flatten(), nn.Branches(*towers), nn.Linear(24, 10))

    work = Workload(build, Adam, lambda where: {}, samples("mlp"), ROWS, 2)
    shapes = ModelShapes(work, Profile({}, {}, {}), numpy_backend())

    def held(group: Group) -> tuple[int, ...]:
        worker = ready_worker(work, group, Layout(tp=2), ROWS, numpy_backend())
        worker.release()
        return tuple(worker.ledger.report().held[kind] for kind in (PARAMETERS, GRADIENTS, STATE))

    most = shapes.state(2, 1, 1, 0, 1, once=False)
    assert (most.parameters, most.gradients, most.optimizer) == max(simulate(held, 2))
