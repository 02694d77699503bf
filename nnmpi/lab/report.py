"""`nnmpi report RUN...`: one page of a run: curves, where time went, memory, options; or of several
runs: their curves in the same pictures, their results, and the options that differ.

    nnmpi report runs/digits-cnn              writes runs/digits-cnn/report.html
    nnmpi report runs/a runs/b runs/c         writes report.html here
    nnmpi report runs/digits-cnn --out page.html
    nnmpi report runs/digits-cnn --tensorboard FOLDER

All numbers come from the run's files, so that the command also works during the run. The page is
one file with its data and scripts inside (see nnmpi.lab.pages).
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nnmpi.base.command import as_words, check_known, read_command, say
from nnmpi.base.errors import UsageError, raised_as
from nnmpi.base.files import OutputFile, foreign, json_text, read_json, rebuilt
from nnmpi.compose.stats import PARTS, ROUNDING
from nnmpi.lab.pages.page import write_page
from nnmpi.metrics.rows import METRICS, each_class
from nnmpi.train.config import all_options
from nnmpi.train.folder import RunFolder, read_run, read_starts
from nnmpi.train.log import describe_metrics
from nnmpi.train.metrics import EVALUATION_FIELDS, read_metrics, sum_staleness

MOST_POINTS, MOST_BARS = 500, 60
MOST_HEIGHTS = 1_000_000  # bars of staleness, of all workers
TRAINED, TESTED = {"training": "train"}, {"test data": "eval"}
BOTH = TRAINED | TESTED
Panel = tuple[str, str, Mapping[str, str]]  # title, key of the values, kinds of records
# of evaluation.json, what a page shows; without classes there is no matrix
EVALUATION: Mapping[str, Any] = {
    "part": str,
    "data": str,
    "step": int,
    "samples": int,
    "classes": tuple[str, ...] | None,
    "confusion": tuple[tuple[int, ...], ...] | None,
}
_MEMORY = "memory_"


@dataclass(frozen=True)
class ReportConfig:
    """Output."""

    out: OutputFile | None = None
    """The page (default: RUN/report.html; of several runs report.html)."""
    replace: bool = False
    """Replace a file that is there."""
    tensorboard: Path | None = None
    """Folder to write the metrics to for TensorBoard, too."""


def main(words: Sequence[str]) -> str:
    """Write the page, and return a sentence with its path.

    Raises:
        UsageError: without a run, for unreadable files, and for a page that cannot be written.
    """
    runs, options = read_command("RUN...", "nnmpi report", __doc__ or "", (ReportConfig,), words)
    is_alone = len(runs) == 1
    names = [run.resolve().name for run in runs]
    if len({*names}) < len(runs):
        names = [str(run) for run in runs]
    for run, name in zip(runs, names, strict=True) if options.tensorboard is not None else ():
        read_run(run, str(run))
        events = options.tensorboard if is_alone else options.tensorboard / name.replace("/", "-")
        write_events(events, read_metrics(RunFolder(run).metrics))
    file = options.out or (RunFolder(runs[0]).page if is_alone else Path("report.html"))
    check_known(file, f"{file}", options.replace)
    data = gather(runs[0]) if is_alone else compare(dict(zip(names, runs, strict=True)))
    write_page(file, "run", f"{'run' if is_alone else 'runs'} {', '.join(names)}", data)
    return f"open {file} in a browser"


def compare(runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the data of a page of several runs, as `gather` does that of one.

    Raises:
        UsageError: see `gather`.
    """
    pages = {name: gather(run) for name, run in runs.items()}
    options = [read_run(run, str(run)) for run in runs.values()]
    rows = [
        [name, *(as_words(name, each.get(name)).partition(" ")[2] for each in options)]
        for name in all_options()
        if len({str(each.get(name)) for each in options}) > 1
    ]
    panels = {
        key: (title, key, kinds)
        for run in runs.values()
        for title, key, kinds in panels_of(read_metrics(RunFolder(run).metrics))
    }
    charts = [
        {
            "title": title,
            "is_share": _is_share(key),
            "lines": [
                line | {"name": f"{name}, {line['name']}"}
                for name, page in pages.items()
                for chart in page["charts"]
                if chart["title"] == title
                for line in chart["lines"]
            ],
        }
        for title, key, _ in panels.values()
    ]
    return {
        "many": True,
        "results": [],
        "head": [[name, result(page["results"])] for name, page in pages.items()],
        "charts": [chart for chart in charts if chart["lines"]],
        "names": [],
        "times": {},
        "parts": [],
        "memory": {},
        "staleness": {"heights": []},
        "evaluation": {},
        "options": [["", *runs], *rows] if rows else [],
        "commands": [],
    }


def result(tests: Sequence[Mapping[str, Any]]) -> str:
    """Return a run's last evaluation as text."""
    if not tests:
        return "not evaluated yet"
    last = tests[-1]
    when = "" if last["epoch"] is None else f" after epoch {last['epoch']:.4g}"
    return f"{', '.join(last['shown'])}{when}"


def panels_of(records: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return the curves of a run: the loss, each metric of its evaluations, rate and gradient."""
    metrics = list(dict.fromkeys(name for record in records for name in _metrics_in(record)))
    titles = {name: METRICS[name].title if name in METRICS else name for name in metrics}
    return [
        ("Loss", "loss", BOTH),
        *((title, name, BOTH) for name, title in titles.items()),
        ("Learning rate", "learning_rate", TRAINED),
        ("Gradient norm", "grad_norm", TRAINED),
    ]


def _metrics_in(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics in a record, in their order."""
    if record["kind"] in ("eval", "test"):
        return [name for name in record if name not in EVALUATION_FIELDS]
    return [name for name in record if name in METRICS]


def _is_share(name: str) -> bool:
    return name in METRICS and METRICS[name].is_share


def _result(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation as the page shows it; the first number of `shown` is its headline."""
    numbers = {name: record[name] for name in _metrics_in(record) if record[name] is not None}
    if record.get("loss") is not None:
        numbers["loss"] = record["loss"]
    shown = [describe_metrics({name: value}) for name, value in numbers.items()]
    return {name: record.get(name) for name in ("kind", "epoch", "elapsed_s")} | {"shown": shown}


def write_events(folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write every number of the records as TensorBoard's scalar KIND/KEY at its step.

    Raises:
        UsageError: without tensorboardX, and for a folder that cannot be written.
    """
    if find_spec("tensorboardX") is None:
        raise UsageError(
            "TensorBoard's files are written by tensorboardX; pip install tensorboardX"
        )
    from tensorboardX import SummaryWriter

    with raised_as(UsageError, f"{folder} cannot be written"), SummaryWriter(str(folder)) as writer:
        for record in records:
            for key, value in record.items():
                if key not in ("kind", "global_step", "epoch", "time") and isinstance(
                    value, int | float
                ):
                    writer.add_scalar(
                        f"{record['kind']}/{key}", value, record["global_step"], record.get("time")
                    )


def gather(run: Path) -> dict[str, Any]:
    """Return the page's data as JSON values; the head of pages/run.js lists them.

    Raises:
        UsageError: without a run in the folder, and for unreadable files.
    """
    options, folder = read_run(run, str(run)), RunFolder(run)
    evaluation, starts = read_evaluation(folder), read_starts(folder)
    commands = [f"{shlex.join(item.command)}    # ranks: {item.ranks}" for item in starts]
    records = read_metrics(folder.metrics)
    with foreign(folder.metrics, UsageError, "the metrics of the run cannot be drawn"):
        trained = [record for record in records if record["kind"] == "train"]
        tests = [record for record in records if record["kind"] in ("eval", "test")]
        stale = sum_staleness(records)
        if stale.largest() * len(stale.histograms) > MOST_HEIGHTS:
            raise ValueError(f"gradients are {stale.largest()} updates old")
        heights = [
            [histogram.get(n, 0) for n in range(stale.largest() + 1)]
            for histogram in stale.histograms
            if stale.total
        ]
        steps = [0, *(record["global_step"] for record in trained)]
        # a record is a mean over the steps since the one before; a resumed run's may be older
        weights = [max(now - before, 1) for before, now in pairwise(steps)]
        times = {
            label: mean for key, label in PARTS.items() if (mean := _mean(trained, key, weights))
        }
        other_s = _mean(trained, "step_s", weights) - sum(times.values())
        workers = max((record.get("workers", 1) for record in trained), default=1)
        if workers > 1:  # out of step: what a worker neither computes nor reads, it waits
            times[PARTS["sync_s"]] = times.get(PARTS["sync_s"], 0.0) + max(other_s, 0.0)
            other_s = 0.0
        page = {
            "head": [list(fact) for fact in starts[-1].facts] if starts else [],
            "results": [_result(test) for test in tests[-2:]],
            "charts": [
                chart for panel in panels_of(records) if (chart := _chart(*panel, records))["lines"]
            ],
            "names": [*PARTS.values()],
            "whose": "on rank 0" if workers == 1 else f"as a mean over {workers} workers",
            "times": times
            | ({"other": other_s} if other_s > ROUNDING * sum(times.values()) else {}),
            "parts": [
                [part[-1]["global_step"], *(_mean(part, key, weight) for key in PARTS)]
                for part, weight in zip(
                    _cut(trained, MOST_BARS), _cut(weights, MOST_BARS), strict=True
                )
            ],
            "memory": {
                key.removeprefix(_MEMORY): n
                for key, n in (trained or [{}])[-1].items()
                if key.startswith(_MEMORY)
            },
            "staleness": {"heights": heights, "mean": stale.mean(), "max": stale.largest()},
            "evaluation": evaluation,
            "options": _options(options, [word for item in starts for word in item.command]),
            "commands": commands,
        }
        _ = json_text(page)  # sums of large numbers may be too large
        return page


def read_evaluation(folder: RunFolder) -> dict[str, Any]:
    """Return the last result of `nnmpi evaluate`, as far as a page shows it; {} without one.

    Raises:
        UsageError: with the file, for one that is none.
    """
    if not folder.evaluation.exists():
        return {}
    advice = "not what nnmpi evaluate writes; call it again, or remove the file"
    with foreign(folder.evaluation, UsageError, advice):
        values = read_json(folder.evaluation)
        known = {name: rebuilt(kind, values.get(name)) for name, kind in EVALUATION.items()}
        lengths = {len(known["classes"] or ()), *map(len, known["confusion"] or ((),))}
        if known["confusion"] and lengths != {len(known["confusion"])}:
            raise ValueError("its confusion matrix does not have a row and a column for each class")
        if known["confusion"]:
            table = each_class(known["confusion"])
            if not all(np.isfinite(values).all() for values in table.values()):
                raise ValueError("the numbers of its confusion matrix are too large")
            known["each_class"] = {name: values.tolist() for name, values in table.items()}
        return known


def _chart(title: str, key: str, kinds: Mapping[str, str], records: Sequence[Any]) -> Any:
    """Return a chart's lines of (step, seconds, value); none if all values are constant, such as a
    fixed learning rate.
    """
    lines = []
    for name, kind in kinds.items():
        chosen = [
            record
            for record in records
            if record["kind"] == kind
            and all(isinstance(record.get(name), int | float) for name in (key, "global_step"))
        ]
        lines.append(
            {
                "name": name,
                "points": [
                    [item["global_step"], item.get("elapsed_s"), item[key]]
                    for item, *_ in _cut(chosen, MOST_POINTS)
                ],
            }
        )
    varies = any(len({value for *_, value in line["points"]}) > 1 for line in lines)
    lines = [line for line in lines if line["points"] and varies]
    return {"title": title, "is_share": _is_share(key), "lines": lines}


def _cut(records: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Return the records in parts of equal length, about `most` of them."""
    length = max(1, len(records) // most)
    return [records[begin : begin + length] for begin in range(0, len(records), length)]


def _mean(records: Sequence[Mapping[str, Any]], key: str, weights: Sequence[int]) -> float:
    values = [
        (weight, record[key])
        for record, weight in zip(records, weights, strict=True)
        if record.get(key) is not None
    ]
    return sum(n * value for n, value in values) / sum(n for n, _ in values) if values else 0.0


def _options(options: Mapping[str, Any], words: Sequence[str]) -> list[list[str]]:
    """Return the run's options that differ from their defaults, but for what it chose for auto.

    Args:
        options: of the run.
        words: of its command lines.
    """
    known, given = all_options(), {word.partition("=")[0].replace("_", "-") for word in words}
    return [
        [*as_words(name, value).partition(" ")[::2]]
        for name, value in options.items()
        if value != known[name].default
        and (
            known[name].default != "auto"
            or given & {known[name].flag, known[name].negation, "--config"}
        )
    ]


if __name__ == "__main__":
    sys.exit(say(main))
