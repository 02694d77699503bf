"""The tables of the screen and the README, and the picture of the speeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.plots import new_figure, save
from benchmarks.harness.tables import Columns, mib, ms, number, render, spread
from benchmarks.training.contestants import EAGER, FSDP, JIT, PURE, SHARDED, STOCK, TUNED
from benchmarks.training.rows import best, pairs, ratios, speedups
from nnmpi.errors import counted

Row = Mapping[str, Any]
Rows = Sequence[Row]
GROUPS = (PURE, JIT, STOCK, TUNED)
RATIOS = {
    "PyTorch / nnmpi": (STOCK, PURE),
    "PyTorch / jit": (STOCK, JIT),
    "PyTorch / eager": (STOCK, EAGER),
    "tuned / nnmpi": (TUNED, PURE),
    "tuned / jit": (TUNED, JIT),
}
BARS: Mapping[str, str] = {PURE: "#4c78a8", JIT: "#72b7b2"}
BAR = 0.38  # the height of one; two of them make a case
_CASE: Columns = (("case", "case"), ("ranks", "ranks"))


def contestants(rows: Rows, markdown: bool) -> str:
    """Return every contestant's time, memory and error, the fastest first."""
    columns = (
        *_CASE,
        ("contestant", "name"),
        ("ms per step (quartiles)", lambda row: spread(row["step_s"], row["step_quartiles_s"], ms)),
        ("CPU ms", lambda row: ms(row["median_process_s"])),
        ("wall ms", lambda row: ms(row["median_wall_s"])),
        ("peak MiB", lambda row: mib(row["peak_bytes"])),
        ("imported MiB", lambda row: mib(row["imported_bytes"])),
        (
            "error of the gradient, of a parameter's, of the weights",
            lambda row: ", ".join(f"{row['errors'][name]:.0e}" for name in ("gradient", "parameter", "weights")),
        ),
    )
    return render(columns, sorted(rows, key=lambda row: row["step_s"]), markdown)


def speeds(rows: Rows, markdown: bool) -> str:
    """Return each side's fastest way, and how many times faster nnmpi is: medians (quartiles) of the rounds' ratios."""
    names = {PURE: "nnmpi, ms", JIT: "nnmpi jit, ms", STOCK: "PyTorch, ms", TUNED: "tuned malloc, ms"}
    columns = (
        *_CASE,
        *((title, lambda row, group=group: _step_ms(row, group)) for group, title in names.items()),
        *((title, lambda row, both=both: _ratio(row, *both)) for title, both in RATIOS.items()),
    )
    return render(columns, _cases(rows), markdown)


def memory(rows: Rows, markdown: bool) -> str:
    """Return the peak resident memory of a rank, in each side's fastest way."""

    def peak(row: Row, group: str) -> int | None:
        return row["best"][group]["peak_bytes"] if group in row["best"] else None

    def share(row: Row, group: str) -> str:
        own, theirs = peak(row, group), peak(row, STOCK)
        return number(own / theirs if own and theirs else None)

    columns = (
        *_CASE,
        ("nnmpi, MiB", lambda row: mib(peak(row, PURE))),
        ("nnmpi jit, MiB", lambda row: mib(peak(row, JIT))),
        ("PyTorch, MiB", lambda row: mib(peak(row, STOCK))),
        ("nnmpi / PyTorch", lambda row: share(row, PURE)),
        ("jit / PyTorch", lambda row: share(row, JIT)),
    )
    return render(columns, _cases(rows), markdown)


def sharded(rows: Rows, markdown: bool) -> str:
    """Return the times of ranks that share the model out, beside replicas."""
    groups = (PURE, SHARDED, STOCK, FSDP)
    both = {"zero 3 / dp": (SHARDED, PURE), "FSDP2 / zero 3": (FSDP, SHARDED), "FSDP2 / DDP": (FSDP, STOCK)}
    names = ("nnmpi dp, ms", "zero 3, ms", "DDP, ms", "FSDP2, ms")
    columns = (
        *_CASE,
        *((title, lambda row, group=group: _step_ms(row, group)) for title, group in zip(names, groups, strict=True)),
        *((title, lambda row, pair=pair: _ratio(row, *pair)) for title, pair in both.items()),
    )
    return render(columns, _cases(rows), markdown)


def several(rows: Rows, markdown: bool) -> str:
    """Return how many times faster several ranks are than one."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for each in speedups(rows):
        found.setdefault((each["case"], each["ranks"]), {})[each["group"]] = each["speedup"]
    groups = [group for group in GROUPS if any(group in speeds for speeds in found.values())]
    columns = (
        ("case", lambda pair: pair[0][0]),
        ("ranks", lambda pair: f"1 to {pair[0][1]}"),
        *((group, lambda pair, group=group: number(pair[1].get(group))) for group in groups),
    )
    return render(columns, found.items(), markdown)


def _cases(rows: Rows) -> Iterable[Row]:
    """Yield case, ranks, the fastest row of each group ("best") and their ratios."""
    found = ratios(rows)
    for case, ranks in pairs(rows):
        fastest = best(rows, case, ranks)
        own = {(each["of"], each["over"]): each for each in found if (each["case"], each["ranks"]) == (case, ranks)}
        yield {"case": case, "ranks": ranks, "best": fastest, "ratios": own}


def _step_ms(row: Row, group: str) -> str:
    return ms(row["best"][group]["step_s"]) if group in row["best"] else "-"


def _ratio(row: Row, of: str, over: str) -> str:
    found = row["ratios"].get((of, over))
    return "-" if found is None else spread(found["ratio"], found["ratio_quartiles"])


def draw_speeds(file: Path, rows: Rows) -> None:
    """Draw how many times faster nnmpi is than PyTorch's fastest way, a panel for each number of ranks.

    Whiskers are quartiles of the rounds' ratios. Without PyTorch nothing is drawn.
    """
    found = [each for each in ratios(rows) if each["of"] == STOCK]
    numbers = list(dict.fromkeys(each["ranks"] for each in found))
    if not numbers:
        return
    figure = new_figure(5 * len(numbers), 4)
    panels = figure.subplots(1, len(numbers), squeeze=False)[0]
    for ranks, axes in zip(numbers, panels, strict=True):
        mine = [each for each in found if each["ranks"] == ranks]
        cases = list(dict.fromkeys(each["case"] for each in mine))
        for place, (group, colour) in enumerate(BARS.items()):
            bars = [each for each in mine if each["over"] == group]
            y = [cases.index(each["case"]) + (place - 0.5) * BAR for each in bars]
            x = [each["ratio"] for each in bars]
            whiskers = [[abs(each["ratio"] - each["ratio_quartiles"][i]) for each in bars] for i in (0, 1)]
            axes.barh(y, x, BAR, xerr=whiskers if bars else None, color=colour, label=group)
            for at, each in zip(y, bars, strict=True):
                axes.text(each["ratio_quartiles"][1], at, f" {each['ratio']:.2f}", va="center", fontsize=8)
        axes.set_xlim(0, 1.16 * max(each["ratio_quartiles"][1] for each in mine))  # the numbers stand in the frame
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(cases)), cases)
        axes.invert_yaxis()
        axes.set_title(f"{counted(ranks, 'rank')}, one thread each", loc="left", fontsize=10)
        axes.set_xlabel("times as fast as PyTorch" + " with DDP and gloo" * (ranks > 1))
    panels[0].legend(frameon=False)
    save(figure, file)
