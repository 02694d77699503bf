"""Statistics of steps: `Totals` adds up, `StepReport` describes one update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import exp, inf, isfinite, log, nan, sqrt
from sys import float_info
from typing import Any

from nnmpi.base.files import rebuilt
from nnmpi.base.units import format_bytes
from nnmpi.comm.world import Traffic
from nnmpi.schedule.schedule import Instruction

ROUNDING = 1e-4  # of a step's time: less does not show in its printed digits

PARTS = {  # of a step's time, as printed, recorded and drawn
    "compute_s": "compute",
    "wait_s": "waiting for stages",
    "sync_s": "synchronization",
    "input_s": "input",
}


def rmse(score: float) -> float:
    """Return the root of the mean squared error from its score, a mean over samples."""
    return sqrt(-score) if score <= 0 else nan


def perplexity(loss: float) -> float:
    """Return e to a mean loss; inf if that overflows."""
    return exp(loss) if loss < log(float_info.max) else inf


def r2(score: float, variance: float) -> float:
    """Return the coefficient of determination 1 - mse / variance; NaN without variance.

    Args:
        score: a mean over samples.
        variance: of the targets; see `Dataset.variance`.
    """
    return 1 + score / variance if variance > 0 else nan


@dataclass
class Totals:
    """Sums over a number of steps; all fields add up.

    It is not frozen: each step makes several, and a frozen one takes more than four times as long
    to make.

    Attributes:
        steps, samples: counts.
        targets: the labels that count: the tokens to predict; without sequences the samples.
        loss_sum, score_sum: sums over targets; `compose.losses` defines the score.
        compute_s, sync_s, input_s: seconds of computing, of waiting for other ranks, of waiting for
            batches.
        hidden_s: seconds of computing while messages were in flight.
        comm_bytes, comm_calls: the bytes of arrays summed over ranks, and the collectives that
            summed them.
        predicted_s: the fitted model's seconds for that communication, in the steps that it can
            predict.
        predicted_steps: the number of those steps.
        wait_s: seconds of waiting for other stages of a pipeline: its bubble.
        wall_s: seconds of wall time, each step's from the end of the previous one.
    """

    steps: int = 0
    samples: int = 0
    targets: int = 0
    loss_sum: float = 0.0
    score_sum: float = 0.0
    compute_s: float = 0.0
    sync_s: float = 0.0
    input_s: float = 0.0
    wall_s: float = 0.0
    hidden_s: float = 0.0
    comm_bytes: int = 0
    comm_calls: int = 0
    predicted_s: float = 0.0
    predicted_steps: int = 0
    wait_s: float = 0.0

    def plus(self, other: Totals) -> Totals:
        """Return the sums of both reports."""
        sums, more = self.__dict__, other.__dict__
        return Totals(**{name: sums[name] + more[name] for name in SUMS})

    def add(self, other: Totals) -> None:
        """Add another report's sums to these."""
        sums, more = self.__dict__, other.__dict__
        for name in SUMS:
            sums[name] += more[name]

    def mean_over(self, workers: int, steps: int) -> Totals:
        """Return the sums over these steps, with times averaged over the workers."""
        if workers == 1:
            return self
        return replace(self, steps=steps, **{name: getattr(self, name) / workers for name in PARTS})

    @property
    def loss(self) -> float:
        """The mean loss of a target."""
        return self.loss_sum / self.targets if self.targets else 0.0

    @property
    def score(self) -> float:
        """The mean score of a target; see `compose.losses`."""
        return self.score_sum / self.targets if self.targets else 0.0

    @property
    def accuracy(self) -> float:
        """The fraction of correct predictions, 0 to 1; NaN for quantities, with negative scores."""
        return self.score if self.score >= 0 else nan

    @property
    def rmse(self) -> float:
        """The root of the mean squared error; NaN for classes."""
        return rmse(self.score)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss: a guess among this many tokens has the same loss."""
        return perplexity(self.loss)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of wall time."""
        return self.samples / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def targets_per_second(self) -> float:
        """Targets per second of wall time."""
        return self.targets / self.wall_s if self.wall_s > 0 else 0.0

    def per_step(self, seconds: float) -> float:
        """Return a sum of seconds divided by the number of steps."""
        return seconds / self.steps if self.steps else 0.0

    @property
    def predicted_step_s(self) -> float | None:
        """The model's prediction for a step's communication; None without one."""
        return self.predicted_s / self.predicted_steps if self.predicted_steps else None

    def communication(self) -> str:
        """Return a step's traffic as text, its overlap with computing, and the prediction."""
        steps, predicted_s = max(self.steps, 1), self.predicted_step_s
        share = self.hidden_s / max(self.sync_s + self.hidden_s, 1e-12)
        exposed_ms, hidden_ms = (
            1e3 * self.per_step(seconds) for seconds in (self.sync_s, self.hidden_s)
        )
        predicted = (
            "no fit to predict it by"
            if predicted_s is None
            else f"predicted {1e3 * predicted_s:.3g} ms"
        )
        calls = self.comm_calls / steps
        arrays = (
            f"{calls:.3g} {'call' if calls == 1 else 'calls'},"
            f" {format_bytes(round(self.comm_bytes / steps))} of arrays"
        )
        return (
            f"communication per step: {arrays}; exposed {exposed_ms:.2f} ms, hidden by computing"
            f" {hidden_ms:.2f} ms ({100 * share:.0f} %); {predicted}"
        )

    def breakdown(self, of: str = "") -> str:
        """Return a step's time by part, in ms and per cent of wall time, as text."""
        wall_s = max(self.wall_s, 1e-12)
        seconds_of = [(name, getattr(self, key)) for key, name in PARTS.items()]
        parts = [
            (name, seconds) for name, seconds in seconds_of if seconds or name != PARTS["wait_s"]
        ]
        rest_s = self.wall_s - sum(seconds for _, seconds in parts)
        if abs(rest_s) < ROUNDING * wall_s:
            rest_s = 0.0
        words = [
            f"{name} {1e3 * self.per_step(seconds):.2f} ms ({100 * seconds / wall_s:.0f} %)"
            for name, seconds in (*parts, ("other", rest_s))
        ]
        return f"step {1e3 * self.per_step(self.wall_s):.2f} ms = {' + '.join(words)}{of}"


SUMS = tuple(item.name for item in fields(Totals))


@dataclass
class PassReport:
    """One pass through the pipeline on this rank.

    Attributes:
        microbatches: their number.
        samples: each computed instruction with its seconds.
        compute_s: seconds of computing.
        wait_s: seconds of waiting for other stages' messages: the bubble, and slow messages.
        sent: each send with the bytes of its arrays.
        peak_live: the most microbatches whose activations were in memory at once.
        total_s: from the first instruction to the last.
    """

    microbatches: int = 0
    samples: list[tuple[Instruction, float]] = field(default_factory=list)
    compute_s: float = 0.0
    wait_s: float = 0.0
    sent: list[tuple[Instruction, list[int]]] = field(default_factory=list)
    peak_live: int = 0
    total_s: float = 0.0


@dataclass
class StepReport(Totals):
    """One update, equal on all ranks except times; loss and score are means over all targets.

    Out of step it is one worker's gradient, of a part of a batch.

    Attributes:
        grad_norm: the norm of the global gradient, before clipping; NaN if every microbatch is an
            update.
        passed: the pass through the pipeline on this rank; None without a pipeline.
        staleness: by microbatch: the number of updates between its forward and its own update;
            empty if there is only one update.
        loss_scale: the factor of this step's loss, and so of its gradients until the update; 1
            without loss scaling.
        skipped: whether the update was skipped because a scaled gradient overflowed float16.
    """

    grad_norm: float = nan
    passed: PassReport | None = None
    staleness: tuple[int, ...] = ()
    loss_scale: float = 1.0
    skipped: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return isfinite(self.loss_sum) and isfinite(self.grad_norm)

    def count(self, traffic: Traffic) -> None:
        """Add a communication of this step."""
        self.hidden_s += traffic.hidden_s
        self.comm_bytes += traffic.bytes
        self.comm_calls += traffic.calls
        self.predicted_s += traffic.predicted_s


class Staleness:
    """Counts each worker's gradients by their staleness.

    Args:
        workers: the number of workers.

    Attributes:
        histograms: by worker: staleness -> number of gradients.
    """

    def __init__(self, workers: int) -> None:
        self.histograms: list[Counter[int]] = [Counter() for _ in range(workers)]

    def add(self, worker: int, staleness: int) -> None:
        """Count one gradient of a worker."""
        self.histograms[worker][staleness] += 1

    @property
    def total(self) -> Counter[int]:
        """All workers' gradients: staleness -> number of gradients."""
        return sum(self.histograms, Counter[int]())

    def mean(self) -> float:
        """Return the mean staleness; 0.0 without gradients."""
        return float(_describe(self.total)["mean"])

    def largest(self) -> int:
        """Return the largest staleness; 0 without gradients."""
        return max(self.total, default=0)

    @classmethod
    def sum(cls, parts: Sequence[Staleness]) -> Staleness:
        """Return the sum of several counts, worker by worker; some may have fewer workers."""
        total = cls(max((len(part.histograms) for part in parts), default=0))
        for part in parts:
            for target, counts in zip(total.histograms, part.histograms, strict=False):
                target.update(counts)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; histograms are lists of (staleness, count)."""
        workers = [
            {"worker": worker, "steps": counts.total(), **_describe(counts)}
            for worker, counts in enumerate(self.histograms)
        ]
        return {**_describe(self.total), "workers": workers}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Staleness:
        """Return the counts from the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: for other values.
        """
        result = cls(0)
        for worker in values["workers"]:
            pairs = rebuilt(Mapping[int, int], worker["histogram"])
            if min((*pairs, *pairs.values()), default=0) < 0:
                raise ValueError(f"the worker {worker.get('worker')} has counts below 0")
            result.histograms.append(Counter(pairs))
        return result


def _describe(counts: Counter[int]) -> dict[str, Any]:
    """Return mean, largest and counts by staleness, ascending, as JSON values."""
    pairs = sorted(counts.items())
    mean = sum(staleness * count for staleness, count in pairs) / max(1, counts.total())
    return {
        "mean": mean,
        "max": max(counts, default=0),
        "histogram": [list(pair) for pair in pairs],
    }
