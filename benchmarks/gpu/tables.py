"""The tables for the screen and the results' README."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.measure import ratios
from benchmarks.harness.tables import Columns, ms, render, spread

Row = Mapping[str, Any]


def contestants(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return every contestant's times and errors; of a failed one, the reason.

    Args:
        rows: of one or several cases and modes.
        markdown: otherwise the table is text.
    """
    columns: Columns = (
        ("case", "case"),
        ("mode", "mode"),
        ("contestant", "name"),
        (
            "device ms (quartiles)",
            lambda row: spread(row["device_s"], row["device_quartiles_s"], ms),
        ),
        (
            "error of losses, of the change",
            lambda row: f"{row['errors']['loss']:.0e}, {row['errors']['change']:.0e}",
        ),
    )
    done = [row for row in rows if "failed" not in row]
    failed = [
        f"{row['case']} in {row['mode']}: {row['name']} failed: {row['failed']}"
        for row in rows
        if "failed" in row
    ]
    return "\n".join([*([render(columns, done, markdown)] if done else []), *failed])


def speeds(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return nnmpi's speed relative to PyTorch's."""
    columns = (
        ("case", "case"),
        ("mode", "mode"),
        ("nnmpi's way", "nnmpi"),
        ("PyTorch's way", "torch"),
        (
            "PyTorch / nnmpi, device (quartiles)",
            lambda row: spread(row["device"], row["device_quartiles"]),
        ),
    )
    return render(columns, ratios(rows), markdown)
