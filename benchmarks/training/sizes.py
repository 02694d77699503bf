"""Time of a step, and memory, against an MLP's width, its depth, the batch and the ranks: curves and their slopes.

    python benchmarks/training/sizes.py --plot sizes.png --json sizes.json

A curve varies one size and keeps the others of BASE. Steps are a `Worker`'s with Adam, on one rank with one thread, all
sizes in turns; the least counts. Memory is the most that the Worker's ledger has counted. Of many ranks the share of
the largest batch is measured on one, and the exchange of gradients added: the fastest all-reduce, simulated on the
cluster of benchmarks/scaling. A slope is an exponent, fitted to the upper half of a curve: time ~ size ** slope.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the checkout, so that the modules here have their full names
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402

import nnmpi  # noqa: E402
from benchmarks.harness import command, plots, results  # noqa: E402
from benchmarks.harness.machine import machine_facts  # noqa: E402
from benchmarks.harness.tables import Columns, mib, ms, number, render  # noqa: E402
from benchmarks.scaling.sweep import NAMES, cluster, seconds  # noqa: E402
from nnmpi import Worker, data, models, optim  # noqa: E402
from nnmpi.backend.memory import keep_freed_memory  # noqa: E402
from nnmpi.comm.group import Group  # noqa: E402

FEATURES, CLASSES = 64, 10
BASE = {"width": 256, "depth": 4, "batch": 128}
CURVES = {
    "width": (64, 128, 256, 512, 1024, 2048),
    "depth": (1, 2, 4, 8, 16, 32),
    "batch": (8, 16, 32, 64, 128, 256, 512, 1024, 2048),
}
RANKS = "ranks"
WARM_UP = 3  # steps: the first two are computed as they stand, then recorded


class Case:
    """A worker and its batch.

    Attributes:
        step_s: the least time of a step so far, of this thread.
    """

    def __init__(self, group: Group, width: int, depth: int, batch: int) -> None:
        draw = np.random.default_rng(0)
        x = draw.standard_normal((batch, FEATURES), np.float32)
        loader = data.Loader(data.Dataset("random", x, draw.integers(0, CLASSES, batch), CLASSES), batch)
        model = models.mlp((FEATURES,), CLASSES, depth * (width,)).initialize(seed=0)
        self._batch, self._worker = next(iter(loader)), Worker(model, optim.Adam(model.storage, lr=1e-5), group)
        self.step_s = np.inf
        for _ in range(WARM_UP):
            self._worker.step(self._batch)

    def time(self, block_s: float) -> None:
        """Do steps for so long."""
        end = time.thread_time() + block_s
        while (begin := time.thread_time()) < end:
            self._worker.step(self._batch)
            self.step_s = min(self.step_s, time.thread_time() - begin)

    def row(self, curve: str, value: int) -> dict[str, Any]:
        """Return this point of a curve."""
        memory = self._worker.ledger.report().peak
        return {"curve": curve, "value": value, "step_s": self.step_s, "sum_s": 0.0, "memory_bytes": memory}

    @property
    def gradient_bytes(self) -> int:
        """What is summed over ranks."""
        return sum(grad.nbytes for grad in self._worker.model.storage.grads)


def measure(curves: Mapping[str, Sequence[int]], group: Group, rounds: int, block_s: float) -> list[dict[str, Any]]:
    """Return the points of all curves, those of the ranks last."""
    sizes = {(curve, value): BASE | {curve: value} for curve, values in curves.items() for value in values}
    distinct = {tuple(size.values()): Case(group, **size) for size in sizes.values()}
    cases = {point: distinct[tuple(size.values())] for point, size in sizes.items()}
    for _ in range(rounds):
        for case in distinct.values():
            case.time(block_s)
    rows, largest, machine = [case.row(*point) for point, case in cases.items()], max(curves["batch"]), cluster()
    for batch in sorted(curves["batch"], reverse=True):
        case, ranks = cases["batch", batch], largest // batch
        found = case.row(RANKS, ranks)
        found["sum_s"] = min(seconds(machine, name, ranks, case.gradient_bytes) for name in NAMES) if ranks > 1 else 0.0
        rows.append(found | {"step_s": found["step_s"] + found["sum_s"]})
    return rows


def slope(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the exponent with which a number grows along the upper half of a curve."""
    upper = rows[(len(rows) - 1) // 2 :]
    x, y = ([np.log(row[name]) for row in upper] for name in ("value", key))
    return float(np.polyfit(x, y, 1)[0])


def draw(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw time above memory, a column for each curve."""
    names = list(dict.fromkeys(row["curve"] for row in rows))
    figure = plots.new_figure(3.4 * len(names), 6)
    panels = figure.subplots(2, len(names), sharex="col", sharey="row")
    for name, column in zip(names, panels.T, strict=True):
        own = [row for row in rows if row["curve"] == name]
        values = [row["value"] for row in own]
        for axes, key, unit, what in zip(column, ("step_s", "memory_bytes"), (1e-3, 2**20), ("ms", "MiB"), strict=True):
            axes.plot(values, [row[key] / unit for row in own], "o-", ms=4)
            if key == "step_s" and name == RANKS:
                axes.plot(
                    values[1:], [row["sum_s"] / unit for row in own[1:]], ":", label="sum of gradients, simulated"
                )
                axes.legend(frameon=False, fontsize=8)
            axes.set(xscale="log", yscale="log", title=f"slope {slope(own, key):.2f}")
            axes.set_xticks(values[:: 1 + len(values) // 7], [str(value) for value in values[:: 1 + len(values) // 7]])
            axes.minorticks_off()
            axes.grid(alpha=0.25)
            if name == names[0]:
                axes.set_ylabel(("time of a step, " if key == "step_s" else "memory of a rank, ") + what)
        column[-1].set_xlabel(name)
    plots.save(figure, file)


def table(rows: Sequence[Mapping[str, Any]], markdown: bool) -> str:
    """Return a line for each curve: its ends, and its slopes."""
    curves = [[row for row in rows if row["curve"] == name] for name in dict.fromkeys(row["curve"] for row in rows)]
    columns: Columns = (
        ("curve", lambda own: own[0]["curve"]),
        ("from, to", lambda own: f"{own[0]['value']}, {own[-1]['value']}"),
        ("step, ms", lambda own: ", ".join(ms(own[end]["step_s"]) for end in (0, -1))),
        ("slope", lambda own: number(slope(own, "step_s"))),
        ("memory, MiB", lambda own: ", ".join(mib(own[end]["memory_bytes"], 1) for end in (0, -1))),
        ("slope of memory", lambda own: number(slope(own, "memory_bytes"))),
    )
    return render(columns, curves, markdown)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the slopes, and write the files; return the exit status."""
    parser = command.CommandParser("python benchmarks/training/sizes.py", (__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=command.picture, metavar="FILE", help="draw the curves: .png, .svg or .pdf")
    parser.add_argument(
        "--most", type=command.positive, default=2048, help="leave larger widths and batches out (2048)"
    )
    command.add_blocks(parser, block_s=0.1)

    def work() -> None:
        options: argparse.Namespace = parser.parse(sys.argv[1:] if words is None else words)
        if options.plot is not None:
            plots.check_can_draw("--plot")
        results.check_writable("--plot", options.plot)
        results.check_writable("--json", options.json)
        keep_freed_memory()
        group = nnmpi.start()
        with threadpool_limits(1, "blas"):
            rows = measure(CURVES, group, options.rounds, options.block_s)
        command.say(f"{machine_facts()['cpu']}\n\n{table(rows, options.markdown)}")
        results.write(options.json, {"machine": machine_facts(), "rows": rows})
        if options.plot is not None:
            draw(options.plot, rows)

    return command.run(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
