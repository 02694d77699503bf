"""Stopping by signal: finish the step, save, and leave, on all ranks at the same step."""

import signal
from types import FrameType, TracebackType
from typing import Self

from nnmpi.comm.checkup import Checkup
from nnmpi.comm.group import Group

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Notes SIGTERM and SIGINT while it is entered, and lets the ranks agree to stop.

    A signal may reach one rank or all, at different steps, so the ranks compare notes now and then.

    A second SIGINT raises KeyboardInterrupt at once, for a step that does not end.
    """

    def __init__(self, group: Group, interval_s: float = 0.5) -> None:
        """Do nothing yet."""
        self._checkup = Checkup(group, interval_s)
        self._noted: int = 0
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        """Take over the signals; outside the main thread, where Python forbids it, leave them as they are."""
        try:
            for number in STOPPING:
                self._before[number] = signal.signal(number, self._note)
        except ValueError:
            self._before.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self, step_s: float) -> int:
        """Return the signal that any rank got, 0 for none; call it once per step on all ranks.

        Args:
            step_s: how long a step takes here, in seconds.
        """
        answers = self._checkup.meet(self._noted, step_s)
        return max(int(each) for each in answers) if answers is not None else 0

    def noted(self) -> int:
        """Return the signal that this rank got, 0 for none (not collective)."""
        return self._noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._noted == signal.SIGINT:
            raise KeyboardInterrupt
        self._noted = number
