"""A segment through parameter servers, in virtual time: the very servers that answer messages elsewhere.

    server 0    take A | update, to A |        take B | update, to B |            (asp)
                      ^ `.                           ^ `.
    worker A   |=====/    `|=====|...            ...  /  `|====|...      |===| computes, for its pace times its factor
    worker B   |====================================/

What happens when is an agenda: a worker has all its replies, and begins; its gradient has arrived at a server. The
gradient is computed with the weights that the worker got when it begins, and pushed when its time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from nnmpi.backend.array import Array
from nnmpi.compose.meeting import Tally, step_seconds
from nnmpi.compose.playing.scene import Scene, Segment
from nnmpi.compose.segment import Progress, SegmentReport
from nnmpi.errors import CommError
from nnmpi.parallel.server import ParameterServer, Push, Reply
from nnmpi.parallel.shards import cut_shards
from nnmpi.synchrony.agenda import Agenda
from nnmpi.synchrony.desk import Desk
from nnmpi.synchrony.network import Network


class Served:
    """Plays segments through servers.

    Attributes:
        servers: they keep their clocks from segment to segment.
    """

    def __init__(self, scene: Scene) -> None:
        storage, sync = scene.model.storage, scene.sync
        self._scene = scene
        self.servers = [
            ParameterServer(
                shard,
                storage,
                scene.optimizer,
                Desk(scene.workers, sync.backup, deals=shard.number == 0),
                scene.workers,
                adapt=sync.adapt,
            )
            for shard in cut_shards(storage, sync.server_count)
        ]
        # A gradient stays until all servers have used it: its worker gets no reply before.
        self._grads = [[grad.copy() for grad in storage.grads] for _ in range(scene.workers)]

    def run(self, segment: Segment) -> tuple[SegmentReport, float]:
        """Play a segment; return what was done, and the virtual time."""
        return _Play(self._scene, self.servers, self._grads, segment).run()


@dataclass
class _Player:
    """One worker in a segment.

    Attributes:
        grads: room for its gradient.
        replies: from servers, with the weights, since its last push.
        free_s: when its last gradient was done.
    """

    grads: list[Array]
    replies: dict[int, tuple[Reply, Sequence[Array]]]
    free_s: float


class _Play:
    """One segment."""

    def __init__(
        self, scene: Scene, servers: Sequence[ParameterServer], grads: Sequence[list[Array]], segment: Segment
    ) -> None:
        self._scene, self._servers, self._segment = scene, servers, segment
        self._agenda = Agenda(segment.begin_s)
        self._network = Network(len(servers), scene.speed.alpha_s, scene.speed.beta_s_per_byte)
        data = scene.model.storage.data
        self._nbytes = [server.shard.nbytes(data) for server in servers]
        self._players = [_Player(own, {}, segment.begin_s) for own in grads]
        self._over = 0  # workers for whom the segment is over
        self._total: int | None = None  # gradients in the segment, once it is known
        self._tally, self._used = Tally(), Tally()  # of gradients that were computed, and of those that were used
        self._updates = self._seen = servers[0].updates

    def run(self) -> tuple[SegmentReport, float]:
        segment, scene, agenda = self._segment, self._scene, self._agenda
        scene.statistics.begin()
        bound = 0 if segment.bsp else scene.sync.bound
        for server in self._servers:
            server.open(segment.batches.start, segment.batches.stop, bound)
        for number in range(len(self._servers)):
            self._answer(number, opening=True)
        while agenda.go_on():
            self._observe()
            self._ask()
        if self._over != scene.workers:
            raise CommError(f"{scene.workers - self._over} of {scene.workers} virtual workers wait for ever")
        for server in reversed(self._servers):  # the number of updates is the first server's
            server.shut()
        scene.statistics.show()
        return self._report(), agenda.now_s

    def _answer(self, number: int, opening: bool = False) -> None:
        """Let a server answer all who may go on. In the opening they have the weights, from the last meeting."""
        server, now_s = self._servers[number], self._agenda.now_s
        replies = server.release()
        if replies:
            weights = [array.copy() for array in server.master]
            far = [reply for reply in replies if not self._at_home(reply.worker, number)]
            arrival_s = now_s
            if far and not opening:
                arrival_s = self._network.reply(number, now_s, self._nbytes[number], len(far))
            for reply in replies:
                at_s = now_s if self._at_home(reply.worker, number) else arrival_s
                self._agenda.add(at_s, partial(self._hear, number, reply, weights))
        if number == 0:
            self._tell_total()

    def _tell_total(self) -> None:
        """Tell the other servers how many gradients there are, once the last one is dealt; a word costs nothing."""
        dealer = self._servers[0].desk.dealer
        if self._total is None and dealer is not None and dealer.exhausted:
            self._total = dealer.dealt
            for number in range(1, len(self._servers)):
                self._servers[number].desk.end(self._total)
                self._agenda.add(self._agenda.now_s, partial(self._answer, number))

    def _hear(self, number: int, reply: Reply, weights: Sequence[Array]) -> None:
        """Let a worker have a server's reply; with the last one it begins."""
        player = self._players[reply.worker]
        player.replies[number] = (reply, weights)
        if len(player.replies) == len(self._servers) or (number == 0 and reply.over):
            self._begin(reply.worker)

    def _begin(self, worker: int) -> None:
        """Let a worker compute what it was told to, or stop."""
        player, segment, now_s = self._players[worker], self._segment, self._agenda.now_s
        replies, player.replies = player.replies, {}
        unit = replies[0][0].unit
        if replies[0][0].over or unit is None:
            self._over += 1
            return
        for number, (_, weights) in replies.items():
            self._lay(number, weights)
        scene = self._scene
        batch = segment.parts.dealt(unit.batch, unit.part, scene.workers, worker, scene.taken[worker])
        scene.taken[worker] += len(batch.y)
        step = segment.number(unit.batch)
        gradient = self._scene.compute(worker, batch, step)
        for mine, computed in zip(player.grads, self._scene.model.storage.grads, strict=True):
            mine[...] = computed
        wait_s, player.free_s = now_s - player.free_s, now_s + gradient.compute_s
        self._tally.add(gradient, wait_s, 0.0)
        push = Push(
            unit,
            gradient.rows,
            batch.global_rows,
            segment.lr(step),
            0,
            gradient.loss_sum,
            gradient.correct,
            gradient.norm,
            gradient.compute_s,
            wait_s,
        )
        versions = [replies[number][0].version for number in range(len(self._servers))]
        self._agenda.add(player.free_s, partial(self._send, worker, push, versions))

    def _send(self, worker: int, push: Push, versions: Sequence[int]) -> None:
        """Send a worker's gradient to all servers."""
        now_s = self._agenda.now_s
        for number, version in enumerate(versions):
            at_s = now_s
            if not self._at_home(worker, number):
                at_s = self._network.push(number, now_s, self._nbytes[number])
            self._agenda.add(at_s, partial(self._arrive, worker, number, replace(push, version=version)))

    def _arrive(self, worker: int, number: int, push: Push) -> None:
        """Give a gradient to a server, and answer."""
        server = self._servers[number]
        dropped = server.desk.dropped
        server.push(worker, push, server.shard.views(self._players[worker].grads))
        if number == 0 and server.desk.dropped == dropped:
            self._note(worker, push)
        self._answer(number)

    def _note(self, worker: int, push: Push) -> None:
        """Count a gradient that will be used, and tell of it."""
        used = self._used
        used.rows += push.rows
        used.loss_sum += push.loss_sum
        used.correct += push.correct
        sums = (push.rows, push.loss_sum, push.correct, push.norm, push.compute_s, push.wait_s)
        self._segment.progress(Progress(push.unit.batch, worker, *sums, self._agenda.now_s))

    def _at_home(self, worker: int, number: int) -> bool:
        """Return whether a worker and a server are on one rank, and need no message."""
        return not self._scene.sync.dedicated and worker == number

    def _lay(self, number: int, weights: Sequence[Array]) -> None:
        """Put a shard's weights into the model."""
        shard = self._servers[number].shard
        for target, values in zip(shard.views(self._scene.model.storage.data), weights, strict=True):
            target[...] = values

    def _observe(self) -> None:
        """Show the servers' weights, if the first one has new ones and all of this moment is done."""
        server, now_s = self._servers[0], self._agenda.now_s
        if self._segment.observe is None or server.updates == self._seen or self._agenda.next_s == now_s:
            return
        self._seen = server.updates
        for number, each in enumerate(self._servers):
            self._lay(number, each.master)
        self._scene.statistics.show()
        self._segment.observe(now_s)

    def _ask(self) -> None:
        """End the segment after the batch that was begun, if somebody asks for it."""
        if not self._tally.signal:
            self._tally.signal = self._segment.asked()
            if self._tally.signal:
                self._servers[0].desk.close()
                self._tell_total()

    def _report(self) -> SegmentReport:
        desk = self._servers[0].desk
        staleness = [server.take_staleness() for server in self._servers]
        return SegmentReport(
            batches=desk.batches_done,
            rows=self._used.rows,
            loss_sum=self._used.loss_sum,
            correct=self._used.correct,
            seconds=self._agenda.now_s - self._segment.begin_s,
            messages=self._network.messages,
            bytes=self._network.bytes,
            updates=self._servers[0].updates - self._updates,
            dropped=desk.dropped,
            undealt=desk.undealt,
            staleness=staleness[0],
            lead=desk.longest_lead,
            signal=self._tally.signal,
            compute_s=step_seconds([self._tally], "compute_s"),
            wait_s=step_seconds([self._tally], "wait_s"),
        )
