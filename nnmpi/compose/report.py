"""What a worker tells of a step and of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from nnmpi.comm.exchange import Traffic
from nnmpi.parallel.pipeline import PassReport


@dataclass(frozen=True)
class StepReport:
    """One update, the same on all ranks but for the times.

    Attributes:
        loss: the mean over the samples of all ranks.
        accuracy: the share of samples whose largest logit is their label's.
        count: the samples of the global batch.
        grad_norm: the length of the global gradient, before clipping; NaN where every microbatch is an update.
        compute_s: seconds in which this rank computed.
        traffic: what was communicated; its `sync_s` are the seconds in which this rank did nothing else.
        wait_s: seconds in which it waited for other stages of its pipeline; sending to them is in `traffic`.
        passed: what the pass through the pipeline was on this rank; None without a pipeline.
        staleness: see `compose.runner.Outcome`.
        loss_scale: what the gradients of this step were multiplied by on their way; 1 without loss scaling.
        skipped: whether there was no update, as a scaled gradient was beyond the range of float16.
    """

    loss: float
    accuracy: float
    count: int
    grad_norm: float
    compute_s: float
    traffic: Traffic
    wait_s: float = 0.0
    passed: PassReport | None = None
    staleness: tuple[int, ...] = ()
    loss_scale: float = 1.0
    skipped: bool = False


@dataclass(frozen=True)
class EvalReport:
    """One evaluation: mean loss and accuracy over `samples` samples of all ranks, in `seconds`."""

    loss: float
    accuracy: float
    samples: int
    seconds: float
