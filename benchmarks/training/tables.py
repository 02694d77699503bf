"""The tables for the screen and the README."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.tables import MISSING, Columns, mib, ms, render, spread
from benchmarks.training.contestants import STOCK
from benchmarks.training.measure import GROUPS, RATIOS, Row, compare

_CASE: Columns = (("case", "case"), ("ranks", "ranks"))


def contestants(rows: Sequence[Row], markdown: bool) -> str:
    """Return every contestant's time, memory and errors, the fastest first."""
    columns = (
        *_CASE,
        ("contestant", "name"),
        ("ms per step (quartiles)", lambda row: spread(row["step_s"], row["step_quartiles_s"], ms)),
        ("peak MiB", lambda row: mib(row["peak_bytes"])),
        (
            "error of loss, gradient, weights",
            lambda row: ", ".join(f"{item:.0e}" for item in row["errors"].values()),
        ),
    )
    return render(columns, sorted(rows, key=lambda row: row["step_s"]), markdown)


def speeds(rows: Sequence[Row], markdown: bool) -> str:
    """Return each group's fastest time, and nnmpi's speed-up: medians (quartiles) of the rounds'
    ratios.
    """

    def step_ms(row: Row, group: str) -> str:
        return ms(row["best"][group]["step_s"]) if group in row["best"] else MISSING

    def times(row: Row, both: str) -> str:
        result = row["ratios"].get(both)
        return MISSING if result is None else spread(result["ratio"], result["ratio_quartiles"])

    columns = (
        *_CASE,
        *((f"{group}, ms", lambda row, group=group: step_ms(row, group)) for group in GROUPS),
        *((f"{a} / {b}", lambda row, both=f"{a} / {b}": times(row, both)) for a, b in RATIOS),
    )
    return render(columns, compare(rows), markdown)


def memory(rows: Sequence[Row], markdown: bool) -> str:
    """Return the peak resident memory of a rank, of each group's fastest contestant."""

    def peak(row: Row, group: str) -> str:
        return mib(row["best"][group]["peak_bytes"]) if group in row["best"] else MISSING

    groups = GROUPS[: GROUPS.index(STOCK) + 1]
    columns = (
        *_CASE,
        *((f"{group}, MiB", lambda row, group=group: peak(row, group)) for group in groups),
    )
    return render(columns, compare(rows), markdown)
