"""What ranks do when they meet after a segment: average running statistics, and tell what they did or what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nnmpi.comm.group import Group
from nnmpi.compose.gradient import Gradient
from nnmpi.errors import DivergenceError
from nnmpi.nn.module import Module
from nnmpi.parallel.mean import average


@dataclass
class Tally:
    """What one rank did in a segment.

    Attributes:
        steps: gradients that it computed; seen: those of them that were of any rows.
        rows, loss_sum, correct: over their samples.
        compute_s, wait_s, input_s: seconds.
        broken: the sentence about a loss or gradient that was not finite; else empty.
        signal: that it got, else 0.
        messages, bytes: that it sent.
        more: what else its way of working has to tell, as JSON values.
    """

    steps: int = 0
    seen: int = 0
    rows: int = 0
    loss_sum: float = 0.0
    correct: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    input_s: float = 0.0
    broken: str = ""
    signal: int = 0
    messages: int = 0
    bytes: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    def add(self, gradient: Gradient, wait_s: float, input_s: float) -> None:
        """Count one more gradient."""
        self.steps += 1
        self.seen += gradient.rows > 0
        self.rows += gradient.rows
        self.loss_sum += gradient.loss_sum
        self.correct += gradient.correct
        self.compute_s += gradient.compute_s
        self.wait_s += wait_s
        self.input_s += input_s


def step_seconds(tallies: Sequence[Tally], name: str) -> float:
    """Return the seconds of a step by one of the names that end in _s, over the steps of all ranks."""
    return float(sum(getattr(tally, name) for tally in tallies)) / max(sum(tally.steps for tally in tallies), 1)


def sum_up(tallies: Sequence[Tally]) -> dict[str, Any]:
    """Return what of a segment's report is the same sum whatever way the ranks went: by its names there."""
    seconds = {name: step_seconds(tallies, name) for name in ("compute_s", "wait_s", "input_s")}
    sent = {name: sum(getattr(tally, name) for tally in tallies) for name in ("messages", "bytes")}
    return {"signal": max(tally.signal for tally in tallies), **sent, **seconds}


def exchange(group: Group, own: Tally) -> list[Tally]:
    """Return every rank's tally. Collective.

    Raises:
        DivergenceError: on all ranks, when one of them found a value that is not finite.
    """
    tallies = [Tally(**values) for values in group.gather(vars(own))]
    for tally in tallies:
        if tally.broken:
            raise DivergenceError(tally.broken)
    return tallies


def average_buffers(model: Module, group: Group, steps: int) -> None:
    """Let running statistics be the mean of all ranks', each counted by the steps that it did. Collective.

    A rank's own statistics have seen its own samples alone; where nobody did a step nothing changes.
    """
    total = group.sum_floats([steps])[0]
    if group.size == 1 or not total:
        return
    average((buffer.data for _, buffer in model.named_buffers()), group, steps / total)
