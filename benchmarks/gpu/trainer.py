"""What every contestant can do on the device, nnmpi's and PyTorch's; and the two clocks that time it."""

import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.cases import Case

Arrays = list[NDArray[np.float64]]


class DeviceTrainer(ABC):
    """One contestant: a model on the device with its optimizer (plain SGD), and one batch in host and device memory.

    Attributes:
        name: unique among those of a case and mode.
        lr: the learning rate of the next step.
    """

    name: str
    lr: float = 0.0

    def __init__(self, case: Case, mode: str) -> None:
        self.case, self.mode = case, mode

    @abstractmethod
    def restore(self) -> None:
        """Give all parameters their first values."""

    @abstractmethod
    def weights(self) -> Arrays:
        """Return copies of the parameters in host memory, in nnmpi's order and layout."""

    @abstractmethod
    def upload(self) -> None:
        """Copy the batch from page-locked host memory to the device, without waiting."""

    @abstractmethod
    def step(self) -> Any:
        """Do forward, backward and update with the batch on the device; return the loss, which stays there."""

    @abstractmethod
    def read(self, loss: Any) -> float:
        """Return a loss as a number: waits for the device."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the device has done everything."""

    @abstractmethod
    def mark(self) -> Any:
        """Return an event that the device passes when it has done all earlier work."""

    @abstractmethod
    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events that have passed."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most that its pool has taken from the device since `reset_peak`, without what others have."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Count the peak from here on."""

    def close(self) -> None:
        """Give device memory back. Nothing else may be called afterwards."""
        vars(self).clear()


def device_s(trainer: DeviceTrainer, steps: int) -> float:
    """Return the seconds per step between events on the device, the batch being there and no loss being read."""
    trainer.wait()
    begin = trainer.mark()
    for _ in range(steps):
        trainer.step()
    end = trainer.mark()
    trainer.wait()
    return trainer.between(begin, end) / steps


def host_s(trainer: DeviceTrainer, steps: int) -> float:
    """Return the seconds per step by the host's clock: upload of the batch, step, and the loss as a number."""
    trainer.wait()
    begin = time.perf_counter()
    for _ in range(steps):
        trainer.upload()
        trainer.read(trainer.step())
    return (time.perf_counter() - begin) / steps
