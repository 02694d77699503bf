"""What a model's parts take on this machine, measured once and kept: whole steps, layers, updates, bytes.

    whole steps    a Worker's, of one replica alone: seconds, activations, what layers that are shared out exchange
    layers         of the chain, forward and backward, as long as the stages of a pipeline take for them, loss and all

All ranks measure at the same time, as they will compute at the same time: they compete for one memory. Replicas whose
layers or sequences are shared out, and pipelines, run on simulated ranks: each has the processor time that it takes.
Where ranks are more than the cores, all times are those of the processor, and how long ranks wait for one is measured
by itself: a short step may be done before others have their turn, a long one or a thousand short ones never are.
"""

from __future__ import annotations

import hashlib
import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate, chain, product
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from nnmpi import clock
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import use_precision
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import Arrangement, arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.options import GradientExchange, Numerics
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Samples
from nnmpi.data.loader import Batch, Cut, Loader
from nnmpi.errors import LayoutError, NnmpiError, UsageError
from nnmpi.memory.ledger import ACTIVATIONS
from nnmpi.nn.chain import open_chain
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.pipeline.profile import LayerProfile, profile
from nnmpi.parallel.sharded.collectives import CATEGORY
from nnmpi.parallel.zero.units import STAGES
from nnmpi.reading import read_json
from nnmpi.schedule.instruction import Instruction, Kind
from nnmpi.schedule.partition import partition
from nnmpi.tensor.flat import FlatStorage
from nnmpi.timeline import Timeline, recording

OLD_DAYS = 180  # after which what was measured and kept counts no more: drivers, kernels and machines change
FORMAT = 13
MOST_SHARES = 8  # ranks of one replica's layers and positions that are measured; more are not looked at
PARTS_PER_RANK = 8  # the smallest part of a batch that is measured is that of so many microbatches for each rank
LONGEST_S = 0.5  # a step that would take longer is not measured, but told from those of fewer rows
MEASURE_S, LEAST_STEPS, MOST_STEPS = 0.15, 3, 30
QUARTILE = 0.25  # what other programs disturb is above it
ROUNDS = 3  # some time apart: what disturbs a machine for a second does not decide
PATIENCE_S = 15.0  # what took so long is not measured again, and not for other rows
TIMES = ("seconds", "update_s", "unrecorded_s")  # of a `StepCost`
STAGE_MICROBATCHES, STAGE_STEPS = 4, (1, 12)  # of a pipeline: in each pass; the fewest and the most passes
END_S = 25e-6  # what a pipeline's message takes of the processor at each end, where one rank cannot measure it
AROUND_MICROBATCHES, AROUND_STEPS = 8, 20
CROWD_S = 0.1  # how long all compute to see whether they have a core each
CROWDED = 1.3  # more turns than that: they have not
SHARED_S = 0.05  # on simulated ranks replicas are measured for the fewest rows, and the most that take up to this

T = TypeVar("T")
Share = tuple[int, int]
"""(tp, sp): how many ranks share the layers, and the positions."""


@dataclass(frozen=True)
class Workload:
    """What is to be trained.

    Attributes:
        build: returns the model, uninitialized.
        optimizer: returns the optimizer of a model's storage.
        losses: (arrangement) -> the losses as `Worker` takes them.
        samples: the training set.
        batch_size: rows of the global batch.
        state_arrays: how many arrays of each parameter's size the optimizer keeps.
        dtype, precision, clip, seed: of the run.
        unit_bytes: how much ZeRO gathers and sums at once; None to choose.
        key: what the measured times hang on, by name: the model's options and the like.
    """

    build: Callable[[], Module]
    optimizer: Callable[[FlatStorage], Optimizer]
    losses: Callable[[Arrangement | None], dict[str, Any]]
    samples: Samples
    batch_size: int
    state_arrays: int
    dtype: str = "float32"
    precision: str = "float32"
    clip: float | None = None
    seed: int = 0
    unit_bytes: int | None = None
    key: Mapping[str, Any] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample and its labels."""
        first = np.arange(1)
        return int(self.samples.rows(first, self.dtype).nbytes + self.samples.labels(first).nbytes)


@dataclass(frozen=True)
class StepCost:
    """A whole step of one replica on its (tp, sp) ranks, for so many rows.

    Attributes:
        seconds: of each rank, without the update, and without messages; replayed, where that can be.
        update_s: of the update of all that a rank has.
        activations: the most bytes at any moment, or those that recordings keep.
        exchanges: (operation, bytes, how often) of what the ranks say to one another.
        unrecorded_s: of the pass as it stands, as stages compute that halve their backwards.
        unrecorded_bytes: the activations of such a pass, as ZeRO 2 and 3 do it.
    """

    seconds: float
    update_s: float
    activations: int
    exchanges: tuple[tuple[str, int, int], ...] = ()
    unrecorded_s: float = 0.0
    unrecorded_bytes: int = 0


@dataclass(frozen=True)
class Profile:
    """What was measured of a workload.

    Attributes:
        facts: what it was measured with; another one is measured for others.
        steps: by share and rows.
        layers: by rows, in the order of the chain.
        zero_s: by stage of ZeRO, how many seconds more a step of one rank takes: its own work, without messages.
        contention: how many times as long a rank computes while all others compute, too, as while they wait.
        crowding: how many times as long as a processor works for it a rank takes, while all compute: more than 1 where
            ranks are more than the cores. It is in none of the seconds above.
        ends_s: by the rows of a microbatch, what a pipeline's message takes of the processor at each end.
        around_s: what a step of a pipeline takes besides its pass and the update.
        raced: by the words of a layout, the seconds of a step as it ran, of those that have raced.
    """

    facts: Mapping[str, Any]
    steps: Mapping[Share, Mapping[int, StepCost]]
    layers: Mapping[int, tuple[LayerProfile, ...]]
    zero_s: Mapping[int, float] = field(default_factory=dict)
    contention: float = 1.0
    crowding: float = 1.0
    ends_s: Mapping[int, float] = field(default_factory=lambda: {1: END_S})
    around_s: float = 0.0
    raced: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, share: Share, rows: int, recorded: bool = True) -> float:
        """Return a step's seconds for any number of rows, on straight lines between what was measured."""
        known = self.steps[share].items()
        return between({r: cost.seconds if recorded else cost.unrecorded_s for r, cost in known}, rows)

    @property
    def update_s(self) -> float:
        """The seconds of an update of the whole model."""
        return min(cost.update_s for cost in self.steps[1, 1].values())

    def exchanges(self, share: Share, rows: int) -> tuple[tuple[str, int, int], ...]:
        """Return what the ranks of a share say to one another in a step, for any number of rows."""
        known = self.steps[share]
        near = min(known, key=lambda each: abs(each - rows))
        return tuple((what, round(size * rows / near), count) for what, size, count in known[near].exchanges)

    def end_s(self, rows: int) -> float:
        """Return what a message of a microbatch of so many rows takes of the processor at each end."""
        return between(self.ends_s, rows) if len(self.ends_s) > 1 else next(iter(self.ends_s.values()))

    def layer(self, number: int, rows: int, field: str) -> float:
        """Return what a layer takes, by the name of one of the fields of `LayerProfile`."""
        return between({r: getattr(costs[number], field) for r, costs in self.layers.items()}, rows)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "format": FORMAT,
            "facts": dict(self.facts),
            "steps": [[*share, rows, asdict(one)] for share, by in self.steps.items() for rows, one in by.items()],
            "contention": self.contention,
            "crowding": self.crowding,
            "ends_s": [[rows, seconds] for rows, seconds in self.ends_s.items()],
            "around_s": self.around_s,
            "zero_s": [[stage, seconds] for stage, seconds in self.zero_s.items()],
            "layers": [[rows, [asdict(layer) for layer in layers]] for rows, layers in self.layers.items()],
            "raced": dict(self.raced),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Profile:
        """Return what `to_json` gave the values of.

        Raises:
            KeyError, TypeError, ValueError: for values that are none.
        """
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']}, not {FORMAT}")
        steps: dict[Share, dict[int, StepCost]] = {}
        for tp, sp, rows, one in value["steps"]:
            exchanges = tuple((str(what), int(size), int(count)) for what, size, count in one["exchanges"])
            steps.setdefault((int(tp), int(sp)), {})[int(rows)] = StepCost(**{**one, "exchanges": exchanges})
        layers = {int(rows): tuple(LayerProfile(**each) for each in found) for rows, found in value["layers"]}
        if (1, 1) not in steps or not layers:
            raise ValueError("it has no times of a whole step, or none of layers")
        zero_s = {int(stage): float(seconds) for stage, seconds in value["zero_s"]}
        raced = {str(words): float(seconds) for words, seconds in value["raced"].items()}
        ends_s = {int(rows): float(seconds) for rows, seconds in value["ends_s"]}
        crowd, around_s = (float(value["contention"]), float(value["crowding"])), float(value["around_s"])
        return cls(dict(value["facts"]), steps, layers, zero_s, *crowd, ends_s, around_s, raced)


def between(known: Mapping[int, float], at: int) -> float:
    """Return a value on the straight lines through those known, which go on beyond the first and the last."""
    if at in known:
        return known[at]
    places = sorted(known)
    if len(places) == 1:
        return known[places[0]] * at / places[0]
    right = min(max(bisect_left(places, at), 1), len(places) - 1)
    low, high = places[right - 1], places[right]
    value = known[low] + (known[high] - known[low]) * (at - low) / (high - low)
    return max(value, 0.0)


def row_counts(batch_size: int, ranks: int) -> list[int]:
    """Return for how many rows a workload is measured: halves of the batch, and halves of these, in rising order."""
    parts = [1 << bit for bit in range((PARTS_PER_RANK * ranks).bit_length())]
    return sorted({-(-batch_size // part) for part in parts})


def measure(
    workload: Workload, group: Group, ranks: int, shares: Sequence[Share], backend: Backend, rounds: int | None = None
) -> Profile:
    """Measure a workload with all ranks of a group at once; the slowest counts. Collective.

    Args:
        workload: the model and the data.
        group: whose ranks measure; each of them measures all.
        ranks: for so many ranks a layout is sought, which says how small parts of a batch may be.
        shares: (tp, sp) to measure besides (1, 1), as far as the model can be shared out so.
        backend: where this rank computes.
        rounds: how often each is measured, of which the quickest counts; None for as often as what is kept.
    """
    rounds = rounds or ROUNDS
    alone = group.split(group.rank)
    counts = row_counts(workload.batch_size, ranks)
    steps: dict[Share, dict[int, StepCost]] = {(1, 1): {}}
    layers: dict[int, tuple[LayerProfile, ...]] = {}
    crowding = 1.0 if backend.is_device else _measure_crowding(group)
    timed = partial(clock.using, clock.ProcessorTime()) if crowding > 1 else nullcontext
    for number in _rounds(group, rounds):
        for rows in counts:
            if number == 0 and group.max_floats([_expected(steps[1, 1], rows)])[0] > LONGEST_S:
                continue
            if number and rows not in layers:
                continue
            group.barrier()
            with timed():
                one = _measure_step(alone, workload, (1, 1), rows, backend)
            one = _least(one, steps[1, 1].get(rows, one))
            steps[1, 1][rows] = one
            group.barrier()
            with timed():
                found = _measure_layers(workload, rows, backend)
            layers[rows] = tuple(map(_quicker, found, layers.get(rows, found)))
    measured = sorted(steps[1, 1])
    whole_s = group.max_floats([steps[1, 1][rows].seconds for rows in measured])
    fewest, middle = measured[0], measured[len(measured) // 2]
    most = max((rows for rows, seconds in zip(measured, whole_s, strict=True) if seconds <= SHARED_S), default=fewest)
    zero_s: dict[int, float] = {}
    if ranks > 1:
        order, in_stages = sorted(measured, key=lambda rows: (rows not in (fewest, most), rows)), {}
        for _, rows in zip(_rounds(group, len(order), always=2), order, strict=False):
            group.barrier()
            in_stages[rows] = _in_stages(workload, layers[rows], rows, backend)
        layers = dict(sorted(in_stages.items()))
        with timed():
            zero_s = _measure_zero(group, alone, workload, middle, backend, rounds)
    steps |= _measure_shares(group, workload, shares, sorted({fewest, most}), backend, rounds)

    def step_alone() -> float:
        with timed():
            return _measure_step(alone, workload, (1, 1), middle, backend).seconds

    contention = _measure_contention(group, step_alone, rounds)
    alone.free()
    around: dict[int, list[tuple[float, float]]] = {}
    for _ in _rounds(group, rounds):
        for rows in sorted({fewest, middle}):
            group.barrier()
            with timed():
                taken = _measure_around(group, workload, rows, backend)
            if taken is not None:
                around.setdefault(rows, []).append(taken)
    ends_s = {rows: min(end_s for end_s, _ in each) for rows, each in around.items()} or {1: END_S}
    around_s = min((step_s for each in around.values() for _, step_s in each), default=0.0)
    own = Profile(dict(workload.key or {}), steps, layers, zero_s, contention, crowding, ends_s, around_s).to_json()
    return _slowest([Profile.from_json(each) for each in group.gather(own)])


def _rounds(group: Group, most: int, always: int = 1) -> Iterator[int]:
    """Yield the numbers of rounds: so many always, and others while they do not take too long together. Collective."""
    begin = clock.now()
    for number in range(most):
        if number >= always and group.max_floats([clock.now() - begin])[0] > PATIENCE_S:
            return
        yield number


def _least(one: StepCost, other: StepCost) -> StepCost:
    return replace(one, **{name: min(getattr(one, name), getattr(other, name)) for name in TIMES})


def _quicker(one: LayerProfile, other: LayerProfile) -> LayerProfile:
    halves = min(one, other, key=lambda each: each.input_s + each.weights_s)
    quicker = min(one, other, key=lambda each: each.seconds)
    return replace(quicker, input_s=halves.input_s, weights_s=halves.weights_s)


def _slowest(profiles: Sequence[Profile]) -> Profile:
    """Return the profile with the longest times of several ranks' ones; the first rank's says the rest."""
    first = profiles[0]
    steps = {
        share: {
            rows: replace(
                one, **{name: max(getattr(each.steps[share][rows], name) for each in profiles) for name in TIMES}
            )
            for rows, one in by.items()
        }
        for share, by in first.steps.items()
    }
    zero_s = {stage: max(each.zero_s[stage] for each in profiles) for stage in first.zero_s}
    return replace(first, steps=steps, zero_s=zero_s)


def _expected(known: Mapping[int, StepCost], rows: int) -> float:
    return between({r: cost.seconds for r, cost in known.items()}, rows) if known else 0.0


def _measure_layers(workload: Workload, rows: int, backend: Backend) -> tuple[LayerProfile, ...]:
    model = workload.build()
    sample = workload.samples.rows(np.arange(rows), workload.dtype)
    with use_precision(workload.precision):
        return tuple(profile(model, open_chain(model), sample, workload.dtype, backend))


def _in_stages(
    workload: Workload, layers: tuple[LayerProfile, ...], rows: int, backend: Backend
) -> tuple[LayerProfile, ...]:
    """Return what layers take as a pipeline's stages compute them; the last one has the loss, too.

    One by one, forwards are too short and backwards too long, and nobody computes the loss. So pipelines are run on
    simulated ranks, and the layers of each of their stages get what it takes, in the proportions that they had.
    """
    if len(layers) == 1:
        return layers
    try:
        for ends in (1, 0):  # first with the last layer alone, to find the part of the loss; then in even halves
            seconds = [layer.seconds for layer in layers]
            even = len(layers) - ends
            split = [*map(len, partition(seconds[:even], min(2, even))), *[1] * ends]
            times = _measure_stages(workload, split, rows, sum(seconds), backend)
            last = list(accumulate(split))
            stages = [layers[end - count : end] for end, count in zip(last, split, strict=True)]
            layers = tuple(layer for stage, own in enumerate(stages) for layer in _as_stage(own, times, stage))
    except NnmpiError:  # this model cannot be cut, or not here
        pass
    return layers


def _as_stage(
    layers: Sequence[LayerProfile], times: Mapping[tuple[Kind, int], float], stage: int
) -> Sequence[LayerProfile]:
    """Return the layers of a stage with its measured times, of which each layer has the part that it had before."""
    kinds = {"forward_s": Kind.F, "backward_s": Kind.B, "input_s": Kind.I, "weights_s": Kind.W}
    factor = dict.fromkeys(kinds, 1.0)
    for name, kind in kinds.items():
        before_s = sum(getattr(layer, name) for layer in layers)
        if before_s and times.get((kind, stage)):
            factor[name] = times[kind, stage] / before_s
    return [
        replace(
            layer,
            seconds=layer.forward_s * factor["forward_s"] + layer.backward_s * factor["backward_s"],
            forward_s=layer.forward_s * factor["forward_s"],
            input_s=layer.input_s * factor["input_s"],
            weights_s=layer.weights_s * factor["weights_s"],
        )
        for layer in layers
    ]


def _measure_stages(
    workload: Workload, split: Sequence[int], rows: int, expected_s: float, backend: Backend
) -> dict[tuple[Kind, int], float]:
    """Return the lower quartile of what each kind of instruction takes on each stage, measured on simulated ranks.

    Args:
        workload: the model and the data.
        split: how many layers each stage has.
        rows: of a microbatch.
        expected_s: of a microbatch, about; says how often it is done.
        backend: where it is computed.

    Raises:
        NnmpiError: for a model that cannot be cut so.
    """
    steps = int(np.clip(MEASURE_S / 2 / max(STAGE_MICROBATCHES * expected_s, 1e-9), *STAGE_STEPS))

    def run(group: Group, schedule: str) -> list[tuple[Instruction, float]]:
        layout = Layout(1, len(split), 1, schedule, split=split)
        worker = ready_worker(workload, group, layout, rows, backend)
        batch = repeated_batch(workload, rows, STAGE_MICROBATCHES)
        passes = [worker.step(batch).passed for _ in range(3 + steps)][3:]  # the third one is recorded
        worker.release()
        return [sample for passed in passes if passed is not None for sample in passed.samples]

    found: dict[tuple[Kind, int], float] = {}
    for schedule in ("zero-bubble", "1f1b"):  # whose forwards count
        samples: dict[tuple[Kind, int], list[float]] = {}
        measured = in_turns(partial(run, schedule=schedule), len(split))
        for one, seconds in chain.from_iterable(measured):
            samples.setdefault((one.kind, one.stage), []).append(seconds)
        found |= {place: float(np.quantile(times, QUARTILE)) for place, times in samples.items()}
    return found


def _measure_around(group: Group, workload: Workload, rows: int, backend: Backend) -> tuple[float, float] | None:
    """Return what pipelines take besides computing and waiting: at each end of a message, and around a pass.

    Pairs of ranks run pipelines of two stages; of an odd number the last one looks on. None where they cannot.
    Collective.

    Args:
        group: all ranks.
        workload: the model and the data.
        rows: of a microbatch.
        backend: where this rank computes.
    """
    pair = group.split(group.rank // 2)
    found: list[tuple[float, float]] = []
    worker: Worker | None = None
    if pair.size == 2:
        with suppress(LayoutError, UsageError):  # this model cannot be cut, as both find
            worker = ready_worker(workload, pair, Layout(1, 2, 1, "1f1b"), rows, backend)
    if worker is not None:
        batch, ends, steps = repeated_batch(workload, rows, AROUND_MICROBATCHES), list[float](), list[float]()
        for _ in range(3 + AROUND_STEPS):
            pair.barrier()
            begin = clock.now()
            passed = worker.step(batch).passed
            assert passed is not None
            steps.append(clock.now() - begin - passed.total_s)
            ends.append((passed.total_s - passed.compute_s - passed.wait_s) / (2 * AROUND_MICROBATCHES))
        update_s = _usual_s(pair, worker.optimizer.step)
        worker.release()
        end_s, step_s = (float(np.quantile(each[3:], QUARTILE)) for each in (ends, steps))
        # After the pass the first rank to come waits for the other.
        found.append((max(0.0, end_s), max(0.0, min(pair.gather(step_s - update_s)))))
    pair.free()
    everyones = [each for theirs in group.gather(found) for each in theirs]
    return None if not everyones else (median(e for e, _ in everyones), median(a for _, a in everyones))


def _measure_shares(
    group: Group, workload: Workload, shares: Sequence[Share], counts: Sequence[int], backend: Backend, rounds: int
) -> dict[Share, dict[int, StepCost]]:
    """Return what replicas take whose layers or positions can be shared out so, by rows. Collective."""
    found: dict[Share, dict[int, StepCost]] = {}
    for _ in _rounds(group, rounds):
        for share in shares:
            for rows in counts:
                group.barrier()
                cost = _measure_share(workload, share, rows, backend)
                if cost is None:
                    found.pop(share, None)
                    break
                known = found.setdefault(share, {})
                known[rows] = _least(cost, known.get(rows, cost))
    return found


def _measure_share(workload: Workload, share: Share, rows: int, backend: Backend) -> StepCost | None:
    """Return the cost of a replica on several simulated ranks; None where it cannot be shared out so."""
    run = partial(_measure_step, workload=workload, share=share, rows=rows, backend=backend)
    try:
        found = in_turns(run, share[0] * share[1])
    except NnmpiError:
        return None
    return replace(found[0], seconds=max(each.seconds for each in found))


def _measure_contention(group: Group, step: Callable[[], float], rounds: int) -> float:
    """Return how many times as long a step takes while the other ranks do it, too, on rank 0. Collective."""
    seconds = []
    for _ in _rounds(group, rounds):
        for together in (True, False):
            group.barrier()
            seconds.append(step() if together or group.is_root else 0.0)
            group.sum_floats([0.0], asleep=True)  # those who wait leave the processor to the others
    slow_s, quick_s = min(seconds[::2]), min(seconds[1::2])
    return float(group.share(max(1.0, slow_s / quick_s) if group.is_root and quick_s > 0 else 1.0))


def _measure_crowding(group: Group) -> float:
    """Return how many times as long as a processor works for them ranks take that all compute. Collective."""
    found = []
    for _ in range(ROUNDS):
        group.barrier()
        begin, own_begin = time.perf_counter(), time.thread_time()
        while (passed_s := time.perf_counter() - begin) < CROWD_S:
            pass
        found.append(passed_s / max(time.thread_time() - own_begin, 1e-9))
    (total,) = group.sum_floats([clock.reproducible(min(found))])
    return total / group.size if total > CROWDED * group.size else 1.0


def _measure_zero(
    group: Group, alone: Group, workload: Workload, rows: int, backend: Backend, rounds: int
) -> dict[int, float]:
    """Return by stage what a step of one rank takes more than without ZeRO, by the least of several rounds."""
    least = dict.fromkeys((0, *STAGES), inf)
    for _ in _rounds(group, rounds):
        for zero in least:
            cost = _measure_step(alone, workload, (1, 1), rows, backend, zero)
            least[zero] = min(least[zero], cost.seconds + cost.update_s)
    return {stage: max(0.0, least[stage] - least[0]) for stage in STAGES}


def _measure_step(
    group: Group, workload: Workload, share: Share, rows: int, backend: Backend, zero: int = 0
) -> StepCost:
    """Return what a step of one replica takes on the ranks of a group."""
    tp, sp = share
    layout = Layout(1, 1, tp, sp=sp, zero=zero, unit_bytes=workload.unit_bytes if zero else None)
    worker = ready_worker(workload, group, layout if group.size > 1 or zero else None, rows, backend)
    batch = next(iter(Loader(workload.samples, rows, shuffle=False, dtype=workload.dtype, workers=0).epoch(0)))
    worker.step(batch)
    worker.step(batch)  # the ledger measures the second one
    unrecorded_bytes = worker.ledger.report().peaks[ACTIVATIONS]
    timeline = Timeline()
    with recording(timeline):
        worker.step(batch)
    said = Counter((e.name, int((e.args or {})["bytes"])) for e in timeline.events if e.category == CATEGORY)
    step_s = _usual_s(group, lambda: worker.step(batch))
    update_s = _usual_s(group, worker.optimizer.step)
    activations = worker.ledger.report().peaks[ACTIVATIONS]

    def as_it_stands() -> None:
        worker.model.storage.zero_grad()
        worker.runner.run(batch, worker.optimizer.steps, 1.0)

    unrecorded_s = _usual_s(group, as_it_stands) if not zero else 0.0
    worker.release()
    exchanges = tuple((what, size, count) for (what, size), count in said.items())
    return StepCost(max(step_s - update_s, 0.0), update_s, activations, exchanges, unrecorded_s, unrecorded_bytes)


def ready_worker(workload: Workload, group: Group, layout: Layout | None, rows: int, backend: Backend) -> Worker:
    """Return what trains a workload in a layout, None for one rank, on the ranks of a group. Collective.

    Args:
        workload, group, layout: as said.
        rows: of what is passed through the model once, to look at it.
        backend: where this rank computes.
    """
    model, where = workload.build(), None
    if layout is not None:
        sample = workload.samples.rows(np.arange(rows), workload.dtype)
        where = arrange(model, group, layout, sample, workload.dtype, backend)
        model = where.model
    storage = FlatStorage if where is None else where.storage
    model.initialize(seed=workload.seed, dtype=workload.dtype, backend=backend, storage=storage)
    return Worker(
        model,
        workload.optimizer(model.storage),
        group,
        **workload.losses(where),
        exchange=GradientExchange(fused_update=False),
        numerics=Numerics(workload.precision, workload.clip),
        seed=workload.seed,
        backend=backend,
        arrangement=where,
    )


def in_turns(run: Callable[[Group], T], ranks: int) -> list[T]:
    """Return what a function returns on each of so many simulated ranks, which take turns on one processor."""
    with threadpool_limits(limits=1, user_api="blas"):
        return simulate(run, ranks)


def repeated_batch(workload: Workload, rows: int, count: int) -> Batch:
    """Return a batch of some microbatches, of samples that may come twice."""
    samples, indices = workload.samples, np.arange(count * rows) % len(workload.samples)
    length = None if samples.lengths is None else int(samples.lengths[indices].max())
    x, y = samples.rows(indices, workload.dtype, length), samples.labels(indices, length)
    y = y.astype(workload.dtype, copy=False) if y.dtype.kind == "f" else y
    cuts = tuple(Cut(i * rows, (i + 1) * rows, i * rows, i) for i in range(count))
    counts = samples.targets
    targets = () if counts is None else tuple(int(counts[indices[c.start : c.stop]].sum()) for c in cuts)
    return Batch(x, y, indices, cuts, count * rows, 0, 0, count, targets=targets, length=length)


def _usual_s(group: Group, call: Callable[[], Any]) -> float:
    """Return the lower quartile of what a call takes; the ranks make as many. Collective."""
    times = []
    for _ in range(2):
        begin = clock.now()
        call()
        times.append(clock.now() - begin)
    count = int(np.clip(MEASURE_S / max(*group.max_floats([times[-1]]), 1e-9), LEAST_STEPS, MOST_STEPS))
    for _ in range(count):
        begin = clock.now()
        call()
        times.append(clock.now() - begin)
    return float(np.quantile(times[2:], QUARTILE))


def shares_of(ranks: int) -> list[Share]:
    """Return every (tp, sp) but (1, 1) that a number of ranks may have and that is measured."""
    numbers = [n for n in range(1, min(ranks, MOST_SHARES) + 1) if ranks % n == 0]
    return [(tp, sp) for tp, sp in product(numbers, numbers) if 1 < tp * sp <= MOST_SHARES and ranks % (tp * sp) == 0]


def default_file(key: Mapping[str, Any], folder: Path, kind: str = "profile") -> Path:
    """Return where the profile, or what else is measured once, with such a key is kept."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder / f"{kind}-{digest}.json"


def load_profile(file: Path, key: Mapping[str, Any]) -> Profile | None:
    """Return the profile in a file; None if there is none of this key, or it is damaged or old."""
    try:
        if datetime.now(UTC).timestamp() - file.stat().st_mtime > 86400 * OLD_DAYS:
            return None
        found = Profile.from_json(read_json(file))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, NnmpiError):
        return None
    return found if dict(found.facts) == json.loads(json.dumps(dict(key))) else None
