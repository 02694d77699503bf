"""A case in a mode, from its arrays to its rows: trainers are made, judged, asked for their memory,
and timed in turns.

    round 0    torch   nnmpi   nnmpi compiled       a block of steps each, timed by events on the device;
    round 1    nnmpi   torch   ...                  another order every round; nobody else uses the card meanwhile

All trainers live in one process and on one stream each, so that no context is switched between
blocks.
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
    """How long is measured: blocks of each trainer, and about how long one takes."""

    rounds: int
    block_s: float


def makers(arrays: CaseArrays, mode: str, backend: Backend, torch_device: str | None) -> Makers:
    """Return what makes each trainer of a case in a mode.

    Args:
        arrays: the case.
        mode: the precision.
        backend: nnmpi's device.
        torch_device: PyTorch's; None where it does not take part.
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
    """Return the course in float64: PyTorch's where it is there, else nnmpi's own.

    Args:
        arrays: the case.
        backend: nnmpi's device.
        torch_device: PyTorch's; None where it does not take part.
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
    """Return a row for each trainer; of one that gave a wrong result or could not run, with the
    reason and no times.

    Args:
        arrays: the case.
        mode: the precision.
        made: what makes each trainer.
        right: the reference's course.
        timing: how long is measured.
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
            # the others are measured all the same; the command ends with status 1
            row.setdefault("name", f"contestant {len(rows)}")
            row["failed"] = f"{type(error).__name__}: {error}"
            row["wrong"] = isinstance(error, WrongResultError)
    time_blocks(trainers, timing)
    for trainer, row in trainers:
        trainer.close()
        row |= summary("device", row["device_blocks_s"])
    return rows


def _look(trainer: DeviceTrainer, arrays: CaseArrays, right: TrainingCourse, row: Row) -> None:
    """Judge a trainer, and let its row have its errors, as long as nobody else computes."""
    row["errors"] = asdict(examine(trainer, arrays.weights, right))
    trainer.lr = LR
    for _ in range(WARM_UP):
        trainer.read(trainer.step())


def time_blocks(trainers: Sequence[tuple[DeviceTrainer, Row]], timing: Timing) -> None:
    """Let the trainers take turns; put the seconds per step, block by block, in their rows."""
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
    """Return the row with the shortest device time; None without any.

    Args:
        rows: of all cases and modes.
        case, mode: of those that are compared.
        side: with what their names begin: "nnmpi" or "torch".
    """
    mine = [
        row for row in rows if (row["case"], row["mode"]) == (case, mode) and "failed" not in row
    ]
    mine = [row for row in mine if row["name"].startswith(side)]
    return min(mine, key=lambda row: row["device_s"], default=None)


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return how many times as fast as PyTorch's fastest way nnmpi's is: medians of the rounds'
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
