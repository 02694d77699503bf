"""What every contestant can do on the device, nnmpi's and PyTorch's; and the clock that times
it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import Case

Arrays = list[NDArray[np.float64]]


class DeviceTrainer:
    """One contestant: a model on the device with its optimizer (plain SGD), and one batch there.

    Each has restore (the first weights), weights (copies in host memory, in nnmpi's order and
    layout), step (returns the loss, on the device), read (it, as a number), wait (for the device),
    mark (an event) and between (two events: seconds).

    Attributes:
        name: unique among those of a case and mode.
        lr: the learning rate of the next step.
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
        """Give device memory back. Nothing else may be called afterwards."""
        vars(self).clear()


def device_s(trainer: DeviceTrainer, steps: int) -> float:
    """Return the seconds per step between events on the device, the batch being there and no loss
    being read.
    """
    trainer.wait()
    begin = trainer.mark()
    for _ in range(steps):
        trainer.step()
    end = trainer.mark()
    trainer.wait()
    return trainer.between(begin, end) / steps
