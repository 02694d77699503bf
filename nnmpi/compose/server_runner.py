"""Segments through a parameter server: take a part, compute its gradient, push it, pull the weights, go on.

    rank 0     | its own parts; between layers it takes gradients and gives weights and parts ............|
    rank 1     | pull |  gradient of batch 0, part 0  | push | pull |  batch 1, part 1 ...
    rank 2     | pull |  gradient of batch 0, part 1         | push | pull | ...

Rank 0 looks after its messages after the forward pass, after each layer of the backward pass, while it waits, and while
it is slowed down. What it does for others is in the time of its step, but is not multiplied by a straggler's factor.
"""

import nnmpi.clock as clock
import nnmpi.timeline as timeline
from nnmpi.compose.local_gradient import LocalGradient
from nnmpi.compose.stats import Totals
from nnmpi.compose.trainer import Progress, SegmentReport, Trainer, TrainingSegment
from nnmpi.parallel.server import ParameterServer, Push, PushPull
from nnmpi.synchrony.sync import Sync

TOLD = ("samples", "targets", "loss_sum", "score_sum", "compute_s", "sync_s", "input_s")  # of a gradient, in its Push


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
