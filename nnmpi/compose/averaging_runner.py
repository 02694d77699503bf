"""Segments without a server: every worker has its own weights, and averages them with others' now and then.

local      worker 0   step step step step | mean of all | step step step step | mean of all
           worker 1   step step step step |             | step step step step |
gossip     worker 0   step | with 3 and 1 | step | with 3 and 1 |
           worker 1   step | with 0 and 2 | step | with 0 and 2 |
"""

from nnmpi import clock, timeline
from nnmpi.comm.agreement import PeriodicCheck
from nnmpi.compose.replica_runner import LocalGradient
from nnmpi.compose.segment import Tally, exchange, sent, sum_up
from nnmpi.compose.state import optimizer_state
from nnmpi.compose.trainer import Progress, SegmentReport, Trainer, TrainingSegment
from nnmpi.data.loader import Batch
from nnmpi.data.upload import batches as uploaded
from nnmpi.errors import UsageError
from nnmpi.optim.clip import scale
from nnmpi.parallel.averaging import Gossip, LocalSGD
from nnmpi.parallel.model_state import ModelState
from nnmpi.parallel.server.parameter_server import ParameterServer
from nnmpi.synchrony.staleness import Staleness
from nnmpi.synchrony.sync import Sync


class AveragingRunner:
    """Runs segments on ranks that are all workers, each with part `rank` of every batch. Making one is collective.

    Attributes:
        steps_done: the steps of this rank in the last segment that had any rows.
        server: None, as there is no server.
    """

    server: ParameterServer | None = None

    def __init__(self, trainer: Trainer, sync: Sync, gradient: LocalGradient) -> None:
        self.model, self.optimizer, self.group, self.sync = trainer.model, trainer.optimizer, trainer.group, sync
        self._gradient, self._throttle = gradient, trainer.throttle
        group, storage, optimizer = self.group, self.model.storage, self.optimizer
        self._averaging: LocalSGD | Gossip = (
            LocalSGD(group, storage, optimizer, sync.local_steps)
            if sync.mode == "local"
            else Gossip(group, storage, optimizer, sync.neighbours, trainer.seed)
        )
        # In a warm-up the mean of all is taken after every step; for plain SGD that is the synchronous run.
        self._warming = LocalSGD(group, storage, optimizer, 1)
        self._check = PeriodicCheck(group)
        self._steps = 0  # of this rank, in the whole run
        self._told_s = 0.0  # when a step was told of
        self._waited_s = 0.0  # for other ranks, since then
        self.steps_done = 0

    def run(self, segment: TrainingSegment) -> SegmentReport:
        """Run one segment."""
        loader, begin = segment.loader, clock.now()
        if (loader.rank, loader.world) != (self.group.rank, self.group.size):
            raise UsageError(
                f"the loader gives part {loader.rank} of {loader.world}, but this is rank {self.group.rank} of "
                f"{self.group.size}; give Loader the rank and world of the group"
            )
        averaging = self._warming if segment.bsp else self._averaging
        averaging.begin()
        tally, staleness = Tally(), Staleness(self.group.size)
        done, stop, signal, self._told_s, self._waited_s = 0, False, 0, begin, 0.0
        with uploaded(loader, segment.epoch, self._gradient.backend, segment.batches.start) as items:
            for number in segment.batches:
                if stop:
                    break
                step, entered = segment.number(number), clock.now()
                batch = next(items)
                input_s = clock.now() - entered
                progress = self._step(batch, step, segment.lr(step), tally, input_s, begin)
                tally.add(progress.totals)
                if self.group.is_root and not tally.broken:
                    segment.progress(progress)
                staleness.add(self.group.rank, averaging.steps_since_average(step))
                waiting = clock.now()
                with timeline.span("average", "average", timeline.REDUCE):
                    averaging.after_step(step, batch.own_targets)
                done += 1
                step_s = clock.now() - entered
                # After the last batch all ranks meet anyway, and exchange signals and errors with their tallies.
                notes = (
                    self._check.gather([segment.poll_signal(), bool(tally.broken)], step_s)
                    if number + 1 < segment.batches.stop
                    else None
                )
                self._waited_s = clock.now() - waiting
                if notes is not None:
                    signal = max(int(note[0]) for note in notes)
                    stop = bool(signal) or any(note[1] for note in notes)
        tally.wait(self._waited_s)
        disagreement = averaging.synchronize()
        tally.signal = max(signal, segment.poll_signal())
        tally.messages, tally.bytes = averaging.messages, averaging.bytes
        tally.more = {"staleness": staleness.to_json()}
        self.steps_done = tally.seen
        return self._report(exchange(self.group, tally), done, disagreement, clock.now() - begin)

    def optimizer_state(self) -> ModelState:
        """Return the optimizer's arrays, which are the same on all ranks between segments."""
        return optimizer_state(self.model, self.optimizer, self.group, None)

    def release(self) -> None:
        """Take everything off the model again. Collective."""
        self._gradient.release()
        self._averaging.release()
        self._warming.release()

    def _step(self, batch: Batch, number: int, lr: float, tally: Tally, input_s: float, begin: float) -> Progress:
        """Do one update of this rank's own weights with the gradient of its part's mean loss."""
        started, self.group.comm.world.step = clock.now(), number
        gradient = self._gradient.run(batch, number)
        if not gradient.is_finite:
            who = f"rank {self.group.rank}"
            tally.broken = tally.broken or self._gradient.explain(gradient, batch, number, who)
        elif gradient.targets:
            scale(self.model.storage.grads, batch.global_targets / gradient.targets)
            self.optimizer.lr = lr
            with timeline.span("update", "update"):
                self.optimizer.step()
        else:
            self.optimizer.steps += 1  # counted alike on all ranks
        self._throttle.wait(started, self.group.rank, self._steps)
        self._steps += 1
        now = clock.now()
        totals = gradient.totals(now - started, self._waited_s, input_s, now - self._told_s)
        self._told_s = now
        return Progress(batch.number, 0, totals, gradient.norm, now - begin)

    def _report(self, tallies: list[Tally], batches: int, disagreement: float, seconds: float) -> SegmentReport:
        staleness = Staleness(self.group.size)
        for tally in tallies:
            staleness.merge(Staleness.from_json(tally.more["staleness"]))
        return SegmentReport(
            sum_up(tallies, batches, self.group.share(seconds)),
            updates=batches,
            staleness=staleness if self.sync.mode == "local" else None,
            disagreement=disagreement,
            **sent(tallies),
        )
