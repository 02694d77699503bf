"""Bulk-synchronous data parallelism: every rank has the whole model and a part of each batch.

    rank 0   batch rows 0..1   forward   backward  |--.            | update
    rank 1   batch rows 2..3   forward   backward  |---> all-reduce| update        the same update everywhere
    rank 2   batch row  4      forward   backward  |--'            | update

Losses are sums; each rank's is divided by the global number of samples before it goes backward, so the sum of the
gradients over ranks is the gradient of the global mean, whatever the ranks' shares are. Gradients are summed in buckets
while backward still runs (Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.backend.recording import perform
from nnmpi.comm.algorithms.registry import AUTO, SHARED
from nnmpi.comm.buffers import is_device
from nnmpi.comm.choose import SHARED_BYTES
from nnmpi.comm.exchange import Exchange, Traffic, predict_traffic
from nnmpi.comm.group import Group
from nnmpi.errors import CommError, DeviceError, NnmpiError, UsageError
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm
from nnmpi.parallel.alike import check_alike
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor


class DataParallel:
    """Keeps the replicas of a model on a group's ranks equal. Making one is collective.

    Parameters and buffers become those of rank 0, batch normalization takes its statistics over all ranks, and
    gradients are summed over the ranks in `backward`. A model has one at a time; `release` takes it off again.

    Args:
        model: initialized, the same on all ranks.
        group: the ranks that share each batch.
        allreduce: a name in `registry.NAMES`, such as "auto", "native" or "ring", for device arrays also "ipc" or
            "nccl"; or one for each bucket.
        bucket_bytes: the longest message, unless one parameter is longer; None for what suits (see `comm.exchange`).
        overlap: whether buckets are summed while backward still runs, or all at its end; None for what pays: with
            ranks on several nodes or arrays on a device, and not on one node's processors.
        backend: where the model's arrays live; NumPy by default.
        exchanged: whether gradients are summed here; otherwise each rank's own are left, for a strategy that sums and
            uses them in one go (see `parallel.fused`).
        hooked: whether this object runs the backward passes; otherwise somebody else does, and calls `reduce` and
            `finish` (see `parallel.pipeline`).
        joint: whether the ranks share each microbatch, and so its batch statistics.

    With "shared", or "auto", the gradients move to memory that the ranks of a node share, if there is some.

    Attributes:
        exchange: what sums the gradients.
        released: whether `release` was called.
        notice: why gradients do not lie in shared memory though they might, else empty.
        traffic: what the communication of the last step was: gradients, and statistics of batch normalization.

    Raises:
        CommError: on all ranks, when their models differ.
        UsageError: for an unknown algorithm or a bucket size below 1; for a model that has a DataParallel already, or
            modules that were not there when it was initialized.
    """

    def __init__(
        self,
        model: Module,
        group: Group,
        allreduce: str | Sequence[str] = AUTO,
        bucket_bytes: int | None = None,
        overlap: bool | None = None,
        backend: Backend | None = None,
        exchanged: bool = True,
        hooked: bool = True,
        joint: bool = True,
    ) -> None:
        self.model, self.group = model, group
        self.storage = model.storage
        self.backend = numpy_backend() if backend is None else backend
        if exchanged:
            check_free(model)
            check_alike(group, self.storage)
        self._last: bool | None = None  # whether the microbatch on its way back is the last one; None between passes
        self._summed = False  # the gradients are those of a step that is over
        self._statistics = self.traffic = Traffic()
        self.released, self.notice = False, ""
        self._shared: list[Array] = self._share_gradients(allreduce) if exchanged else []
        buffers = self.storage.grads if exchanged else []
        spans = [(span.buffer, span.start, span.stop) for span in self.storage.spans] if exchanged else []
        try:
            self.exchange = Exchange(group, buffers, spans, allreduce, bucket_bytes, overlap)
        except NnmpiError:  # on all ranks
            self._unshare_gradients()
            raise
        share_state(model, group)
        if group.size > 1 and hooked:
            for number, span in enumerate(self.storage.spans):
                span.parameter.guard = self._check_pass
                if exchanged and self.exchange.overlap:  # else nobody needs to know, and the tape is quicker
                    span.parameter.hook = self._hook(number)
        if group.size > 1 and joint:
            for _, module in model.named_modules():
                if isinstance(module, BatchNorm):
                    module.all_reduce = self._sum_statistics

    def backward(self, loss_sum: Tensor, samples: int, last: bool = True, scale: float = 1.0) -> None:
        """Add the gradient of the global mean loss, on all ranks; collective.

        Args:
            loss_sum: the sum of the losses of this rank's samples.
            samples: the number of samples of all ranks (and of all microbatches) together.
            last: False for all but the last of several microbatches, whose gradients are only added up.
            scale: what all gradients are multiplied by (see `optim.loss_scale`).

        Raises:
            UsageError: when the gradients of the step before were not forgotten: see `Module.zero_grad`.
            CommError: when the pass before this one ended in an exception halfway.
        """
        seed = namespace(loss_sum.data).full(loss_sum.shape, scale / max(samples, 1))  # float64 until backward
        perform(self._begin, last)  # so that a compiled step does it again each time
        try:
            loss_sum.backward(seed)
        finally:
            perform(self._end)
        if last:
            perform(self.finish)

    def reduce(self, numbers: Sequence[int]) -> None:
        """Begin the sum of gradients that are final in this step, by their parameters' numbers in the storage.

        Raises:
            UsageError: after `release`.
        """
        self.check_held()
        for number in numbers:
            self.storage.spans[number].parameter.finish_gradient()
            self.exchange.ready(number)

    def finish(self) -> None:
        """End a step: return when all gradients are summed; collective.

        Raises:
            UsageError: after `release`.
        """
        self.check_held()
        self.storage.finish_gradients()
        self.exchange.finish()
        self._summed = True
        self.traffic = self.exchange.traffic.plus(self._statistics)
        self._statistics = Traffic()

    def _begin(self, last: bool) -> None:
        """Open a pass; refuse one whose gradients would be added to what is no sum of this step's."""
        self.check_held()
        if self.exchange.under_way:
            raise CommError(
                "the backward pass before this one broke off with gradients on their way; release this DataParallel "
                "and make a new one"
            )
        if self._summed and any(span.parameter.grad is not None for span in self.storage.spans):
            raise UsageError(
                "the gradients of the last step are still there, summed over the ranks; call model.zero_grad() before "
                "each step (and backward(..., last=False) for all but the last of a step's losses)"
            )
        self._summed, self._last = False, last

    def _end(self) -> None:
        """Close the pass, whether it has ended or broken off."""
        self._last = None

    def check_equal(self) -> None:
        """Compare a hash of the parameters over all ranks; collective.

        Raises:
            CommError: on all ranks, naming a parameter that differs and the ranks.
        """
        digests = [_digest(self.backend.to_host(span.parameter.data)) for span in self.storage.spans]
        everyone = self.group.gather(digests)
        for number, span in enumerate(self.storage.spans):
            different = [rank for rank, theirs in enumerate(everyone) if theirs[number] != everyone[0][number]]
            if different:
                raise CommError(
                    f"the weights of {span.parameter.name} on rank {different[0]} are not those of rank 0 "
                    f"({len(different)} of {self.group.size} ranks differ)"
                )

    def release(self) -> None:
        """Take the strategy off the model again: its hooks, the statistics over ranks, its communicator. Collective.

        A second call does nothing.
        """
        if self.released:
            return
        self.released = True
        for span in self.storage.spans:
            span.parameter.hook = span.parameter.guard = None
        for _, module in self.model.named_modules():
            if isinstance(module, BatchNorm):
                module.all_reduce = None
        self.exchange.free()
        self._unshare_gradients()

    def _hook(self, number: int) -> Callable[[Parameter], None]:
        def final(parameter: Parameter) -> None:
            if self._last:
                parameter.finish_gradient()  # in its place, if somebody has set another array
                self.exchange.ready(number)

        return final

    def _check_pass(self) -> None:
        """Refuse gradients of a pass that is not this object's."""
        if self._last is None:
            raise UsageError(
                "this model's gradients are to be summed over ranks: call parallel.backward(loss, samples) instead of "
                "loss.backward(), or parallel.release() first"
            )

    def _share_gradients(self, allreduce: str | Sequence[str]) -> list[Array]:
        """Return arrays in shared memory where the gradients now lie; none if that is no use.

        They are moved there although "auto" may not choose shared memory for a bucket: elsewhere it could not.
        """
        names = {allreduce} if isinstance(allreduce, str) else set(allreduce)
        long = any(grad.nbytes >= SHARED_BYTES for grad in self.storage.grads)
        if any(is_device(grad) for grad in self.storage.grads):  # staging takes buffers in shared memory by itself
            return []
        if self.group.size == 1 or not (SHARED in names or (AUTO in names and long)):
            return []
        arrays: list[Array] = []
        try:
            memory = self.group.memory()
            if len(set(memory.node_of)) == self.group.size:  # every rank is alone on its node
                return []
            for grad in self.storage.grads:
                arrays.append(memory.allocate(grad.size, str(grad.dtype)))
        except DeviceError as error:
            if arrays:
                memory.drop(arrays)
            self.notice = f"gradients stay in private memory: {error}"
            return []
        self.storage.move(grads=arrays)
        return arrays

    def _unshare_gradients(self) -> None:
        """Let the gradients lie in this rank's own memory again, and give back what was shared; collective."""
        if not self._shared:
            return
        if any(grad is shared for grad, shared in zip(self.storage.grads, self._shared, strict=True)):
            self.storage.move(grads=[np.zeros_like(grad) for grad in self.storage.grads])
            if self.model.storage is not self.storage:  # it was initialized again, and keeps its new values
                self.model.storage.move()
        self.group.memory().drop(self._shared)
        self._shared = []

    def check_held(self) -> None:
        """Refuse to go on after the end, when each rank would do so with gradients of its own.

        Raises:
            UsageError: after `release`.
        """
        if self.released:
            raise UsageError("this DataParallel (or its worker) was released; make a new one")

    def _sum_statistics(self, array: Array) -> Array:
        """Return the sum over the ranks of a small float64 array, which nobody else needs."""
        begin = time.perf_counter()
        total: Array = namespace(array).ascontiguousarray(array)
        self.group.all_reduce(total.reshape(-1), check=False)
        spent_s = time.perf_counter() - begin
        self._statistics = self._statistics.plus(predict_traffic(self.group, total.nbytes, spent_s))
        return total


def share_state(model: Module, group: Group) -> None:
    """Give all ranks rank 0's parameters and buffers; collective."""
    for array in [*model.storage.data, *(buffer.data for _, buffer in model.named_buffers())]:
        if array.flags.c_contiguous:
            group.broadcast(array)
        else:
            values = namespace(array).ascontiguousarray(array)
            group.broadcast(values)
            array[...] = values
    if model.storage.common:
        group.barrier()  # the parameters are the node's: nobody may write there before the last rank has


def _digest(array: Array) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


def check_free(model: Module) -> None:
    """Refuse a model that has a strategy already, or of which some gradients would not be summed.

    Raises:
        UsageError: says which, and what to do.
    """
    stored = {id(span.parameter) for span in model.storage.spans}
    strange = [name for name, parameter in model.named_parameters() if id(parameter) not in stored]
    if strange:
        raise UsageError(
            f"{strange[0]!r} is not in the model's storage, as its module was put in later; call "
            "model.initialize() again"
        )
    model.storage.finish_gradients()
    parameters = [span.parameter for span in model.storage.spans]
    if any(each.hook is not None or each.guard is not None for each in parameters):
        raise UsageError("the model has a DataParallel (or other hooks) already; call its release() first")
    if model.storage.common:
        raise UsageError("the model has a fused update already; call its worker's release() first")
