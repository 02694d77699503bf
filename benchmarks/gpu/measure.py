"""A case in a mode, from its contestants to their rows: first steps, judgement, blocks in turns.

    round 0    PyTorch   nnmpi     nnmpi.compile     a block of steps each, about as long;
    round 1    nnmpi     PyTorch   ...               a new order every round, one at a time

All contestants live in one process: no context switch between blocks.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

from benchmarks.gpu.cases import BF16, COMPILED, EAGER, FLOAT32, OURS, PEERS, TF32, TORCH, Case
from benchmarks.gpu.trainer import DeviceTrainer, step_s
from benchmarks.gpu.trainer_nnmpi import NnmpiDeviceTrainer
from benchmarks.harness.turns import in_turns, ratio, steps_in_block, summary
from nnmpi.backend.backend import Backend

Row = dict[str, Any]
Makers = Mapping[str, Callable[[], DeviceTrainer]]
FIRST, MOST_STEPS = 5, 2000
# The largest difference of a contestant's first losses from the judge's, relative to the first one.
# float32 has 24 bits, TF32 11, bfloat16 8, and AdamW's first steps have the length of its rate for
# the smallest gradient, too.
TOLERANCES = {FLOAT32: 1e-3, TF32: 5e-3, BF16: 2e-2}
RANDOM_TOLERANCE = 0.1


@dataclass(frozen=True)
class Timing:
    """The length of a measurement: blocks of each contestant, and seconds of a block, about."""

    rounds: int
    block_s: float


def makers(
    case: Case, mode: str, names: Sequence[str], backend: Backend, torch_device: str | None
) -> Makers:
    """Return the constructors of contestants by name; without PyTorch, nnmpi's alone.

    Args:
        case: the model and its batch.
        mode: the precision.
        names: of contestants.
        backend: nnmpi's device.
        torch_device: PyTorch's; None: without PyTorch.
    """
    result: dict[str, Callable[[], DeviceTrainer]] = {}
    for name in names:
        if name in OURS:
            result[name] = lambda name=name: NnmpiDeviceTrainer(
                case, mode, backend, name == COMPILED
            )
        elif torch_device is not None:
            from benchmarks.gpu.trainer_torch import TorchDeviceTrainer

            result[name] = lambda name=name: TorchDeviceTrainer(case, mode, torch_device, name)
    return result


def measure(case: Case, mode: str, made: Makers, timing: Timing) -> list[Row]:
    """Return a row for each contestant; of one that failed, with the reason and no times.

    Args:
        case: the model and its batch.
        mode: the precision.
        made: the contestants.
        timing: the length of the measurement.
    """
    rows: list[Row] = [
        {"case": case.name, "mode": mode, "batch": case.shape[0], "name": name} for name in made
    ]
    running: list[tuple[DeviceTrainer, Row]] = []
    try:
        for row in rows:
            with noted(row):
                trainer = made[row["name"]]()
                running.append((trainer, row))
                begin = time.perf_counter()
                row["losses"] = [trainer.read(trainer.step()) for _ in range(FIRST)]
                row["first_s"] = time.perf_counter() - begin
                row["peak_bytes"] = trainer.peak_bytes()
                seconds = min(step_s(trainer, 1), step_s(trainer, 2))
                row["steps"] = steps_in_block(timing.block_s, [seconds], MOST_STEPS)
                row["blocks_s"] = []
        for (trainer, row), counts in in_turns(running, timing.rounds):
            if "failed" not in row:
                with noted(row):
                    seconds = step_s(trainer, row["steps"])
                    if counts:
                        row["blocks_s"].append(seconds)
        for trainer, row in running:
            if "failed" not in row:
                with noted(row):
                    row |= summary("step", row["blocks_s"])
                    row["last_loss"] = trainer.read(trainer.step())
    finally:
        for trainer, row in running:
            with noted(row):
                trainer.close()
    judge(rows, RANDOM_TOLERANCE if case.random else TOLERANCES[mode])
    return rows


@contextmanager
def noted(row: Row) -> Iterator[None]:
    """Note an error in a contestant's row; the others are still measured."""
    try:
        yield
    except Exception as error:
        row.setdefault("failed", f"{type(error).__name__}: {error}"[:500])


def judge(rows: Sequence[Row], tolerance: float) -> None:
    """Compare the first losses of a case's rows with one of them; note the error and what is wrong.

    The judge is PyTorch eager, or nnmpi's loop without it. All start from the same weights, so a
    wrong gradient shows in the losses after it.

    Args:
        rows: of one case in one mode.
        tolerance: the largest error of a loss, relative to the first one.
    """
    done = {row["name"]: row for row in rows if "failed" not in row}
    right = next((done[name] for name in (TORCH, EAGER, COMPILED) if name in done), None)
    for row in done.values():
        assert right is not None
        pairs = zip(row["losses"], right["losses"], strict=True)
        errors = [abs(a - b) / right["losses"][0] for a, b in pairs]
        row["error"] = max(errors, key=lambda error: error if isfinite(error) else float("inf"))
        if not (row["error"] <= tolerance and isfinite(row["last_loss"])):
            row["wrong"] = (
                f"losses off by {row['error']:.0e} of {right['name']}'s, the last one"
                f" {row['last_loss']:.3g}"
            )


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each case and mode, the slowest of nnmpi's first.

    A contestant's time is divided by nnmpi.compile's of the same rounds. "ratio" is the smallest
    of these medians, that of the fastest peer; None if nnmpi.compile or every peer failed.

    Args:
        rows: of `measure`, several of one case and mode where it was called again.
    """
    result = []
    for key in dict.fromkeys((row["case"], row["mode"]) for row in rows):
        mine = [row for row in rows if (row["case"], row["mode"]) == key]
        fields: Row = {"case": key[0], "mode": key[1], "batch": mine[0]["batch"], "ratio": None}
        fields["by_name"] = {row["name"]: row for row in reversed(mine)}
        fields["notes"] = [
            f"{row['name']}: {note}"
            for row in mine
            for note in (row.get("failed"), row.get("wrong"))
            if note
        ]
        pairs = [
            (ratio("ratio", peer["blocks_s"], ours["blocks_s"]), peer["name"])
            for ours, peer in _pairs(mine)
        ]
        if pairs:
            best, fields["peer"] = min(pairs, key=lambda pair: pair[0]["ratio"])
            fields |= best
        result.append(fields)
    return sorted(result, key=_place)


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return nnmpi.compile's row and a peer's, of the same rounds, for each peer."""
    ours, result = None, []
    for row in sorted(rows, key=lambda row: row["part"] * 10 + (row["name"] in PEERS)):
        if "failed" in row:
            continue
        if row["name"] == COMPILED:
            ours = row
        elif row["name"] in PEERS and ours is not None and ours["part"] == row["part"]:
            result.append((ours, row))
    return result


def _place(row: Row) -> float:
    """Return a sort key: what nnmpi cannot do, then the slowest; at last rows without peers."""
    if row["ratio"] is not None:
        return float(row["ratio"])
    return 0.0 if COMPILED in row["by_name"] and "failed" in row["by_name"][COMPILED] else 1e9
