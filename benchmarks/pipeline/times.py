"""Measures steps on two ranks and on one, interleaved, beside their simulation from the stages'
times.

round 0    serial  gpipe  naive  1f1b ...    one step of each contestant, in a new order every round
round 1    1f1b  naive  serial ...
...        even rounds give the stages' times, odd rounds the steps': the simulation never uses the
           steps that it is compared with

The network is an MLP that can be cut into equal stages. Its first layer computes no gradient for
its input, so it has two products and the others three; to compensate, it is half as wide again.
"""

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.turns import StepContestant, ratio, summary, take_turns
from nnmpi import optim
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import Messages
from nnmpi.compose.arrange import arrange
from nnmpi.compose.exchange import gradient_norm
from nnmpi.compose.layout import Layout
from nnmpi.compose.stats import PassReport, StepReport
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.models.mlp import mlp
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedule import Kind
from nnmpi.schedule.schedules import make
from nnmpi.schedule.simulate import Costs, measured_costs, simulate_schedule

SERIAL, SCHEDULES = "serial", ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
VIRTUAL = 2  # stages per rank of "interleaved"
MESSAGES = 30
CLASSES = 10


class ScheduledWorker(StepContestant):
    """A worker that runs one schedule, or one rank alone. Construction is collective.

    Args:
        name: of the schedule, or SERIAL.
        settings: "width" and "layers" of the network, "rows" of a microbatch.
        microbatches: of a step.
        group: the ranks of a pipeline.
        alone: a group of this rank alone.

    Attributes:
        passes: the counted steps' reports, with the seconds of their instructions.
        updates_s: seconds of gradient norm and update, in counted rounds.
    """

    def __init__(
        self, name: str, settings: Mapping[str, Any], microbatches: int, group: Group, alone: Group
    ) -> None:
        self.microbatches, self.virtual = microbatches, VIRTUAL if name == "interleaved" else 1
        ranks = alone if name == SERIAL else group
        width, layers = settings["width"], settings["layers"]
        stages, features = ranks.size * self.virtual, width * 3 // 2
        cut = [2 * layers // stages] * stages  # each ends after an activation
        cut[0] += 1  # flatten
        cut[-1] += 1  # the last linear layer, which is small
        schedule = "1f1b" if name == SERIAL else name
        layout = Layout(
            1, ranks.size, 1, pipeline=schedule, virtual_stages=self.virtual, split=tuple(cut)
        )
        self.where = arrange(mlp((features,), CLASSES, (width,) * layers), ranks, layout)
        self.where.model.initialize(seed=1)
        self.optimizer = optim.build("sgd", self.where.model.storage, lr=1e-3)
        generator, rows = np.random.default_rng(0), settings["rows"] * microbatches
        x = generator.standard_normal((rows, features), np.float32)
        noise = Dataset("noise", x, generator.integers(0, CLASSES, rows), CLASSES)
        with Loader(noise, rows, microbatches=microbatches, shuffle=False, workers=0).epoch(
            0
        ) as batches:
            batch = next(batches)
        worker = Worker(self.where.model, self.optimizer, ranks, arrangement=self.where)
        super().__init__(name, worker, batch, runs=name != SERIAL or group.is_root)
        self.passes: list[PassReport] = []
        self.updates_s: list[float] = []

    def note(self, report: StepReport) -> None:
        """Store the report of a pass."""
        if report.passed is not None:
            self.passes.append(report.passed)

    def update(self, keep: bool) -> None:
        """Time the gradient norm and the update. Collective."""
        if self.name == SERIAL or not keep:
            return
        begin = time.perf_counter()
        gradient_norm(self.where.model.storage, self.where)
        self.optimizer.step()
        self.updates_s.append(time.perf_counter() - begin)


def measure(group: Group, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each contestant and number of microbatches. Collective over two ranks.

    Args:
        group: the ranks.
        settings: "width", "layers", "rows", "microbatches" (several), "rounds".
    """
    alone = group.split(group.rank)
    rows: list[dict[str, Any]] = []
    for microbatches in settings["microbatches"]:
        contestants = [
            ScheduledWorker(name, settings, microbatches, group, alone)
            for name in (SERIAL, *SCHEDULES)
        ]
        take_turns(contestants, group, 2 * settings["rounds"], ScheduledWorker.update)
        message_s = _message_s(group, (settings["rows"], settings["width"]))
        serial_s = contestants[0].seconds(group)[1::2]
        for contestant in contestants:
            step_s = contestant.seconds(group)[1::2]
            row = {"name": contestant.name, "microbatches": microbatches, "steps": len(step_s)}
            row |= summary("step", step_s)
            if contestant.name != SERIAL:
                row |= _simulated(contestant, group, message_s, row["step_s"])
                row |= ratio("speed", serial_s, step_s)
            rows.append(row)
        for contestant in contestants:
            contestant.worker.release()
    return rows


def _simulated(
    contestant: ScheduledWorker, group: Group, message_s: float, step_s: float
) -> dict[str, Any]:
    """Return a row's fields by simulation, the same on all ranks; `step_s` is the measurement."""
    costs = _costs(contestant, group, message_s)
    schedule = lower(make(contestant.name, group.size, contestant.microbatches, contestant.virtual))
    simulation = simulate_schedule(schedule, costs)
    return {
        "simulated_s": simulation.makespan_s,
        "bubble": simulation.bubble,
        "measured_over_simulated": step_s / simulation.makespan_s,
    }


def _costs(contestant: ScheduledWorker, group: Group, message_s: float) -> Costs:
    """Return each stage's costs, from the even rounds."""
    stages = group.size * contestant.virtual
    local: list[list[Any]] = [
        [element.kind, element.stage, seconds]
        for pass_ in contestant.passes[::2]
        for element, seconds in pass_.samples
    ]
    update_s = median(contestant.updates_s) / contestant.virtual
    local += [[Kind.STEP, stage, update_s] for stage in contestant.where.stages]
    samples = [
        (Kind(kind).at(stage), seconds)
        for item in group.gather(local)
        for kind, stage, seconds in item
    ]
    for stage in range(stages):
        samples += [(kind.at(stage), message_s) for kind in (Kind.SEND_ACT, Kind.SEND_GRAD)]
    return measured_costs(stages, samples)


def _message_s(group: Group, shape: tuple[int, int]) -> float:
    """Return the seconds of an activation's message between two idle ranks. Collective."""
    array, answer = (np.zeros(shape, np.float32) for _ in range(2))
    messages, times = Messages(group), []
    for _ in range(MESSAGES):
        arrival = messages.receive(answer, 1 - group.rank, 1)
        group.barrier()
        begin = time.perf_counter()
        if group.is_root:
            messages.send(array, 1, 1)
            arrival.wait()
        else:
            arrival.wait()
            messages.send(array, 0, 1)
        messages.drain()
        times.append((time.perf_counter() - begin) / 2)
    messages.free()
    return float(group.share(median(times)))
