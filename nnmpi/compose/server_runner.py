"""Segments through parameter servers: take a part, compute its gradient, push it, pull the weights, go on.

    server 0   | assigns parts, takes gradients, gives weights ........................|
    worker 1   | pull |  gradient of batch 0, part 0  | push | pull |  batch 1, part 1 ...
    worker 2   | pull |  gradient of batch 0, part 1         | push | pull | ...

A worker that is a server too looks after its messages after the forward pass, after each layer of the backward pass,
while it waits, and while it is slowed down. What it does for others is in the time of its step, but is not multiplied
by a straggler's factor.
"""

from collections.abc import Callable
from functools import partial

from nnmpi import clock, timeline
from nnmpi.compose.replica_runner import LocalGradient
from nnmpi.compose.segment import Tally, exchange, sent, sum_up
from nnmpi.compose.state import sharded_optimizer_state
from nnmpi.compose.trainer import OnProgress, PollSignal, Progress, SegmentReport, Totals, Trainer, TrainingSegment
from nnmpi.parallel.model_state import ModelState
from nnmpi.parallel.server.parameter_server import ParameterServer, Push
from nnmpi.parallel.server.push_pull import PushPull
from nnmpi.parallel.server.shards import Shard, cut_shards
from nnmpi.synchrony.consistency import ConsistencyController
from nnmpi.synchrony.staleness import Staleness
from nnmpi.synchrony.sync import Sync


class ParameterServerRunner:
    """Runs segments on ranks of which some are servers. Making one is collective.

    Attributes:
        shard: what this rank's server owns; None on other ranks.
        steps_done: the gradients of any rows that this rank computed in the last segment.
    """

    def __init__(self, trainer: Trainer, sync: Sync, gradient: LocalGradient, synchronous_sends: bool) -> None:
        model, optimizer, group = trainer.model, trainer.optimizer, trainer.group
        self.model, self.optimizer, self.group, self.sync = model, optimizer, group, sync
        self._gradient, self._throttle = gradient, trainer.throttle
        self._workers, servers = sync.worker_ranks(group.size), sync.server_ranks(group.size)
        self._is_worker = group.rank in self._workers
        shards = cut_shards(model.storage, len(servers))
        self.server: ParameterServer | None = None
        self.shard: Shard | None = None
        if group.rank in servers:
            number = servers.index(group.rank)
            self.shard = shards[number]
            controller = ConsistencyController(len(self._workers), sync.backup, assigns=number == 0)
            self.server = ParameterServer(
                self.shard, model.storage, optimizer, controller, len(self._workers), adapt=sync.adapt
            )
        self._note: Callable[[int, Push], None] = lambda worker, push: None
        self._talk = PushPull(
            group, sync, model.storage, shards, self.server, self._noted, synchronous_sends, backend=trainer.backend
        )
        if self.server is not None and self._is_worker:
            gradient.look_after(self._serve, self._talk.serve_until)
        self._steps = -1  # of this rank in the whole run: its own, after those of a run that is resumed
        self._taken = 0  # samples, likewise
        self._told_s = 0.0  # when a gradient was told of
        self._served_s = 0.0  # spent on others' messages while a gradient was computed
        self._updates = self._dropped = 0  # of this rank's server: updates before the segment, gradients that came late
        self._used = Totals()  # of the gradients that server 0 could use
        self._late = Totals()  # the times of those that it could not, since the last one that it could
        self.steps_done = 0

    def run(self, segment: TrainingSegment) -> SegmentReport:
        """Run one segment."""
        begin = self._told_s = clock.now()
        tally = Tally()
        self._used, self._late, self._dropped = Totals(), Totals(), 0
        if self.server is not None:
            self._updates, self.server.signal = self.server.updates, segment.poll_signal
        self._note = partial(self._count, tally, segment.progress, segment.poll_signal, begin)
        if self._steps < 0:
            worker = max(0, self.group.rank - self._workers.start)
            self._steps = segment.step
            self._taken = segment.loader.rows_before(segment.step, worker, len(self._workers))
        self._talk.open(segment.batches.start, segment.batches.stop, 0 if segment.bsp else self.sync.bound)
        if self._is_worker:
            self._work(segment, tally)
        self._talk.finish()
        tally.messages, tally.bytes = self._talk.messages, self._talk.bytes
        tally.signal = tally.signal or segment.poll_signal()
        tally.more = self._tell()
        self.steps_done = tally.seen
        self.optimizer.steps = int(self.group.share(self.optimizer.steps))  # those of the first shard
        return self._report(exchange(self.group, tally), clock.now() - begin)

    def optimizer_state(self) -> ModelState:
        """Return the optimizer's arrays, of which each server has those of its shard."""
        return sharded_optimizer_state(self.model, self.optimizer, self.group, self.shard)

    def release(self) -> None:
        """Take everything off the model again, and give all ranks the optimizer's state. Collective.

        Until then each server alone has that of its shard.
        """
        for arrays in self.optimizer.slots().values():
            self._talk.broadcast_shards(arrays)
        self._gradient.release()
        self._talk.free()

    def _work(self, segment: TrainingSegment, tally: Tally) -> None:
        """Be a worker until the segment is over."""
        parts, worker = segment.loader.parts(segment.epoch), self._workers.index(self.group.rank)
        while True:
            begin = clock.now()
            with timeline.span("pull", "pull", timeline.WAITING):
                ticket = self._talk.pull()
            if ticket.over or ticket.task is None:
                tally.wait(clock.now() - begin)
                return
            pulled = clock.now()
            task = ticket.task
            batch = parts.assigned(task.batch, task.part, len(self._workers), worker, self._taken)
            self._taken += len(batch.y)
            self.group.comm.world.step = number = segment.number(task.batch)
            started = clock.now()
            self._served_s = 0.0
            gradient = self._gradient.run(batch, number)
            self._wait_as_slow(started)
            broken = not gradient.is_finite
            if broken and not tally.broken:
                tally.broken = self._gradient.explain(gradient, batch, number, f"rank {self.group.rank}")
            spent_s, wait_s = clock.now() - started, pulled - begin
            tally.add(gradient.totals(spent_s, wait_s, started - pulled))
            with timeline.span("push", "push", timeline.SEND):
                self._talk.push(
                    Push(
                        task,
                        gradient.rows,
                        gradient.targets,
                        batch.global_targets,
                        segment.lr(number),
                        0,
                        gradient.loss_sum,
                        gradient.score_sum,
                        gradient.norm,
                        spent_s,
                        wait_s,
                        started - pulled,
                        segment.poll_signal() or ticket.signal,
                        broken,
                    )
                )

    def _wait_as_slow(self, started: float) -> None:
        """Be as slow as this rank is told to be: what it did for others meanwhile does not count as its step."""
        rest = self._talk.serve_until if self.server is not None else None
        spent_s = clock.now() - started - self._served_s
        self._throttle.wait(started, self.group.rank, self._steps, rest, spent_s)
        self._steps += 1

    def _serve(self) -> None:
        begin = clock.now()
        self._talk.serve()
        self._served_s += clock.now() - begin

    def _count(
        self,
        tally: Tally,
        progress: OnProgress,
        poll_signal: PollSignal,
        begin: float,
        worker: int,
        push: Push,
    ) -> None:
        """Count a gradient that has come, and tell of it if it will be used; on server 0."""
        assert self.server is not None
        controller = self.server.controller
        times = Totals(compute_s=push.compute_s, sync_s=push.wait_s, input_s=push.input_s)
        if controller.dropped == self._dropped and not push.broken:
            before_s, self._told_s = self._told_s, clock.now()
            counts = Totals(1, push.rows, push.targets, push.loss_sum, push.score_sum, wall_s=self._told_s - before_s)
            totals = counts.plus(times).plus(self._late)
            self._used, self._late = self._used.plus(counts), Totals()
            progress(Progress(push.task.batch, worker, totals, push.norm, self._told_s - begin))
        else:
            self._late = self._late.plus(times)
        self._dropped = controller.dropped
        tally.signal = tally.signal or push.signal or poll_signal()
        if tally.signal:
            controller.close()

    def _noted(self, worker: int, push: Push) -> None:
        self._note(worker, push)

    def _tell(self) -> dict[str, object]:
        """Return what this rank's server has to tell of the segment."""
        server = self.server
        if server is None:
            return {}
        return {
            "updates": server.updates - self._updates,
            "staleness": server.take_staleness().to_json(),
            "lead": server.controller.longest_lead,
            "dropped": server.controller.dropped,
            "unassigned": server.controller.unassigned,
            "batches": server.controller.batches_done,
        }

    def _report(self, tallies: list[Tally], seconds: float) -> SegmentReport:
        used = Totals.from_json(self.group.share(self._used.to_json()))
        first = next(tally.more for tally in tallies if tally.more)
        return SegmentReport(
            sum_up(tallies, first["batches"], self.group.share(seconds), used),
            updates=first["updates"],
            dropped=first["dropped"],
            unassigned=first["unassigned"],
            staleness=Staleness.from_json(first["staleness"]),
            lead=first["lead"],
            **sent(tallies),
        )
