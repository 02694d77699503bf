"""Ranks that compare notes now and then, though none of them is told when the others have something to say.

    rank 0   step step step [notes] step step step step [notes]     at steps that rank 0 chooses from its own step time
    rank 1   step step step [notes] step step step step [notes]     and the others are told the time before

Ranks that went by their own clocks would wait for one another at different steps.
"""

from __future__ import annotations

from typing import Any

from nnmpi.comm.group import Group


class Checkup:
    """Gathers a value of every rank about every `interval_s` seconds."""

    def __init__(self, group: Group, interval_s: float = 0.5) -> None:
        self._group, self._interval_s = group, interval_s
        self._steps_left = 1

    def meet(self, value: Any, step_s: float) -> list[Any] | None:
        """Return every rank's JSON value if they compare notes at this step, else None; call it once per step.

        Collective at some steps, the same on all ranks.

        Args:
            step_s: how long a step takes here, in seconds.
        """
        if self._group.size == 1:
            return [value]
        self._steps_left -= 1
        if self._steps_left > 0:
            return None
        answers = self._group.gather([value, max(1, int(self._interval_s / max(step_s, 1e-9)))])
        self._steps_left = int(answers[0][1])
        return [answer[0] for answer in answers]
