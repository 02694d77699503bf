"""The activations of a pipeline's ranks, to the byte: what its stages' instructions do to memory, taken in any order.

    two microbatches through the stages, each on a simulated rank    ->  bytes of F, B, I, W of each stage, and messages
    these bytes in the order of a schedule's program, rank by rank   ->  the most at any moment

    live   |    F0    F1    B0 ..          a receive is posted one ahead, into memory of its own; what was sent stays
           |  ,----.,----.                 until the next message of its kind is sent
           '--'    ''    '-----            (see `parallel.pipeline.executor`, which does both)

The first backward of a stage writes its gradients, later ones add to them, which takes more: hence two microbatches.

Recorded passes keep their memory, and more of it, as what is free lies in pieces. What the same instructions take and
give back while they are recorded, in the schedule's order, tells how much (`pass_report.recorded_bytes`).

What a budget for activations costs is told from what each layer takes forward, kept or not, and backward, measured as
a run with such a budget does at its start.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias, TypeVar

from nnmpi import clock
from nnmpi.backend.backend import Backend
from nnmpi.backend.memory_pool import ChunkPart
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.layout import Layout
from nnmpi.compose.pipeline_runner import PipelineRunner
from nnmpi.compose.replica_runner import ReplicaRunner
from nnmpi.compose.runner import Runner
from nnmpi.memory.ledger import ACTIVATIONS
from nnmpi.memory.plan import Costs
from nnmpi.parallel.pipeline.budget import StageCosts
from nnmpi.parallel.pipeline.pass_report import ENDS_FLIGHT, InstructionBytes, PassReport, StageBytes
from nnmpi.planner.profile import Workload, in_turns, ready_worker, repeated_batch
from nnmpi.schedule.instruction import Instruction, Kind

T = TypeVar("T")
Recorded: TypeAlias = Mapping[tuple[Kind, int, bool], Sequence[int]]


def measure_stages(
    workload: Workload,
    cuts: Sequence[range],
    share: tuple[int, int],
    rows: int,
    again: bool,
    halves: bool,
    backend: Backend,
) -> tuple[StageBytes, ...]:
    """Return what two microbatches do to the memory of stages, on each of the ranks that share their layers.

    Args:
        workload: the model and the data.
        cuts: the layers of each stage.
        share: (tp, sp).
        rows: of a microbatch.
        again: whether stages compute their forward again.
        halves: whether backwards are done in halves.
        backend: where they are computed.
    """
    schedule, split, (tp, sp) = "zero-bubble" if halves else "gpipe", [len(cut) for cut in cuts], share
    layout = Layout(1, len(cuts), tp, schedule, split=split, activation_memory="least" if again else None, sp=sp)

    def run(group: Group) -> tuple[tuple[int, ...], PassReport, Recorded]:
        worker, batch = ready_worker(workload, group, layout, rows, backend), repeated_batch(workload, rows, 2)
        for _ in range(2):
            passed = worker.step(batch).passed
        where, runner = worker.arrangement, worker.runner
        assert passed is not None and where is not None and isinstance(runner, PipelineRunner)
        runner.pool.events = []
        worker.step(batch)  # which is recorded, if any are
        order = [one for one, _ in passed.samples]
        worker.release()
        return where.mesh.place[2:], passed, _recorded(order, again, runner.pool.events)

    everyones: dict[tuple[int, ...], list[tuple[PassReport, Recorded]]] = {}
    for place, passed, recorded in simulate(run, len(cuts) * tp * sp, cpu_factor=0.0):
        everyones.setdefault(place, []).append((passed, recorded))
    return tuple(map(_stage_bytes, everyones.values()))


def _recorded(order: Sequence[Instruction], again: bool, events: Sequence[Sequence[tuple[ChunkPart, int]]]) -> Recorded:
    """Return `StageBytes.recorded` of a rank, given what was computed, and what each part of that took and gave back.

    A backward has two parts where the forward comes again.
    """
    found: dict[tuple[Kind, int, bool], list[int]] = {}
    numbers: dict[tuple[int, int | None], int] = {}
    owner: dict[ChunkPart, tuple[tuple[int, int | None], int]] = {}
    now: dict[tuple[int, int | None], list[int]] = {}
    coming = iter(events)
    for one in order:
        key, flight = (one.kind, one.stage), (one.stage, one.microbatch)
        unit = now[flight] = found.setdefault((*key, (*key, True) not in found), [])
        for part in islice(coming, 1 + (again and one.kind is Kind.B)):
            for span, nbytes in part:
                if nbytes:
                    owner[span] = flight, numbers.setdefault(flight, 0)
                    numbers[flight] += 1
                    unit.append(nbytes)
                else:
                    theirs, number = owner.pop(span)
                    now[theirs].append(~number)
    return found


def _stage_bytes(found: Sequence[tuple[PassReport, Recorded]]) -> StageBytes:
    """Return what the stages' passes show."""
    units: dict[tuple[Kind, int, bool], InstructionBytes] = {}
    passes = [passed for passed, _ in found]
    for passed in passes:
        seen = Counter[tuple[Kind, int]]()
        leaving: dict[int, tuple[int | None, InstructionBytes]] = {}
        for one, taken in passed.bytes.items():
            units[one.kind, one.stage, not seen[one.kind, one.stage]] = _by_itself(one, taken, leaving)
            seen[one.kind, one.stage] += 1
    after = tuple(0 if passed.count is None else passed.count.peak for passed in passes)
    recorded = {unit: events for _, each in found for unit, events in each.items()}
    return StageBytes(units, max(passed.begin_bytes for passed in passes), after, recorded)


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


def measure_stage_costs(
    workload: Workload, cuts: Sequence[range], share: tuple[int, int], rows: int, backend: Backend
) -> dict[int, StageCosts]:
    """Return what each stage of a pipeline takes for a microbatch of so many rows; see `measure_costs`.

    Raises:
        NnmpiError: for stages that can have no budget.
    """
    layout = Layout(1, len(cuts), share[0], split=[len(cut) for cut in cuts], sp=share[1])

    def look(runner: Runner) -> Mapping[int, StageCosts]:
        assert isinstance(runner, PipelineRunner)
        return runner.stage_costs

    found = _with_any_budget(workload, layout, len(cuts) * share[0] * share[1], rows, backend, look)
    return {stage: costs for each in found for stage, costs in each.items()}


def _with_any_budget(
    workload: Workload, layout: Layout, ranks: int, rows: int, backend: Backend, look: Callable[[Runner], T]
) -> list[T]:
    """Return what a function finds in each rank's runner after a step with a budget that nothing passes."""

    def run(group: Group) -> T:
        with clock.using(clock.ProcessorTime()):
            worker = ready_worker(workload, group, replace(layout, activation_memory=sys.maxsize), rows, backend)
            worker.step(repeated_batch(workload, rows, 1 if layout.pp == 1 else 2))
        worker.release()
        return look(worker.runner)

    return in_turns(run, ranks)


def _by_itself(
    one: Instruction, taken: InstructionBytes, leaving: dict[int, tuple[int | None, InstructionBytes]]
) -> InstructionBytes:
    """Return what an instruction does where no message still keeps what it lets go of."""
    if one.kind is Kind.SEND_ACT:
        leaving[one.stage] = one.microbatch, taken
    if one.kind in ENDS_FLIGHT and one.stage in leaving:
        number, message = leaving[one.stage]
        if number == one.microbatch:
            return taken._replace(net=taken.net - message.held + message.alone)
    return taken
