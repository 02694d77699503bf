"""What all trainers have in common, however their ranks go on: train up to a point, evaluate, state, report, release.

    segment = trainer.run(loader, epoch, 0, loader.batches_per_epoch, step=0, lr=lambda step: 0.1)
    print(segment.totals.loss, trainer.evaluate(test_loader.epoch(0)).accuracy)

The batches between two such points are a segment. At its ends all ranks have the same weights, so that evaluations and
checkpoints are those of any other run. Within it the ranks may meet after every step, or each goes on at its own speed:

    in step       rank 0   |--0--|.....|--1--|.....|--2--|.....|--3--|.....|      `compose.worker`
                  rank 1   |----0------|----1------|----2------|----3------|
    out of step   worker 0 |--0--|--2--|--4--|--5--|--7--|        |               `compose.asynchronous`
                  worker 1 |----1-----|----3-----|----6-----|     |

    Trainer             the interface; TrainingSegment: what it is asked to train on
    Progress            what it tells on the way; SegmentReport: at the end; Totals: the sums in both
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.precision import precision as mode_of
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.losses import Scored
from nnmpi.compose.options import Numerics
from nnmpi.compose.runner import EvalReport, SumLoss, named_loss
from nnmpi.compose.state import model_state, optimizer_state
from nnmpi.data.loader import Batch, Loader
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.model_state import ModelState
from nnmpi.synchrony.slow import NOT_SLOW, Slow
from nnmpi.synchrony.staleness import Staleness

ROUNDING = 1e-4  # of a step's time: less than is printed of it


PARTS = {  # of a step's time: what is printed, recorded and drawn of it
    "compute_s": "compute",
    "wait_s": "waiting for stages",
    "sync_s": "synchronization",
    "input_s": "input",
}


@dataclass
class Totals(Scored):
    """Sums over a number of steps; all fields add up.

    It is not frozen, since each step makes several, and making a frozen one takes more than four times as long.

    Attributes:
        steps, samples: counts.
        targets: the labels that count: the tokens that were to be predicted; elsewhere the samples.
        loss_sum, score_sum: sums over targets; see `compose.losses` for what a score is.
        compute_s, sync_s, input_s: seconds of computing, of waiting for other ranks, of waiting for batches.
        hidden_s: seconds of computing while messages were under way.
        comm_bytes, comm_calls: bytes of arrays that were summed over ranks, and collectives that did it.
        predicted_s: seconds that the fitted model gives that communication, in those of the steps that it knows.
        predicted_steps: the number of those steps.
        wait_s: seconds of waiting for other stages of a pipeline: its bubble.
        wall_s: seconds from the end of the step before to the end of each.
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
        """Return the sums of both."""
        return Totals(  # spelled out, as a loop over the fields takes ten times as long
            self.steps + other.steps,
            self.samples + other.samples,
            self.targets + other.targets,
            self.loss_sum + other.loss_sum,
            self.score_sum + other.score_sum,
            self.compute_s + other.compute_s,
            self.sync_s + other.sync_s,
            self.input_s + other.input_s,
            self.wall_s + other.wall_s,
            self.hidden_s + other.hidden_s,
            self.comm_bytes + other.comm_bytes,
            self.comm_calls + other.comm_calls,
            self.predicted_s + other.predicted_s,
            self.predicted_steps + other.predicted_steps,
            self.wait_s + other.wait_s,
        )

    def mean_over(self, workers: int, steps: int) -> Totals:
        """Return the sums over so many steps, whose times are the means over the workers' times in these."""
        if workers == 1:
            return self
        return replace(self, steps=steps, **{name: getattr(self, name) / workers for name in PARTS})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; floats keep every bit."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Totals:
        """Return what `to_json` gave."""
        return cls(**values)

    @property
    def loss(self) -> float:
        """Return the mean loss of a target."""
        return self.loss_sum / self.targets if self.targets else 0.0

    @property
    def score(self) -> float:
        """Return the mean score of a target; see `compose.losses`."""
        return self.score_sum / self.targets if self.targets else 0.0

    @property
    def samples_per_second(self) -> float:
        """Return samples per second of wall time."""
        return self.samples / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def targets_per_second(self) -> float:
        """Return targets per second of wall time."""
        return self.targets / self.wall_s if self.wall_s > 0 else 0.0

    def per_step(self, seconds: float) -> float:
        """Return a sum of seconds divided by the number of steps."""
        return seconds / self.steps if self.steps else 0.0

    @property
    def predicted_step_s(self) -> float | None:
        """Return what the model gives the communication of a step; None if it knows none."""
        return self.predicted_s / self.predicted_steps if self.predicted_steps else None

    def communication(self) -> str:
        """Return what was communicated in a step, how much of it computing hid, and what the model says."""
        steps, predicted_s = max(self.steps, 1), self.predicted_step_s
        share = self.hidden_s / max(self.sync_s + self.hidden_s, 1e-12)
        exposed_ms, hidden_ms = (1e3 * self.per_step(seconds) for seconds in (self.sync_s, self.hidden_s))
        predicted = "no fit to predict it by" if predicted_s is None else f"predicted {1e3 * predicted_s:.3g} ms"
        return (
            f"communication per step: {self.comm_calls / steps:.3g} calls, {self.comm_bytes / steps / 2**20:.3g} MB; "
            f"exposed {exposed_ms:.2f} ms, hidden by computing {hidden_ms:.2f} ms ({100 * share:.0f} %); {predicted}"
        )

    def breakdown(self) -> str:
        """Return where an iteration's time went, in ms and per cent of its wall time."""
        wall_s = max(self.wall_s, 1e-12)
        found = [(name, getattr(self, key)) for key, name in PARTS.items()]
        parts = [(name, seconds) for name, seconds in found if seconds or name != PARTS["wait_s"]]
        rest_s = self.wall_s - sum(seconds for _, seconds in parts)
        if abs(rest_s) < ROUNDING * wall_s:
            rest_s = 0.0
        words = [
            f"{name} {1e3 * self.per_step(seconds):.2f} ms ({100 * seconds / wall_s:.0f} %)"
            for name, seconds in (*parts, ("other", rest_s))
        ]
        return f"step {1e3 * self.per_step(self.wall_s):.2f} ms = " + " + ".join(words)


@dataclass
class Progress:
    """A step that all ranks did together, or out of step: a gradient that was used, or a step of a worker's own.

    Attributes:
        batch: the number of its batch in the epoch.
        worker: who computed it; 0 for a step that all did together.
        totals: over its samples, with the worker's times; one step. Its `wall_s` are the seconds since the one before.
        norm: the length of the gradient of these samples' mean loss, before clipping.
        at_s: the seconds of the segment so far.
        more: what else is to be told of it, by name.
    """

    batch: int
    worker: int
    totals: Totals
    norm: float
    at_s: float
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SegmentReport:
    """A segment, the same on all ranks; where they are in step, but for its times, which are this rank's.

    Attributes:
        totals: over the batches that were done (fewer than asked for after a signal), and the samples of the gradients
            that were used. Out of step the times are means over the workers, and `wall_s` lasts until all are there.
        signal: the number of the signal that ended it early, else 0.

    What only ranks out of step have to tell:
        messages, bytes: of gradients and weights, each counted once, over all ranks.
        updates: of the weights; of local steps, those of a worker.
        staleness: of the gradients that were used, by worker. None where nothing of the kind is defined (gossip).
        lead: the largest number of steps by which a worker that began one was ahead of the slowest.
        disagreement: how far the ranks' weights were from their mean before they met, relative to its length.
    """

    totals: Totals = field(default_factory=Totals)
    signal: int = 0
    messages: int = 0
    bytes: int = 0
    updates: int = 0
    staleness: Staleness | None = None
    lead: int = 0
    disagreement: float = 0.0

    def plus(self, other: SegmentReport) -> SegmentReport:
        """Return the report of both: sums, and the largest signal, updates, lead and disagreement."""
        largest = ("signal", "updates", "lead", "disagreement")
        found = [each.staleness for each in (self, other) if each.staleness is not None]
        return SegmentReport(
            totals=self.totals.plus(other.totals),
            messages=self.messages + other.messages,
            bytes=self.bytes + other.bytes,
            staleness=Staleness.sum(found) if found else None,
            **{name: max(getattr(self, name), getattr(other, name)) for name in largest},
        )

    @property
    def batches(self) -> int:
        """How many batches were done."""
        return self.totals.steps


Rate: TypeAlias = Callable[[int], float]
OnProgress: TypeAlias = Callable[[Progress], None]
PollSignal: TypeAlias = Callable[[], int]


@dataclass(frozen=True)
class TrainingSegment:
    """What a trainer is to train on; see `Trainer.run`.

    Attributes:
        batches: the numbers of the batches in the epoch.
        step: the number of the first of them in the whole run.
    """

    loader: Loader
    epoch: int
    batches: range
    step: int
    lr: Rate
    progress: OnProgress
    poll_signal: PollSignal

    def number(self, batch: int) -> int:
        """Return the number in the whole run of a batch of the epoch."""
        return self.step + batch - self.batches.start


class Trainer(ABC):
    """Trains and evaluates a model on the ranks of a group. All ranks make the same calls.

    Attributes:
        model, optimizer, group, seed, slow: as given.
        loss, evaluation_loss: (logits, labels) -> the sum of the samples' losses.
        backend: where the model lives.
        precision: of products, see `backend.precision`.
        clip: the largest length of the gradient, or None.
        arrangement: how the model lies on the ranks; None where each has all of it.
        in_step: whether the ranks meet after every step. Then `progress` is told of every step on every rank; else on
            rank 0 alone, of gradients as they come in, and what becomes of a whole segment is in its report.
        reporters: how many calls of `progress` there are for each batch, one for each worker.
    """

    in_step = False
    reporters = 1

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        group: Group,
        loss: SumLoss | str | None,
        evaluation_loss: SumLoss | None,
        numerics: Numerics,
        seed: int,
        backend: Backend | None,
        slow: Slow = NOT_SLOW,
        arrangement: Arrangement | None = None,
    ) -> None:
        self.model, self.optimizer, self.group, self.seed = model, optimizer, group, seed
        self.loss = named_loss(loss, arrangement)
        self.evaluation_loss = self.loss if evaluation_loss is None else evaluation_loss
        self.backend = numpy_backend() if backend is None else backend
        self.precision = mode_of() if numerics.precision is None else numerics.precision
        self.clip = numerics.clip
        self.slow = slow
        self.arrangement = arrangement

    def __repr__(self) -> str:
        """Say what is trained, with what, and on which ranks."""
        where = f"{self.group.size} ranks" if self.arrangement is None else str(self.arrangement.mesh.mesh)
        model = f"{type(self.model).__name__} of {self.model.storage.size:,} parameters"
        return f"{type(self).__name__}({model}, {self.optimizer!r}, rank {self.group.rank} of {where})"

    def run(
        self,
        loader: Loader,
        epoch: int,
        first: int,
        stop: int,
        step: int,
        lr: Rate,
        progress: OnProgress | None = None,
        poll_signal: PollSignal | None = None,
    ) -> SegmentReport:
        """Train on the batches first..stop-1 of an epoch, and meet. Collective.

        Args:
            loader: of the training data. Through servers, any rank's; else this rank's own part.
            step: the number of batches before them in the whole run, which keys dropout and the learning rate.
            lr: the learning rate of a step.
            progress: called for every step, or on rank 0 for every gradient; see `in_step`.
            poll_signal: whether this rank got a signal, and which; then all end after a whole batch.

        Returns:
            What was done; its totals may be of fewer steps, after a signal.

        Raises:
            DivergenceError: on all ranks, when a loss or gradient was not finite; it was not used.
            UsageError: for a loader of another part than this rank's, where it matters.
        """
        tell, ask = progress or (lambda _: None), poll_signal or (lambda: 0)
        return self._run(TrainingSegment(loader, epoch, range(first, stop), step, lr, tell, ask))

    @abstractmethod
    def _run(self, segment: TrainingSegment) -> SegmentReport:
        """Train on a segment, and meet."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> EvalReport:
        """Return loss and score over this rank's parts of all batches, put together over the ranks; collective."""

    def state(self) -> tuple[ModelState, ModelState]:
        """Return the model's and the optimizer's arrays as those of the whole model, over all ranks.

        The optimizer's are called "slot/parameter"; for its numbers, see `scalars`.
        """
        return model_state(self.model, self.group, self.arrangement), optimizer_state(
            self.model, self.optimizer, self.group, self.arrangement
        )

    def scalars(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the arrays, as JSON values; among them the optimizer's "steps"."""
        return {"steps": self.optimizer.steps}

    def load_scalars(self, values: Mapping[str, Any]) -> None:
        """Put back what `scalars` gave, of this trainer or of another kind."""
        self.optimizer.steps = values["steps"]

    def algorithms(self) -> list[str] | None:
        """Return the all-reduce that was chosen for each bucket of gradients; None where none are summed by one."""
        return None

    def describe_exchange(self) -> str:
        """Return what sums gradients over the ranks, in words; empty where none are summed by an all-reduce."""
        return ""

    @abstractmethod
    def summary(self) -> Sequence[str]:
        """Return lines about what was done since the last call. Collective."""

    def memory(self) -> Sequence[str]:
        """Return lines about the most memory that was taken, if that is known. Collective."""
        return ()

    @abstractmethod
    def release(self) -> None:
        """Take everything off the model again: it is then one that each rank has for itself. Collective."""
