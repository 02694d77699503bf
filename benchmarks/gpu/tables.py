"""The tables of the screen and of the results' README."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.measure import fractions, ratios
from benchmarks.harness.tables import Columns, mib, ms, number, percent, render, spread

Row = Mapping[str, Any]


def contestants(rows: Sequence[Row], ceilings: Mapping[str, Any], markdown: bool = False) -> str:
    """Return every contestant's times, memory, errors and fractions of the ceilings; of one that failed, why.

    Args:
        rows: of one or several cases and modes.
        ceilings: as `ceilings.py` has measured them.
        markdown: otherwise the table is text.
    """
    columns: Columns = (
        ("case", "case"),
        ("mode", "mode"),
        ("contestant", "name"),
        ("device ms (quartiles)", lambda row: spread(row["device_s"], row["device_quartiles_s"], ms)),
        ("end-to-end ms (quartiles)", lambda row: spread(row["host_s"], row["host_quartiles_s"], ms)),
        ("peak MiB", lambda row: mib(row["peak_bytes"])),
        ("of products", lambda row: percent(fractions(row, ceilings)["products"])),
        ("of copies", lambda row: percent(fractions(row, ceilings)["within"])),
        ("of uploads", lambda row: percent(fractions(row, ceilings)["up"])),
        (
            "error of losses, of the change",
            lambda row: f"{row['errors']['loss']:.0e}, {row['errors']['change']:.0e}",
        ),
    )
    done = [row for row in rows if "failed" not in row]
    failed = [
        f"{row['case']} in {row['mode']}: {row['name']} failed: {row['failed']}" for row in rows if "failed" in row
    ]
    return "\n".join([*([render(columns, done, markdown)] if done else []), *failed])


def speeds(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return how many times as fast as PyTorch nnmpi is, beside the targets."""
    columns = (
        ("case", "case"),
        ("mode", "mode"),
        ("nnmpi's way", "nnmpi"),
        ("PyTorch's way", "torch"),
        ("PyTorch / nnmpi, device (quartiles)", lambda row: spread(row["device"], row["device_quartiles"])),
        ("end-to-end (quartiles)", lambda row: spread(row["host"], row["host_quartiles"])),
        ("memory, PyTorch / nnmpi", lambda row: number(row["memory"])),
        ("target", lambda row: number(row["target"])),
        ("reached", lambda row: {None: "-", True: "yes", False: "no"}[row["reached"]]),
    )
    return render(columns, ratios(rows), markdown)


def ceilings(found: Mapping[str, Any], markdown: bool = False) -> str:
    """Return what the card can do, as measured."""
    rows = []
    for row in found["products"]:
        theirs = row["torch_flops_per_s"]
        what = f"product of {row['side']} x {row['side']} in {row['mode']}, TFLOP/s"
        rows.append((what, row["nnmpi_flops_per_s"] / 1e12, None if theirs is None else theirs / 1e12))
    names = {
        "within": "copies on the card (read + written)",
        "up": "copies to the card",
        "down": "copies from the card",
    }
    rows += [(f"{what}, GB/s", found["copies"][f"{name}_bytes_per_s"] / 1e9, None) for name, what in names.items()]
    columns = (
        ("what", lambda row: row[0]),
        ("through nnmpi", lambda row: number(row[1], ".1f")),
        ("through PyTorch", lambda row: number(row[2], ".1f")),
    )
    return render(columns, rows, markdown)


def mnist(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return the times of the epochs on MNIST, and the accuracies."""
    columns = (
        ("contestant", "name"),
        ("all epochs, s", lambda row: f"{row['total_s']:.2f}"),
        ("an epoch, s (quartiles)", lambda row: spread(row["epoch_s"], row["epoch_quartiles_s"])),
        ("test accuracy", lambda row: percent(row["accuracy"], 2)),
        ("data", "data"),
    )
    return render(columns, rows, markdown)
