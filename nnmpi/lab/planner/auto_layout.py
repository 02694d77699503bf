"""`--layout auto`: choose a layout by prediction, then by a race.

    profile and fit (cached or measured)
        -> the predicted best layout of each kind
        -> a race of the first RACERS of these
        -> the winner's options

A prediction may be off by 10 %. Layouts of one kind (the same axes in use, ZeRO or not) have
similar errors. So the race compares kinds, and the prediction chooses within a kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

import nnmpi.base.clock as clock
from nnmpi.backend.backend import Backend
from nnmpi.base.command import non_defaults
from nnmpi.base.errors import counted
from nnmpi.base.units import format_seconds
from nnmpi.comm.agreement import on_root
from nnmpi.comm.group import Group
from nnmpi.comm.saved_fit import find_fit
from nnmpi.compose.stats import PARTS
from nnmpi.data.dataset import Samples
from nnmpi.lab.planner.network import QUICK, Say, find_network
from nnmpi.lab.planner.price import PIPELINES, Candidate, LayoutPrice, plan
from nnmpi.lab.planner.profile import Workload, find_profile, kept_profile, time_layout
from nnmpi.train import computing as host
from nnmpi.train.build import build_full_model
from nnmpi.train.computing import choose_computing, multiplications
from nnmpi.train.config import Config
from nnmpi.train.derived import count_microbatches, find_layout
from nnmpi.train.inputs import load_samples

RACE_S = 0.6  # seconds per layout and round
RACERS = 4  # layouts of different kinds
RACE_ROUNDS = 2
FAR_OFF = 0.15  # of a step's time
SHORT_S = 1e-3  # of an MLP's 230 us, a run's own work and the waits for it were 170 us more
# Options that a price knows
PRICED = {"layout", "activation_memory", "compress", *Candidate.__dataclass_fields__}
MENDS = {
    "compute_s": "nnmpi plan --remeasure measures the model anew",
    "wait_s": "nnmpi plan --remeasure measures the stages anew",
    "sync_s": "nnmpi comm fit measures the messages",
    "input_s": "the plan has no time for it: give the loader more workers",
}


@dataclass(frozen=True)
class ChosenLayout:
    """The result of `--layout auto`.

    Attributes:
        config: with the layout's options.
        lines: for the header.
        price: of a step; None without a search.
    """

    config: Config
    lines: tuple[str, ...]
    price: LayoutPrice | None = None

    def compare(self, batch_size: int, records: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a line with a step's predicted time and the measured one (the metrics' median).

        Beyond `FAR_OFF` it names the part of the step that differs most.
        """
        if self.price is None:
            return []
        windows = [record for record in records if record.get("kind") == "train"]
        # the first one compiles, records and fills caches
        windows = [item for item in windows[1:] or windows if item.get("samples_per_second")]
        predicted = f"step predicted {format_seconds(self.price.seconds, 3)}"
        if not windows:
            return [f"{predicted}; too few steps to measure it"]
        measured_s = batch_size / median(item["samples_per_second"] for item in windows)
        error = self.price.seconds / measured_s - 1
        line = f"{predicted}, measured {format_seconds(measured_s, 3)} ({round(100 * error):+d} %)"
        if abs(error) <= FAR_OFF:
            return [line]
        if measured_s < SHORT_S:
            return [f"{line}; between steps as short as this a run looks after itself"]
        price = self.price
        expected = {
            "compute_s": price.computing_s + price.update_s,
            "wait_s": price.bubble_s,
            "sync_s": price.exposed_s,
            "input_s": 0.0,
        }
        took = {part: median(item.get(part) or 0.0 for item in windows) for part in expected}
        part = max(expected, key=lambda part: abs(took[part] - expected[part]))
        was, now = (format_seconds(item[part], 3) for item in (expected, took))
        return [
            f"{line}; most of it in {PARTS[part]}, predicted {was}, measured {now}; {MENDS[part]}"
        ]


def choose(config: Config, group: Group, backend: Backend, say: Say) -> ChosenLayout:
    """Return the configuration with the fastest layout, equal on all ranks. Collective.

    A run that is shorter than a search gets replicas.

    Args:
        config: with --layout auto.
        group: all ranks of the run.
        backend: of this rank.
        say: called with a sentence before a measurement.

    Raises:
        UsageError: on all ranks, for options that leave nothing to choose.
        LayoutError: on all ranks, when no layout fits the memory.
    """
    samples = load_samples(config, group, say)
    model = build_full_model(config, samples[0], backend, group)
    config, kernels = choose_computing(config, model, samples[0], backend, group)
    work = multiplications(config.optimization, model, samples[0])
    if group.size == 1 or (work < host.PAYS and config.parallel.memory_limit is None):
        line = (
            f"planner: replicas; a search pays in runs of {host.PAYS:.0e} multiplications, this one"
            f" has {work:.0e}"
        )
        result = ChosenLayout(config.having(layout="given"), (line,))
    else:
        with host.computing(config):
            result = _search(Workload(config, samples, backend), group, say)
    return replace(result, lines=(*result.lines, *filter(None, [kernels])))


def foresee(
    config: Config, samples: tuple[Samples, Samples], group: Group, backend: Backend, say: Say
) -> ChosenLayout | None:
    """Return the price of a layout that is given, of parts that were measured before. Collective.

    None without a kept profile or fit, and for options that have no price.

    Args:
        config, group, backend, say: as for `choose`; with a layout.
        samples: the training and the test set.
    """
    layout, mesh = find_layout(config, group)
    workload = Workload(config, samples, backend)
    parts = count_microbatches(config, mesh.pp, workload.batch_size)
    if (
        non_defaults(config.parallel).keys() - PRICED
        or non_defaults(config.sync)
        or layout.activation_memory not in (None, "least")
        or (layout.pipeline not in dict(PIPELINES) if mesh.pp > 1 else parts > 1)
    ):
        return None
    profile, _ = kept_profile(workload, group, group.size, say)
    if profile is None or mesh.shape[2:] not in profile.shares or find_fit(group, QUICK) is None:
        return None
    pipelined: dict[str, Any] = {
        "pipeline": layout.pipeline,
        "virtual_stages": layout.stages_per_rank,
    }
    candidate = Candidate(
        *mesh.shape,
        zero=layout.zero,
        microbatches=parts,
        recompute=layout.activation_memory is not None,
        **pipelined if mesh.pp > 1 else {},
    )
    network = find_network(group, say, group.size)
    price = LayoutPrice(
        **on_root(group, lambda: vars(workload.pricer(profile, network).price(candidate)))
    )
    line = (
        f"plan: a step is predicted to take {format_seconds(price.seconds, 3)}; computing measured"
        f" on {profile.date}; messages {network.name}"
    )
    return ChosenLayout(config, (line,), price)


def _search(workload: Workload, group: Group, say: Say) -> ChosenLayout:
    begin, config = clock.now(), workload.config
    network = find_network(group, say, group.size)
    profile, store = find_profile(workload, group, group.size, say)

    def search() -> tuple[list[list[Any]], int]:
        pricer = workload.pricer(profile, network)
        result = plan(pricer, config.parallel.memory_limit, kind=lambda element: element.kind)
        racing = list(result.best[:RACERS])
        # The price of replicas is a measured step, so it is the most reliable: one always races.
        replicas = [item for item in result.best if item.candidate.dp == group.size]
        if replicas and not any(replica in racing for replica in replicas):
            racing[RACERS - 1 :] = replicas[:1]
        return [
            [str(item.candidate), item.options(), vars(item.price)] for item in racing
        ], result.considered

    first, considered = on_root(group, search)
    names = [name for name, _, _ in first]
    saved = all(name in profile.raced for name in names)
    if not saved:
        say(
            f"racing {counted(len(first), 'layout')} for some steps each, which is done once and"
            " kept"
        )
        times = race(workload, [options for _, options, _ in first], group)
        profile = replace(profile, raced=dict(zip(names, times, strict=True)))
        store(profile)
    order = sorted((profile.raced[name], i) for i, name in enumerate(names))
    prices = [LayoutPrice(**price) for *_, price in first]
    name, options, _ = first[order[0][1]]
    price = prices[order[0][1]]
    lines = [
        f"planner: {considered} layouts; computing measured on {profile.date}; messages"
        f" {network.name}",
        *(
            f"race{' (kept)' if saved else ''}: {names[i]}: predicted"
            f" {format_seconds(prices[i].seconds, 3)}, took {format_seconds(measured_s, 3)}"
            for measured_s, i in order
        ),
        (
            f"chosen: {name}; a step is predicted to take"
            f" {format_seconds(price.seconds, 3)} (found in "
            f"{format_seconds(clock.now() - begin, 2)})"
        ),
    ]
    return ChosenLayout(config.having(**options, layout="given"), tuple(lines), price)


def race(workload: Workload, layouts: Sequence[Mapping[str, Any]], group: Group) -> list[float]:
    """Return the seconds of each layout's step, the least of RACE_ROUNDS. Collective.

    Every other round runs backwards, so that a drift of the machine's speed favours no layout.
    """
    times = [inf] * len(layouts)
    for turn in range(RACE_ROUNDS):
        for i in sorted(range(len(layouts)), reverse=bool(turn % 2)):
            times[i] = min(times[i], time_layout(workload, layouts[i], group, RACE_S))
    return times
