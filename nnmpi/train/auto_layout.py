"""A layout that the planner chooses: `--layout auto`, and what `python -m nnmpi.plan` has in common with it.

profile and fit (kept or measured)  ->  search  ->  race of the first ones, if wanted  ->  options
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as numbers
from itertools import islice
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import threadpoolctl

from nnmpi import clock
from nnmpi.backend.backend import Backend
from nnmpi.comm.agreement import on_root
from nnmpi.comm.algorithms.registry import AUTO
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Machine
from nnmpi.comm.measure import find_fit
from nnmpi.comm.measure import measure as measure_fit
from nnmpi.compose.worker import Worker
from nnmpi.custom import custom_file
from nnmpi.data.dataset import Samples
from nnmpi.errors import UsageError, counted
from nnmpi.files import cache_folder, write_atomically
from nnmpi.planner import report
from nnmpi.planner.network import PlannedNetwork
from nnmpi.planner.price import Pricer
from nnmpi.planner.profile import QUARTILE, Profile, Workload, default_file, load_profile, measure, shares_of
from nnmpi.planner.search import plan
from nnmpi.planner.shapes import ModelShapes
from nnmpi.planner.space import Candidate
from nnmpi.train.build import (
    build_losses,
    build_model,
    build_optimizer,
    build_trainer,
    build_whole,
    find_layout,
    needs_arrangement,
)
from nnmpi.train.computing import Computing, choose_computing, explained
from nnmpi.train.config import Config, ParallelConfig, to_json
from nnmpi.train.inputs import load_inputs, load_samples
from nnmpi.train.signature import ModelSignature
from nnmpi.units import format_seconds
from nnmpi.version import VERSION

Say = Callable[[str], None]
FIT_S = 6.0  # for a fit that is made on the way; `python -m nnmpi.comm fit` takes its time
RACE_S, LEAST_STEPS, MOST_STEPS, WARM_UP_STEPS = 0.6, 5, 300, 3
SETTLED = 3  # the first of so many parts of the steps does not count: 2 ms are 12 % longer in the first 0.1 s
RACERS = 4  # of different kinds
RACE_ROUNDS, BEHIND = 3, 1.15  # what is so far behind after a round does not run in the next


@dataclass(frozen=True)
class ChosenLayout:
    """What `--layout auto` has chosen.

    Attributes:
        config: with the layout's options.
        computing: what computes on the host, as it was priced.
        lines: for the header.
        predicted_s: of a step.
    """

    config: Config
    computing: Computing
    lines: tuple[str, ...]
    predicted_s: float

    def compare(self, batch_size: int, records: Sequence[Mapping[str, Any]]) -> str:
        """Return a line with the step as it was predicted and as it was measured, the median of the metrics."""
        rates = [each["samples_per_second"] for each in records if each.get("kind") == "train"]
        rates = [rate for rate in rates[1:] or rates if rate]
        predicted = f"step predicted {format_seconds(self.predicted_s, 3)}"
        if not rates:
            return f"{predicted}; too few steps to measure it"
        took_s = batch_size / median(rates)
        off = 100 * (self.predicted_s / took_s - 1)
        return f"{predicted}, measured {format_seconds(took_s, 3)} ({off:+.0f} %)"


def workload_of(config: Config, samples: Samples) -> Workload:
    """Return what a configuration trains, as the planner takes it."""
    options, wanted = config.optimization, config.optimization.batch_size
    files = [file for name in (config.model.model, options.optimizer, options.loss) if (file := custom_file(name))]
    outputs = ModelSignature.of(samples, None).outputs
    key = {
        "model": to_json(config.model),
        "own": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else "",
        "sample": [*samples.sample_shape, outputs],
        "optimizer": [options.optimizer, options.momentum, options.clip],
        "numbers": [config.run.dtype, config.run.precision, config.run.jit],
    }
    return Workload(
        build=lambda: build_model(config.model, samples.sample_shape, outputs),
        optimizer=lambda storage: build_optimizer(options, storage),
        losses=lambda where: build_losses(options, where),
        samples=samples,
        batch_size=len(samples) if wanted == "full" else min(wanted, len(samples)),
        state_arrays=2 if options.optimizer != "sgd" else int(options.momentum > 0),
        dtype=config.run.dtype,
        precision=config.run.precision,
        clip=options.clip,
        seed=config.run.seed,
        key=key,
    )


def take_profile(workload: Workload, group: Group, ranks: int, backend: Backend, say: Say) -> tuple[Workload, Profile]:
    """Return the profile that is kept for a workload, or measure and keep one. Collective.

    Args:
        workload: what is to be trained.
        group: that measures.
        ranks: that a layout is sought for.
        backend: where this rank computes.
        say: called with a sentence before it is measured.
    """
    pools = threadpoolctl.threadpool_info()
    blas = [[each.get("internal_api"), each.get("version")] for each in pools]
    threads = [each.get("num_threads") for each in pools]
    more = {"host": platform.node(), "blas": blas, "threads": threads, "at_once": group.size, "version": VERSION}
    key = {**workload.key, "batch": workload.batch_size, "ranks": ranks, "backend": backend.name, **more}
    workload = replace(workload, key=group.share(key))
    file = profile_file(workload)
    kept: Any = on_root(group, lambda: _load(file, workload))
    if kept is not None:
        return workload, Profile.from_json(kept)
    say("measuring the model's parts, which is done once and kept")
    with explained(backend, "the model's parts are measured here, and do not fit ({}); give a smaller model or batch"):
        found = measure(workload, group, ranks, shares_of(ranks), backend)
    on_root(group, lambda: _keep(file, found, say))
    return workload, found


def _keep(file: Path, found: Profile, say: Say) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(found.to_json()).encode())
    except OSError as error:
        say(f"the profile cannot be kept: {error}")


def profile_file(workload: Workload) -> Path:
    """Return where the profile of a workload with a whole key is kept."""
    return default_file(workload.key, cache_folder())


def _load(file: Path, workload: Workload) -> dict[str, Any] | None:
    found = load_profile(file, workload.key)
    return None if found is None else found.to_json()


def take_network(group: Group, say: Say) -> PlannedNetwork:
    """Return what messages cost between the ranks of a job: as kept, or measured in a few seconds. Collective."""
    if group.size == 1:
        return PlannedNetwork("one rank sends nothing", Machine.uniform(0.0, 0.0), 1)
    fit = find_fit(group)
    if fit is None:
        say("measuring messages for some seconds; python -m nnmpi.comm fit measures longer, and keeps what it finds")
        fit = measure_fit(group, budget_s=FIT_S)
    return PlannedNetwork.fitted(fit)


def choose(config: Config, group: Group, backend: Backend, local_rank: int, say: Say) -> ChosenLayout:
    """Return the configuration with the layout that takes least time; the same on all ranks. Collective.

    Args:
        config: with the layout left open.
        group: all ranks of the run.
        backend: where this rank computes.
        local_rank: this rank's number on its node.
        say: called with a sentence when something takes its time.

    Raises:
        UsageError: on all ranks, for options that leave nothing to choose.
        LayoutError: on all ranks, when nothing fits the memory.
    """
    begin = clock.now()
    train, _ = load_samples(config, group, local_rank, say)
    model = build_whole(config, train, backend, group)
    config, computing = choose_computing(config, model, train, backend, group)
    with computing.in_use():
        return _choose(config, computing, train, group, backend, local_rank, say, begin)


def _choose(
    config: Config,
    computing: Computing,
    train: Samples,
    group: Group,
    backend: Backend,
    local_rank: int,
    say: Say,
    begin: float,
) -> ChosenLayout:
    workload, profile = take_profile(workload_of(config, train), group, group.size, backend, say)
    network = take_network(group, say)

    def look() -> list[Any]:
        pricer = Pricer(workload, profile, network, ModelShapes(workload, profile, backend))
        found = plan(pricer, config.parallel.memory_limit_bytes, RACERS, kind_of)
        racing = list(found.best)
        if found.replicas is not None and found.replicas not in racing:  # pipelines may all be dearer than predicted
            racing[RACERS - 1 :] = [found.replicas]
        first = [[str(one.candidate), report.options(one), one.price.seconds] for one in racing]
        return [first, found.looked_at, found.priced]

    first, looked_at, priced = on_root(group, look)
    lines = [f"planner: {looked_at} layouts, {priced} of them simulated; messages {network.name}"]
    best = 0
    if len(first) > 1:
        names = [name for name, _, _ in first]
        kept = all(name in profile.raced for name in names)
        if not kept:
            say(f"racing {counted(len(first), 'layout')} for some steps each, which is done once and kept")
            times = race([with_options(config, each) for _, each, _ in first], group, backend, local_rank)
            profile = replace(profile, raced=dict(zip(names, times, strict=True)))
            on_root(group, lambda: _keep(profile_file(workload), profile, say))
        order = sorted((profile.raced[name], i) for i, name in enumerate(names))
        best = order[0][1]
        lines += [
            f"race{' (kept)' if kept else ''}: {names[i]}: predicted {format_seconds(first[i][2], 3)}, "
            f"took {format_seconds(took_s, 3)}"
            for took_s, i in order
        ]
    name, options, seconds = first[best]
    found_s = format_seconds(clock.now() - begin, 2)
    lines.append(f"chosen: {name}; a step is predicted to take {format_seconds(seconds, 3)} (found in {found_s})")
    return ChosenLayout(with_options(config, options), computing, tuple(lines), seconds)


def kind_of(layout: Candidate) -> tuple[Any, ...]:
    """Return what prices of layouts that are alike have in common, and so their errors."""
    return tuple(size > 1 for size in layout.axes), layout.zero > 0, layout.allreduce == AUTO


def race(layouts: Sequence[Config], group: Group, backend: Backend, local_rank: int) -> list[float]:
    """Return the seconds of a step of each layout, the least of some rounds. Collective.

    They run in turns, forwards and backwards, as the machine's speed may change meanwhile. What is far behind after a
    round is out, and has the time that it took until then.
    """
    samples = load_samples(layouts[0], group, local_rank, _silent)
    times = [inf] * len(layouts)
    running = list(range(len(layouts)))
    for _ in range(RACE_ROUNDS):
        for i in running:
            times[i] = min(times[i], time_layout(layouts[i], group, backend, local_rank, samples).seconds)
        running = [i for i in reversed(running) if times[i] <= BEHIND * min(times)]
        if len(running) == 1:
            break
    return times


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Return a configuration with the options of a layout, and none left open."""
    return replace(config, parallel=replace(config.parallel, **options, layout="given"))


@dataclass(frozen=True)
class TimedLayout:
    """A layout that was run for some steps.

    Attributes:
        seconds: of a step, undisturbed: the lower quartile, of the slowest rank.
        memory: the most bytes of each kind, of the rank that has most in all.
    """

    seconds: float
    memory: Mapping[str, int]


def time_layout(
    config: Config, group: Group, backend: Backend, local_rank: int, samples: tuple[Samples, Samples] | None = None
) -> TimedLayout:
    """Return what a configuration takes, run for some steps. Collective. What is trained meanwhile is thrown away.

    The data are loaded, where `samples` does not say what `load_samples` has returned.

    Raises:
        NnmpiError: on all ranks, where the layout cannot be.
    """
    layout, mesh = find_layout(config, group)
    place = mesh.coordinates(group.rank).d, mesh.dp
    inputs = load_inputs(config, group, local_rank, _silent, place, mesh.pp, samples)
    if group.size > 1 and group.fit is None:
        group.fit = find_fit(group)
    wanted = layout if needs_arrangement(layout, mesh) else None
    model = build_whole(config, inputs.train, backend, group)
    trainer = build_trainer(config, model, group, inputs, backend, wanted)
    if not isinstance(trainer, Worker):
        raise UsageError("only layouts of ranks in step are raced")
    batches = (batch for epoch in numbers() for batch in inputs.train_loader.epoch(epoch))
    times: list[float] = []
    steps = MOST_STEPS
    for number, batch in enumerate(islice(batches, WARM_UP_STEPS + MOST_STEPS)):
        group.barrier()
        begin = clock.now()
        trainer.step(batch, 0.0)
        times.append(clock.now() - begin)
        if number + 1 == WARM_UP_STEPS:
            steps = round(RACE_S / max(group.max_floats([times[-1]])[0], 1e-9))
            steps = min(max(steps, LEAST_STEPS), MOST_STEPS)
        if number + 1 == WARM_UP_STEPS + steps:
            break
    everyones = group.gather(dict(trainer.ledger.report().peaks))
    trainer.release()
    if trainer.arrangement is not None:
        trainer.arrangement.free()
    most = max(everyones, key=lambda peaks: sum(peaks.values()))
    settled = times[max(WARM_UP_STEPS, len(times) // SETTLED) :]
    return TimedLayout(group.max_floats([float(np.quantile(settled, QUARTILE))])[0], most)


def _silent(_: str) -> None:
    pass


def check_open(config: ParallelConfig, asynchronous: bool, resuming: bool = False) -> None:
    """Refuse options that say themselves what the planner is to choose.

    Raises:
        UsageError: naming the first.
    """
    if asynchronous:
        raise UsageError("--layout auto is for ranks in step; leave it, or --sync, out")
    if resuming:
        raise UsageError("--layout auto is for a new run; leave it out: with --resume the run's own layout goes on")
    plain = ParallelConfig()
    left_open = (
        *("dp", "pp", "tp", "sp", "pipeline", "virtual_stages", "microbatches", "split", "reduction"),
        *("zero", "activation_memory", "offload_state", "allreduce"),
    )
    for name in left_open:
        if getattr(config, name) != getattr(plain, name):
            raise UsageError(f"--layout auto chooses --{name.replace('_', '-')} itself; leave one of them out")
