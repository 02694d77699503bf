"""Segments without a server: every worker has its own weights, and averages them with others' now and then.

local      worker 0   step step step step | mean of all | step step step step | mean of all
           worker 1   step step step step |             | step step step step |
gossip     worker 0   step | with 3 and 1 | step | with 3 and 1 |
           worker 1   step | with 0 and 2 | step | with 0 and 2 |
"""

import nnmpi.clock as clock
import nnmpi.timeline as timeline
from nnmpi.comm.agreement import PeriodicCheck
from nnmpi.compose.local_gradient import LocalGradient
from nnmpi.compose.stats import Totals
from nnmpi.compose.trainer import Progress, SegmentReport, Trainer, TrainingSegment
from nnmpi.data.loader import Batch
from nnmpi.errors import UsageError
from nnmpi.optim.clip import scale
from nnmpi.parallel.averaging import Gossip, LocalSGD
from nnmpi.synchrony.consistency import Staleness
from nnmpi.synchrony.sync import Sync


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
