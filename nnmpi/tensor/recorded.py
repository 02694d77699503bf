"""How an operation runs while a step is recorded: its calls noted one by one, or its forward and backward as wholes.

An operation that is `replayable` computes through `self.xp`, which is then the recorder's stand-in. Of any other one,
`forward` and `backward` are noted, and their results copied to where the first ones lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array, is_array, namespace
from nnmpi.backend.memory_pool import alias
from nnmpi.backend.recording import Recorder
from nnmpi.errors import ShapeError
from nnmpi.tensor.variable import Variable

if TYPE_CHECKING:
    from nnmpi.tensor.function import Function


def record_forward(recorder: Recorder, node: Function, inputs: tuple[Any, ...], values: list[Any]) -> Array:
    """Return the result of an operation's forward pass, after noting it for the replay.

    Args:
        recorder: of the step that is recorded.
        node: the operation.
        inputs: its inputs as it was called with them: variables, arrays, None.
        values: the same as arrays, which `forward` takes.
    """
    for x in inputs:
        if isinstance(x, Variable) and x.node is None and x not in recorder.made:
            recorder.saw(x)
    if node.replayable:
        node.xp = recorder.module(node.xp)
        return node.forward(*values)
    result = recorder.alone(node.forward, *values)
    if not is_array(result):
        return result  # type: ignore[no-any-return]  # `Function` refuses it
    place = _own(recorder, result, values)
    bare, target = [alias(value) for value in values], alias(place)

    def again() -> None:
        _put(target, node.forward(*bare))

    recorder.note(again)
    return place


def record_backward(recorder: Recorder, node: Function, grad: Array) -> tuple[Array | None, ...]:
    """Return the gradients of an operation's inputs, after noting that for the replay.

    Args:
        recorder: of the step that is recorded.
        node: the operation, after its forward pass.
        grad: the gradient of its result, of the result's shape.
    """
    if node.replayable:
        return node.backward(grad)
    known = [grad, *(getattr(edge, "buffer", None) for edge in node.edges or ())]
    results = recorder.alone(node.backward, grad)
    if not isinstance(results, tuple | list) or not all(each is None or is_array(each) for each in results):
        return results  # type: ignore[no-any-return]  # the tape refuses it
    places = tuple(None if each is None else _own(recorder, each, known) for each in results)

    edges, bare, targets = node.edges, alias(grad), [alias(each) for each in places]

    def again() -> None:
        node.edges = edges  # so that it finds gradients' places, and what it adds to there, as it did
        try:
            results = node.backward(bare)
        finally:
            node.edges = None
        for target, result in zip(targets, results, strict=True):
            if target is not None and result is not None:
                _put(target, result)

    recorder.note(again)
    return places


def _own(recorder: Recorder, result: Any, known: Sequence[Any]) -> Array:
    """Return a result as an array that later ones can be written to.

    One that is, or is a view of, what the operation was given stays so: it will be again. Any other one is copied, as
    it may be somebody's: a row of a table, for example. The copy lies in the recording's memory.
    """
    place = _writable(result)
    if any(type(each) is type(place) and namespace(place).may_share_memory(each, place) for each in known):
        return place
    return recorder.copy(place)


def _writable(result: Any) -> Array:
    """Return a result as an array that can be written to element by element: a broadcast one cannot."""
    if isinstance(result, np.ndarray):
        return result if result.flags.writeable else result.copy(order="K")
    if isinstance(result, np.generic):
        return np.asarray(result)
    place: Array = result
    if 0 in place.strides and place.size > 1:  # broadcast: a device's arrays have no flag that says so
        place = place.copy()
    return place


def _put(place: Array, result: Any) -> None:
    """Copy a result to its place, unless it is a view of what lies there.

    Raises:
        ShapeError: when it has another shape than the first one, as what a mask picks may have.
    """
    if result.shape != place.shape:
        raise ShapeError(
            f"an operation of a compiled step gave {result.shape} in place of the {place.shape} that was recorded; "
            "shapes that depend on values, such as x[mask]'s, cannot be compiled"
        )
    if not (is_array(result) and namespace(place).may_share_memory(place, result)):
        place[...] = result
