"""What ranks that are out of step count in a segment, exchange when they meet, and have to tell of it.

Tally               what one rank did in a segment
exchange            all ranks' tallies, when they meet; sum_up, sent: what becomes of them
StalenessSummary    how stale gradients were, and what was sent, in lines
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nnmpi.comm.group import Group
from nnmpi.compose.trainer import PARTS, SegmentReport, Totals
from nnmpi.errors import DivergenceError
from nnmpi.nn.module import Module
from nnmpi.parallel.averaging import average
from nnmpi.synchrony.staleness import Staleness

SHOWN_WORKERS = 16


@dataclass
class Tally:
    """What one rank did in a segment.

    Attributes:
        totals: of the gradients that it computed; each is a step.
        seen: how many of them were of any targets.
        broken: the sentence about a loss or gradient that was not finite; else empty.
        signal: that it got, else 0.
        messages, bytes: that it sent.
        more: what else its way of working has to tell, as JSON values.
    """

    totals: Totals = field(default_factory=Totals)
    seen: int = 0
    broken: str = ""
    signal: int = 0
    messages: int = 0
    bytes: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    def add(self, totals: Totals) -> None:
        """Count one more gradient."""
        self.totals = self.totals.plus(totals)
        self.seen += totals.targets > 0

    def wait(self, seconds: float) -> None:
        """Count seconds of waiting for others."""
        self.totals = self.totals.plus(Totals(sync_s=seconds))


def sum_up(tallies: Sequence[Tally], batches: int, seconds: float, used: Totals | None = None) -> Totals:
    """Return the totals of a segment of so many batches and seconds.

    Args:
        tallies: of all ranks; a step's times are the mean over those that computed gradients, or waited to: with backup
            workers a gradient may last for several steps.
        used: over the samples whose gradients were used; by default all were.
    """
    computed = Totals()
    for tally in tallies:
        computed = computed.plus(tally.totals)
    workers = sum(1 for tally in tallies if tally.totals.steps or tally.totals.sync_s)
    times = {name: 1 / max(workers, 1) * getattr(computed, name) for name in PARTS}
    return replace(used or computed, steps=batches, wall_s=seconds, **times)


def sent(tallies: Sequence[Tally]) -> dict[str, Any]:
    """Return what was sent and which signal came, as fields of a segment's report by name."""
    return {
        "signal": max(tally.signal for tally in tallies),
        "messages": sum(tally.messages for tally in tallies),
        "bytes": sum(tally.bytes for tally in tallies),
    }


def exchange(group: Group, own: Tally) -> list[Tally]:
    """Return every rank's tally. Collective.

    Raises:
        DivergenceError: on all ranks, when one of them found a value that is not finite.
    """
    gathered = group.gather({**vars(own), "totals": own.totals.to_json()})
    tallies = [Tally(**{**values, "totals": Totals.from_json(values["totals"])}) for values in gathered]
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


class StalenessSummary:
    """Says in lines how stale gradients were, how far workers were ahead, and how much was sent, over some segments."""

    def __init__(self) -> None:
        self._sum = SegmentReport(Totals())

    def add(self, report: SegmentReport) -> None:
        """Count a segment in, if anything was done in it."""
        if not report.batches:
            return
        total, staleness = self._sum, self._sum.staleness
        if report.staleness is not None:
            staleness = staleness or Staleness(len(report.staleness.histograms))
            staleness.merge(report.staleness)
        self._sum = SegmentReport(
            total.totals.plus(report.totals),
            messages=total.messages + report.messages,
            bytes=total.bytes + report.bytes,
            dropped=total.dropped + report.dropped,
            unassigned=total.unassigned + report.unassigned,
            staleness=staleness,
            lead=max(total.lead, report.lead),
            disagreement=max(total.disagreement, report.disagreement),
        )

    def lines(self) -> list[str]:
        """Return what there is to report, and forget the segments."""
        total, self._sum = self._sum, SegmentReport(Totals())
        steps = total.batches
        if not steps:
            return []
        sent = f"{total.messages / steps:.3g} messages with {total.bytes / steps / 2**20:.3g} MB per step"
        lost = (
            f"; {total.dropped} gradients came too late and were dropped, {total.unassigned} parts of batches were not "
            "begun"
        )
        return [*_stale(total), f"{sent}, over all ranks{lost if total.dropped or total.unassigned else ''}"]


def _stale(total: SegmentReport) -> list[str]:
    """Return how stale gradients were, and how far apart the ranks' weights."""
    far, stale, lead = total.disagreement, total.staleness, total.lead
    words = []
    if stale is not None:
        counts = [stale.count(worker) for worker in range(len(stale.histograms))]
        shown = ", ".join(map(str, counts[:SHOWN_WORKERS])) + (", ..." if len(counts) > SHOWN_WORKERS else "")
        words = [f"staleness {stale.mean():.2f} on average, at most {stale.largest()}"]
        words += [f"at most {lead} {'step' if lead == 1 else 'steps'} ahead"] if lead else []
        words += [f"steps by worker: {shown}"]
    words += [f"weights differed by {100 * far:.2g} % before they were averaged at the end"] if far else []
    return ["; ".join(words)] if words else []
