"""`python -m nnmpi.report RUN`: a run as one page for a browser: curves, where time went, memory, layout, options.

    python -m nnmpi.report runs/digits-cnn                 writes runs/digits-cnn/report.html
    python -m nnmpi.report runs/digits-cnn --out page.html
    python -m nnmpi.report runs/digits-cnn/trace.json.gz   of a run with --trace: what each rank did

All numbers are those of the run's own files. A run that is under way can be looked at, too.
"""

import gzip
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from nnmpi.command import HelpAsked, Parser, say
from nnmpi.compose.stats import PARTS
from nnmpi.errors import NnmpiError, UsageError
from nnmpi.pages.page import write_page
from nnmpi.reading import check_ordinary, parse_json
from nnmpi.synchrony.staleness import Staleness
from nnmpi.timeline import COMPUTE, WAITING
from nnmpi.train.cli import read_given
from nnmpi.train.config import all_options
from nnmpi.train.folder import RunFolder, read_run
from nnmpi.train.metrics import read_metrics, sum_staleness

MOST_POINTS = 500  # of a line
MOST_EVENTS = 100_000  # of a trace
MOST_BARS = 60  # of a histogram
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
_MEMORY = "memory_"


def main(words: Sequence[str]) -> str:
    """Write the page and return where it is.

    Raises:
        UsageError: when there is no run, its files cannot be read, or the page cannot be written.
    """
    parser = Parser("python -m nnmpi.report", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run, or a trace")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html, trace.html)")
    given = parser.parse_args(words)
    if given.run.is_file():
        name = given.run.name.split(".")[0]
        file = given.out or given.run.with_name(f"{name}.html")
        title = given.run.resolve().parent.name if name == "trace" else name
        write_page(file, "trace", f"trace of {title}", gather_trace(given.run))
        return f"{file} shows the trace in a browser"
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
        starts = folder.starts.read_text(errors="replace").splitlines() if folder.starts.is_file() else []
        began = [parse_json(line) for line in starts]
        commands = [f"{shlex.join(each['command'])}    # ranks: {each['ranks']}" for each in began]
        kinds = [each["kind"] for each in records]
    except (OSError, ValueError, TypeError, LookupError) as error:  # the last two: of other JSON than a run writes
        raise UsageError(f"{run}: the metrics of the run cannot be read: {error}") from None
    trained = [each for each, kind in zip(records, kinds, strict=True) if kind == "train"]
    stale = sum_staleness(records)
    width, heights = bars(stale) if stale.count() else (1, [])
    return {
        "head": began[-1].get("facts", []) if began else [],
        "results": [_result(each) for each in records if each["kind"] in ("eval", "test")][-2:],
        "charts": [chart for panel in PANELS if (chart := _chart(*panel, records))["lines"]],
        "times": {label: mean for key, label in PARTS.items() if (mean := _mean(trained, key))},
        "memory": {key.removeprefix(_MEMORY): n for key, n in (trained or [{}])[-1].items() if key.startswith(_MEMORY)},
        "staleness": {"width": width, "heights": heights, "mean": stale.mean(), "max": stale.largest()},
        **_options(options, began),
        "commands": commands,
    }


def bars(stale: Staleness) -> tuple[int, list[list[int]]]:
    """Return how many values of staleness share a bar, and the heights of each worker's bars, from staleness 0 on."""
    width = -(-(stale.largest() + 1) // MOST_BARS)
    heights = [[0] * (stale.largest() // width + 1) for _ in stale.histograms]
    for own, histogram in zip(heights, stale.histograms, strict=True):
        for staleness, count in histogram.items():
            own[staleness // width] += count
    return width, heights


def _result(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record.get(key) for key in ("kind", "epoch", "loss", "accuracy", "perplexity", "elapsed_s")}


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


def _options(options: Mapping[str, Any], began: Sequence[Mapping[str, Any]]) -> dict[str, list[list[str]]]:
    """Return the options that the commands gave, and those that the run has chosen: others that are no defaults.

    Where the commands are not known, or the files that they named cannot be read any more, all count as given.

    Args:
        options: the run's.
        began: its starts.
    """

    def text(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)

    known = all_options()
    changed = {name: text(value) for name, value in options.items() if name in known and value != known[name].default}
    found: dict[str, Any] = {}
    try:
        for start in began:
            found |= read_given(start["command"][3:], Path(str(start.get("folder", ""))))
        given = {name: text(value) for name, value in found.items()} if began else changed
    except (NnmpiError, HelpAsked):
        given = changed
    chosen = {name: value for name, value in changed.items() if given.get(name) != value}
    return {
        title: [[known[name].flag, value] for name, value in some.items()]
        for title, some in (("options", given), ("chosen", chosen))
    }


# ---- traces ----

_KINDS = {COMPUTE: "computing", WAITING: "waiting"}  # by track; else "exchange"
_Times = Sequence[tuple[float, float]]


def gather_trace(file: Path) -> dict[str, Any]:
    """Return what the page of a trace shows, as JSON values; times in seconds.

    The time is cut into parts where a first rank begins a step; a trace without steps is one part.

    Raises:
        UsageError: when the file is no trace that nnmpi wrote, or has more events than fit a page.
    """
    try:
        check_ordinary(file)
        text = file.read_bytes()
        rows = parse_json(gzip.decompress(text) if file.suffix == ".gz" else text)["traceEvents"]
        if len(rows) > MOST_EVENTS:
            raise UsageError(f"{file}: a page shows up to {MOST_EVENTS} events, not {len(rows)}; trace fewer steps")
        ranks, steps = _tracks(rows)
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, zlib.error) as error:
        raise UsageError(f"{file} is no trace that can be read: {error}") from None
    spans = [span for rank in ranks for track in rank["tracks"] for span in track["spans"]]
    starts = sorted((begin, name) for name, begin in steps.items()) or [(0.0, "all")]
    last = max([starts[-1][0], *(span[3] for span in spans)])
    parts = [(name, begin, end) for (begin, name), (end, _) in zip(starts, [*starts[1:], (last, "")], strict=True)]
    shares = [[_shares(rank, begin, end) for rank in ranks] for _, begin, end in parts]
    return {"ranks": ranks, "parts": parts, "shares": shares}


def _tracks(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the ranks with their tracks that have spans, and when each step began on the first rank to do so."""
    named = {(row["name"], row["pid"], row["tid"]): row["args"].get("name", "") for row in rows if row["ph"] == "M"}
    found: dict[int, dict[str, list[list[Any]]]] = {row["pid"]: {} for row in rows}
    steps: dict[str, float] = {}
    for row in rows:
        if row["ph"] == "X":
            track, begin = named["thread_name", row["pid"], row["tid"]], row["ts"] / 1e6
            if row["cat"] == "step":
                steps[row["name"]] = min(begin, steps.get(row["name"], begin))
            else:
                span = [row["name"], row["cat"], begin, begin + row["dur"] / 1e6, row.get("args")]
                found[row["pid"]].setdefault(track, []).append(span)
    return [
        {
            "name": named["process_name", rank, 0],
            "tracks": [
                {"name": name, "kind": _KINDS.get(name.split()[0], "exchange"), "spans": spans}
                for name, spans in tracks.items()
            ],
        }
        for rank, tracks in sorted(found.items())
    ], steps


def _shares(rank: Mapping[str, Any], begin: float, end: float) -> dict[str, float]:
    """Return for how long a rank did each kind of thing in a part, and for how long nothing of them ("idle")."""
    times: dict[str, list[tuple[float, float]]] = {"computing": [], "exchange": [], "waiting": []}
    for track in rank["tracks"]:
        times[track["kind"]] += [(max(begin, span[2]), min(end, span[3])) for span in track["spans"]]
    found = {kind: _covered(each) for kind, each in times.items()}
    return found | {"idle": end - begin - _covered([span for each in times.values() for span in each])}


def _covered(spans: _Times) -> float:
    """Return how much time lies in at least one of some spans."""
    total, until = 0.0, -inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


if __name__ == "__main__":
    sys.exit(say(main))
