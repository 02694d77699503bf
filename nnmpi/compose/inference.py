"""Results of a model for samples, wherever its parts lie: forward passes alone, without an optimizer.

x  --> all stages -->  outputs on the last one  --> every rank of the replica has them
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import to_float32, use_precision
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.executor import Executor
from nnmpi.nn.mode import evaluation
from nnmpi.parallel.pipeline.stage import Scope
from nnmpi.shard import part, split
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor


class Inference:
    """Gives a model's outputs. Making one is collective, and so is every call over the ranks of a replica.

    Args:
        where: the arrangement of a model that has its values.
        backend: where it computes.
        precision: what products read.
    """

    def __init__(self, where: Arrangement, backend: Backend, precision: str = "float32") -> None:
        self._where, self._backend, self._precision = where, backend, precision
        self._found: dict[int, Array] = {}  # by microbatch, on the last stage
        self._length: int | None = None  # of the sequences, where ranks share them
        scope: Scope = lambda _microbatch, _again: evaluation()  # noqa: E731 - it is one word
        self._executor = Executor(where.model, where, backend, scope, self._keep, lambda: self._length)

    def __call__(self, x: Array) -> Array:
        """Return the outputs for samples, in host memory, on all ranks of the replica.

        Args:
            x: (rows, *sample_shape), at least one row, the same on these ranks.
        """
        where = self._where
        if where.sequence is not None:
            self._length = x.shape[1]
            x = where.sequence.take(x)
        batch = self._backend.asarray(x)
        self._found.clear()
        cuts = split(len(x), min(len(x), max(len(where.cuts), 1)))
        with use_precision(self._precision), no_grad():
            self._executor.run([batch[cut.start : cut.stop] for cut in cuts])
        own = np.concatenate([self._found[number] for number in sorted(self._found)]) if self._found else None
        return self._shared(self._whole(own))

    def release(self) -> None:
        """Give back what it holds of MPI. Collective."""
        self._executor.free()

    def _whole(self, own: Array | None) -> Array | None:
        """Return the outputs of all classes and positions, on the last stage's ranks; None elsewhere."""
        tp, classes, sequence = self._where.mesh.tp, self._where.classes, self._where.sequence
        if own is not None and classes:
            whole = np.zeros((*own.shape[:-1], classes), own.dtype)
            mine = part(classes, tp.size, tp.rank)
            whole[..., mine.start : mine.stop] = own
            tp.all_reduce(whole.reshape(-1))
            own = whole
        if own is None or sequence is None:
            return own
        with no_grad():
            return sequence.gather(Tensor(own), sequence.placement(self._length or 0)).numpy()

    def _shared(self, outputs: Array | None) -> Array:
        """Return what the last stage's rank has on all ranks of the pipeline."""
        pp = self._where.mesh.pp
        if pp.size == 1:
            assert outputs is not None
            return outputs
        root = (len(self._where.cuts) - 1) % pp.size
        found: list[Any] = pp.gather(None if outputs is None else [str(outputs.dtype), *outputs.shape])
        dtype, *shape = found[root]
        result = np.empty(shape, dtype) if outputs is None else outputs
        pp.broadcast(result.reshape(-1), root)
        return result

    def _keep(self, result: Tensor, microbatch: int) -> Tensor:
        outputs = Tensor(to_float32(self._backend.xp, result.data)).numpy()
        self._found[microbatch] = np.array(outputs, order="C")
        return result
