"""What is told of a segment: the batches between two meetings, in which ranks go on at their own pace.

worker 0   |--0--|--2--|--4--|--5--|--7--|        |
worker 1   |----1-----|----3-----|----6-----|     |  meeting: the same weights everywhere,
                                                     evaluation, checkpoint, the next segment
"""

from __future__ import annotations

from dataclasses import dataclass

from nnmpi.synchrony.staleness import Staleness


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
        undealt: parts of batches that nobody had begun when their step was over.
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
    undealt: int = 0
    staleness: Staleness | None = None
    lead: int = 0
    disagreement: float = 0.0
    signal: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    input_s: float = 0.0
