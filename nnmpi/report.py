"""`python -m nnmpi.report RUN`: one page of a run: curves, where time went, memory, options.

    python -m nnmpi.report runs/digits-cnn                 writes runs/digits-cnn/report.html
    python -m nnmpi.report runs/digits-cnn --out page.html
    python -m nnmpi.report runs/digits-cnn --tensorboard FOLDER

All numbers come from the run's files, so that the command also works during the run. The page is
one file with its data and scripts inside (see nnmpi.pages); bokeh draws its curves if installed.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from nnmpi.command import read_command, say
from nnmpi.compose.stats import PARTS, ROUNDING
from nnmpi.errors import UsageError, raised_as
from nnmpi.files import foreign, read_json
from nnmpi.pages.page import write_page
from nnmpi.train.config import all_options, shown
from nnmpi.train.folder import RunFolder, read_run
from nnmpi.train.metrics import read_metrics, sum_staleness

MOST_POINTS, MOST_BARS = 500, 60
ACCURACY = "accuracy"
STEPS, SECONDS = ("global_step", "steps"), ("elapsed_s", "seconds")
TRAINED, TESTED = {"training": "train"}, {"test data": "eval"}
BOTH = TRAINED | TESTED
PANELS = [  # title, key of the values, kinds of records, x axis
    ("Loss", "loss", BOTH, STEPS),
    ("Perplexity", "perplexity", BOTH, STEPS),
    ("Accuracy", ACCURACY, BOTH, STEPS),
    ("Root of the mean squared error", "rmse", BOTH, STEPS),
    ("Share of the variance that is explained (R2)", "r2", BOTH, STEPS),
    ("Learning rate", "learning_rate", TRAINED, STEPS),
    ("Gradient norm", "grad_norm", TRAINED, STEPS),
    ("Training speed, samples per second", "samples_per_second", TRAINED, STEPS),
    ("Loss over time", "loss", BOTH, SECONDS),
    ("Accuracy over time", ACCURACY, BOTH, SECONDS),
]
COLOURS = "#4c78a8", "#d1495b", "#8aa83c", "#b07aa1"  # legible in the light and the dark theme
PAINT = dict(zip(PARTS.values(), COLOURS, strict=True)) | {"other": "#6b7785"}
Columns = Mapping[str, Sequence[float]]
RESULT = ("kind", "epoch", "loss", "accuracy", "perplexity", "elapsed_s")
_MEMORY = "memory_"


@dataclass(frozen=True)
class ReportConfig:
    """Output."""

    out: Path | None = None
    """The page (default: RUN/report.html)."""
    tensorboard: Path | None = None
    """Folder to write the metrics to for TensorBoard, too."""


def main(words: Sequence[str]) -> str:
    """Write the page, and return a sentence with its path.

    Raises:
        UsageError: without a run, for unreadable files, and for a page that cannot be written.
    """
    run, options = read_command(
        "RUN", "python -m nnmpi.report", __doc__ or "", (ReportConfig,), words
    )
    file = options.out or run / "report.html"
    if options.out is None and file.is_symlink():
        raise UsageError(f"{file} is a link, which may lead anywhere; remove it, or give --out")
    if options.tensorboard is not None:
        read_run(run, str(run))
        write_events(options.tensorboard, read_metrics(RunFolder(run).metrics))
    result, library, hint = gather(run), "", "; for its curves: pip install bokeh"
    if find_spec("bokeh"):
        from bokeh.resources import Resources

        library, hint = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), ""
        with foreign(RunFolder(run).metrics, UsageError, "the numbers of the run cannot be drawn"):
            result["charts"] = draw(result)
    write_page(file, "run", f"run {run.resolve().name}", result, library)
    return f"{file} shows the run in a browser{hint}"


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
    with foreign(folder.metrics, UsageError, "the metrics of the run cannot be read"):
        records = read_metrics(folder.metrics)
        starts = read_metrics(folder.starts) if folder.starts.is_file() else []
        commands = [f"{shlex.join(item['command'])}    # ranks: {item['ranks']}" for item in starts]
        trained = [record for record in records if record["kind"] == "train"]
        tests = [record for record in records if record["kind"] in ("eval", "test")]
        stale = sum_staleness(records)
        heights = [
            [histogram.get(n, 0) for n in range(stale.largest() + 1)]
            for histogram in stale.histograms
            if stale.count()
        ]
        times = {label: mean for key, label in PARTS.items() if (mean := _mean(trained, key))}
        other_s = _mean(trained, "step_s") - sum(times.values())
        return {
            "head": starts[-1].get("facts", []) if starts else [],
            "results": [{key: test.get(key) for key in RESULT} for test in tests[-2:]],
            "charts": [chart for panel in PANELS if (chart := _chart(*panel, records))["lines"]],
            "paint": PAINT,
            "times": times
            | ({"other": other_s} if other_s > ROUNDING * sum(times.values()) else {}),
            "parts": [
                [part[-1]["global_step"], *(_mean(part, key) for key in PARTS)]
                for part in _cut(trained, MOST_BARS)
            ],
            "memory": {
                key.removeprefix(_MEMORY): n
                for key, n in (trained or [{}])[-1].items()
                if key.startswith(_MEMORY)
            },
            "staleness": {"heights": heights, "mean": stale.mean(), "max": stale.largest()},
            "evaluation": read_json(folder.evaluation) if folder.evaluation.is_file() else {},
            "options": _options(options),
            "commands": commands,
        }


def _chart(
    title: str, key: str, kinds: Mapping[str, str], over: tuple[str, str], records: Sequence[Any]
) -> Any:
    """Return a chart's lines; none if all are constant, such as a fixed learning rate."""
    lines = []
    for name, kind in kinds.items():
        chosen = [
            record
            for record in records
            if record["kind"] == kind and None not in (record.get(key), record.get(over[0]))
        ]
        lines.append(
            {
                "name": name,
                "points": [[item[over[0]], item[key]] for item, *_ in _cut(chosen, MOST_POINTS)],
            }
        )
    varies = any(len({value for _, value in line["points"]}) > 1 for line in lines)
    lines = [line for line in lines if line["points"] and varies]
    return {"title": title, "accuracy": key == ACCURACY, "along": over[1], "lines": lines}


def _cut(records: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Return the records in parts of equal length, about `most` of them."""
    length = max(1, len(records) // most)
    return [records[begin : begin + length] for begin in range(0, len(records), length)]


def draw(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return {title: chart} of the result of `gather`, as JSON of bokeh's."""
    from bokeh.embed import json_item
    from bokeh.models import CustomJSTickFormatter, DataRange1d, HoverTool
    from bokeh.plotting import figure

    def plot(tips: Any, **keywords: Any) -> Any:
        defaults = {
            "height": 260,
            "sizing_mode": "stretch_width",
            "toolbar_location": None,
            "tools": "",
        }
        result = figure(**defaults | keywords)
        result.add_tools(HoverTool(tooltips=tips, mode="vline"))
        return result

    def stack(
        what: str, ends: Sequence[float], begin: float, columns: Columns, x: str, y: str
    ) -> Any:
        """Draw stacked bars, each from the end of the previous one to its own."""
        sides = [*pairwise([begin, *ends])]
        middles = {"x": [(a + b) / 2 for a, b in sides], "wide": [b - a for a, b in sides]}
        source = {what: ends, **middles, **columns}
        result = plot(
            [(name, f"@{{{name}}}{{0.[00]}}") for name in (what, *columns)],
            x_axis_label=x,
            y_axis_label=y,
        )
        paint = [
            PAINT.get(name, colour) for name, colour in zip(columns, cycle(COLOURS), strict=False)
        ]
        named = {"color": paint, "legend_label": [*columns]}
        result.hover.renderers = result.vbar_stack(
            [*columns], x="x", width="wide", source=source, **named
        )[-1:]
        return result

    plots: dict[str, Any] = {}
    if data["parts"]:
        ends, *parts = zip(*data["parts"], strict=True)
        columns = {
            n: [1e3 * s for s in part]
            for n, part in zip(PARTS.values(), parts, strict=True)
            if any(part)
        }
        plots["Where a step's time went, over the steps"] = stack(
            "step", ends, 0, columns, "steps", "ms"
        )
    for chart in data["charts"]:
        least = min(
            (1 - y for line in chart["lines"] for _, y in line["points"] if y < 1), default=1.0
        )
        # Accuracy is drawn as the error 1 - accuracy on a flipped logarithmic axis: 97 and 99 %
        # are far apart.
        axis = (
            {"y_axis_type": "log", "y_range": DataRange1d(flipped=True)}
            if chart["accuracy"]
            else {}
        )
        if "speed" in chart["title"]:
            # From 0: an automatic range would magnify the dip of each epoch's short last batch.
            axis = {"y_range": DataRange1d(start=0)}
        plotted = plot(
            f"$name: @y{{0.[00000]}}<br>@x{{0.[0]}} {chart['along']}",
            x_axis_label=chart["along"],
            **axis,
        )
        if chart["accuracy"]:
            plotted.yaxis.ticker = [
                base * 10.0**-power for power in range(1, 6) for base in (5, 2, 1)
            ]
            plotted.yaxis.formatter = CustomJSTickFormatter(
                code="return `${+(100 * (1 - tick)).toPrecision(5)} %`"
            )
        else:
            plotted.yaxis.formatter.power_limit_low = -5  # 0.0005 instead of 5.000e-4
        plotted.hover.renderers = []
        for colour, line in zip(COLOURS, chart["lines"], strict=False):
            x, y = zip(*line["points"], strict=True)
            drawn = [max(1 - item, least / 2) for item in y] if chart["accuracy"] else y
            named = {
                "source": {"x": x, "y": y, "drawn": drawn},
                "name": line["name"],
                "color": colour,
            }
            plotted.hover.renderers.append(
                plotted.line("x", "drawn", line_width=2, legend_label=line["name"], **named)
            )
            plotted.scatter("x", "drawn", size=3 if len(x) > 20 else 6, **named)
        plots[chart["title"]] = plotted
    if heights := data["staleness"]["heights"]:
        workers = {f"worker {worker}": local for worker, local in enumerate(heights)}
        ends = tuple(n + 0.5 for n in range(len(heights[0])))
        plots["Staleness"] = stack(
            "up to", ends, -0.5, workers, "updates that came between", "gradients"
        )
    if counts := data["evaluation"].get("confusion"):
        names = [str(name) for name in data["evaluation"]["classes"]]
        cells = [
            (a, b, n, n / sum(row), COLOURS[a != b], 0.7 + 0.3 * n / sum(row))
            for a, row in zip(names, counts, strict=True)
            for b, n in zip(names, row, strict=True)
            if n
        ]
        tips = [("is", "@a"), ("taken for", "@b"), ("samples", "@n"), ("of these", "@share{0.0 %}")]
        plotted = plot(
            tips,
            x_range=names,
            y_range=names[::-1],
            x_axis_label="taken for",
            y_axis_label="is",
            height=380,
        )
        plotted.hover.mode = "mouse"
        source = dict(
            zip(("a", "b", "n", "share", "color", "alpha"), zip(*cells, strict=True), strict=True)
        )
        plotted.rect("b", "a", 0.97, 0.97, source=source, color="color", alpha="alpha")
        plotted.text(
            "b",
            "a",
            text="n",
            source=source,
            text_align="center",
            text_baseline="middle",
            text_color="white",
        )
        plots["Confusion"] = plotted
    for plotted in plots.values():
        for legend in plotted.legend:
            legend.update(
                orientation="horizontal",
                background_fill_alpha=0,
                border_line_alpha=0,
                margin=0,
                padding=2,
            )
            ink = "#808890"  # legible in the light and the dark theme
            legend.update(
                visible=len(legend.items) > 1, location="top_left", label_text_color=ink, ncols=2
            )
            plotted.add_layout(legend, "above")
    return {title: json_item(plotted) for title, plotted in plots.items()}


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else 0.0


def _options(options: Mapping[str, Any]) -> list[list[str]]:
    """Return the run's options that differ from their defaults, given or chosen."""
    known = all_options()
    return [
        [known[name].flag, shown(value)]
        for name, value in options.items()
        if value != known[name].default
    ]


if __name__ == "__main__":
    sys.exit(say(main))
