"""Segments through a parameter server: take a part, compute its gradient, push it, pull the weights, go on.

    rank 0     | its own parts; between layers it takes gradients and gives weights and parts ............|
    rank 1     | pull |  gradient of batch 0, part 0  | push | pull |  batch 1, part 1 ...
    rank 2     | pull |  gradient of batch 0, part 1         | push | pull | ...

Rank 0 looks after its messages after the forward pass, after each layer of the backward pass, while it waits, and while
it is slowed down. What it does for others is in the time of its step, but is not multiplied by a straggler's factor.

Segments without a server: every worker has its own weights, and averages them with others' now and then.

local      worker 0   step step step step | mean of all | step step step step | mean of all
           worker 1   step step step step |             | step step step step |
gossip     worker 0   step | with 3 and 1 | step | with 3 and 1 |
           worker 1   step | with 0 and 2 | step | with 0 and 2 |

Both compute the gradient of one part of a batch by `LocalGradient`, which sends no message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import nnmpi.clock as clock
import nnmpi.timeline as timeline
from nnmpi.backend.precision import use_precision
from nnmpi.backend.recording import refuse_inside
from nnmpi.comm.agreement import PeriodicCheck
from nnmpi.compose.losses import DeferredScalars
from nnmpi.compose.passes import Passes
from nnmpi.compose.stats import Totals
from nnmpi.compose.trainer import Progress, SegmentReport, Trainer, TrainingSegment
from nnmpi.data.loader import Batch
from nnmpi.errors import UsageError
from nnmpi.optim.clip import coefficient, global_norm, scale
from nnmpi.parallel.averaging import Gossip, LocalSGD
from nnmpi.parallel.divergence import locate_nonfinite, nonfinite_message
from nnmpi.parallel.server import ParameterServer, Push, PushPull
from nnmpi.synchrony.consistency import Staleness
from nnmpi.synchrony.sync import Sync

TOLD = ("samples", "targets", "loss_sum", "score_sum", "compute_s", "sync_s", "input_s")  # of a gradient, in its Push


@dataclass(frozen=True)
class Gradient:
    """What computing a gradient gave; the gradient itself is in the model's storage.

    Attributes:
        totals: of the part, a step; its times are for the caller to fill in.
        norm: the length of the gradient of the part's mean loss, before clipping; not finite if the loss is not.
    """

    totals: Totals
    norm: float

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers, so that it may be used."""
        return isfinite(self.totals.loss_sum) and isfinite(self.norm)


class LocalGradient:
    """Computes gradients of parts of batches.

    Args:
        trainer: whose model it is, without another strategy; its `clip` is for the gradient of a part's mean loss.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.model, self.backend, self.clip = trainer.model, trainer.backend, trainer.clip
        self._passes = Passes(trainer)
        self._precision = trainer.precision

    def look_after(self, poll: Callable[[], None]) -> None:
        """Call this, too, from now on: many times while a gradient is computed.

        Raises:
            UsageError: when a strategy has the model's hooks already.
        """
        parameters = [span.parameter for span in self.model.storage.spans]
        if any(each.hook is not None or each.guard is not None for each in parameters):
            raise UsageError("the model has a DataParallel (or other hooks) already; call its release() first")
        self._passes.poll = poll
        for parameter in parameters:
            parameter.hook = lambda _: poll()

    def run(self, batch: Batch, step: int) -> Gradient:
        """Compute the gradient of the part's losses, divided by the targets of the whole batch, into `storage.grads`.

        The gradients of all parts of a batch add up to that of its mean loss.

        Args:
            step: the number of the batch in the run, which keys dropout: the masks are those of a synchronous run.
        """
        refuse_inside("a worker's step")
        with use_precision(self._precision):
            return self._run(batch, step)

    def _run(self, batch: Batch, step: int) -> Gradient:
        self.model.storage.zero_grad()
        self._passes.train(batch, step)  # as `DataParallel` divides, but the parts' gradients are added up elsewhere
        self.model.storage.finish_gradients()
        (loss_sum, score_sum, targets), norm = self._passes.sums(), 0.0
        if targets:
            norm = self._clip(batch.global_targets / targets)
        totals = Totals(steps=1, samples=len(batch.y), targets=targets, loss_sum=loss_sum, score_sum=score_sum)
        return Gradient(totals, norm)

    def evaluate(self, batch: Batch, scalars: DeferredScalars) -> bool:
        """See `Passes.evaluate`."""
        with use_precision(self._precision):
            return self._passes.evaluate(batch, scalars)

    def explain(self, gradient: Gradient, batch: Batch, step: int, who: str) -> str:
        """Return the sentence about a gradient that is not finite, after computing it again.

        Args:
            who: whose it is: "rank 2", "worker 2".
        """
        with use_precision(self._precision):
            place = locate_nonfinite(self.model, *self._passes.suspect(batch, step, isfinite))
            return nonfinite_message(step + 1, gradient.totals.loss, place, who)

    def release(self) -> None:
        """Take everything off the model again."""
        if self._passes.poll is not None:
            for span in self.model.storage.spans:
                span.parameter.hook = None

    def _clip(self, ratio: float) -> float:
        """Return the length of the gradient of this part's mean loss, and clip the gradient by it.

        The stored gradient is divided by the whole batch's targets, so its length is multiplied by the batch's
        targets / the part's.
        """
        grads = self.model.storage.grads
        norm = global_norm(grads) * ratio
        if self.clip is not None:
            scale(grads, coefficient(norm, self.clip))
        return norm


class ParameterServerRunner:
    """Runs segments on ranks of which the first is the server. Making one is collective.

    Attributes:
        server: on rank 0; None on the others.
        steps_done: how many gradients this rank computed in the last segment, not counting parts without rows.
    """

    def __init__(self, trainer: Trainer, sync: Sync, gradient: LocalGradient) -> None:
        model, optimizer, group = trainer.model, trainer.optimizer, trainer.group
        self.optimizer, self.group, self.sync, self.slow = optimizer, group, sync, trainer.slow
        self._gradient = gradient
        self._segment: TrainingSegment | None = None
        self.server = ParameterServer(model.storage, optimizer, group.size) if group.is_root else None
        self._talk = PushPull(group, model.storage, self.server, self._count, trainer.backend)
        if group.is_root:
            gradient.look_after(self._serve)
        self._steps = -1  # of this rank in the whole run: its own, after those of a run that is resumed
        self._taken = 0  # samples, likewise
        self._begin_s = self._told_s = 0.0  # of the segment; when a gradient was told of
        self._served_s = 0.0  # spent on others' messages while a gradient was computed
        self.steps_done = 0

    def run(self, segment: TrainingSegment) -> tuple[SegmentReport, str, int]:
        """Run one segment; return what this rank did, what was wrong with a gradient of its, and the batches of all."""
        self._begin_s = self._told_s = clock.now()
        self._segment = segment
        if self._steps < 0:
            self._steps = segment.step
            self._taken = segment.loader.rows_before(segment.step, self.group.rank, self.group.size)
        server, before = self.server, 0 if self.server is None else self.server.version
        self._talk.open(segment.batches.start, segment.batches.stop, self.sync.bound)
        totals, broken = self._work(segment)
        self._talk.finish()
        report = SegmentReport(
            totals=totals,
            signal=segment.poll_signal(),
            messages=self._talk.messages,
            bytes=self._talk.bytes,
            updates=0 if server is None else server.version - before,
            staleness=None if server is None else server.staleness,
            lead=0 if server is None else server.controller.longest_lead,
        )
        batches = 0 if server is None else server.controller.batches_done
        self.optimizer.steps = int(self.group.share(self.optimizer.steps))
        return report, broken, batches

    def release(self) -> None:
        """Take everything off the model again, and give all ranks the optimizer's state. Collective.

        Until then rank 0 alone has it.
        """
        for arrays in self.optimizer.slots().values():
            self._talk.broadcast(arrays)
        self._gradient.release()
        self._talk.free()

    def _work(self, segment: TrainingSegment) -> tuple[Totals, str]:
        """Work until the segment is over; return the sums of this rank's gradients, and what was wrong with one."""
        loader, rank, sums, broken = segment.loader, self.group.rank, Totals(), ""
        order = loader.order(segment.epoch)
        self.steps_done = 0
        while True:
            begin = clock.now()
            with timeline.span("pull", "pull", timeline.WAITING):
                task = self._talk.pull()
            pulled = clock.now()
            if task is None:
                return sums.plus(Totals(sync_s=pulled - begin)), broken
            part = task.part if loader.partition == "none" else rank  # or as many samples of its own
            batch = loader.part(order, segment.epoch, task.batch, part, self.group.size, self._taken)
            self._taken += len(batch.y)
            self.group.comm.world.step = number = segment.number(task.batch)
            started, self._served_s = clock.now(), 0.0
            gradient = self._gradient.run(batch, number)
            spent_s = clock.now() - started - self._served_s
            self.slow.wait(spent_s, rank, self._steps, self._talk.serve_until if self.server else None)
            self._steps += 1
            if not gradient.is_finite and not broken:
                broken = self._gradient.explain(gradient, batch, number, f"rank {rank}")
            totals = gradient.totals
            totals.compute_s, totals.sync_s = clock.now() - started, pulled - begin
            totals.input_s = started - pulled
            sums = sums.plus(totals)
            self.steps_done += totals.targets > 0
            push = Push(
                batch=task.batch,
                part=task.part,
                global_targets=batch.global_targets,
                lr=segment.lr(number),
                norm=gradient.norm,
                signal=segment.poll_signal(),
                broken=not gradient.is_finite,
                **{name: getattr(totals, name) for name in TOLD},
            )
            with timeline.span("push", "push", timeline.SEND):
                self._talk.push(push)

    def _serve(self) -> None:
        begin = clock.now()
        self._talk.poll()
        self._served_s += clock.now() - begin

    def _count(self, worker: int, push: Push) -> None:
        """Tell of a gradient that has come, on rank 0; after a signal no further batch is begun."""
        segment = self._segment
        assert segment is not None
        assert self.server is not None
        if not push.broken:
            before_s, self._told_s = self._told_s, clock.now()
            told = {name: getattr(push, name) for name in TOLD}
            totals = Totals(steps=1, wall_s=self._told_s - before_s, **told)
            segment.progress(Progress(push.batch, worker, totals, push.norm, self._told_s - self._begin_s))
        if segment.poll_signal():
            self.server.controller.close()


class AveragingRunner:
    """Runs segments on ranks that are all workers, each with part `rank` of every batch. Making one is collective.

    Attributes:
        steps_done: how many steps this rank did in the last segment, not counting parts without rows.
    """

    def __init__(self, trainer: Trainer, sync: Sync, gradient: LocalGradient) -> None:
        self.model, self.optimizer, self.group, self.slow = (
            trainer.model,
            trainer.optimizer,
            trainer.group,
            trainer.slow,
        )
        self._gradient, self._is_local = gradient, sync.mode == "local"
        what = (self.group, self.model.storage, self.optimizer)
        self._averaging = LocalSGD(*what, sync.local_steps) if self._is_local else Gossip(*what)
        self._check = PeriodicCheck(self.group)
        self._steps = 0  # of this rank, in the whole run
        self._broken = ""
        self.steps_done = 0

    def run(self, segment: TrainingSegment) -> tuple[SegmentReport, str, int]:
        """Run one segment; see `ParameterServerRunner.run`."""
        loader, begin = segment.loader, clock.now()
        if (loader.rank, loader.world) != (self.group.rank, self.group.size):
            raise UsageError(
                f"the loader gives part {loader.rank} of {loader.world}, but this is rank {self.group.rank} of "
                f"{self.group.size}; give Loader the rank and world of the group"
            )
        averaging, staleness, sums = self._averaging, Staleness(self.group.size), Totals()
        averaging.begin()
        done, signal, told_s, waited_s = 0, 0, begin, 0.0
        self._broken, self.steps_done = "", 0
        with loader.epoch(segment.epoch, segment.batches.start, self._gradient.backend) as items:
            for number in segment.batches:
                step, entered = segment.number(number), clock.now()
                batch = next(items)
                started = clock.now()
                totals, norm = self._step(batch, step, segment.lr(step))
                before_s, told_s = told_s, clock.now()
                totals.compute_s, totals.sync_s = told_s - started, waited_s
                totals.input_s, totals.wall_s = started - entered, told_s - before_s
                sums = sums.plus(totals)
                self.steps_done += totals.targets > 0
                if self.group.is_root and not self._broken:
                    segment.progress(Progress(number, 0, totals, norm, told_s - begin))
                staleness.add(self.group.rank, averaging.steps_since_average(step))
                waiting = clock.now()
                with timeline.span("average", "average", timeline.REDUCE):
                    averaging.after_step(step, batch.own_targets)
                done += 1
                # After the last batch all ranks meet anyway, and exchange signals and errors with their reports.
                notes = None
                if number + 1 < segment.batches.stop:
                    notes = self._check.gather([segment.poll_signal(), bool(self._broken)], clock.now() - entered)
                waited_s = clock.now() - waiting
                if notes is not None:
                    signal = max(int(note[0]) for note in notes)
                    if signal or any(note[1] for note in notes):
                        break
        report = SegmentReport(
            totals=sums.plus(Totals(sync_s=waited_s)),
            disagreement=averaging.synchronize(),
            signal=max(signal, segment.poll_signal()),
            messages=averaging.messages,
            bytes=averaging.bytes,
            updates=done,
            staleness=staleness if self._is_local else None,
        )
        return report, self._broken, done

    def release(self) -> None:
        """Take everything off the model again. Collective."""
        self._gradient.release()
        self._averaging.release()

    def _step(self, batch: Batch, number: int, lr: float) -> tuple[Totals, float]:
        """Update this rank's own weights by the gradient of its part's mean loss; return its sums and length."""
        started, self.group.comm.world.step = clock.now(), number
        gradient = self._gradient.run(batch, number)
        targets = gradient.totals.targets
        if not gradient.is_finite:
            who = f"rank {self.group.rank}"
            self._broken = self._broken or self._gradient.explain(gradient, batch, number, who)
        elif targets:
            scale(self.model.storage.grads, batch.global_targets / targets)
            self.optimizer.lr = lr
            with timeline.span("update", "update"):
                self.optimizer.step()
        else:
            self.optimizer.steps += 1  # counted alike on all ranks
        self.slow.wait(clock.now() - started, self.group.rank, self._steps)
        self._steps += 1
        return gradient.totals, gradient.norm
