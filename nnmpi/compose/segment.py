"""What ranks that are out of step put together when they meet at the end of a segment, and have to tell of it.

meet                what every rank did, as one report
average_buffers     running statistics of all ranks
StalenessSummary    how stale gradients were, and what was sent, in lines
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from nnmpi.comm.group import Group
from nnmpi.compose.stats import Totals
from nnmpi.compose.trainer import SegmentReport
from nnmpi.errors import DivergenceError
from nnmpi.nn.module import Module
from nnmpi.parallel.averaging import average
from nnmpi.synchrony.staleness import Staleness

SHOWN_WORKERS = 16


def meet(group: Group, own: SegmentReport, broken: str, batches: int, seconds: float) -> SegmentReport:
    """Return what all ranks did in a segment. Collective.

    Args:
        own: what this rank did; each of its gradients is a step.
        broken: the sentence about a loss or gradient that was not finite; else empty.
        batches, seconds: of the segment; those of rank 0 count.

    Raises:
        DivergenceError: on all ranks, when one of them found a value that is not finite.
    """
    stale = None if own.staleness is None else own.staleness.to_json()
    values = {**vars(own), "totals": own.totals.to_json(), "staleness": stale}
    gathered = group.gather([values, broken, batches, seconds])
    for _, sentence, *_ in gathered:
        if sentence:
            raise DivergenceError(sentence)
    report = reduce(SegmentReport.plus, [_from_json(values) for values, *_ in gathered])
    _, _, batches, seconds = gathered[0]
    totals = report.totals.mean_over(group.size, batches)
    return replace(report, totals=replace(totals, steps=batches, wall_s=seconds))


def _from_json(values: Mapping[str, Any]) -> SegmentReport:
    stale = values["staleness"]
    parts = {"totals": Totals.from_json(values["totals"]), "staleness": stale and Staleness.from_json(stale)}
    return SegmentReport(**{**values, **parts})


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
        self._sum = SegmentReport()

    def add(self, report: SegmentReport) -> None:
        """Count a segment in."""
        self._sum = self._sum.plus(report)

    def lines(self) -> list[str]:
        """Return what there is to report, and forget the segments."""
        total, self._sum = self._sum, SegmentReport()
        steps = total.batches
        if not steps:
            return []
        sent = f"{total.messages / steps:.3g} messages with {total.bytes / steps / 2**20:.3g} MB per step"
        return [*_stale(total), f"{sent}, over all ranks"]


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
