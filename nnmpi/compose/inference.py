"""Results of a model for samples, wherever its parts lie: forward passes alone, without an optimizer.

x  --> all stages -->  outputs on the last one  --> every rank of the replica has them
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.kernels import to_float32
from nnmpi.backend.precision import use_precision
from nnmpi.compose.arrange import Arrangement
from nnmpi.nn.mode import evaluation
from nnmpi.parallel.pipeline.executor import GradientSink, Pipeline
from nnmpi.parallel.pipeline.stage import Stage
from nnmpi.shard import part, split
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor


class ForwardPasses:
    """Takes microbatches through a model, wherever its stages lie. Making one is collective, and so is all it does.

    Args:
        where: the arrangement of the model.
        backend: where it computes.
        mode: entered around each pass.
        keep: given the result of each microbatch and its number, where the last stage is.
        shared: as `Stage` takes it, where microbatches are this rank's positions of sequences; else None.
    """

    def __init__(
        self,
        where: Arrangement,
        backend: Backend,
        mode: Callable[[], AbstractContextManager[Any]],
        keep: Callable[[Tensor, int], Tensor],
        shared: Callable[[Tensor, bool], Tensor] | None = None,
    ) -> None:
        self._model, self._mode, self._keep, self._shared = where.model, mode, keep, shared
        self._pipeline: Pipeline | None = None
        if where.stages:
            last = len(where.cuts) - 1
            stages = {
                number: Stage(
                    number, layers, where.starts[number], self._scope, keep if number == last else None, shared=shared
                )
                for number, layers in where.stages.items()
            }
            self._pipeline = Pipeline(where.mesh.pp, stages, last + 1, where.layout.schedule, GradientSink(), backend)

    def run(self, microbatches: Sequence[Array], model: Callable[[Any], Tensor] | None = None) -> None:
        """Take them through, without gradients.

        Args:
            microbatches: model input, at least one.
            model: what computes in the model's place where it is not cut into stages, such as a recording of it.
        """
        model = self._model if model is None else model
        with no_grad():
            if self._pipeline is not None:
                self._pipeline.infer(microbatches)
                return
            for number, each in enumerate(microbatches):
                with self._mode():
                    x = Tensor(each) if self._shared is None else self._shared(Tensor(each), True)
                    result = model(x)
                    self._keep(result if self._shared is None else self._shared(result, False), number)

    def free(self) -> None:
        """Give back what it holds of MPI."""
        if self._pipeline is not None:
            self._pipeline.free()

    def _scope(self, microbatch: int, again: bool) -> AbstractContextManager[Any]:
        return self._mode()


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
        self._length = 0  # of the sequences, where ranks share them
        shared = None if where.sequence is None else self._positions
        self._passes = ForwardPasses(where, backend, evaluation, self._keep, shared)

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
        with use_precision(self._precision):
            self._passes.run([batch[cut.start : cut.stop] for cut in cuts])
        own = np.concatenate([self._found[number] for number in sorted(self._found)]) if self._found else None
        return self._shared(self._whole(own))

    def release(self) -> None:
        """Give back what it holds of MPI. Collective."""
        self._passes.free()

    def _positions(self, x: Tensor, enters: bool) -> Tensor:
        sequence = self._where.sequence
        assert sequence is not None
        return (sequence.enter if enters else sequence.leave)(x, self._length)

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
            return sequence.gather(Tensor(own), sequence.placement(self._length)).numpy()

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
