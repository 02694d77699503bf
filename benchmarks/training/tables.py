"""The tables of the screen and the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.pipeline.readme import table
from benchmarks.training.contestants import EAGER, JIT, NAIVE, PURE, STOCK, TUNED
from benchmarks.training.rows import best, pairs, ratios, speedups

Row = Mapping[str, Any]
Rows = Sequence[Row]
GROUPS = (PURE, JIT, STOCK, TUNED)
COLUMNS = ((STOCK, PURE), (STOCK, JIT), (STOCK, EAGER), (TUNED, PURE), (TUNED, JIT))


def contestants(rows: Rows, markdown: bool) -> str:
    """Return every contestant's time, memory and error."""
    head = "case | ranks | contestant | ms per step (quartiles) | CPU ms | wall ms | peak MiB | imported MiB | "
    head += "error of the gradient, of a parameter's, of the weights"
    lines = []
    for row in sorted(rows, key=lambda row: row["step_s"]):
        errors = ", ".join(f"{row['errors'][name]:.0e}" for name in ("gradient", "parameter", "weights"))
        times = f"{ms(row['median_process_s'])} | {ms(row['median_wall_s'])}"
        memory = f"{mib(row['peak_bytes'])} | {mib(row['imported_bytes'])}"
        lines.append(f"{row['case']} | {row['ranks']} | {row['name']} | {_spread(row)} | {times} | {memory} | {errors}")
    return render(head, lines, markdown)


def speeds(rows: Rows, markdown: bool) -> str:
    """Return each side's fastest way, and how many times faster nnmpi is: medians (quartiles) of the rounds' ratios."""
    head = "case | ranks | nnmpi, ms | nnmpi jit, ms | PyTorch, ms | tuned malloc, ms | PyTorch / nnmpi | PyTorch / jit"
    head += " | PyTorch / eager | tuned / nnmpi | tuned / jit"
    found = {(each["case"], each["ranks"], each["of"], each["over"]): each for each in ratios(rows)}
    lines = []
    for case, ranks in pairs(rows):
        fastest = best(rows, case, ranks)
        if NAIVE in fastest:
            continue
        times = [ms(fastest[group]["step_s"]) if group in fastest else "-" for group in GROUPS]
        every = [(case, ranks, of, over) for of, over in COLUMNS]
        speed = [_ratio(found[each]) if each in found else "-" for each in every]
        lines.append(" | ".join([case, str(ranks), *times, *speed]))
    return render(head, lines, markdown)


def memory(rows: Rows, markdown: bool) -> str:
    """Return the peak resident memory of a rank, in each side's fastest way."""
    head = "case | ranks | nnmpi, MiB | nnmpi jit, MiB | PyTorch, MiB | nnmpi / PyTorch | jit / PyTorch"
    lines = []
    for case, ranks in pairs(rows):
        fastest = best(rows, case, ranks)
        if NAIVE in fastest:
            continue
        peaks = [fastest[group]["peak_bytes"] if group in fastest else None for group in (PURE, JIT, STOCK)]
        shares = [f"{peak / peaks[2]:.2f}" if peak and peaks[2] else "-" for peak in peaks[:2]]
        lines.append(" | ".join([case, str(ranks), *("-" if peak is None else mib(peak) for peak in peaks), *shares]))
    return render(head, lines, markdown)


def several(rows: Rows, markdown: bool) -> str:
    """Return how many times faster several ranks are than one."""
    found = speedups(rows)
    groups = [group for group in (PURE, JIT, STOCK, TUNED, NAIVE) if any(each["group"] == group for each in found)]
    lines = []
    for case, ranks in pairs(rows):
        mine = {
            each["group"]: f"{each['speedup']:.2f}" for each in found if (each["case"], each["ranks"]) == (case, ranks)
        }
        if mine:
            lines.append(" | ".join([case, f"1 to {ranks}", *(mine.get(group, "-") for group in groups)]))
    return render(" | ".join(["case", "ranks", *groups]), lines, markdown)


def shallowspeed(rows: Rows, markdown: bool) -> str:
    """Return the time of ShallowSpeed's design beside nnmpi's."""
    lines = []
    for case, ranks in pairs(rows):
        fastest = best(rows, case, ranks)
        if NAIVE in fastest:
            found = {each["over"]: _ratio(each) for each in ratios(rows) if _is(each, case, ranks, NAIVE)}
            times = [ms(fastest[group]["step_s"]) if group in fastest else "-" for group in (NAIVE, PURE, JIT)]
            lines.append(" | ".join([str(ranks), *times, *(found.get(group, "-") for group in (PURE, JIT))]))
    head = "ranks | its design, ms | nnmpi, ms | nnmpi jit, ms | its design / nnmpi | its design / jit"
    return render(head, lines, markdown)


def growth(rows: Rows, markdown: bool) -> str:
    """Return resident sizes before and after many steps."""
    lines = []
    for row in rows:
        more = row["after_bytes"] - row["before_bytes"]
        sizes = f"{mib(row['before_bytes'])} | {mib(row['after_bytes'])} | {more / 2**20:+.2f}"
        lines.append(f"{row['case']} | {row['ranks']} | {row['name']} | {row['steps']} | {sizes}")
    return render("case | ranks | contestant | steps | before, MiB | after, MiB | more, MiB", lines, markdown)


def start(rows: Rows, markdown: bool) -> str:
    """Return the times from command to first step."""
    lines = []
    for row in rows:
        first, third = row["quartiles_s"]
        share = row["share_of_torchrun"]
        times = f"{row['start_s']:.2f} ({first:.2f} to {third:.2f})"
        lines.append(f"{row['name']} | {row['ranks']} | {times} | {'-' if share is None else f'{share:.2f}'}")
    return render("started by | ranks | seconds to the first step (quartiles) | share of torchrun's", lines, markdown)


def render(head: str, lines: Iterable[str], markdown: bool) -> str:
    """Return a table of lines whose cells are divided by " | ": Markdown, or columns of equal width."""
    found = list(lines)
    if markdown:
        return table(head, found)
    cells = [line.split(" | ") for line in (head, *found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _is(found: Row, case: str, ranks: int, of: str) -> bool:
    return (found["case"], found["ranks"], found["of"]) == (case, ranks, of)


def _spread(row: Row) -> str:
    first, third = row["quartiles_s"]
    return f"{ms(row['step_s'])} ({ms(first)} to {ms(third)})"


def _ratio(found: Row) -> str:
    first, third = found["quartiles"]
    return f"{found['ratio']:.2f} ({first:.2f} to {third:.2f})"


def ms(seconds: float) -> str:
    """Return milliseconds with three digits that say something."""
    value = 1e3 * seconds
    return f"{value:.{max(0, 2 - len(str(int(value))) + (value < 1) + 1)}f}"


def mib(count: float) -> str:
    return f"{count / 2**20:.0f}"
