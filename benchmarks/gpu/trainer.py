"""The interface of a contestant on the device, and its clock."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import Case

Arrays = list[NDArray[np.float64]]


class DeviceTrainer:
    """One contestant: a model on the device with its optimizer (plain SGD), and one batch.

    Attributes:
        name: unique within a case and mode.
        lr: the learning rate of the next step.
        restore: sets the first weights.
        weights: returns copies in host memory, in nnmpi's order and layout.
        step: returns the loss, on the device.
        read: (loss) -> its number.
        wait: for the device.
        mark: records an event.
        between: (event, event) -> seconds.
    """

    name: str
    lr: float = 0.0
    restore: Callable[[], None]
    weights: Callable[[], Arrays]
    step: Callable[[], Any]
    read: Callable[[Any], float]
    wait: Callable[[], None]
    mark: Callable[[], Any]
    between: Callable[[Any, Any], float]

    def __init__(self, case: Case, mode: str) -> None:
        self.case, self.mode = case, mode

    def close(self) -> None:
        """Free device memory. No other method may follow."""
        vars(self).clear()


def device_s(trainer: DeviceTrainer, steps: int) -> float:
    """Return the seconds per step between device events; the batch is on the device, and no loss is
    read.
    """
    trainer.wait()
    begin = trainer.mark()
    for _ in range(steps):
        trainer.step()
    end = trainer.mark()
    trainer.wait()
    return trainer.between(begin, end) / steps
