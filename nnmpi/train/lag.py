"""The segments since the last lines about them, and those lines: how stale, how far ahead, how much was sent."""

from nnmpi.compose.segment import SegmentReport
from nnmpi.synchrony.staleness import Staleness
from nnmpi.train.progress import duration

SHOWN_WORKERS = 16


class Lag:
    """Adds up segments."""

    def __init__(self) -> None:
        self._reports: list[SegmentReport] = []

    def add(self, report: SegmentReport) -> None:
        """Keep a segment."""
        if report.batches:
            self._reports.append(report)

    def tell(self, virtual: bool) -> list[str]:
        """Return what there is to say, and forget the segments.

        Args:
            virtual: whether their seconds are of virtual time.
        """
        reports, self._reports = self._reports, []
        if not reports:
            return []
        batches = sum(report.batches for report in reports)
        messages, size = sum(report.messages for report in reports), sum(report.bytes for report in reports)
        sent = f"{messages / batches:.3g} messages with {size / batches / 2**20:.3g} MB per step, over all ranks"
        clock = f"{duration(sum(report.seconds for report in reports))} of virtual time; " if virtual else ""
        return [*_stale(reports), f"{clock}{sent}{_losses(reports)}"]


def _stale(reports: list[SegmentReport]) -> list[str]:
    """Return how stale gradients were, and how apart weights."""
    far = max(report.disagreement for report in reports)
    apart = f"weights differed by {100 * far:.2g} % before they were averaged at the end" if far else ""
    known = [report.staleness for report in reports if report.staleness is not None]
    if not known:
        return [apart] if apart else []
    total = Staleness(len(known[0].histograms))
    for each in known:
        total.merge(each)
    counts = [total.count(worker) for worker in range(len(total.histograms))]
    shown = ", ".join(map(str, counts[:SHOWN_WORKERS])) + (", ..." if len(counts) > SHOWN_WORKERS else "")
    words = [f"staleness {total.mean():.2f} on average, at most {total.largest()}"]
    lead = max(report.lead for report in reports)
    if lead:
        words.append(f"at most {lead} {'step' if lead == 1 else 'steps'} ahead")
    words.append(f"steps by worker: {shown}")
    return ["; ".join([*words, apart] if apart else words)]


def _losses(reports: list[SegmentReport]) -> str:
    dropped, undealt = sum(report.dropped for report in reports), sum(report.undealt for report in reports)
    if not dropped and not undealt:
        return ""
    return f"; {dropped} gradients came too late and were dropped, {undealt} parts of batches were not begun"
