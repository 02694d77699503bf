"""`nnmpi speedup --ranks 1,2,4,8 -- TRAIN OPTIONS`: measure strong or weak scaling.

samples/s                        measured (*): the median over the lines of metrics, without the
                                 first one
  |              . *             model (.): a step of the first number of ranks, divided, and the
  |         .*                   cost model's sum of gradients, given a fit or a --network
  |    .*
  +---------------- ranks

Each number of ranks is a training run of its own, started as a user would start it: so start-up,
data and logging are those of real runs.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import isfinite, isnan, nan
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from nnmpi.base.command import flag_of, read_command, read_words, require, say
from nnmpi.base.errors import LaunchError, UsageError, counted, raised_as
from nnmpi.base.files import OutputFile, write_json
from nnmpi.base.launcher import python_words
from nnmpi.base.picture import check_figure, new_figure, save_figure
from nnmpi.comm.algorithms.registry import ALGORITHMS
from nnmpi.comm.duration import price
from nnmpi.comm.fit import parse_network
from nnmpi.lab.launching import find_launcher
from nnmpi.train.cli import without
from nnmpi.train.config import OptimizationConfig, all_options
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import read_metrics

PROGRAM = "nnmpi speedup"
DESCRIPTION = """Measure how training scales with the number of ranks.

Runs the training with each number of ranks, one after another, and prints speed-up and efficiency
beside the cost model's.

nnmpi speedup --ranks 1,2,4 -- --dataset digits --model cnn
nnmpi speedup --ranks 1,2,4,8,16 --simulate --network alpha_us=50,gbit=1 -- --model mlp
nnmpi speedup --ranks 1,2,4 --weak -- --model mlp --batch-size 64

The options after -- are the train command's. A run takes 60 steps by default. With --slow ms= a
step takes the same time on any number of ranks: then use --weak."""
STEPS = 60
# Options with which a step may communicate more than one sum of all gradients over all ranks.
OTHERWISE = {"layout", "pp", "tp", "sp", "zero", "reduction", "sync", "config"}


@dataclass(frozen=True)
class Scaled:
    """A run on some ranks.

    Attributes:
        ranks: their number.
        samples_per_second: the median.
        step_s: seconds of a step, the median.
        sum_s: the cost model's seconds of a step's sum of gradients; NaN without a known network.
        speedup: over the first run, in samples per second; NaN until compared, as the next two.
        efficiency: `speedup` divided by the factor of the number of ranks.
        predicted: the model's speed-up.
    """

    ranks: int
    samples_per_second: float
    step_s: float
    sum_s: float
    speedup: float = nan
    efficiency: float = nan
    predicted: float = nan


@dataclass(frozen=True)
class ScalingConfig:
    """The measurement."""

    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks, ascending, such as 1,2,4."""
    weak: bool = False
    """Weak scaling: --batch-size is per rank."""
    simulate: bool = False
    """Run on simulated ranks in one process, without MPI."""
    json: OutputFile | None = None
    """File for the numbers."""
    plot: OutputFile | None = None
    """File for a plot: .svg, .png, .pdf."""
    replace: bool = False
    """Replace files that are there."""
    network: str | None = None
    """Links of simulated ranks, as --network of the train command."""

    def __post_init__(self) -> None:
        shown = ",".join(map(str, self.ranks))
        require(
            min(self.ranks) > 0, f"--ranks is {shown}; give numbers of at least 1, such as 1,2,4"
        )
        require(
            list(self.ranks) == sorted({*self.ranks}),
            f"{shown} does not increase; give each number once, such as 1,2,4",
        )


def main(words: Sequence[str]) -> str:
    """Run the trainings and return the table.

    Raises:
        UsageError: for wrong options of this command or of the train command.
        LaunchError: when a run fails.
    """
    cut = [*words, "--"].index("--")
    train_words = words[cut + 1 :]
    (options,) = read_command("", PROGRAM, DESCRIPTION, (ScalingConfig,), words[:cut])
    train_words = [*train_words, *(["--network", options.network] if options.network else [])]
    check_figure(options.plot)
    given: dict[str, Any] = {}
    with suppress(UsageError):  # the first run prints the error
        given = read_words(train_words, list(all_options().values()), PROGRAM, DESCRIPTION)
    if taken := given.keys() & {"out", "resume", "ranks", "simulate"}:
        raise UsageError(f"{flag_of(min(taken))} is chosen by this command; leave it out after --")
    # a step of --slow ms= takes as long on any number of ranks, whatever its share of the batch
    constant_time = "ms=" in str(given.get("slow", "")).replace(" ", "")
    rows: list[Scaled] = []
    for count in options.ranks:
        run = _measure(count, train_words, given, options)
        rows.append(_compared(run, rows, options.weak, constant_time))
        print(
            f"{counted(count, 'rank')}: {rows[-1].samples_per_second:.0f} samples/s",
            file=sys.stderr,
            flush=True,
        )
    if options.json is not None:
        numbers = [{k: v if isfinite(v) else None for k, v in asdict(row).items()} for row in rows]
        with raised_as(UsageError, f"{options.json} cannot be written"):
            write_json(options.json, numbers)
    if options.plot is not None:
        _draw(rows, options.plot, _describe(given, options))
    result = _table(rows)
    if constant_time and not options.weak:
        result += (
            "\n--slow ms= gives a step the same time on any number of ranks; --weak gives them more"
            " work"
        )
    return result


def _measure(
    ranks: int, words: Sequence[str], given: Mapping[str, Any], options: ScalingConfig
) -> Scaled:
    """Train on some ranks with the options `words`, parsed in `given`, and read the metrics."""
    usual = {"log_every": "5", "eval_every": "0", "quiet": None}
    if not {"max_steps", "epochs"} & given.keys():
        usual |= {"epochs": "1000", "max_steps": str(STEPS)}
    more = [
        word
        for name, value in usual.items()
        if name not in given
        for word in (flag_of(name), value)
        if word is not None
    ]
    if options.weak:
        batch = given.get("batch_size", OptimizationConfig.batch_size)
        if batch == "full":
            raise UsageError(
                "--batch-size full does not grow with the ranks; give a number, or leave --weak out"
            )
        words = without(("--batch-size",), words)
        more += ["--batch-size", str(batch * ranks)]
    start = [] if options.simulate else find_launcher(ranks, ()).command(ranks, {})
    more += ["--simulate", str(ranks)] if options.simulate else []
    with tempfile.TemporaryDirectory(prefix="nnmpi-speedup-") as folder:
        run = Path(folder) / "run"
        program = [*start, *python_words(), "-m", "nnmpi.train"]
        command = [*program, *words, *more, "--out", str(run)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            text = [line for line in ran.stderr.splitlines() if line.strip()] or ["no output"]
            raise LaunchError(
                f"the run on {counted(ranks, 'rank')} ended with status {ran.returncode}: "
                f"{text[0].removeprefix('nnmpi: ')}"
            )
        records = [item for item in read_metrics(RunFolder(run).metrics) if item["kind"] == "train"]
    if len(records) < 2:
        raise UsageError(
            "a run of fewer than 10 steps is too short to time; give more with --max-steps"
        )
    steps = [
        (after["elapsed_s"] - before["elapsed_s"]) / (after["global_step"] - before["global_step"])
        for before, after in pairwise(records)
    ]
    sums = [
        nan if record["predicted_sync_s"] is None else record["predicted_sync_s"]
        for record in records
    ]
    rate = median(record["samples_per_second"] for record in records[1:])
    sum_s = _price(ranks, given, records[0]["memory_gradients"])
    return Scaled(ranks, rate, median(steps), median(sums) if isnan(sum_s) else sum_s)


def _price(ranks: int, given: Mapping[str, Any], nbytes: int) -> float:
    """Return the seconds of the gradients' sum on --network; NaN unless it is one named sum."""
    name = given.get("allreduce", "")
    if "network" not in given or name not in ALGORITHMS or given.keys() & OTHERWISE:
        return nan
    return price(ALGORITHMS[name], ranks, nbytes, parse_network(given["network"], ranks))


def _compared(run: Scaled, before: Sequence[Scaled], weak: bool, constant_time: bool) -> Scaled:
    """Return a run with its speed-up over the first one.

    Args:
        constant_time: whether a step takes as long on any number of ranks.
    """
    first = before[0] if before else run
    times = run.ranks / first.ranks
    samples = times if weak else 1  # of a step, relative to the first run's
    predicted_s = first.step_s * (1 if constant_time else samples / times) + (
        run.sum_s if before else 0
    )
    speedup = samples * first.step_s / run.step_s
    return replace(
        run,
        speedup=speedup,
        efficiency=speedup / times,
        predicted=samples * first.step_s / predicted_s,
    )


def _table(rows: Sequence[Scaled]) -> str:
    lines = ["ranks  samples/s    ms/step  speed-up  efficiency  model's speed-up  off"]
    for row in rows:
        off = row.predicted / row.speedup - 1
        model = f"{row.predicted:16.2f} {off:+5.0%}" if isfinite(off) else f"{'-':>16}"
        numbers = (
            f"{row.samples_per_second:9.0f} {1e3 * row.step_s:10.2f} {row.speedup:9.2f}"
            f" {row.efficiency:10.0%}"
        )
        lines.append(f"{row.ranks:5}  {numbers}  {model}")
    if not all(isfinite(row.predicted) for row in rows):
        lines.append(
            "-: the cost of sums is unknown; make a fit with mpirun -n N nnmpi comm fit, or give"
            " --network with an --allreduce such as ring"
        )
    return "\n".join(lines)


def _describe(given: Mapping[str, Any], options: ScalingConfig) -> str:
    """Return what is trained, and between which ranks: the title of the figure."""
    known = {name: option.default for name, option in all_options().items()} | {**given}
    parts = [
        f"{known['model']} on {known['dataset']}",
        f"batch {known['batch_size']}{' per rank' if options.weak else ''}",
        "simulated" if options.simulate else "measured",
        *([f"links {known['network']}"] if known["network"] else []),
    ]
    return "\n".join(wrap(", ".join(parts), 60))


def _draw(rows: Sequence[Scaled], file: Path, title: str) -> None:
    """Draw the speed-ups over the ranks, on axes in powers of two, with the ideal line."""
    figure = new_figure(5, 4)
    figure.suptitle(title, size=10)
    axes, ranks = figure.subplots(), [row.ranks for row in rows]
    axes.plot(ranks, [count / ranks[0] for count in ranks], color="0.7", label="ideal")
    if all(isfinite(row.predicted) for row in rows):
        axes.plot(ranks, [row.predicted for row in rows], "--", color="C1", label="cost model")
    axes.plot(ranks, [row.speedup for row in rows], "o-", color="C0", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="ranks", ylabel=f"speed-up over {counted(ranks[0], 'rank')}")
    axes.legend(frameon=False)
    save_figure(figure, file)


if __name__ == "__main__":
    sys.exit(say(main))
