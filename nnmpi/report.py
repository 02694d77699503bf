"""`python -m nnmpi.report RUN`: a run as one page for a browser: curves, where time went, memory, layout, options.

    python -m nnmpi.report runs/digits-cnn                 writes runs/digits-cnn/report.html
    python -m nnmpi.report runs/digits-cnn --out page.html
    python -m nnmpi.report runs/digits-cnn --tensorboard FOLDER

All numbers are those of the run's own files. A run that is under way can be looked at, too.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nnmpi.command import Parser, say
from nnmpi.compose.stats import PARTS
from nnmpi.errors import UsageError, raised_as
from nnmpi.files import foreign
from nnmpi.pages.page import write_page
from nnmpi.train.config import all_options, shown
from nnmpi.train.folder import RunFolder, read_run
from nnmpi.train.metrics import read_metrics, sum_staleness

MOST_POINTS = 500  # of a line
STEPS, SECONDS = ("global_step", "step"), ("elapsed_s", "seconds")
TRAINED, TESTED = {"training": "train"}, {"test data": "eval"}
BOTH = TRAINED | TESTED
PANELS = [  # title, label and key of the values, whose they are, and what they are drawn over
    ("Loss", "loss", "loss", BOTH, STEPS),
    ("Perplexity", "perplexity", "perplexity", BOTH, STEPS),
    ("Accuracy", "accuracy", "accuracy", BOTH, STEPS),
    ("Root of the mean squared error", "RMSE", "rmse", BOTH, STEPS),
    ("Share of the variance that is explained", "R2", "r2", BOTH, STEPS),
    ("Learning rate", "learning rate", "learning_rate", TRAINED, STEPS),
    ("Length of the gradient", "norm", "grad_norm", TRAINED, STEPS),
    ("Passes over the training data", "epochs", "epoch", TRAINED, STEPS),
    ("Training speed", "samples per second", "samples_per_second", TRAINED, STEPS),
    ("Evaluation speed", "samples per second", "samples_per_second", TESTED, STEPS),
    ("Evaluation speed in batches", "batches per second", "steps_per_second", TESTED, STEPS),
    ("Runtime of an evaluation", "seconds", "runtime", TESTED, STEPS),
    ("Loss over time", "loss", "loss", BOTH, SECONDS),
    ("Accuracy over time", "accuracy", "accuracy", BOTH, SECONDS),
]
RESULT = ("kind", "epoch", "loss", "accuracy", "perplexity", "elapsed_s")
_MEMORY = "memory_"


def main(words: Sequence[str]) -> str:
    """Write the page and return where it is.

    Raises:
        UsageError: when there is no run, its files cannot be read, or the page cannot be written.
    """
    parser = Parser("python -m nnmpi.report", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="for TensorBoard's files of its metrics")
    given = parser.parse_args(words)
    file = given.out or given.run / "report.html"
    if given.out is None and file.is_symlink():
        raise UsageError(f"{file} is a link, which may lead anywhere; remove it, or give --out")
    if given.tensorboard is not None:
        read_run(given.run, str(given.run))
        write_events(given.tensorboard, read_metrics(RunFolder(given.run).metrics))
    write_page(file, "run", f"run {given.run.resolve().name}", gather(given.run))
    return f"{file} shows the run in a browser"


def write_events(folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write every number of the records as a scalar KIND/KEY at its step, for TensorBoard.

    Raises:
        UsageError: without tensorboardX, and for a folder that cannot be written.
    """
    if find_spec("tensorboardX") is None:
        raise UsageError("TensorBoard's files are written by tensorboardX; pip install 'nnmpi[tensorboard]'")
    from tensorboardX import SummaryWriter

    with raised_as(UsageError, f"{folder} cannot be written"), SummaryWriter(str(folder)) as writer:
        for record in records:
            for key, value in record.items():
                if key not in ("kind", "global_step", "epoch", "time") and isinstance(value, int | float):
                    writer.add_scalar(f"{record['kind']}/{key}", value, record["global_step"], record.get("time"))


def gather(run: Path) -> dict[str, Any]:
    """Return what the page shows, as JSON values.

    Raises:
        UsageError: when there is no run in the folder, or its files cannot be read.
    """
    options, folder = read_run(run, str(run)), RunFolder(run)
    with foreign(folder.metrics, UsageError, "the metrics of the run cannot be read"):
        records = read_metrics(folder.metrics)
        began = read_metrics(folder.starts) if folder.starts.is_file() else []
        commands = [f"{shlex.join(each['command'])}    # ranks: {each['ranks']}" for each in began]
        trained = [each for each in records if each["kind"] == "train"]
        tests = [each for each in records if each["kind"] in ("eval", "test")]
        stale = sum_staleness(records)
        heights = [[each.get(n, 0) for n in range(stale.largest() + 1)] for each in stale.histograms if stale.count()]
        return {
            "head": began[-1].get("facts", []) if began else [],
            "results": [{key: each.get(key) for key in RESULT} for each in tests[-2:]],
            "charts": [chart for panel in PANELS if (chart := _chart(*panel, records))["lines"]],
            "times": {label: mean for key, label in PARTS.items() if (mean := _mean(trained, key))},
            "memory": {
                key.removeprefix(_MEMORY): n for key, n in (trained or [{}])[-1].items() if key.startswith(_MEMORY)
            },
            "staleness": {"heights": heights, "mean": stale.mean(), "max": stale.largest()},
            "options": _options(options),
            "commands": commands,
        }


def _chart(
    title: str, label: str, key: str, kinds: Mapping[str, str], over: tuple[str, str], records: Sequence[Any]
) -> dict[str, Any]:
    lines = []
    for name, kind in kinds.items():
        chosen = [each for each in records if each["kind"] == kind and None not in (each.get(key), each.get(over[0]))]
        points = [[each[over[0]], each[key]] for each in chosen]
        lines.append({"name": name, "points": points[:: max(1, len(points) // MOST_POINTS)]})
    lines = [line for line in lines if line["points"]]
    return {"title": title, "label": label, "along": over[1], "lines": lines}


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [each[key] for each in records if each.get(key) is not None]
    return sum(values) / len(values) if values else 0.0


def _options(options: Mapping[str, Any]) -> list[list[str]]:
    """Return the run's options that are no defaults: those that were given, and those that it has chosen."""
    known = all_options()
    return [[known[name].flag, shown(value)] for name, value in options.items() if value != known[name].default]


if __name__ == "__main__":
    sys.exit(say(main))
