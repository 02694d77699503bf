"""`nnmpi plan`: find the layout whose step is fastest, for a model and a machine."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from textwrap import wrap
from typing import Any, NamedTuple

from nnmpi.base.command import as_words, check_numbers, require
from nnmpi.base.errors import counted
from nnmpi.base.launcher import start_words
from nnmpi.base.units import Bytes, format_bytes, format_seconds
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.ranks import parse_together, run_on_ranks
from nnmpi.commands.start import read_with_train_options
from nnmpi.lab.planner.network import PlannedNetwork, find_network
from nnmpi.lab.planner.price import LayoutSearch, plan
from nnmpi.lab.planner.profile import Workload, find_profile
from nnmpi.memory.ledger import KINDS
from nnmpi.train.build import build_full_model
from nnmpi.train.computing import check_backend, choose_computing, computing, make_backend
from nnmpi.train.config import (
    SEQUENCE_MODELS,
    Config,
    DataConfig,
    ModelConfig,
    NumericsConfig,
    OptimizationConfig,
    ParallelConfig,
    RunConfig,
)
from nnmpi.train.inputs import SampleConfig, load_samples, match_loss

PROGRAM = "nnmpi plan"
DESCRIPTION = """Find the layout of a model with the fastest step, on these ranks or on others.

mpirun -n 2 nnmpi plan --model gpt --dataset paradise-lost --batch-size 16
nnmpi plan --model cnn --shape 28 28 1 --ranks 64 --nodes 16 --network alpha_us=20,gbit=10
mpirun -n 2 nnmpi plan --model nets/mine.py:build --batch-size 64 --memory 2GiB

All ranks of this job measure the model's parts once, at the same time; the profile is saved. From
it every layout gets a predicted time. With --memory, layouts that do not fit may recompute
activations. Prints the ten best, their bytes, why others were rejected, and the command of the
first."""
WIDTH = 100
TIMES = ("computing", "bubble", "messages", "update")
# the ledger's kinds, as headings
SHORT = ("weights", "gradients", "state", "activations", "exchange", "batches")
REASONS = 8  # the most frequent reasons for rejected layouts that are printed


@dataclass(frozen=True)
class PlanConfig:
    """The machine and the output."""

    ranks: int | None = None
    """Ranks to plan for (default: this job's)."""
    nodes: int = 1
    """Nodes, with equally many ranks each."""
    memory: Bytes | None = None
    """Bytes per rank for everything, such as 16GiB (default: unlimited)."""
    network: str = "fit"
    """The network: fit, measured on this machine for this many ranks; the file of a fit; or latency
    and bandwidth between nodes, such as alpha_us=50,gbit=10, or alpha=5e-5,beta=8e-10 in seconds.
    To these inside_gbit=80 adds the bandwidth within a node.
    """
    kept: int = 10
    """Layouts to print."""
    remeasure: bool = False
    """Measure the model's parts, though a profile was kept."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_numbers(self, "ranks nodes kept memory", 1)


SHARED: Mapping[type[Any], str] = {
    ModelConfig: "",
    DataConfig: "",
    OptimizationConfig: "batch_size optimizer loss momentum weight_decay",
    NumericsConfig: "",
    ParallelConfig: "compress",
    RunConfig: "backend dtype jit seed",
}


class _Asked(NamedTuple):
    machine: PlanConfig
    samples: SampleConfig
    config: Config
    given: dict[str, Any]  # the options that the train command has too, by name


def parse(words: Sequence[str]) -> _Asked:
    """Parse the command line.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names, values or combinations.
    """
    asked = _Asked(
        *read_with_train_options(words, (PlanConfig, SampleConfig), SHARED, PROGRAM, DESCRIPTION)
    )
    shape, config, given = asked.samples.shape, asked.config, asked.given
    require(
        not (shape and "dataset" in given),
        "--shape replaces --dataset; leave one of them out",
    )
    require(
        shape is None or config.optimization.batch_size != "full",
        "--batch-size full needs a data set, but --shape names none; give a number",
    )
    if shape is not None and config.model.model in SEQUENCE_MODELS:
        require(
            len(shape) == 1,
            f"--shape for --model {config.model.model} is one number, its tokens, such as 64",
        )
        require(
            config.model.context in (None, shape[0]),
            f"--shape has {shape[0]} tokens, but --context is {config.model.context}; leave"
            " --context out",
        )
        given["context"] = shape[0]
    return asked


def main(words: Sequence[str], group: Group) -> None:
    """Print the best layouts. Collective.

    Raises:
        NnmpiError: on all ranks, for every expected error.
    """
    console, asked = parse_together(words, parse, group)
    machine, config = asked.machine, asked.config
    ranks = group.size if machine.ranks is None else machine.ranks
    backend = make_backend(config.run.backend, group)
    if asked.samples.shape is None:
        samples = load_samples(config, group, console.say)[0]
    with agreed(group):
        if asked.samples.shape is not None:
            drawn = asked.samples.draw(int(config.optimization.batch_size), config)
            samples = match_loss(config.optimization.loss, drawn)
        check_backend(config, backend)
    model = build_full_model(config, samples, backend, group)
    config, _ = choose_computing(config, model, samples, backend, group)
    with computing(config):
        # the network first: it may be invalid, and measuring the model takes longer
        network = find_network(group, console.say, ranks, machine.nodes, machine.network)
        workload = Workload(config, (samples, samples), backend)
        profile, _ = find_profile(workload, group, ranks, console.say, machine.remeasure)

        def search() -> list[str]:
            pricer = workload.pricer(profile, network)
            result = plan(pricer, machine.memory, machine.kept)
            command = train_command(asked, ranks, result.best[0].options())
            step_s = profile.step(workload.batch_size, "seconds")
            return [
                *_header(asked, ranks, network, step_s, profile.date),
                *describe(result, profile.raced),
                "",
                command,
            ]

        console.finish(*on_root(group, search))


def _header(
    asked: _Asked, ranks: int, network: PlannedNetwork, step_s: float, date: str
) -> list[str]:
    machine, compress = asked.machine, asked.config.parallel.compress
    memory = "any memory" if machine.memory is None else f"{format_bytes(machine.memory)} each"
    return [
        (
            f"{asked.config.model.model}, batches of {asked.config.optimization.batch_size};"
            f" {counted(ranks, 'rank')} on {counted(len(set(network.nodes)), 'node')}, {memory}"
        ),
        f"messages: {network.name}{f'; gradients by {compress}' if compress else ''}",
        (
            f"computing: measured here on {date}; a step of one rank takes"
            f" {format_seconds(step_s, 3)} without the update"
        ),
        "",
    ]


def describe(search: LayoutSearch, raced: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of a search's result, at most 100 columns wide.

    Args:
        raced: the measured seconds of some layouts' steps, by their text.
    """
    yield counted(search.considered, "layout")
    yield ""
    yield f"{'':>3}{'step':>10}{'measured':>10}" + "".join(map("{:>10}".format, TIMES)) + "  layout"
    for number, element in enumerate(search.best, 1):
        name, price = str(element.candidate), element.price
        took_s = raced.get(name)
        times = "".join(
            f"{'-' if item is None else format_seconds(item, 3):>10}"
            for item in (price.seconds, took_s, *vars(price).values())
        )
        first, *rest = wrap(name, WIDTH - 65)
        yield f"{number:>3}{times}  {first}"
        yield from (f"{'':>65}{line}" for line in rest)
    yield ""
    yield f"{'':>3}{'bytes':>12}" + "".join(f"{name:>13}" for name in SHORT)
    for number, element in enumerate(search.best, 1):
        sizes = "".join(f"{format_bytes(element.memory.get(kind, 0)):>13}" for kind in KINDS)
        yield f"{number:>3}{format_bytes(element.bytes):>12}{sizes}"
    if search.refused:
        yield ""
        yield "excluded:"
    for reason, count in search.refused.most_common(REASONS):
        first, *rest = wrap(reason, WIDTH - 10)
        yield f"{count:>8}  {first}"
        yield from (f"{'':>10}{line}" for line in rest)


def train_command(asked: _Asked, ranks: int, layout: Any) -> str:
    """Return the shell command that trains with a layout."""
    words = [f"{start_words(ranks)} nnmpi train"]
    words += starmap(as_words, {**asked.given, **layout}.items())
    if asked.samples.shape is not None:
        words.append("--dataset DATA")
    return " ".join(words)


if __name__ == "__main__":
    run_on_ranks(sys.argv[1:], main)
