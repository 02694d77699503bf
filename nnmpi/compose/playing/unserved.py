"""A segment of workers with weights of their own, in virtual time.

    local, every 2     worker 0   |===|===|......|-ring-|===|===|......|-ring-|
                       worker 1   |======|======|-ring-|======|======|-ring-|      all wait for the slowest

    gossip, ring       worker 0   |===|...|x|===|...|x|        a step is over when it and the neighbours' are,
                       worker 1   |======|x|===|x|             and the exchange with them is
                       worker 2   |===|...|x|===|...|x|

Averages over all are priced as an all-reduce on a ring. The meeting at the end costs one for the weights, unless they
have just been averaged; that the optimizer's states are averaged there, too, is for checkpoints and costs nothing.
"""

from __future__ import annotations

from nnmpi.comm.cost import ring_all_reduce
from nnmpi.compose.meeting import Tally, step_seconds
from nnmpi.compose.playing.copies import Copies
from nnmpi.compose.playing.scene import Scene, Segment
from nnmpi.compose.segment import Progress, SegmentReport
from nnmpi.optim.clip import scale
from nnmpi.synchrony.pairs import matching, ring
from nnmpi.synchrony.staleness import Staleness


class Unserved:
    """Plays segments of local steps or gossip."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._copies = Copies(scene.model.storage, scene.optimizer, scene.workers)

    def run(self, segment: Segment) -> tuple[SegmentReport, float]:
        """Play a segment; return what was done, and the virtual time. Progress is told of every worker's steps."""
        return _Play(self._scene, self._copies, segment).run()


class _Play:
    """One segment."""

    def __init__(self, scene: Scene, copies: Copies, segment: Segment) -> None:
        self._scene, self._copies, self._segment = scene, copies, segment
        self._every = 1 if segment.bsp else scene.sync.local_steps  # a warm-up averages after every step
        self._local = segment.bsp or scene.sync.mode == "local"
        self._clocks = [segment.begin_s] * scene.workers
        self._waited = [0.0] * scene.workers  # since each worker's last step
        self._rows = [0] * scene.workers  # since the last average
        self._apart = False  # whether somebody has done a step since
        self._tally, self._staleness = Tally(), Staleness(scene.workers)
        self._messages = self._bytes = self._done = self._age = 0

    def run(self) -> tuple[SegmentReport, float]:
        scene, segment, tally = self._scene, self._segment, self._tally
        self._copies.begin()
        scene.statistics.begin()
        for batch in segment.batches:
            self._step(batch)
            self._done += 1
            if segment.observe is not None:
                self._copies.show(self._shares())
                scene.statistics.show()
                segment.observe(max(self._clocks))
            tally.signal = segment.asked()
            if tally.signal:
                break
        disagreement = self._meet()
        now_s = max(self._clocks)
        report = SegmentReport(
            batches=self._done,
            rows=tally.rows,
            loss_sum=tally.loss_sum,
            correct=tally.correct,
            seconds=now_s - segment.begin_s,
            messages=self._messages,
            bytes=self._bytes,
            updates=self._done,
            staleness=self._staleness if scene.sync.mode == "local" else None,
            disagreement=disagreement,
            signal=tally.signal,
            compute_s=step_seconds([tally], "compute_s"),
            wait_s=step_seconds([tally], "wait_s"),
        )
        return report, now_s

    def _step(self, batch: int) -> None:
        """Let everybody do one step with its part of a batch, and average."""
        number = self._segment.number(batch)
        computed = [self._compute(worker, batch, number) for worker in range(self._scene.workers)]
        self._apart = True
        self._age += 1
        if not self._local:
            self._gossip(number, computed)
        else:
            self._clocks = computed
            if (number + 1) % self._every == 0:
                self._average()
        self._waited = [after - own for after, own in zip(self._clocks, computed, strict=True)]
        self._tally.wait_s += sum(self._waited)

    def _compute(self, worker: int, number: int, step: int) -> float:
        """Let one worker do its step; return when it is done."""
        scene, segment = self._scene, self._segment
        batch = segment.parts(number, worker, scene.workers)
        self._copies.load(worker)
        gradient = scene.compute(worker, batch, step)
        if gradient.rows:
            # of the mean loss over its own rows, and not a part of the whole batch's
            scale(scene.model.storage.grads, batch.global_rows / gradient.rows)
            self._copies.step(worker, segment.lr(step))
        else:
            self._copies.skip(worker)
        self._rows[worker] += gradient.rows
        self._tally.add(gradient, 0.0, 0.0)
        self._staleness.add(worker, self._age)
        done_s = self._clocks[worker] + gradient.compute_s
        sums = (gradient.rows, gradient.loss_sum, gradient.correct, gradient.norm)
        segment.progress(Progress(number, worker, *sums, gradient.compute_s, self._waited[worker], done_s))
        return done_s

    def _shares(self) -> list[float]:
        """Return each worker's share in the mean: by its rows since the last average; with gossip all count alike."""
        total, workers = sum(self._rows), self._scene.workers
        if not self._local or not total:
            return [1 / workers] * workers
        return [rows / total for rows in self._rows]

    def _average(self) -> None:
        """Give everybody the mean, when the slowest has come and the sum has gone round."""
        self._copies.average(self._shares())
        self._ring()

    def _ring(self) -> None:
        """Let an all-reduce of the weights pass."""
        workers, speed, nbytes = self._scene.workers, self._scene.speed, self._scene.nbytes
        end_s = max(self._clocks) + ring_all_reduce(workers, nbytes, speed.alpha_s, speed.beta_s_per_byte)
        self._clocks = [end_s] * workers
        self._messages += 2 * workers * (workers - 1)
        self._bytes += 2 * (workers - 1) * nbytes
        self._rows = [0] * workers
        self._apart, self._age = False, 0

    def _gossip(self, number: int, computed: list[float]) -> None:
        """Average with this step's neighbours, when they have come."""
        scene = self._scene
        workers = scene.workers
        if scene.sync.neighbours == "ring":
            self._copies.mix_ring()
            talks = [ring(worker, workers) for worker in range(workers)]
        else:
            partners = matching(workers, scene.seed, number)
            self._copies.mix_pairs(partners)
            talks = [() if partner == worker else (partner,) for worker, partner in enumerate(partners)]
        message_s = scene.speed.seconds(scene.nbytes)
        self._clocks = [
            max([computed[worker], *(computed[other] for other in others)]) + len(others) * message_s
            for worker, others in enumerate(talks)
        ]
        self._apart = workers > 2
        messages = sum(len(others) for others in talks)
        self._messages += messages
        self._bytes += messages * scene.nbytes

    def _meet(self) -> float:
        """Let the model have the mean of all; return how far they were apart."""
        disagreement = self._copies.meet(self._shares())
        if self._apart:
            self._ring()
        self._scene.statistics.show()
        return disagreement
