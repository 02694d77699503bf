"""The profile of a model's parts on this machine, measured once and cached.

    steps      of one replica, for several numbers of rows: seconds, update, activations
    shares     of replicas whose layers or positions are sharded: the ratio to one rank, and the
               messages between the ranks
    layers     of the chain, forward and backward: their ratios, and their bytes

All ranks measure at the same time, since they will compute at the same time and share caches and
memory bandwidth; the slowest counts, and all get the same profile. Replicas with sharded layers or
sequences run on these ranks where they divide into such, else on simulated ones; only the ratio of
their time, without messages, to that of one rank is used.

A virtual machine's speed changes by a half, for a second or for minutes. So all is measured twice,
and each number is the least; and layouts whose times are subtracted take turns. To scale each
measurement by a short step beside it was tried: long steps are not slower by the same factor, and a
cnn's prices were off by 15 % in place of 7 to 13.

A profile holds for what it was measured with: the kernels that ran, the processors, the ranks of
each node. Other ones are another key. What no key can say, such as a slower clock, is found by a
step that is measured again before the profile is used. A profile that was measured beside other
programs is used once, and not kept.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product, repeat
from math import inf, prod
from typing import Any, TypeAlias

import numpy as np
import threadpoolctl

from nnmpi.backend import onednn
from nnmpi.backend.backend import Backend
from nnmpi.backend.blas import read_cpu
from nnmpi.backend.precision import use_precision
from nnmpi.base.custom import custom_file
from nnmpi.base.errors import NnmpiError, UsageError
from nnmpi.base.files import cache_folder, json_text, parse_json, read_json, rebuilt, write_json
from nnmpi.base.launcher import usable_cores
from nnmpi.base.timeline import Timeline, tracing
from nnmpi.base.units import format_seconds
from nnmpi.base.version import VERSION
from nnmpi.comm.agreement import on_root
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Machine
from nnmpi.comm.mesh import SP, TP
from nnmpi.comm.saved_fit import find_fit
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Samples
from nnmpi.data.loader import Batch
from nnmpi.lab.measure import Refilled, time_calls
from nnmpi.lab.planner.network import QUICK, PlannedNetwork, Say
from nnmpi.lab.planner.price import (
    MEASURED,
    Candidate,
    ModelShapes,
    Pricer,
    Profile,
    SegmentCosts,
    Share,
    ShareCost,
    StepCost,
)
from nnmpi.memory.fitting import StageCost, peak_of_stages
from nnmpi.memory.layers import measure as measure_layers
from nnmpi.memory.layers import of_chain
from nnmpi.memory.plan import LayerCost
from nnmpi.nn.chain import open_chain
from nnmpi.nn.mode import training
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import STAGES
from nnmpi.ops.collectives import CATEGORY
from nnmpi.tensor.tensor import Tensor
from nnmpi.train.build import build_model, trial_run
from nnmpi.train.computing import explain_errors, installed_numba
from nnmpi.train.config import Config, to_json
from nnmpi.train.derived import find_layout
from nnmpi.train.signature import ModelSignature

FORMAT = 23  # of the cached profile; part of its key
MOST_SHARES = 8  # largest tp x sp that is measured and considered
PARTS_PER_RANK = 8  # microbatches per rank, for the smallest part of a batch that is measured
LONGEST_S = 0.5  # a longer step is not measured but extrapolated from fewer rows
MEASURE_S, WARM_UP_STEPS = 0.35, 5  # steps 2 and 3 make a recording
TRACED_STEPS = 5
RECORDED_STEPS = 2  # after these the memory of a recording is known
PASSES = 2
SEVERAL = 4  # microbatches of a step that is measured beside one of a single microbatch
LEAST = {"activation_memory": "least"}
_Timed: TypeAlias = tuple[Callable[[Any], Any], Iterator[Any]]
"""A call, and its arguments, which are made outside the measured time."""
_Sent = tuple[str, str, int]  # operation, axis, bytes
QUARTILE = 0.25  # other programs disturb the steps above it
# The first 1/SETTLED of the steps does not count: in the first 0.1 s a step of 2 ms takes 12 %
# longer.
SETTLED = 3
# The share by which the time of a kept profile's longest short step may differ now. Alone on two
# cores 14 of 14 were within it, of an MLP's 64 rows (of 4 rows, timed for 0.1 s, 9 of 14 were);
# beside two other programs 1 of 4.
STALE, SHORT_S = 0.25, 0.05  # seconds of a short step
BUSY = 0.15  # of the processor time, taken by other programs


@dataclass(frozen=True)
class Workload:
    """A configuration with its training and test set, on this rank's backend."""

    config: Config
    samples: tuple[Samples, Samples]
    backend: Backend

    @property
    def dtype(self) -> str:
        """The model's dtype."""
        return self.config.run.dtype

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        return self.config.optimization.rows(len(self.samples[0]))

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample and its labels."""
        return int(self.rows(1).nbytes + self.samples[0].labels(np.arange(1)).nbytes)

    @property
    def outputs(self) -> int:
        """The model's number of outputs: classes or quantities."""
        return ModelSignature.of(self.samples[0], None).outputs

    def rows(self, count: int) -> Any:
        """Return the first `count` samples as model input."""
        return self.samples[0].rows(np.arange(count), self.dtype)

    def build(self) -> Module:
        """Return the model, uninitialized."""
        return build_model(self.config.model, self.samples[0].sample_shape, self.outputs)

    def pricer(self, profile: Profile, network: PlannedNetwork) -> Pricer:
        """Return a pricer of the workload's layouts."""
        seconds, arrays = (
            [layer.seconds for layer in profile.layers],
            self.config.state_arrays,
        )
        shapes = ModelShapes(self.build, self.dtype, arrays, self.rows(1), seconds, self.backend)
        count = partial(count_costs, self)
        compress = self.config.parallel.compress
        return Pricer(self.batch_size, self.row_bytes, profile, network, shapes, count, compress)

    def key(self, group: Group, ranks: int) -> dict[str, Any]:
        """Return everything on which the measured times depend, equal on all ranks. Collective."""
        config, options = self.config, self.config.optimization
        files = [
            file
            for name in (config.model.model, options.optimizer, options.loss)
            if (file := custom_file(name))
        ]
        # BLAS has kernels for each processor, and a variable may name others
        names = ("internal_api", "version", "architecture", "num_threads")
        pools = [[pool.get(name) for name in names] for pool in threadpoolctl.threadpool_info()]
        library = onednn.find().library
        local = [
            platform.node(),
            None if library is None else [library.version, library.unit],
            read_cpu("model name"),
            installed_numba(),
            self.backend.card,
            pools,
        ]
        key = {
            "format": FORMAT,
            "model": to_json(config.model),
            "own": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
            "sample": [*self.samples[0].sample_shape, self.outputs, self.batch_size],
            "optimizer": [options.optimizer, options.momentum, bool(options.weight_decay)],
            "loss": [options.loss, bool(options.class_weights), options.label_smoothing > 0],
            "numbers": [
                config.run.dtype,
                to_json(config.numerics),
                config.run.jit,
                self.backend.name,
            ],
            "hosts": sorted(Counter(group.gather(json_text(local))).items()),
            "ranks": [ranks, group.size],
            "nnmpi": VERSION,
        }
        return group.share(parse_json(json_text(key)))


# ---- the cache ----


def kept_profile(
    workload: Workload, group: Group, ranks: int, say: Say
) -> tuple[Profile | None, Callable[[Profile], None]]:
    """Return a workload's kept profile, if there is one, and a function to keep one. Collective.

    Same arguments as `find_profile`.
    """
    key = workload.key(group, ranks)
    digest = hashlib.blake2b(json_text(key, sort_keys=True).encode(), digest_size=8).hexdigest()

    def load() -> Any:
        """Return the profile as JSON values; None if it is missing or damaged."""
        with suppress(OSError, KeyError, TypeError, ValueError, AttributeError, NnmpiError):
            result = read_json(cache_folder() / f"profile-{digest}.json")
            if result.pop("key") == key and rebuilt(Profile, result):
                return result
        return None

    def store(profile: Profile) -> None:
        if not group.is_root or profile.busy > BUSY:
            return
        try:
            file = cache_folder() / f"profile-{digest}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"key": key, **profile.to_json()})
        except (OSError, UsageError) as error:  # such as no home folder: measured in each run
            say(f"the profile cannot be kept: {error}")

    saved = on_root(group, load)
    return None if saved is None else rebuilt(Profile, saved), store


def find_profile(
    workload: Workload, group: Group, ranks: int, say: Say, remeasure: bool = False
) -> tuple[Profile, Callable[[Profile], None]]:
    """Return a workload's kept or measured profile, and a function to keep one. Collective.

    Args:
        workload: to measure.
        group: the ranks that measure.
        ranks: the planned number of ranks.
        say: called with a sentence before measuring, and if the profile is not kept.
        remeasure: measure even if a profile was kept.
    """
    kept, store = kept_profile(workload, group, ranks, say)
    why = "" if kept is None or remeasure else _why_stale(kept, workload, group)
    if kept is not None and not (why or remeasure):
        return kept, store
    say(f"{why}measuring the model's parts, which is done once and kept")
    with explain_errors(
        workload.backend,
        "the model's parts are measured here, and do not fit ({}); give a smaller model or batch",
    ):
        result = measure(workload, group, ranks, shares_of(ranks))
    if result.busy > BUSY:
        say(
            f"other programs took {result.busy:.0%} of the processor meanwhile, so this profile is"
            " too slow, and is not kept"
        )
    store(result)
    return result, store


def _why_stale(kept: Profile, workload: Workload, group: Group) -> str:
    """Return the sentence of a step that does not take what a profile says; else nothing."""
    short = {rows: cost for rows, cost in kept.steps.items() if cost.seconds < SHORT_S}
    rows, cost = max(short.items()) if short else min(kept.steps.items())
    alone = group.split(group.rank)
    step_s = time_layout(workload, {"batch_size": rows}, alone, timed=group)
    alone.free()
    expected_s = cost.seconds + cost.update_s
    if abs(step_s / max(expected_s, 1e-12) - 1) <= STALE:
        return ""
    took, was = (format_seconds(seconds, 3) for seconds in (step_s, expected_s))
    return f"a step of {rows} rows takes {took} now, and {was} in the profile of {kept.date}; "


def shares_of(ranks: int) -> list[Share]:
    """Return the (tp, sp) to measure for a number of ranks, without (1, 1)."""
    few = [n for n in range(1, min(ranks, MOST_SHARES) + 1) if ranks % n == 0]
    return [
        (tp, sp)
        for tp, sp in product(few, few)
        if 1 < tp * sp <= MOST_SHARES and ranks % (tp * sp) == 0
    ]


# ---- measuring ----


def measure(workload: Workload, group: Group, ranks: int, shares: Sequence[Share]) -> Profile:
    """Measure a workload with all ranks of a group at once; the slowest counts. Collective.

    Each number is the least of `PASSES`.

    Args:
        workload: to measure.
        group: the ranks that measure.
        ranks: the planned number of ranks, which limits the parts of a batch.
        shares: (tp, sp) to measure besides (1, 1); those impossible for the model are left out.
    """
    batch, result = workload.batch_size, None
    sizes = sorted({-(-batch // part) for part in (1, ranks, PARTS_PER_RANK * ranks)})
    for _ in range(PASSES):
        profile = _measure(workload, group, sizes, result is None).to_json()
        result, sizes = _least(profile, result or profile), [rows for rows, _ in profile["steps"]]
    costs = {(1, 1): ShareCost()}
    for share in shares:
        cost = _measure_share(group, workload, share, max(sizes))
        if cost is not None:
            costs[share] = cost
    return rebuilt(Profile, group.share(replace(rebuilt(Profile, result), shares=costs).to_json()))


def _least(one: Any, other: Any) -> Any:
    """Return JSON values of the same form, with the lesser of each two floats."""
    if isinstance(one, dict):
        return {key: _least(value, other[key]) for key, value in one.items()}
    if isinstance(one, list | tuple):
        return [_least(*pair) for pair in zip(one, other, strict=True)]
    return min(one, other) if isinstance(one, float) else one


def _measure(workload: Workload, group: Group, sizes: Sequence[int], chooses: bool) -> Profile:
    """Measure all but shares once; with `chooses`, without the sizes of too long steps."""
    alone = group.split(group.rank)
    wall_s, own_s = time.perf_counter(), time.process_time()
    steps: dict[int, StepCost] = {}
    for rows in sizes:
        expected = Profile(steps, {}, (), rows).step(rows, "seconds") if steps and chooses else 0.0
        if expected <= LONGEST_S:
            steps[rows] = _measure_replica(workload, rows, group, alone)
    fewest = min(steps)
    once_s = _measure_once(workload, fewest, steps[fewest].update_s, group, alone)
    alone.free()
    piped_s = _measure_piped(workload, fewest, group)
    rows = max(steps)
    layers = _measure_layers(workload, rows, group)
    few = _measure_layers(workload, fewest, group)
    wall_s, own_s = time.perf_counter() - wall_s, time.process_time() - own_s
    # ranks wait in calls that do not sleep, so alone a rank has all the time of its core
    on_node = max(Counter(group.nodes()).values())
    own = own_s / wall_s * max(1.0, on_node / usable_cores()[1])
    (busy,) = group.max_floats([0.0 if workload.backend.is_device else max(0.0, 1 - own)])
    profile = Profile(
        steps,
        {(1, 1): ShareCost()},
        layers,
        rows,
        few,
        once_s=once_s,
        piped_s=piped_s,
        date=time.strftime("%Y-%m-%d %H:%M"),
        busy=busy,
    )
    if group.size > 1:
        profile = replace(profile, zero_s=_measure_zero(workload, fewest, profile, group))
    return profile


def _measure_zero(
    workload: Workload, rows: int, profile: Profile, group: Group
) -> dict[int, float]:
    """Return what each ZeRO stage adds to plain replicas' step, of so many rows each, beside what
    its price adds.

    Without a fit nothing is known of its sums, and all of it counts.
    """
    fit, ranks, result = find_fit(group, QUICK), group.size, dict[int, float]()
    machine = Machine.uniform(0.0, 0.0) if fit is None else fit.machine
    few = replace(workload, config=workload.config.having(batch_size=rows * ranks))
    pricer = few.pricer(profile, PlannedNetwork("", machine, ranks, fit))
    for zero in STAGES:
        pair = Candidate(ranks), Candidate(ranks, zero=zero)
        with suppress(UsageError):  # an optimizer of whole matrices
            plain_s, zero_s = (
                step_s - pricer.price(layout).seconds
                for layout, step_s in zip(
                    pair,
                    time_layouts(few, [layout.options() for layout in pair], group),
                    strict=True,
                )
            )
            result[zero] = max(0.0, zero_s - plain_s)
    return result


def _measure_layers(workload: Workload, rows: int, group: Group) -> tuple[LayerCost, ...]:
    """Return the costs of the slowest rank's layers, on all ranks."""
    x = Tensor(workload.backend.asarray(workload.rows(rows)))
    with use_precision(workload.config.numerics.precision), training():
        model = workload.build()
        layers = of_chain(model, open_chain(model), workload.dtype, workload.backend)
        # pipelines have several microbatches
        costs = measure_layers(layers, x, workload.backend, adds=True)
    by_rank = [
        tuple(rebuilt(LayerCost, cost) for cost in item)
        for item in group.gather([asdict(cost) for cost in costs])
    ]
    return max(by_rank, key=lambda layers: sum(layer.seconds for layer in layers))


def _measure_replica(workload: Workload, rows: int, group: Group, alone: Group) -> StepCost:
    size = {"batch_size": rows}
    step_s = least_s = time_layout(workload, size, alone, timed=group)
    with ready(workload, size, alone) as (worker, _):
        update = (lambda _: worker.optimizer.step()), repeat(None)
        (update_s,) = typical_s(group, [update])
    with suppress(UsageError):  # a model that is not recomputed
        least_s = time_layout(workload, size | LEAST, alone, timed=group)
    step_s, least_s = (max(seconds - update_s, 0.0) for seconds in (step_s, least_s))
    return StepCost(step_s, update_s, least_s)


def _measure_once(
    workload: Workload, rows: int, update_s: float, group: Group, alone: Group
) -> float:
    """Return the seconds of a step beside its microbatches and its update, from two steps."""
    several = min(SEVERAL, workload.batch_size // rows)
    if several < 2:
        return 0.0
    sizes = [{"batch_size": rows * n, "microbatches": n} for n in (1, several)]
    one_s, all_s = time_layouts(workload, sizes, alone, timed=group)
    return max(0.0, (several * one_s - all_s) / (several - 1) - update_s)


def _measure_piped(
    workload: Workload, fewest: int, group: Group
) -> dict[tuple[str, int, int], float]:
    """Return a pipeline's part of a profile, of two ranks."""
    result = dict[tuple[str, int, int], float]()
    if group.size % 2 or workload.batch_size < 2 * SEVERAL * fewest:
        return result
    pair = group.split(group.rank // 2)
    for (pipeline, virtual), rows in product(MEASURED, (fewest, SEVERAL * fewest)):
        most = min(4 * SEVERAL, workload.batch_size // rows)
        few = min(SEVERAL, most // 2)
        options = {"pp": 2, "pipeline": pipeline, "virtual_stages": virtual}
        with suppress(UsageError):  # a model that cannot be cut
            sizes = [options | {"batch_size": rows * n, "microbatches": n} for n in (few, most)]
            few_s, all_s = time_layouts(workload, sizes, pair, timed=group)
            result[pipeline, virtual, rows] = max(0.0, (all_s - few_s) / (most - few))
    pair.free()
    return result


def _measure_share(group: Group, workload: Workload, share: Share, rows: int) -> ShareCost | None:
    """Return the cost of a replica on several ranks; None if impossible. Collective.

    The ranks are the group's where they can be divided so, else simulated ones. Messages do not
    count: the shortest of each operation is its time, and longer ones wait for another rank. With
    more ranks than cores they do, as they wait for a core, which no price of messages has.
    """
    crowded = max(Counter(group.nodes()).values()) > usable_cores()[1]

    def run(tp: int, sp: int, local: Group) -> tuple[float, float, Counter[_Sent]]:
        options, sent_s = {"tp": tp, "sp": sp, "batch_size": rows}, inf
        with ready(workload, options, local) as (worker, batches):
            worker.step(next(batches), lr=0.0)  # whose messages wait for what is made once
            for _ in range(TRACED_STEPS):
                timeline = Timeline()
                with tracing(timeline):
                    worker.step(next(batches), lr=0.0)
                events = [e for e in timeline.events if e.category == CATEGORY]
                spans = local.gather([e.end_s - e.begin_s for e in events])
                sent_s = min(sent_s, sum(map(min, zip(*spans, strict=True))))
            mesh = worker.arrangement.mesh.sizes
            axis_of = {  # of the ranks as events name them
                f"{tuple(local.comm.members[rank] for rank in ranks)}": axis
                for axis in (SP, TP)
                for ranks in mesh.groups(axis)
            }
            sent = Counter(
                (e.name, axis_of[e.collective.partition(" of ")[2]], int((e.args or {})["bytes"]))
                for e in events
            )
            call = partial(worker.step, lr=0.0), batches
            (step_s,) = typical_s(local, [call])
        least_s, sent_s = step_s, 0.0 if crowded else sent_s
        with suppress(UsageError):  # a model that is not recomputed
            least_s = time_layout(workload, options | LEAST, local)
        return step_s - sent_s, least_s - sent_s, sent

    def spent(tp: int, sp: int) -> tuple[float, float, Counter[_Sent]]:
        if group.size % prod(share):
            with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
                return simulate(partial(run, tp, sp), tp * sp)[0]
        local = group.split(group.rank // (tp * sp))
        try:
            return run(tp, sp, local)
        finally:
            local.free()

    try:
        passes = [(spent(1, 1), spent(*share)) for _ in range(PASSES)]
    except NnmpiError:
        return None
    # the least of each, since the least ratio would be that of a step alone which was disturbed
    times = np.array([[one[:2], several[:2]] for one, several in passes]).min(axis=0)
    ratio, least = group.max_floats([*(times[1] / np.maximum(times[0], 1e-12))])
    _, (*_, sent) = passes[-1]
    exchanges = tuple(
        (what, axis, nbytes / rows, count) for (what, axis, nbytes), count in sent.items()
    )
    return ShareCost(ratio, exchanges, least)


def count_costs(workload: Workload, ranks: int, options: Mapping[str, Any]) -> SegmentCosts:
    """Return a layout's segments, and their bytes.

    A pass of the layout on simulated ranks counts them, as a run's second step does. If its
    recording takes more, the rest is work of each segment.
    """

    def run(group: Group) -> SegmentCosts:
        with ready(workload, options, group) as (worker, batches):
            for _ in range(RECORDED_STEPS):
                worker.step(next(batches), lr=0.0)
            executor, recorded = worker.passes.executor, worker.passes.replay.held_bytes
            schedule = executor.schedule_for(options.get("microbatches", 1))
            counted = peak_of_stages(executor.costs, schedule, executor.rank, executor.recomputed)
            more = max(0.0, recorded - counted)
            return executor.counts, {
                stage: cost._replace(work=cost.work + more)
                for stage, cost in executor.costs.items()
            }

    (counts, _), *_ = by_rank = simulate(run, ranks)
    costs: dict[int, StageCost] = {}
    for stage, cost in chain.from_iterable(own.items() for _, own in by_rank):
        costs[stage] = StageCost(*map(max, cost, costs.get(stage, cost)))
    return counts, costs


@contextmanager
def ready(
    workload: Workload, options: Mapping[str, Any], group: Group
) -> Iterator[tuple[Worker, Iterator[Batch]]]:
    """Yield a warmed-up trainer of a workload in a layout, with batches; see `trial_run`.

    Args:
        workload: to train.
        options: of the layout and the batch, in place of the run's.
        group: all ranks.
    """
    config = workload.config.having(**options, layout="given")
    layout, _ = find_layout(config, group)
    if group.size > 1 and group.fit is None:
        group.fit = find_fit(group)
    with trial_run(config, workload.samples, layout, group, workload.backend) as (
        worker,
        _,
        batches,
    ):
        # a trial is measured: all ranks do the same in it
        worker.passes.replay.compares = worker._check.is_on = False
        for _ in range(WARM_UP_STEPS):
            worker.step(next(batches), lr=0.0)
        yield worker, batches


def time_layout(
    workload: Workload,
    options: Mapping[str, Any],
    group: Group,
    budget_s: float = MEASURE_S,
    timed: Group | None = None,
) -> float:
    """Return the seconds of a step of one layout; see `time_layouts`. Collective."""
    return time_layouts(workload, [options], group, budget_s, timed)[0]


def time_layouts(
    workload: Workload,
    several: Sequence[Mapping[str, Any]],
    group: Group,
    budget_s: float = MEASURE_S,
    timed: Group | None = None,
) -> list[float]:
    """Return the seconds of a step of each layout, which take turns. Collective.

    Args:
        workload, several, group: see `ready`.
        budget_s, timed: seconds for all of them, and the ranks of which the slowest counts; by
            default the same group.
    """
    with ExitStack() as stack:
        return typical_s(
            timed or group,
            [
                (partial(worker.step, lr=0.0), batches)
                for options in several
                for worker, batches in [stack.enter_context(ready(workload, options, group))]
            ],
            budget_s,
        )


def typical_s(
    group: Group,
    calls: Sequence[_Timed],
    budget_s: float = MEASURE_S,
) -> list[float]:
    """Return the lower quartile of each call's seconds, the slowest rank's each time. Collective.

    Args:
        group: all ranks.
        calls: to time in turns.
        budget_s: for all of them.
    """

    def refilled(call: Callable[[Any], Any], arguments: Iterator[Any]) -> Refilled:
        argument: list[Any] = [None]

        def refill() -> None:
            argument[0] = next(arguments)

        return lambda: call(argument[0]), refill

    times = time_calls(group, [refilled(*item) for item in calls], budget_s)
    settled = times[:, times.shape[1] // SETTLED :]
    return [float(item) for item in np.quantile(settled, QUARTILE, axis=1)]
