"""The activations of ranks: steps of simulated ranks, counted by the ledger.

What a budget for activations costs is told from what each layer takes forward, kept or not, and backward, measured as
a run with such a budget does at its start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from nnmpi import clock
from nnmpi.backend.backend import Backend
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.layout import Layout
from nnmpi.compose.replica_runner import ReplicaRunner
from nnmpi.compose.runner import Runner
from nnmpi.memory.ledger import ACTIVATIONS
from nnmpi.memory.plan import Costs
from nnmpi.planner.profile import Workload, in_turns, ready_worker, repeated_batch
from nnmpi.planner.space import Candidate

T = TypeVar("T")


def measure_pipeline(
    workload: Workload, one: Candidate, cuts: Sequence[range], rows: int, backend: Backend
) -> list[int]:
    """Return the activations of each of a pipeline's ranks, on one replica.

    Args:
        workload: the model and the data.
        one: the layout.
        cuts: the layers of each stage.
        rows: of a microbatch.
        backend: where they are computed.
    """
    layout = replace(one.layout(), dp=1, zero=0, split=[len(cut) for cut in cuts])

    def run(group: Group) -> tuple[int, int]:
        worker = ready_worker(workload, group, layout, rows, backend)
        batch = repeated_batch(workload, rows, one.microbatches)
        for _ in range(3):  # the ledger measures the second one; the third one is recorded
            worker.step(batch)
        where = worker.arrangement
        assert where is not None
        worker.release()
        return where.mesh.place.p, worker.ledger.report().peaks[ACTIVATIONS]

    found = simulate(run, one.pp * one.tp * one.sp, cpu_factor=0.0)
    return [max(nbytes for place, nbytes in found if place == rank) for rank in range(one.pp)]


def measure_whole(
    workload: Workload, share: tuple[int, int], rows: int, backend: Backend, recorded: bool = True
) -> int:
    """Return the activations of a replica without a pipeline.

    Args:
        workload: the model and the data.
        share: (tp, sp).
        rows: of a step.
        backend: where it is computed.
        recorded: whether steps are replayed, where that can be, so that their memory is kept.
    """
    ranks = share[0] * share[1]

    def run(group: Group) -> int:
        layout = Layout(1, 1, share[0], sp=share[1]) if ranks > 1 else None
        worker, batch = ready_worker(workload, group, layout, rows, backend), repeated_batch(workload, rows, 1)
        for _ in range(2 + recorded):  # the ledger measures the second one; the third one is recorded
            worker.step(batch)
        worker.release()
        return worker.ledger.report().peaks[ACTIVATIONS]

    return max(simulate(run, ranks, cpu_factor=0.0))


def measure_costs(workload: Workload, share: tuple[int, int], zero: int, rows: int, backend: Backend) -> Costs:
    """Return what each layer of a replica without a pipeline takes, as plans for its activations are made of.

    Args:
        workload: the model and the data.
        share: (tp, sp).
        zero: the stage of ZeRO, which lets weights come layer by layer from stage 2 on.
        rows: of a step.
        backend: where it is computed.

    Raises:
        NnmpiError: for a model that has no such plans.
    """
    layout = Layout(1, 1, share[0], sp=share[1], zero=zero, unit_bytes=workload.unit_bytes if zero else None)

    def look(runner: Runner) -> Costs:
        assert isinstance(runner, ReplicaRunner) and runner.activation_plans is not None
        return runner.activation_plans.costs

    return _with_any_budget(workload, layout, share[0] * share[1], rows, backend, look)[0]


def _with_any_budget(
    workload: Workload, layout: Layout, ranks: int, rows: int, backend: Backend, look: Callable[[Runner], T]
) -> list[T]:
    """Return what a function finds in each rank's runner after a step with a budget that nothing passes."""

    def run(group: Group) -> T:
        with clock.using(clock.ProcessorTime()):
            worker = ready_worker(workload, group, replace(layout, activation_memory=sys.maxsize), rows, backend)
            worker.step(repeated_batch(workload, rows, 1))
        worker.release()
        return look(worker.runner)

    return in_turns(run, ranks)
