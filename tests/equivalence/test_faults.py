"""The contract sees what it is for: faults are planted that other frameworks had, and found."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nnmpi.compose.worker as worker_module
from nnmpi import models
from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.layout import Layout
from nnmpi.compose.pipeline_runner import PipelineRunner
from nnmpi.errors import CommError
from nnmpi.optim.clip import sum_of_squares
from nnmpi.parallel.pipeline import boundary as boundary
from nnmpi.tensor.flat import FlatStorage
from tests.equivalence import own
from tests.equivalence.cover import SETUPS, layers, spread
from tests.equivalence.reference import Setup, differences, run

pytestmark = pytest.mark.mpi

Found = list[str]


@pytest.fixture
def found(group: Group, alone: Group) -> Callable[..., Found]:
    """Return a function that runs a setup under a layout, and returns on all ranks what the contract finds."""

    def work(setup: Setup, layout: Layout, **options: Any) -> Found:
        parallel = run(setup, group, layout, synchronous_sends=True, **options)
        serial = run(setup, alone) if group.is_root else None
        result: Found = group.share(differences(parallel, serial, setup) if serial is not None else None)
        return result

    return work


def pipeline(group: Group, setup: Setup, schedule: str = "gpipe", **options: Any) -> Layout:
    """Return a layout with two stages, or as many as there are ranks."""
    return spread(setup, (group.size // 2, 2, 1) if group.size % 2 == 0 else (1, group.size, 1), schedule, **options)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_one_receive_buffer_for_all_microbatches(
    group: Group, found: Callable[..., Found], monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """ShallowSpeed's: a layer still holds the input of one microbatch when the next is received over it.

    (The last stage of a 1F1B pipeline holds only one at a time, and could have one buffer.)
    """
    if group.size == 1:
        return
    setup = SETUPS["mlp"]
    layout = pipeline(group, setup, schedule)
    stages = (layout.pp or 1) * layout.virtual_stages
    split = (3, *[2] * (stages - 2), layers(setup) - 3 - 2 * (stages - 2))  # every stage but one begins with a Linear
    layout = replace(layout, split=split)
    assert not found(setup, layout)
    memory: dict[Any, Array] = {}
    monkeypatch.setattr(boundary, "new_buffer", lambda *look: memory.setdefault(look, np.empty(look[0], look[1])))
    assert any("gradient of step 1" in line for line in found(setup, layout))


def test_seeds_of_the_local_rows(group: Group, found: Callable[..., Found], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over each replica's own rows, and the sum or mean of those."""
    if group.size == 1:
        return
    right = PipelineRunner._seeds

    def wrong(self: PipelineRunner, running: Any) -> list[Array]:
        share = len(running.batch.y) / running.batch.global_rows
        return [np.asarray(seed / max(share, 1e-9) / self.arrangement.mesh.dp.size) for seed in right(self, running)]

    monkeypatch.setattr(PipelineRunner, "_seeds", wrong)
    setup = SETUPS["mlp"]
    layout = pipeline(group, setup)
    lines = found(setup, layout)  # 29 rows are not the same number on each replica; with one replica nothing is wrong
    assert any("gradient of step 1" in line for line in lines) == (layout.dp != 1)


def test_norms_that_count_twice(group: Group, found: Callable[..., Found], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicated parameters of a tensor group, and tied ones, added once by each rank."""
    if group.size == 1:
        return

    def wrong(storage: FlatStorage, where: Arrangement) -> float:
        return math.sqrt(where.mesh.model.sum_floats([sum_of_squares(storage.grads)])[0])

    monkeypatch.setattr(worker_module, "gradient_norm", wrong)
    right = worker_module.read_norm  # of a device; the serial run has no arrangement

    def wrong_there(values: Any, storage: FlatStorage, where: Arrangement | None = None) -> float:
        return right(values, storage) if where is None else wrong(storage, where)

    monkeypatch.setattr(worker_module, "read_norm", wrong_there)
    setup = Setup(models.mlp, {"hidden": (9, 8, 7)}, microbatches=2)
    assert any("gradient norms" in line for line in found(setup, Layout(tp=group.size)))
    tied = Setup(own.tied)
    assert any("gradient norms" in line for line in found(tied, spread(tied, (1, group.size, 1), "1f1b")))


def test_gradients_of_ties_that_are_not_added(
    group: Group, found: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    if group.size == 1:
        return

    def wrong(self: PipelineRunner) -> Any:
        self.parallel.finish()
        return self.parallel.traffic

    monkeypatch.setattr(PipelineRunner, "_finish", wrong)
    setup = Setup(own.tied, microbatches=2)
    layout = spread(setup, (1, group.size, 1), "1f1b")
    assert any("3.weight's gradient" in line for line in found(setup, layout, check=False))


@pytest.mark.needs_ranks(2)
def test_ties_that_went_apart_are_seen_by_the_comparison_of_weights(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks that share a weight, one of which has changed it."""
    if group.size != 2:
        return
    from_updates = PipelineRunner._finish

    def wrong(self: PipelineRunner) -> Any:
        traffic = from_updates(self)
        self.model.storage.grads[0][...] *= 1 + self.arrangement.mesh.pp.rank
        return traffic

    monkeypatch.setattr(PipelineRunner, "_finish", wrong)
    setup = Setup(own.tied, optimizer="sgd", microbatches=2)
    with pytest.raises(CommError, match="differ between the ranks of the stages that share it"):
        run(setup, group, spread(setup, (1, 2, 1), "1f1b"))


def test_statistics_that_are_updated_again(
    group: Group, found: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the forward that a recomputing stage repeats."""
    if group.size == 1:
        return
    right = PipelineRunner._mode

    def wrong(self: PipelineRunner, running: Any, microbatch: int, again: bool) -> AbstractContextManager[None]:
        return right(self, running, microbatch, False)

    monkeypatch.setattr(PipelineRunner, "_mode", wrong)
    setup = Setup(own.noisy, microbatches=2)
    lines = found(setup, pipeline(group, setup, activation_memory="least"))
    assert lines and all("running" in line or "evaluation" in line for line in lines)
