"""The runner of a pipeline: microbatches through this rank's stages, and what becomes of the parameters' gradients.

    backward of stage s, microbatch m  --> added(s, m)       fixed order: taken into the tree of s
    the last one of stage s            --> reduce(s)         else: its sum over the replicas begins, beside the rest
    all done                           --> finish            wait for the sums; add up tied parameters over stages

PipeDream (Narayanan et al., 2019) updates after every microbatch instead, without a flush. Each backward then uses the
weights that its forward used: an update goes into a new copy of the stage's weights, and the graphs of microbatches on
their way keep the old ones until they have gone back (weight stashing).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import nan

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.record import Backend
from nnmpi.comm.exchange import Traffic
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.given import Given, give, label_check
from nnmpi.compose.readings import Readings
from nnmpi.compose.runner import CORRECT, LOSS, Outcome, SumLoss, Values, check_cuts, correct_of
from nnmpi.data.loader import Batch
from nnmpi.nn.mode import current, evaluation, training
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.divergence import explain_gradients
from nnmpi.parallel.fixed import FixedReduction
from nnmpi.parallel.pipeline import Pipeline
from nnmpi.parallel.stage import Stage
from nnmpi.shard import split
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor


class Pipelined:
    """Runs this rank's stages.

    Args:
        arrangement: with stages; its model initialized.
        optimizer: over that model's storage; used here only where every microbatch is an update.
        loss, evaluation_loss: (logits, labels) -> the sum of the samples' losses.
        seed: of the run.
        allreduce, bucket_bytes, overlap: see `parallel.DataParallel`.
        synchronous: see `comm.messages.Messages`.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        optimizer: Optimizer,
        loss: SumLoss,
        evaluation_loss: SumLoss,
        backend: Backend,
        seed: int,
        allreduce: str | Sequence[str],
        bucket_bytes: int | None,
        overlap: bool | None,
        synchronous: bool = False,
    ) -> None:
        self.arrangement, self.optimizer, self.backend, self.seed = arrangement, optimizer, backend, seed
        layout, mesh = arrangement.layout, arrangement.mesh
        self.model: Module = arrangement.model
        self.updates = layout.asynchronous
        self.parallel = DataParallel(
            self.model,
            mesh.dp,
            allreduce,
            bucket_bytes,
            overlap,
            backend,
            not layout.fixed,
            hooked=False,
            joint=not layout.fixed,
        )
        count = len(arrangement.cuts)
        self._last = count - 1
        self._numbers = _numbers(arrangement)
        self._waiting = self._holders()
        parts = list(self._numbers.values())
        self._places = {stage: i for i, stage in enumerate(self._numbers)}
        self.fixed = FixedReduction(self.model, mesh.dp, parts, backend) if layout.fixed else None
        self._losses: tuple[SumLoss, SumLoss] = (loss, evaluation_loss)
        self._correct = correct_of(arrangement)
        self.readings, self._check = Readings(backend), label_check(loss, arrangement.classes)
        self._batch: _Running | None = None
        self._is_released = False
        self._traffic = Traffic()  # of the updates within a pass
        stages = {
            number: Stage(
                number,
                links,
                arrangement.starts[number],
                self._scope,
                self._head if number == self._last else None,
                self._recomputes,
            )
            for number, links in arrangement.stages.items()
        }
        place = mesh.place
        self.pipeline = Pipeline(
            mesh.pp, stages, count, layout.schedule, self, backend, synchronous, f"d{place.d}t{place.t}"
        )

    @property
    def _counts(self) -> bool:
        """Whether this rank's losses count: it has the last stage, and of those that share it, it is the first."""
        return self._last in self.arrangement.stages and self.arrangement.mesh.place.t == 0

    # ---- what a Worker calls ----

    def run(self, batch: Batch, step: int, scale: float) -> Outcome:
        """See `Runner.run`."""
        check_cuts(batch, self.fixed is not None)
        given = give(batch, self.model, self.backend)
        self.readings.clear()
        running = self._batch = _Running(batch, given, step, self._losses[0], self.readings)
        if self.fixed is not None:
            self.fixed.begin(batch.microbatches)
        self._waiting = self._holders()
        self._traffic = Traffic()
        report = self.pipeline.train(running.inputs, self._seeds(running, scale)) if batch.cuts else None
        begin = time.perf_counter()
        traffic = self._traffic if self.updates else self._finish()
        if self.fixed is not None:
            traffic = Traffic(time.perf_counter() - begin, 0.0, self.fixed.sent_bytes, len(self._numbers), nan)
        rows = len(batch.y) if self._counts else 0
        return Outcome(partial(self._sums, batch), rows, traffic, report, tuple(running.staleness))

    def _sums(self, batch: Batch, values: Values) -> tuple[float, float]:
        """See `Outcome.sums`."""
        cuts = batch.cuts if self._counts else ()
        numbered = {cut.number: values[LOSS, m] for m, cut in enumerate(cuts)}
        total = sum(numbered.values())
        if self.fixed is not None:
            total = self.fixed.sum_numbers(numbered, self.arrangement.mesh.world)
            total = total if self.arrangement.mesh.world.is_root else 0.0
        return total, sum(values[CORRECT, m] for m in range(len(cuts)))

    def evaluate(self, batch: Batch, readings: Readings) -> int:
        """See `Runner.evaluate`."""
        given = give(batch, self.model, self.backend)
        parts = [(part.start, part.stop) for part in split(len(batch.y), max(1, min(len(batch.y), self._last + 1)))]
        self._batch = _Running(batch, given, 0, self._losses[1], readings, parts, trains=False)
        with no_grad():
            self.pipeline.infer(self._batch.inputs)
        return len(batch.y) if self._counts else 0

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """See `Runner.explain`."""
        world = self.arrangement.mesh.world
        return explain_gradients(world, self.model, step + 1, value, "microbatches and replicas")

    def release(self) -> None:
        """See `Runner.release`."""
        if self._is_released:
            return
        self._is_released = True
        self.parallel.release()
        self.pipeline.free()
        if self.fixed is not None:
            self.fixed.release()

    # ---- what the stages call ----

    @contextmanager
    def _scope(self, microbatch: int, again: bool) -> Iterator[None]:
        running = self._batch
        assert running is not None
        with self._mode(running, microbatch, again):
            yield

    def _mode(self, running: _Running, microbatch: int, again: bool) -> AbstractContextManager[None]:
        if not running.trains:
            return evaluation()
        cut = running.batch.cuts[microbatch]
        if self.fixed is not None:
            self.fixed.microbatch = cut.number
        if self.updates and not again:
            running.versions[microbatch] = self.optimizer.steps
        return training(self.seed, running.step + (microbatch if self.updates else 0), cut.first_row, again)

    def _head(self, result: Tensor, microbatch: int) -> Tensor:
        running = self._batch
        assert running is not None
        given = running.given.rows(slice(*running.parts[microbatch]))
        again = current().again
        if not again:
            self._check(given, running.parts[microbatch][0], result)
        loss = running.loss(result, given.y)
        if not again:
            hits = self._correct(result, given)
            if running.trains:
                running.readings.put((LOSS, microbatch), loss.data)
                running.readings.put((CORRECT, microbatch), hits)
            elif self._counts:
                running.readings.add(LOSS, loss.data)
                running.readings.add(CORRECT, hits)
        return loss

    def _recomputes(self, microbatch: int) -> bool:
        running = self._batch
        return running is not None and self.arrangement.layout.recomputes(microbatch, len(running.inputs))

    def _seeds(self, running: _Running, scale: float) -> list[Array]:
        """Return the gradients of the microbatches' loss sums: scale / the samples that an update's mean is over."""
        batch = running.batch
        rows = [len(part) for part in split(batch.global_rows, batch.microbatches)]
        counts = [rows[cut.number] if self.updates else batch.global_rows for cut in batch.cuts]
        xp = self.backend.xp
        seeds = {count: xp.full((), scale / max(count, 1), "float64") for count in set(counts)}
        return [seeds[count] for count in counts]  # `backward` converts them to the loss's dtype

    # ---- what the pipeline calls: see parallel.pipeline.Sink ----

    def added(self, stage: int, microbatch: int) -> None:
        """See `Sink.added`."""
        running = self._batch
        if self.fixed is not None and running is not None:
            self.fixed.add(self._places[stage], running.batch.cuts[microbatch].number)

    def reduce(self, stage: int, microbatch: int | None) -> None:
        """See `Sink.reduce`: only parameters whose last stage this is are final."""
        if self.fixed is not None or microbatch is not None:
            return
        final = []
        for number in self._numbers[stage]:
            self._waiting[number].discard(stage)
            if not self._waiting[number]:
                final.append(number)
        self.parallel.reduce(sorted(final, reverse=True))

    def progress(self) -> None:
        """See `Sink.progress`."""
        self.parallel.exchange.progress()

    def step(self, stage: int, microbatch: int | None) -> None:
        """See `Sink.step`: sum over the replicas, and update a new copy of the weights."""
        running = self._batch
        assert running is not None and microbatch is not None
        self._traffic = self._traffic.plus(self._finish())
        storage = self.model.storage
        storage.move(data=[data.copy() for data in storage.data])
        for span in storage.spans:  # the move has forgotten the gradients, but they are still where they were
            span.parameter.grad = span.parameter.buffer
        running.staleness.append(self.optimizer.steps - running.versions.pop(microbatch))
        self.optimizer.step()
        storage.zero_grad()

    # ---- sums ----

    def _finish(self) -> Traffic:
        """End an update's sums; return what they were."""
        if self.fixed is not None:
            self.fixed.finish()
        else:
            self.parallel.finish()
        own = {span.parameter.name: span.parameter for span in self.model.storage.spans}
        for tie in self.arrangement.ties:  # in the same order on all ranks of the pipeline
            grad = own[tie.name].grad
            assert grad is not None
            total: Array = namespace(grad).ascontiguousarray(grad)
            tie.group.all_reduce(total.reshape(-1), check=False)
            grad[...] = total
        return self.parallel.traffic

    def _holders(self) -> dict[int, set[int]]:
        """Return, for each parameter's number, the stages of this rank that have it."""
        holders: dict[int, set[int]] = {}
        for stage, numbers in self._numbers.items():
            for number in numbers:
                holders.setdefault(number, set()).add(stage)
        return holders


class _Running:
    """A batch on its way: its microbatches, and what came of them on this rank."""

    def __init__(
        self,
        batch: Batch,
        given: Given,
        step: int,
        loss: SumLoss,
        readings: Readings,
        parts: Sequence[tuple[int, int]] | None = None,
        trains: bool = True,
    ) -> None:
        self.parts = [(cut.start, cut.stop) for cut in batch.cuts] if parts is None else parts
        self.batch, self.given, self.step, self.loss, self.trains = batch, given, step, loss, trains
        self.readings = readings
        self.inputs = [given.x[start:stop] for start, stop in self.parts]
        self.versions: dict[int, int] = {}
        self.staleness: list[int] = []


def _numbers(arrangement: Arrangement) -> dict[int, list[int]]:
    """Return, for each stage of this rank, the numbers of its parameters in the storage."""
    number_of = {id(span.parameter): i for i, span in enumerate(arrangement.model.storage.spans)}
    return {
        stage: sorted({number_of[id(p)] for link in links for _, module in link.members for p in module.parameters()})
        for stage, links in arrangement.stages.items()
    }
