"""A case in a mode, from its arrays to its rows: sides are made, judged, asked for their memory, and timed in turns.

    round 0    torch   nnmpi   nnmpi compiled       a block of steps each by events, and one by the host's clock;
    round 1    nnmpi   torch   ...                  another order every round; nobody else uses the card meanwhile

All sides live in one process and on one stream each, so that no context is switched between blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.gpu.cases import FLOAT32, target
from benchmarks.gpu.judge import Course, WrongResultError, course, examine, rate
from benchmarks.gpu.ours import Ours
from benchmarks.gpu.side import Side, device_s, host_s
from benchmarks.gpu.subject import Subject
from benchmarks.gpu.work import flops, moved, uploaded
from benchmarks.training.cases import CNN
from benchmarks.training.rounds import LR
from benchmarks.training.rows import quartiles
from nnmpi.backend.record import Backend

Row = dict[str, Any]
Makers = Sequence[Callable[[], Side]]
WARM_UP, MOST_STEPS = 3, 2000


@dataclass(frozen=True)
class Timing:
    """How long is measured: blocks of each side, and about how long one takes."""

    rounds: int
    block_s: float


def makers(subject: Subject, mode: str, backend: Backend, torch_device: str | None) -> Makers:
    """Return what makes each side of a case in a mode."""
    found: list[Callable[[], Side]] = [
        lambda compiled=compiled: Ours(subject, mode, backend, compiled) for compiled in (False, True)
    ]
    if torch_device is not None:
        from benchmarks.gpu.theirs import Theirs

        layouts = (False, True) if subject.case.model == CNN else (False,)
        found += [lambda layout=layout: Theirs(subject, mode, torch_device, layout) for layout in layouts]
    return found


def reference(subject: Subject, backend: Backend, torch_device: str | None) -> Course:
    """Return the course in float64: PyTorch's where it is there, else nnmpi's own."""
    side: Side
    if torch_device is not None:
        from benchmarks.gpu.theirs import Theirs

        side = Theirs(subject, FLOAT32, torch_device, contiguous=True, dtype="float64")
    else:
        side = Ours(subject, FLOAT32, backend, compiled=False, dtype="float64")
    found = course(side, subject.weights, rate(side, subject.weights))
    side.close()
    return found


def measure(subject: Subject, mode: str, made: Makers, right: Course, timing: Timing) -> list[Row]:
    """Return a row for each side; of one that gave a wrong result or could not run, with the reason and no times."""
    rows, sides = [], []
    for make in made:
        row: Row = {"case": subject.case.name, "mode": mode, "batch": subject.case.batch}
        rows.append(row)
        try:
            side = make()
            row["name"] = side.name
            _look(side, subject, right, row)
            sides.append((side, row))
        except Exception as error:  # the others are measured all the same; the command ends with status 1
            row.setdefault("name", f"contestant {len(rows)}")
            row["failed"] = f"{type(error).__name__}: {error}"
            row["wrong"] = isinstance(error, WrongResultError)
    play(sides, timing)
    for side, row in sides:
        side.close()
        _rate(subject, row)
    return rows


def _look(side: Side, subject: Subject, right: Course, row: Row) -> None:
    """Judge a side, and let its row have its errors and its memory, as long as nobody else computes."""
    row["errors"] = asdict(examine(side, subject.weights, right))
    side.lr = LR
    side.forget_peak()
    for _ in range(WARM_UP):
        side.upload()
        side.read(side.step())
    row["peak_bytes"], row["used_bytes"] = side.peak_bytes(), side.used_bytes()


def play(sides: Sequence[tuple[Side, Row]], timing: Timing) -> None:
    """Let the sides take turns; put the seconds per step, block by block, in their rows."""
    if not sides:
        return
    first = [(device_s(side, WARM_UP), device_s(side, WARM_UP))[1] for side, _ in sides]
    steps = min(max(1, round(timing.block_s / max(median(first), 1e-6))), MOST_STEPS)
    for _, row in sides:
        row.update(steps=steps, device_blocks_s=[], host_blocks_s=[])
    for number in range(-1, timing.rounds):  # the first round warms up
        for side, row in random.Random(number).sample(list(sides), len(sides)):
            device, host = device_s(side, steps), host_s(side, steps)
            if number >= 0:
                row["device_blocks_s"].append(device)
                row["host_blocks_s"].append(host)


def _rate(subject: Subject, row: Row) -> None:
    """Put medians, quartiles and rates in a row."""
    case, mode = subject.case, row["mode"]
    for clock in ("device", "host"):
        blocks = row[f"{clock}_blocks_s"]
        row[f"{clock}_s"], row[f"{clock}_quartiles_s"] = median(blocks), quartiles(blocks)
    row["flops"], row["moved_bytes"], row["uploaded_bytes"] = flops(case), moved(case, mode), uploaded(case)


def fastest(rows: Sequence[Row], case: str, mode: str, side: str) -> Row | None:
    """Return the row with the shortest device time of those whose name begins so; None without any."""
    mine = [row for row in rows if (row["case"], row["mode"]) == (case, mode) and "failed" not in row]
    mine = [row for row in mine if row["name"].startswith(side)]
    return min(mine, key=lambda row: row["device_s"], default=None)


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return how many times as fast as PyTorch's fastest way nnmpi's is: medians of the rounds' ratios."""
    found = []
    for case, mode in dict.fromkeys((row["case"], row["mode"]) for row in rows):
        ours, theirs = (fastest(rows, case, mode, side) for side in ("nnmpi", "torch"))
        if ours is None or theirs is None:
            continue
        ratio: Row = {"case": case, "mode": mode, "nnmpi": ours["name"], "torch": theirs["name"]}
        for clock in ("device", "host"):
            both = zip(theirs[f"{clock}_blocks_s"], ours[f"{clock}_blocks_s"], strict=True)
            each = [a / max(b, 1e-12) for a, b in both]
            ratio[clock], ratio[f"{clock}_quartiles"] = median(each), quartiles(each)
        ratio["memory"] = theirs["peak_bytes"] / max(ours["peak_bytes"], 1)
        ratio["target"] = target(case, mode)
        ratio["reached"] = None if ratio["target"] is None else ratio["device"] >= ratio["target"]
        found.append(ratio)
    return found


def fractions(row: Mapping[str, Any], ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Return which part of the measured ceilings a row reaches: of products, of copies within the card, and up to it.

    The last one is the least time that the upload takes, as a share of the end-to-end time.
    """
    product = next(each for each in ceilings["products"] if each["mode"] == row["mode"])
    copies = ceilings["copies"]
    return {
        "products": row["flops"] / row["device_s"] / product["flops_per_s"],
        "within": row["moved_bytes"] / row["device_s"] / copies["within_bytes_per_s"],
        "up": row["uploaded_bytes"] / row["host_s"] / copies["up_bytes_per_s"],
    }
