"""Measures steps on two ranks and on one, interleaved, beside what the simulation makes of the stages' own times.

round 0    serial  gpipe  naive  1f1b ...        one step of each contestant, in another order every round
round 1    1f1b  naive  serial ...
...        even rounds give the times of the stages, odd ones those of the steps: the simulation never sees
           the steps that it is compared with
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import numpy as np

from benchmarks.pipeline.quiet import rest_until
from benchmarks.pipeline.subject import Subject
from nnmpi import optim
from nnmpi.comm.group import Group
from nnmpi.comm.messages import Messages
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.norm import gradient_norm
from nnmpi.compose.worker import Worker
from nnmpi.parallel.pipeline import PassReport
from nnmpi.schedule.instruction import Instruction, Kind
from nnmpi.schedule.lower import lower
from nnmpi.schedule.registry import make
from nnmpi.schedule.simulate import Costs, simulate

SERIAL, SCHEDULES = "serial", ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
VIRTUAL = 2  # stages per rank of "interleaved"
WARM_UP = 2
MESSAGES = 30


class Contestant:
    """One way to do a step. Making one is collective."""

    def __init__(self, name: str, subject: Subject, group: Group, alone: Group) -> None:
        self.name, self.subject, self.batch = name, subject, subject.batch()
        self.virtual = VIRTUAL if name == "interleaved" else 1
        self.runs = name != SERIAL or group.is_root
        ranks = alone if name == SERIAL else group
        count = ranks.size * self.virtual
        split = subject.cut(count)
        schedule = "1f1b" if name == SERIAL else name
        layout = Layout(1, ranks.size, 1, schedule, self.virtual, split=split)
        self.where = arrange(subject.build(), ranks, layout)
        self.where.model.initialize(seed=1)
        self.optimizer = optim.build("sgd", self.where.model.storage, lr=1e-3)
        self.worker = Worker(self.where.model, self.optimizer, ranks, arrangement=self.where)
        self.steps_s: list[tuple[float, float]] = []  # begin and end
        self.passes: list[PassReport] = []
        self.updates_s: list[float] = []

    def step(self, keep: bool) -> None:
        """Do a step; serial ones on the first rank alone."""
        if not self.runs:
            return
        begin = time.perf_counter()
        report = self.worker.step(self.batch)
        end = time.perf_counter()
        if keep:
            self.steps_s.append((begin, end))
            if report.passed is not None:
                self.passes.append(report.passed)

    def update(self) -> None:
        """Time what comes after the pass: the gradient's length and the update."""
        if self.name == SERIAL:
            return
        begin = time.perf_counter()
        gradient_norm(self.where.model.storage, self.where)
        self.optimizer.step()
        self.updates_s.append(time.perf_counter() - begin)


def measure(group: Group, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each contestant and number of microbatches. Collective over two ranks.

    Args:
        settings: "subject" without its microbatches, "microbatches", "rounds".
    """
    alone = group.split(group.rank)
    rows: list[dict[str, Any]] = []
    for microbatches in settings["microbatches"]:
        subject = Subject(**settings["subject"], microbatches=microbatches)
        contestants = [Contestant(name, subject, group, alone) for name in (SERIAL, *SCHEDULES)]
        _play(contestants, group, settings["rounds"])
        message_s = _message_s(group, subject)
        found = [_row(contestant, group, message_s) for contestant in contestants]
        serial_s = np.array(found[0].pop("all_s"))
        for row in found[1:]:
            ratios = serial_s / np.array(row.pop("all_s"))
            row["speed"], row["speed_quartiles"] = median(ratios), quartiles(ratios)
        rows += found
        for contestant in contestants:
            contestant.worker.release()
    return rows


def _play(contestants: Sequence[Contestant], group: Group, rounds: int) -> None:
    """Let everyone do a step in each round."""
    for number in range(-WARM_UP, 2 * rounds):
        for contestant in random.Random(number).sample(contestants, len(contestants)):
            rest_until(group)
            group.barrier()
            contestant.step(keep=number >= 0)
            rest_until(group)
            if number >= 0:
                contestant.update()


def _row(contestant: Contestant, group: Group, message_s: float) -> dict[str, Any]:
    """Return what came out, the same on all ranks."""
    stamps = [each for each in group.gather([list(pair) for pair in contestant.steps_s]) if each]
    begins, ends = np.array(stamps)[..., 0].max(axis=0), np.array(stamps)[..., 1].max(axis=0)
    measured = (ends - begins)[1::2]
    row: dict[str, Any] = {
        "name": contestant.name,
        "microbatches": contestant.subject.microbatches,
        "steps": len(measured),
        "step_s": median(measured),
        "step_quartiles_s": quartiles(measured),
        "all_s": list(measured),
    }
    if contestant.name == SERIAL:
        return row
    costs = _costs(contestant, group, message_s)
    schedule = lower(make(contestant.name, group.size, contestant.subject.microbatches, contestant.virtual))
    simulation = simulate(schedule, costs)
    passes = group.gather([report.total_s for report in contestant.passes[1::2]])
    row |= {
        "pass_s": median(np.array(passes).max(axis=0)),
        "simulated_s": simulation.makespan_s,
        "bubble": simulation.bubble,
        "measured_over_simulated": row["step_s"] / simulation.makespan_s,
        "stage_ms": {str(kind): [1e3 * each for each in times] for kind, times in costs.seconds.items()},
    }
    return row


def _costs(contestant: Contestant, group: Group, message_s: float) -> Costs:
    """Return what each stage takes, from the even rounds."""
    stages = group.size * contestant.virtual
    own = [[str(one), seconds] for each in contestant.passes[::2] for one, seconds in each.samples]
    own += [[f"{stage}STEP", median(contestant.updates_s) / contestant.virtual] for stage in contestant.where.stages]
    samples = [(Instruction.parse(text), seconds) for each in group.gather(own) for text, seconds in each]
    for stage in range(stages):
        samples += [(kind.at(stage), message_s) for kind in (Kind.SEND_ACT, Kind.SEND_GRAD)]
    return Costs.measured(stages, samples)


def _message_s(group: Group, subject: Subject) -> float:
    """Return how long an activation is on its way between two ranks that do nothing else."""
    array, answer = (np.zeros((subject.rows, subject.width), np.float32) for _ in range(2))
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


def quartiles(values: Any) -> list[float]:
    values = [float(value) for value in values]
    return [quantiles(values, n=4)[i] for i in (0, 2)] if len(values) > 1 else [values[0]] * 2
