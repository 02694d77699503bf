"""Three figures: predicted against measured; time over ranks by strategy; bytes by kind.

python benchmarks/plan --draw DIR [--json plan.json]
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.plots import colours, new_figure, save
from nnmpi.memory.ledger import KINDS
from nnmpi.planner.space import Candidate
from nnmpi.planner.survey import SHORT, SurveyedSystem, SurveyRow, systems

GIGA = 1e9
SLOW = {"across_gbit": 10, "batch": 1024}  # where strategies cross
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MICROBATCHES = 4  # of a pipeline, for each of its ranks


def draw_measured(file: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Draw predicted against measured steps, a colour for each model, and the diagonal."""
    figure = new_figure(6.4, 6.0)
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    ends = []
    for each, colour in zip(found, colours(), strict=False):
        model = each["command"].split()[1]
        for piped, marker in ((False, "o"), (True, "^")):
            rows = [row for row in each["rows"] if (row["pp"] > 1) is piped]
            x, y = ([1e3 * row[name] for row in rows] for name in ("took_s", "step_s"))
            label = f"{model}, {'pipelines' if piped else 'without a pipeline'}"
            axes.plot(x, y, marker, color=colour, markersize=5, alpha=0.7, label=label)
            ends += [*x, *y]
    line = [0.8 * min(ends), 1.25 * max(ends)]
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(line, [0.9 * end for end in line], [1.1 * end for end in line], color="grey", alpha=0.2)
    axes.set_title("grey: within 10 %", fontsize=10)
    axes.tick_params(which="both", labelsize=7)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    save(figure, file)


def strategies(ranks: int) -> dict[str, Candidate]:
    """Return a layout of each strategy for so many ranks, as far as there is one."""
    found = {
        "data parallelism": Candidate(dp=ranks, allreduce="ring"),
        "ZeRO 3": Candidate(dp=ranks, zero=3, allreduce="ring"),
        "shared layers": Candidate(tp=ranks) if ranks <= 8 else Candidate(dp=ranks // 8, tp=8, allreduce="ring"),
    }
    if ranks > 1:
        pp = min(ranks, 8)
        piped = Candidate(pp=pp, dp=ranks // pp, microbatches=MICROBATCHES * pp)
        found["pipeline, 1F1B"] = replace(piped, allreduce="ring") if ranks > pp else piped
    return found if ranks > 1 else {name: Candidate() for name in ("data parallelism", "ZeRO 3", "shared layers")}


def draw_ranks(file: Path, system: SurveyedSystem) -> None:
    """Draw the step of one model over ranks, a line for each strategy, with a ring where the quickest one changes."""
    told, lines = system.told, {}
    for ranks in RANKS:
        part = SurveyedSystem({**told, "devices": ranks, "per_node": min(ranks, told["per_node"])})
        pricer = part.pricer(part.layers, [1, 2, 4, 8, 16])
        for name, one in strategies(ranks).items():
            if one.dp * one.microbatches <= told["batch"]:
                lines.setdefault(name, {})[ranks] = pricer.price(one).seconds
    figure = new_figure(7.5, 5.0)
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="ranks", ylabel="step, s")
    for (name, points), colour in zip(lines.items(), colours(), strict=False):
        axes.plot(list(points), list(points.values()), "o-", color=colour, markersize=4, label=name)
    best = {ranks: min((p[ranks], name) for name, p in lines.items() if ranks in p) for ranks in RANKS[1:]}
    for (_, (_, before)), (ranks, (seconds, after)) in pairwise(best.items()):
        if before != after:
            axes.plot([ranks], [seconds], "o", markersize=14, markerfacecolor="none", color="black")
    axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    axes.set_title(
        f"{told['model']['name']}, batch {told['batch']}, {told['device']['name']}, {told['per_node']} on a node, "
        f"{told['across_gbit']} Gbit/s between\nringed: another strategy is the quickest from here on",
        fontsize=9,
    )
    save(figure, file)


def draw_bytes(file: Path, rows: Sequence[SurveyRow]) -> None:
    """Draw what a device of each system holds, by kind, and what it has."""
    figure = new_figure(9.0, 5.0)
    axes = figure.add_subplot(ylabel="GB of the device that has most")
    bottom = [0.0] * len(rows)
    for kind, name, colour in zip(KINDS, SHORT, colours(), strict=False):
        held = [row.own.memory.get(kind, 0) / GIGA for row in rows]
        axes.bar(range(len(rows)), held, bottom=bottom, color=colour, label=name, width=0.7)
        bottom = [a + b for a, b in zip(bottom, held, strict=True)]
    for i, row in enumerate(rows):
        limit = row.system.limit_bytes / GIGA
        axes.plot([i - 0.4, i + 0.4], [limit, limit], color="black", label="" if i else "the device's memory")
    axes.set_yscale("symlog", linthresh=8)
    ticks = (0, 2, 4, 6, 8, 16, 32, 64, 128)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    names = [f"{row.system.told['system']}\n{row.system.parameters / GIGA:.3g}B" for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=35, ha="right", fontsize=8)
    axes.legend(fontsize=8, ncols=2)
    axes.grid(alpha=0.3, axis="y")
    save(figure, file)


def draw(folder: Path, found: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draw all three into a folder; the first only where something was measured.

    Args:
        folder: made where it is not there.
        found: what runs of the benchmark have written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.png" for name in ("ranks", "bytes", "measured")]
    every = list(systems())
    bert = next(each for each in every if each.told["system"] == "PyTorch DDP")
    draw_ranks(files[0], SurveyedSystem({**bert.told, **SLOW}))
    draw_bytes(files[1], [SurveyRow(each, *each.own(), None, None) for each in every])
    if not found:
        return files[:2]
    draw_measured(files[2], found)
    return files
