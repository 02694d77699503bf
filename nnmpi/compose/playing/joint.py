"""A segment of synchronous updates by all-reduce, in virtual time: the slowest worker, then a ring.

    worker 0   |======|..........|-ring-|======|..........|-ring-|
    worker 1   |======|..........|-ring-|======|..........|-ring-|
    worker 2   |=================|-ring-|=================|-ring-|      a straggler

What all workers together compute is the gradient of the whole batch, and so it is computed as one.
"""

from __future__ import annotations

from dataclasses import replace

from nnmpi.comm.cost import ring_all_reduce
from nnmpi.compose.meeting import Tally, step_seconds
from nnmpi.compose.playing.scene import Scene, Segment
from nnmpi.compose.segment import Progress, SegmentReport


class Joint:
    """Plays segments in which everybody waits for everybody. Nothing stands behind it from one to the next."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def run(self, segment: Segment) -> tuple[SegmentReport, float]:
        """Play a segment; return what was done, and the virtual time.

        Progress is told once for each batch, for worker 0, which stands for all.
        """
        scene, tally, now_s, signal, done = self._scene, Tally(), segment.begin_s, 0, 0
        workers, nbytes = scene.workers, scene.nbytes
        sum_s = ring_all_reduce(workers, nbytes, scene.speed.alpha_s, scene.speed.beta_s_per_byte)
        wait_s = 0.0
        for number in segment.batches:
            batch = segment.parts.whole(number, self._scene.workers)
            gradient = scene.gradient.run(batch, segment.number(number))
            scene.check(gradient, batch, segment.number(number), "the workers together")
            scene.optimizer.lr = segment.lr(segment.number(number))
            scene.optimizer.step()
            each_s = [scene.take_step(worker) for worker in range(workers)]
            now_s += max(each_s) + sum_s
            gradient = replace(gradient, compute_s=sum(each_s) / workers)
            tally.add(gradient, max(each_s) + sum_s - gradient.compute_s, 0.0)
            sums = (gradient.rows, gradient.loss_sum, gradient.correct, gradient.norm)
            segment.progress(Progress(number, 0, *sums, gradient.compute_s, wait_s, now_s))
            wait_s = max(each_s) + sum_s - gradient.compute_s
            done += 1
            if segment.observe is not None:
                segment.observe(now_s)
            signal = segment.asked()
            if signal:
                break
        report = SegmentReport(
            batches=done,
            rows=tally.rows,
            loss_sum=tally.loss_sum,
            correct=tally.correct,
            seconds=now_s - segment.begin_s,
            messages=done * 2 * workers * (workers - 1),
            bytes=done * 2 * (workers - 1) * nbytes,
            updates=done,
            signal=signal,
            compute_s=step_seconds([tally], "compute_s"),
            wait_s=step_seconds([tally], "wait_s"),
        )
        return report, now_s
