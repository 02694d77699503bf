"""What a model's parts take on this machine, measured once and kept: whole steps, layers, updates, bytes.

    steps      of a Worker of one replica, for several numbers of rows: seconds, activations, exchanges
    layers     of the chain, forward and backward; together they take what a step takes

All ranks measure at the same time, as they will compute at the same time, and the slowest counts. Replicas whose
layers or sequences are shared out run on simulated ranks: of these the ratio to one rank counts, measured likewise.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

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
from nnmpi.data.loader import Loader
from nnmpi.errors import NnmpiError
from nnmpi.memory.layers import measure as measure_layers
from nnmpi.memory.layers import of_chain
from nnmpi.memory.ledger import ACTIVATIONS
from nnmpi.memory.plan import LayerCost, kept_bytes
from nnmpi.nn.chain import open_chain
from nnmpi.nn.mode import training
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.sharded.collectives import CATEGORY
from nnmpi.reading import read_json
from nnmpi.tensor.parameter import FlatStorage
from nnmpi.tensor.tensor import Tensor
from nnmpi.timeline import Timeline, recording

FORMAT = 15
MOST_SHARES = 8  # ranks of one replica's layers and positions that are measured; more are not looked at
PARTS_PER_RANK = 8  # the smallest part of a batch that is measured is that of so many microbatches for each rank
LONGEST_S = 0.5  # a step that would take longer is not measured, but estimated from those of fewer rows
MEASURE_S, LEAST_STEPS, MOST_STEPS = 0.15, 3, 30
QUARTILE = 0.25  # what other programs disturb is above it
ROUNDS = 3  # some time apart: what disturbs a machine for a second does not decide
PATIENCE_S = 15.0  # what took so long is not measured again

Share = tuple[int, int]
"""(tp, sp): how many ranks share the layers, and the positions."""


@dataclass(frozen=True, kw_only=True)
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
        key: what the measured times depend on, by name: the model's options and the like.
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
    key: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample and its labels."""
        first = np.arange(1)
        return int(self.samples.rows(first, self.dtype).nbytes + self.samples.labels(first).nbytes)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A whole step of one replica on its (tp, sp) ranks, for so many rows.

    Attributes:
        seconds: of each rank, without the update, and without messages; replayed, where that can be.
        eager_s: the same without replay, as stages compute whose backwards are halved.
        update_s: of the update of all that a rank has.
        activations: the most bytes at any moment, or those that recordings keep.
        exchanges: (operation, bytes, how often) of the messages between the ranks.
    """

    seconds: float
    eager_s: float
    update_s: float
    activations: int
    exchanges: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured of a workload.

    Attributes:
        facts: what it was measured with; another one is measured for others.
        steps: by share and rows.
        layers: by rows, in the order of the chain.
        raced: by the text of a layout, the seconds of a step as it ran, of those that have raced.
    """

    facts: Mapping[str, Any]
    steps: Mapping[Share, Mapping[int, StepCost]]
    layers: Mapping[int, tuple[LayerCost, ...]]
    raced: Mapping[str, float] = field(default_factory=dict)

    def step(self, share: Share, rows: int, name: str) -> float:
        """Return one of the fields of `StepCost` for any number of rows."""
        return between({known: getattr(cost, name) for known, cost in self.steps[share].items()}, rows)

    def layer(self, number: int, rows: int, name: str) -> float:
        """Return one of the fields of `LayerCost` for any number of rows."""
        return between({known: getattr(costs[number], name) for known, costs in self.layers.items()}, rows)

    def kept(self, layers: range, rows: int) -> float:
        """Return the bytes that some layers in a row save for their backward, for any number of rows."""
        return between({known: kept_bytes(costs, layers) for known, costs in self.layers.items()}, rows)

    def exchanges(self, share: Share, rows: int) -> tuple[tuple[str, int, int], ...]:
        """Return the messages between the ranks of a share in a step, for any number of rows."""
        known = self.steps[share]
        near = min(known, key=lambda each: abs(each - rows))
        return tuple((what, round(size * rows / near), count) for what, size, count in known[near].exchanges)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "format": FORMAT,
            "facts": dict(self.facts),
            "steps": [[*share, rows, asdict(one)] for share, by in self.steps.items() for rows, one in by.items()],
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
        layers = {int(rows): tuple(LayerCost(**each) for each in found) for rows, found in value["layers"]}
        if (1, 1) not in steps or not layers:
            raise ValueError("it has no times of a whole step, or none of layers")
        raced = {str(name): float(seconds) for name, seconds in value["raced"].items()}
        return cls(facts=dict(value["facts"]), steps=steps, layers=layers, raced=raced)


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


def measure(workload: Workload, group: Group, ranks: int, shares: Sequence[Share], backend: Backend) -> Profile:
    """Measure a workload with all ranks of a group at once; the slowest counts. Collective.

    Args:
        ranks: for so many ranks a layout is sought, which says how small parts of a batch may be.
        shares: (tp, sp) to measure besides (1, 1), as far as the model can be shared out so.
    """
    alone = group.split(group.rank)
    steps: dict[int, StepCost] = {}
    for rows in row_counts(workload.batch_size, ranks):
        if not steps or between({known: cost.seconds for known, cost in steps.items()}, rows) <= LONGEST_S:
            found = _least(group, partial(_measure_step, alone, workload, (1, 1), rows, backend))
            assert found is not None
            steps[rows] = found
    alone.free()
    few = sorted({min(steps), max(steps)})
    layers = {}
    for rows in few:
        measured = _measure_layers(workload, rows, backend)
        factor = steps[rows].seconds / (sum(layer.seconds for layer in measured) or 1.0)
        names = ("forward_s", "keep_s", "backward_s", "input_s")
        layers[rows] = tuple(
            replace(layer, **{name: factor * getattr(layer, name) for name in names}) for layer in measured
        )
    every: dict[Share, dict[int, StepCost]] = {(1, 1): steps}
    plain = {rows: _measure_share(group, workload, (1, 1), rows, backend) for rows in few} if shares else {}
    for share in shares:
        costs = {}
        for rows in few:
            one, whole = _measure_share(group, workload, share, rows, backend), plain[rows]
            if one is None or whole is None:
                break
            factors: dict[str, Any] = {
                name: getattr(steps[rows], name) * getattr(one, name) / (getattr(whole, name) or 1.0)
                for name in ("seconds", "eager_s", "update_s")
            }
            costs[rows] = replace(one, **factors)
        else:
            every[share] = costs
    return Profile(facts=dict(workload.key), steps=every, layers=layers)


def _least(group: Group, run: Callable[[], StepCost | None]) -> StepCost | None:
    """Return the quickest of some rounds, each as long as on the slowest rank. Collective."""
    found: StepCost | None = None
    for _ in _rounds(group):
        group.barrier()
        one = run()
        if one is None:
            return None
        names = ("seconds", "eager_s", "update_s")
        slowest = group.max_floats([getattr(one, name) for name in names])
        times: dict[str, Any] = dict(zip(names, slowest, strict=True))
        if found is not None:
            times = {name: min(seconds, getattr(found, name)) for name, seconds in times.items()}
        found = replace(one, **times)
    return found


def _rounds(group: Group) -> Iterator[int]:
    begin = clock.now()
    for number in range(ROUNDS):
        if number and group.max_floats([clock.now() - begin])[0] > PATIENCE_S:
            return
        yield number


def _measure_layers(workload: Workload, rows: int, backend: Backend) -> tuple[LayerCost, ...]:
    model = workload.build()
    sample = workload.samples.rows(np.arange(rows), workload.dtype)
    with use_precision(workload.precision), training():
        measured = of_chain(model, open_chain(model), workload.dtype, backend)
        return tuple(measure_layers(measured, Tensor(backend.asarray(sample)), backend))


def _measure_share(group: Group, workload: Workload, share: Share, rows: int, backend: Backend) -> StepCost | None:
    """Return the cost of a replica on several simulated ranks; None where it cannot be shared out so. Collective."""

    def run() -> StepCost | None:
        try:
            with threadpool_limits(limits=1, user_api="blas"):
                step = partial(_measure_step, workload=workload, share=share, rows=rows, backend=backend)
                found = simulate(step, share[0] * share[1])
        except NnmpiError:
            return None
        return replace(found[0], seconds=max(each.seconds for each in found))

    return _least(group, run)


def _measure_step(group: Group, workload: Workload, share: Share, rows: int, backend: Backend) -> StepCost:
    """Return what a step of one replica takes on the ranks of a group."""
    tp, sp = share
    worker = ready_worker(workload, group, Layout(1, 1, tp, sp=sp) if group.size > 1 else None, rows, backend)
    batch = next(iter(Loader(workload.samples, rows, shuffle=False, dtype=workload.dtype, workers=0).epoch(0)))
    worker.step(batch)
    worker.step(batch)  # the ledger measures the second one
    timeline = Timeline()
    with recording(timeline):
        worker.step(batch)
    sent = Counter((e.name, int((e.args or {})["bytes"])) for e in timeline.events if e.category == CATEGORY)
    step_s = _usual_s(group, lambda: worker.step(batch))
    update_s = _usual_s(group, worker.optimizer.step)
    activations = worker.ledger.report().peaks[ACTIVATIONS]

    def eager() -> None:
        worker.model.storage.zero_grad()
        worker.passes.train(batch, worker.optimizer.steps, may_replay=False)

    eager_s = _usual_s(group, eager)
    worker.release()
    return StepCost(
        seconds=max(step_s - update_s, 0.0),
        eager_s=eager_s,
        update_s=update_s,
        activations=activations,
        exchanges=tuple((what, size, count) for (what, size), count in sent.items()),
    )


def ready_worker(workload: Workload, group: Group, layout: Layout | None, rows: int, backend: Backend) -> Worker:
    """Return what trains a workload in a layout, None for one rank, on the ranks of a group. Collective.

    Args:
        rows: of what is passed through the model once, to look at it.
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


def _usual_s(group: Group, call: Callable[[], Any]) -> float:
    """Return the lower quartile of what a call takes; the ranks make as many. Collective."""
    times: list[float] = []
    count = LEAST_STEPS
    while len(times) < 2 + count:
        begin = clock.now()
        call()
        times.append(clock.now() - begin)
        if len(times) == 2:
            count = int(np.clip(MEASURE_S / max(*group.max_floats(times[-1:]), 1e-9), LEAST_STEPS, MOST_STEPS))
    return float(np.quantile(times[2:], QUARTILE))


def shares_of(ranks: int) -> list[Share]:
    """Return every (tp, sp) but (1, 1) that a number of ranks may have and that is measured."""
    numbers = [n for n in range(1, min(ranks, MOST_SHARES) + 1) if ranks % n == 0]
    return [(tp, sp) for tp, sp in product(numbers, numbers) if 1 < tp * sp <= MOST_SHARES and ranks % (tp * sp) == 0]


def default_file(key: Mapping[str, Any], folder: Path) -> Path:
    """Return where the profile with such a key is kept."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder / f"profile-{digest}.json"


def load_profile(file: Path, key: Mapping[str, Any]) -> Profile | None:
    """Return the profile in a file; None if there is none of this key, or it is damaged."""
    try:
        found = Profile.from_json(read_json(file))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, NnmpiError):
        return None
    return found if dict(found.facts) == json.loads(json.dumps(dict(key))) else None
