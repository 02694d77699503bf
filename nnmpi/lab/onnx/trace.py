"""Recording a forward pass: its operations, with their inputs, results and lines."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.recording import Recorder
from nnmpi.base.errors import UsageError
from nnmpi.base.lines import shown, users_line
from nnmpi.nn.mode import evaluation, observed
from nnmpi.nn.module import Module
from nnmpi.tensor.function import Function, no_grad
from nnmpi.tensor.shape import GetItem, is_basic
from nnmpi.tensor.tensor import Tensor


class Applied(NamedTuple):
    """One application of an operation.

    Attributes:
        function: the operation.
        inputs: arrays, numbers and None; of x[key] also the key's indices, which may be results.
        result: its array. It and the inputs are alive, so that their ids name them.
        line: " (net.py:12)", of the user's code; or "".
    """

    function: Function
    inputs: list[Any]
    result: Array
    line: str


class ForwardRecorder(Recorder):
    """Notes each operation as a whole, and refuses to lend the values that it computed.

    Args:
        inputs: the model's.
    """

    def __init__(self, inputs: Sequence[Array]) -> None:
        super().__init__()
        self.applied: list[Applied] = []
        self._of_batch = {id(x) for x in inputs}

    def apply(self, function: Any, inputs: Any, values: list[Any]) -> Any:
        """See `Recorder.apply`."""
        result = self.run_eagerly(function.forward, *values)
        result = np.asarray(result) if isinstance(result, np.generic) else result
        key = function.key if isinstance(function, GetItem) else ()
        indices = [np.asarray(part) for part in key if not is_basic((part,))]
        self.applied.append(Applied(function, [*values, *indices], result, line()))
        self._of_batch.add(id(result))
        return result

    def wrap(self, x: Any) -> Any:
        """Return an array that Python reads; refuse one that depends on the batch."""
        if id(x) in self._of_batch:
            raise UsageError(self.refusal("a tensor's array (data)"))
        return x

    def refusal(self, what: str, remedy: str = "") -> str:
        """See `Recorder.refusal`."""
        return (
            f"{what} in a forward that is exported would always be the sample's{line()}; compute"
            " with tensors alone"
        )


def line() -> str:
    """Return the line of the user's code that is being run, in brackets; or nothing."""
    file, number = users_line()
    return f" ({shown(file)}:{number})" if file else ""


def trace(model: Module, inputs: Sequence[Array]) -> tuple[list[Applied], list[Array]]:
    """Return the operations of a forward pass in evaluation, and its results.

    Raises:
        UsageError: when the forward reads values, or returns no tensors.
    """
    tensors = [Tensor(x) for x in inputs]
    tracer = ForwardRecorder([x._data for x in tensors])
    # an observer gets each layer's result: none is a part of another one's
    with no_grad(), evaluation(), observed(lambda *_: None), tracer.running():
        result = model(*tensors)
    results = result if isinstance(result, tuple | list) else [result]
    if not results or not all(isinstance(x, Tensor) for x in results):
        raise UsageError(
            f"a model that is exported returns a tensor or several; this one returns {result!r:.60}"
        )
    return tracer.applied, [x._data for x in results]
