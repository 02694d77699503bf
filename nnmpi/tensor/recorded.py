"""How what is noted whole runs while a step is recorded: an operation that is not `replayable`, forward or backward.

Its results are copied to where the first ones lie. A `replayable` operation computes through the recorder's stand-in
for NumPy instead, and each of its calls is noted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, is_array, namespace
from nnmpi.backend.memory_pool import alias
from nnmpi.backend.recording import Recorder
from nnmpi.errors import ShapeError


def record_whole(
    recorder: Recorder, compute: Callable[..., Any], inputs: Sequence[Any], places: Sequence[Any] = ()
) -> Any:
    """Return an array, or arrays and None in a tuple, after noting for the replay how they are computed.

    Args:
        recorder: of the step that is recorded.
        compute: gives the results.
        inputs: its arguments.
        places: arrays besides these that a result may lie in.
    """
    results = recorder.alone(compute, *inputs)
    is_single = is_array(results)
    found = [results] if is_single else results
    if not isinstance(found, tuple | list) or not all(each is None or is_array(each) for each in found):
        return results  # whoever called refuses it
    known = (*inputs, *places)
    kept = tuple(None if each is None else _own(recorder, each, known) for each in found)
    bare, targets = [alias(each) for each in inputs], [alias(each) for each in kept]

    def again() -> None:
        results = compute(*bare)
        for target, result in zip(targets, [results] if is_single else results, strict=True):
            if target is not None and result is not None:
                _put(target, result)

    recorder.note(again)
    return kept[0] if is_single else kept


def _own(recorder: Recorder, result: Any, known: Sequence[Any]) -> Array:
    """Return a result as an array that later ones can be written to.

    One that is, or is a view of, what the operation was given stays so: it will be again. Any other one is copied, as
    it may be somebody's: a row of a table, for example. The copy lies in the recording's memory.
    """
    place = np.asarray(result) if isinstance(result, np.generic) else result
    is_broadcast = 0 in place.strides and place.size > 1  # a device's arrays have no flag that says so
    if is_broadcast or isinstance(place, np.ndarray) and not place.flags.writeable:
        place = place.copy(order="K")
    if any(type(each) is type(place) and namespace(place).may_share_memory(each, place) for each in known):
        return place
    return recorder.copy(place)


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
