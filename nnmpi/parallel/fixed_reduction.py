"""Gradients summed in a fixed order: the same bits on any number of replicas.

The bits of a floating-point sum depend on its order, and the bits of a matrix product on its shape.
So one replica computes each microbatch, undivided, and the microbatches' gradients are added in a
tree that depends on their number alone (see `comm.fixed_order`):

    serial              4 microbatches on 1 replica:    ((0 + 1) + (2 + 3))
    2 replicas          0 + 1  on one, 2 + 3 on the other, and then the sum of both
    3 replicas          0 + 1  |  2  |  3               the same tree

Any number of replicas works (those beyond the number of microbatches are idle), and any number of
microbatches, as long as no batch norm occurs twice in the model. Two runs have the same bits if
they have the same number of microbatches. This holds for losses, gradients, their norm, weights and
running statistics. It does not hold for the loss of an evaluation, whose batches the layout cuts.
It holds on one processor type, with one BLAS library and one thread. Batch statistics are per
microbatch; running statistics are updated by the microbatches in order.
"""

from collections.abc import Mapping
from functools import partial
from math import nan
from typing import Self

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.base.errors import UsageError
from nnmpi.comm.buffers import is_device, put, room_like, to_host, to_hosts
from nnmpi.comm.fixed_order import SumTree, sum_in_fixed_order
from nnmpi.comm.group import Group
from nnmpi.comm.world import Traffic
from nnmpi.data.loader import Batch
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm
from nnmpi.parallel.data import Replicas, StrategySetting


class FixedReduction(Replicas):
    """Sums a model's gradients over microbatches and replicas.

        begin(microbatches)   begin_pass, loss.backward(), finish_pass, end_pass   ...  finish()

    Args:
        model: initialized; the running statistics of its batch norms are updated here from now on.
        group: the replicas.
        needs_rows: whether each rank needs rows in the first batch, by which passes are planned.
    """

    keeps_own = False
    shares_batches = False

    @classmethod
    def why_not(cls, setting: StrategySetting) -> str:
        """See `Replicas.why_not`."""
        return "" if setting.layout.fixed_order else 'the layout\'s reduction is not "fixed"'

    @classmethod
    def made_for(cls, setting: StrategySetting) -> Self:
        """See `Replicas.made_for`."""
        needs_rows = setting.layout.activation_memory is not None
        return cls(setting.model, setting.group, needs_rows)

    def __init__(self, model: Module, group: Group, needs_rows: bool = False) -> None:
        super().__init__(model, group)
        self._is_unchecked = needs_rows
        self._norms = [
            module for _, module in model.named_modules() if isinstance(module, BatchNorm)
        ]
        self._observed: list[dict[int, tuple[Array, Array]]] = [{} for _ in self._norms]
        self._trees: list[SumTree] = []
        self._count = 0
        for number, norm in enumerate(self._norms):
            norm.observe = partial(self._observe, number)

    def begin(self, microbatches: int) -> None:
        """Begin a step of this many microbatches, over all replicas."""
        self._count = microbatches
        self._trees = [SumTree(microbatches) for _ in self.storage.grads]
        for observed in self._observed:
            observed.clear()

    def begin_step(self, batch: Batch) -> None:
        """See `Replicas.begin_step`."""
        if len(batch.cuts) == batch.microbatches and len(batch.y) != batch.global_rows:
            raise UsageError(
                f"this rank has a part of each of {batch.microbatches} microbatches, but reduction"
                ' "fixed" needs whole ones; give step the batches of a Loader with'
                " whole_microbatches=True"
            )
        unchecked, self._is_unchecked = self._is_unchecked, False
        if unchecked and 0 in self.group.gather(len(batch.cuts)):
            raise UsageError(
                "ranks without samples cannot take part in the plan for activations with reduction"
                " fixed; give a larger batch, fewer ranks, or no activation_memory"
            )
        self.begin(batch.microbatches)

    def finish_pass(self) -> None:
        """Take the microbatch's gradients, and clear them in the model."""
        self.storage.finish_gradients()
        for tree, grad in zip(self._trees, self.storage.grads, strict=True):
            tree.push(self.microbatch, to_host(grad))
        for span in self.storage.spans:
            span.parameter.grad = None

    def finish(self) -> None:
        """Write the sums into the storage's gradients; update running statistics. Collective."""
        grads = self.storage.grads
        with self.group.collective("gradients"):
            for tree, grad in zip(self._trees, grads, strict=True):
                out = room_like(grad, grad.shape) if is_device(grad) else grad
                sum_in_fixed_order(self.group, tree, out)
                put(out, grad)
        for span in self.storage.spans:
            span.parameter.grad = span.parameter.buffer
        for norm, observed in zip(self._norms, self._observed, strict=True):
            self._update_statistics(norm, observed)
        if self.group.size > 1:
            sent_bytes = sum(grad.nbytes for grad in grads)
            self.group.count(Traffic(0.0, sent_bytes, len(grads), nan))

    def describe(self) -> str:
        """See `Replicas.describe`."""
        return "in a fixed tree over the microbatches, after the backward pass"

    def sum_losses(self, losses: Mapping[int, float], group: Group) -> float:
        """Return the sum in the same tree on the first rank, 0 on the others. Collective."""
        tree, total = SumTree(self._count), np.zeros(1)
        for microbatch, loss in losses.items():
            tree.push(microbatch, np.array([loss]))
        with group.collective("losses"):
            sum_in_fixed_order(group, tree, total)
        return float(total[0]) if group.is_root else 0.0

    def release(self) -> None:
        """See `Replicas.release`."""
        super().release()
        for norm in self._norms:
            norm.observe = None

    def _observe(self, number: int, mean: Array, variance: Array) -> None:
        if self.microbatch in self._observed[number]:
            raise UsageError(
                "a batch normalization runs twice in one microbatch, as the model uses it in two"
                " places; make a layer for each, or leave out the fixed reduction"
            )
        self._observed[number][self.microbatch] = (mean, variance)

    def _update_statistics(self, norm: BatchNorm, observed: dict[int, tuple[Array, Array]]) -> None:
        """Update running statistics by all microbatches in order, on every replica."""
        channels = norm.running_mean._data.size
        by_microbatch = np.zeros((self._count, 2, channels), str(norm.running_mean._data.dtype))
        for microbatch, (mean, variance) in observed.items():
            by_microbatch[microbatch, 0], by_microbatch[microbatch, 1] = to_hosts([mean, variance])
        # each row is nonzero on one replica only, so the sum rounds nothing
        self.group.all_reduce(by_microbatch.reshape(-1), check=False)
        xp = namespace(norm.running_mean._data)
        for mean, variance in by_microbatch:
            norm.update_running(xp.asarray(mean), xp.asarray(variance))
