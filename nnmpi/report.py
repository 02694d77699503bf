"""`python -m nnmpi.report RUN`: a run as one page for a browser: curves, where time went, memory, layout, options.

    python -m nnmpi.report runs/digits-cnn                    writes runs/digits-cnn/report.html
    python -m nnmpi.report runs/digits-cnn --out page.html

All numbers are those of the run's own files. A run that is under way can be looked at, too.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnmpi.command import Parser, say
from nnmpi.errors import UsageError
from nnmpi.pages.page import write_page
from nnmpi.reading import parse_json
from nnmpi.train.cli import read_run
from nnmpi.train.config import all_options
from nnmpi.train.curves import OVER_TIME, PANELS, TIMES, Panel, bars
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import read_metrics, sum_staleness

MOST_POINTS = 500  # of a line
_HEAD = re.compile(r"([a-z][\w /-]*|MPI): {1,}(\S.*)")
_MEMORY = "memory_"


def main(words: Sequence[str]) -> str:
    """Write the page and return where it is.

    Raises:
        UsageError: when there is no run, its files cannot be read, or the page cannot be written.
    """
    parser = Parser("python -m nnmpi.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    given = parser.parse_args(words)
    file = given.out or given.run / "report.html"
    write_page(file, "run", f"run {given.run.resolve().name}", gather(given.run))
    return f"{file} shows the run in a browser"


def gather(run: Path) -> dict[str, Any]:
    """Return what the page shows, as JSON values.

    Raises:
        UsageError: when there is no run in the folder, or its files cannot be read.
    """
    options, folder = read_run(run, str(run)), RunFolder(run)
    try:
        records = read_metrics(folder.metrics)
        console = folder.console.read_text(errors="replace") if folder.console.is_file() else ""
        starts = folder.starts.read_text(errors="replace").splitlines() if folder.starts.is_file() else []
        commands = [shlex.join(parse_json(line)["command"]) for line in starts]
        kinds = [each["kind"] for each in records]
    except (OSError, ValueError, TypeError, LookupError) as error:  # the last two: of other JSON than a run writes
        raise UsageError(f"{run}: the metrics of the run cannot be read: {error}") from None
    trained = [each for each, kind in zip(records, kinds, strict=True) if kind == "train"]
    stale = sum_staleness(records)
    width, heights = bars(stale) if stale.count() else (1, [])
    return {
        "head": _head(console),
        "results": [_result(each) for each in records if each["kind"] in ("eval", "test")][-2:],
        "charts": [chart for panel in (*PANELS, *OVER_TIME) if (chart := _chart(panel, records))["lines"]],
        "times": {label: mean for key, label in TIMES if (mean := _mean(trained, key))},
        "memory": {key.removeprefix(_MEMORY): n for key, n in (trained or [{}])[-1].items() if key.startswith(_MEMORY)},
        "staleness": {"width": width, "heights": heights, "mean": stale.mean(), "max": stale.largest()},
        "options": _changed(options),
        "commands": commands,
    }


def _head(console: str) -> list[list[str]]:
    """Return what the run said of itself before its first epoch: layout, MPI, data, model ..."""
    found: list[list[str]] = []
    for line in console.splitlines():
        match = _HEAD.fullmatch(line)
        if match is None or line.startswith("epoch "):
            break
        found.append([match[1], match[2]])
    return found


def _result(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record.get(key) for key in ("kind", "epoch", "loss", "accuracy", "perplexity", "elapsed_s")}


def _chart(panel: Panel, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    along, label = panel.along
    lines = []
    for name, (kind, key) in panel.series.items():
        chosen = [each for each in records if each["kind"] == kind and None not in (each.get(key), each.get(along))]
        points = [[each[along], each[key]] for each in chosen]
        lines.append({"name": name, "points": points[:: max(1, len(points) // MOST_POINTS)]})
    lines = [line for line in lines if line["points"]]
    return {"title": panel.title, "label": panel.label, "along": label, "lines": lines}


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [each[key] for each in records if each.get(key) is not None]
    return sum(values) / len(values) if values else 0.0


def _changed(options: Mapping[str, Any]) -> list[list[str]]:
    """Return the options that are not the defaults."""
    known = all_options()
    return [
        [known[name].flag, " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)]
        for name, value in options.items()
        if name in known and value != known[name].default
    ]


if __name__ == "__main__":
    sys.exit(say(main))
