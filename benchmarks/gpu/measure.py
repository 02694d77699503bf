"""A case in a mode, from its arrays to its rows: make the trainers, judge them, time them in turns.

    round 0    torch   nnmpi   nnmpi compiled     a block of steps each, timed by device events;
    round 1    nnmpi   torch   ...                a new order every round, one trainer at a time

All trainers live in one process, each on its own stream: no context switch between blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.cases import FLOAT32, CaseArrays
from benchmarks.gpu.judge import TrainingCourse, course, examine, rate
from benchmarks.gpu.trainer import DeviceTrainer, device_s
from benchmarks.gpu.trainer_nnmpi import NnmpiDeviceTrainer
from benchmarks.harness.turns import WrongResultError, in_turns, ratio, steps_in_block, summary
from benchmarks.training.measure import LR
from nnmpi.backend.backend import Backend

Row = dict[str, Any]
Makers = Sequence[Callable[[], DeviceTrainer]]
WARM_UP, MOST_STEPS = 3, 2000


@dataclass(frozen=True)
class Timing:
    """The length of a measurement: blocks of each trainer, and seconds of a block, about."""

    rounds: int
    block_s: float


def makers(arrays: CaseArrays, mode: str, backend: Backend, torch_device: str | None) -> Makers:
    """Return a constructor for each trainer of a case in a mode.

    Args:
        arrays: the case.
        mode: the precision.
        backend: nnmpi's device.
        torch_device: PyTorch's; None: without PyTorch.
    """
    result: list[Callable[[], DeviceTrainer]] = [
        lambda compiled=compiled: NnmpiDeviceTrainer(arrays, mode, backend, compiled)
        for compiled in (False, True)
    ]
    if torch_device is not None:
        from benchmarks.gpu.trainer_torch import TorchDeviceTrainer

        result.append(lambda: TorchDeviceTrainer(arrays, mode, torch_device))
    return result


def reference(arrays: CaseArrays, backend: Backend, torch_device: str | None) -> TrainingCourse:
    """Return the course in float64, by PyTorch, or by nnmpi without it.

    Args:
        arrays: the case.
        backend: nnmpi's device.
        torch_device: PyTorch's; None: without PyTorch.
    """
    trainer: DeviceTrainer
    if torch_device is not None:
        from benchmarks.gpu.trainer_torch import TorchDeviceTrainer

        trainer = TorchDeviceTrainer(arrays, FLOAT32, torch_device, dtype="float64")
    else:
        trainer = NnmpiDeviceTrainer(arrays, FLOAT32, backend, compiled=False, dtype="float64")
    result = course(trainer, arrays.weights, rate(trainer, arrays.weights))
    trainer.close()
    return result


def measure(
    arrays: CaseArrays, mode: str, made: Makers, right: TrainingCourse, timing: Timing
) -> list[Row]:
    """Return a row for each trainer; of a wrong or failed one, with the reason and no times.

    Args:
        arrays: the case.
        mode: the precision.
        made: the trainers' constructors.
        right: the reference's course.
        timing: the length of the measurement.
    """
    rows, trainers = [], []
    for make in made:
        row: Row = {"case": arrays.case.name, "mode": mode, "batch": arrays.case.batch}
        rows.append(row)
        try:
            trainer = make()
            row["name"] = trainer.name
            _look(trainer, arrays, right, row)
            trainers.append((trainer, row))
        except Exception as error:
            # the others are still measured; the command ends with status 1
            row.setdefault("name", f"contestant {len(rows)}")
            row["failed"] = f"{type(error).__name__}: {error}"
            row["wrong"] = isinstance(error, WrongResultError)
    time_blocks(trainers, timing)
    for trainer, row in trainers:
        trainer.close()
        row |= summary("device", row["device_blocks_s"])
    return rows


def _look(trainer: DeviceTrainer, arrays: CaseArrays, right: TrainingCourse, row: Row) -> None:
    """Judge a trainer alone on the device, note its errors in its row, and warm it up."""
    row["errors"] = asdict(examine(trainer, arrays.weights, right))
    trainer.lr = LR
    for _ in range(WARM_UP):
        trainer.read(trainer.step())


def time_blocks(trainers: Sequence[tuple[DeviceTrainer, Row]], timing: Timing) -> None:
    """Time the trainers in turns; put the seconds per step, block by block, in their rows."""
    if not trainers:
        return
    first = [(device_s(trainer, WARM_UP), device_s(trainer, WARM_UP))[1] for trainer, _ in trainers]
    steps = steps_in_block(timing.block_s, first, MOST_STEPS)
    for _, row in trainers:
        row.update(steps=steps, device_blocks_s=[])
    for (trainer, row), counts in in_turns(trainers, timing.rounds):
        seconds = device_s(trainer, steps)
        if counts:
            row["device_blocks_s"].append(seconds)


def fastest(rows: Sequence[Row], case: str, mode: str, side: str) -> Row | None:
    """Return the row with the shortest device time, or None.

    Args:
        rows: of all cases and modes.
        case, mode: of the comparison.
        side: prefix of their names: "nnmpi" or "torch".
    """
    mine = [
        row for row in rows if (row["case"], row["mode"]) == (case, mode) and "failed" not in row
    ]
    mine = [row for row in mine if row["name"].startswith(side)]
    return min(mine, key=lambda row: row["device_s"], default=None)


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the speed of nnmpi's fastest way relative to PyTorch's: medians of the rounds'
    ratios.
    """
    result = []
    for case, mode in dict.fromkeys((row["case"], row["mode"]) for row in rows):
        ours, theirs = (fastest(rows, case, mode, side) for side in ("nnmpi", "torch"))
        if ours is None or theirs is None:
            continue
        fields: Row = {"case": case, "mode": mode, "nnmpi": ours["name"], "torch": theirs["name"]}
        fields |= ratio("device", theirs["device_blocks_s"], ours["device_blocks_s"])
        result.append(fields)
    return result
