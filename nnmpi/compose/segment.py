"""Segments: the batches between two meetings of asynchronous ranks, each of which goes on at its own speed.

worker 0   |--0--|--2--|--4--|--5--|--7--|        |
worker 1   |----1-----|----3-----|----6-----|     |  meeting: the same weights everywhere,
                                                     evaluation, checkpoint, the next segment

    Throttle            slows a rank down on purpose, so that a laptop shows what a mixed cluster does
    Progress            what is reported of one gradient; SegmentReport: of a segment
    Tally               what one rank did in a segment, which the ranks exchange when they meet

The throttle makes a step last at least so long, and a straggler a multiple of that:

computed      |======|                                  what the step took here
minimum       |======|....|                             at least so long, as if the machine were slower
factor 3      |======|....|.........|.........|         a straggler waits until three times that have passed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnmpi import clock, timeline
from nnmpi.comm.group import Group
from nnmpi.compose.replicas import Gradient
from nnmpi.errors import DivergenceError
from nnmpi.nn.module import Module
from nnmpi.parallel.averaging import average
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.staleness import Staleness

POLL_INTERVAL_S = 0.001


@dataclass(frozen=True)
class Throttle:
    """The minimum time of a step, and who takes how many times as long.

    Attributes:
        minimum_s: every step takes at least so many seconds.
        slowdown: the factor of each rank in each step.
    """

    minimum_s: float = 0.0
    slowdown: Slowdown = field(default_factory=Slowdown)

    def step_seconds(self, computed_s: float, rank: int, step: int) -> float:
        """Return how long a step is to take whose computation took `computed_s` seconds.

        Args:
            computed_s: seconds.
            rank: whose step it is.
            step: the number of steps that this rank has done before.
        """
        return max(computed_s, self.minimum_s) * self.slowdown.factor(rank, step)

    def wait(
        self, begin_s: float, rank: int, step: int, poll: Callable[[], None] | None = None, spent_s: float | None = None
    ) -> None:
        """Sleep until a step has lasted long enough.

        Args:
            begin_s: when it began, of `nnmpi.clock.now`.
            rank: whose step it is.
            step: the number of steps that this rank has done before.
            poll: called about every millisecond meanwhile; None for nothing.
            spent_s: the seconds that it was computed; by default those since `begin_s`.
        """
        computed_s = clock.now() - begin_s if spent_s is None else spent_s
        left_s = self.step_seconds(computed_s, rank, step) - computed_s
        if left_s <= 0:
            return
        end_s = clock.now() + left_s
        with timeline.span("slowed down", "slowdown"):
            while (left_s := end_s - clock.now()) > 0:
                if poll is None:
                    clock.sleep(left_s)
                else:
                    clock.sleep(min(POLL_INTERVAL_S, left_s))
                    poll()


@dataclass(frozen=True)
class Progress:
    """One gradient that was used, or one step of a worker's own.

    Attributes:
        batch: the number of its batch in the epoch.
        worker: who computed it.
        rows: the samples that it is of.
        loss_sum, correct: sums over these samples.
        norm: the length of the gradient of their mean loss, before clipping.
        compute_s, wait_s, input_s: seconds in which the worker computed it, waited before for others, and for its data.
        at_s: seconds since the segment began; in virtual time since the run began.
    """

    batch: int
    worker: int
    rows: int
    loss_sum: float
    correct: float
    norm: float
    compute_s: float
    wait_s: float
    at_s: float
    input_s: float = 0.0


@dataclass(frozen=True)
class SegmentReport:
    """A segment, the same on all ranks.

    Attributes:
        batches: how many were done; fewer than asked for after a signal.
        rows, loss_sum, correct: sums over the samples of the gradients that were used.
        seconds: from its beginning to the meeting; virtual ones in virtual time.
        messages, bytes: of gradients and weights, each counted once, over all ranks.
        updates: of the weights; with several servers, of the first one's shard. Of local steps, those of a worker.
        dropped: gradients that came too late for a synchronous step with backup workers.
        unassigned: parts of batches that nobody had begun when their step was over.
        staleness: of the gradients that were used, by worker; with several servers, of the first one's shard. None
            where nothing of the kind is defined (gossip).
        lead: the largest number of steps by which a worker that began one was ahead of the slowest; with several
            servers, as the first one saw it: the others let workers go on for whom there was nothing left to do.
        disagreement: how far the ranks' weights were from their mean before they met, relative to its length.
        signal: the number of the signal that ended it early, else 0.
        compute_s, wait_s, input_s: seconds of a step, mean over the workers.
    """

    batches: int
    rows: int
    loss_sum: float
    correct: float
    seconds: float
    messages: int = 0
    bytes: int = 0
    updates: int = 0
    dropped: int = 0
    unassigned: int = 0
    staleness: Staleness | None = None
    lead: int = 0
    disagreement: float = 0.0
    signal: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    input_s: float = 0.0


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
    """Return the fields of a segment's report, by name, that servers and averaging compute alike from the tallies."""
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
