"""The interface of a contestant on the device, and its clock."""

import gc
import time
from collections.abc import Callable
from typing import Any

LR = 1e-4  # in five steps a wrong gradient shows, and rounding does not grow


class DeviceTrainer:
    """One contestant: a model on the device with AdamW, and one batch.

    Attributes:
        step: returns the loss, on the device.
        read: (loss) -> its number.
        wait: for the device.
        peak_bytes: the most memory that it has had since it was made; None where nobody counts it.
    """

    step: Callable[[], Any]
    read: Callable[[Any], float]
    wait: Callable[[], None]
    peak_bytes: Callable[[], int | None]

    def close(self) -> None:
        """Free device memory. No other method may follow."""
        vars(self).clear()
        gc.collect()  # a compiled step refers to its model, and the model to it


def step_s(trainer: DeviceTrainer, steps: int) -> float:
    """Return the seconds per step; the batch is on the device, and the last loss is read.

    Whoever reads a loss has waited for its step, on whatever stream the step has run.
    """
    trainer.wait()
    begin = time.perf_counter()
    for _ in range(steps):
        loss = trainer.step()
    trainer.read(loss)
    trainer.wait()
    return (time.perf_counter() - begin) / steps
