"""The tables of the screen and of the results' README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.measure import fractions, ratios
from benchmarks.training.tables import mib, ms, render

Row = Mapping[str, Any]


def contestants(rows: Sequence[Row], ceilings: Mapping[str, Any], markdown: bool = False) -> str:
    """Return every contestant's times, memory, errors and fractions of the ceilings; of one that failed, why."""
    head = "case | mode | contestant | device ms (quartiles) | end-to-end ms (quartiles) | peak MiB | of products | "
    head += "of copies | of uploads | error of losses, of the change"
    lines, failed = [], []
    for row in rows:
        if "failed" in row:
            failed.append(f"{row['case']} in {row['mode']}: {row['name']} failed: {row['failed']}")
            continue
        part = fractions(row, ceilings)
        times = " | ".join(_spread(row, clock) for clock in ("device", "host"))
        shares = " | ".join(f"{100 * part[name]:.1f} %" for name in ("products", "within", "up"))
        errors = f"{row['errors']['loss']:.0e}, {row['errors']['change']:.0e}"
        memory = mib(row["peak_bytes"])
        lines.append(f"{row['case']} | {row['mode']} | {row['name']} | {times} | {memory} | {shares} | {errors}")
    return "\n".join([render(head, lines, markdown), *failed] if lines else failed)


def speeds(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return how many times as fast as PyTorch nnmpi is, beside the targets; "" without PyTorch."""
    head = "case | mode | nnmpi's way | PyTorch's way | PyTorch / nnmpi, device (quartiles) | end-to-end (quartiles) | "
    head += "memory, PyTorch / nnmpi | target | reached"
    lines = []
    for each in ratios(rows):
        times = " | ".join(_ratio(each, clock) for clock in ("device", "host"))
        wanted = "-" if each["target"] is None else f"{each['target']:.2f}"
        reached = {None: "-", True: "yes", False: "no"}[each["reached"]]
        named = f"{each['case']} | {each['mode']} | {each['nnmpi']} | {each['torch']}"
        lines.append(f"{named} | {times} | {each['memory']:.2f} | {wanted} | {reached}")
    return render(head, lines, markdown) if lines else ""


def ceilings(found: Mapping[str, Any], markdown: bool = False) -> str:
    """Return what the card can do, as measured."""
    lines = []
    for row in found["products"]:
        theirs = row["torch_flops_per_s"]
        other = "-" if theirs is None else f"{theirs / 1e12:.1f}"
        what = f"product of {row['side']} x {row['side']} in {row['mode']}, TFLOP/s"
        lines.append(f"{what} | {row['nnmpi_flops_per_s'] / 1e12:.1f} | {other}")
    names = {
        "within": "copies on the card (read + written)",
        "up": "copies to the card",
        "down": "copies from the card",
    }
    lines += [f"{what}, GB/s | {found['copies'][f'{name}_bytes_per_s'] / 1e9:.1f} | -" for name, what in names.items()]
    return render("what | through nnmpi | through PyTorch", lines, markdown)


def mnist(rows: Sequence[Row], markdown: bool = False) -> str:
    """Return the times of the epochs on MNIST, and the accuracies."""
    lines = []
    for row in rows:
        first, third = row["epoch_quartiles_s"]
        epoch = f"{row['epoch_s']:.2f} ({first:.2f} to {third:.2f})"
        lines.append(f"{row['name']} | {row['total_s']:.2f} | {epoch} | {100 * row['accuracy']:.2f} % | {row['data']}")
    head = "contestant | all epochs, s | an epoch, s (quartiles) | test accuracy | data"
    return render(head, lines, markdown)


def _spread(row: Row, clock: str) -> str:
    first, third = row[f"{clock}_quartiles_s"]
    return f"{ms(row[f'{clock}_s'])} ({ms(first)} to {ms(third)})"


def _ratio(each: Row, clock: str) -> str:
    first, third = each[f"{clock}_quartiles"]
    return f"{each[clock]:.2f} ({first:.2f} to {third:.2f})"
