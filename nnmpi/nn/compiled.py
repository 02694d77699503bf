"""Recording a training step once and replaying it: `nnmpi.compile`.

    @nnmpi.compile
    def step(x, y):                          first call          runs, and notes every call on arrays
        model.zero_grad()                    later calls         copy x and y to their places, make the noted calls
        loss = ops.cross_entropy(model(x), y)                    again: no graph, no checks, nothing
                                                                 allocated
        loss.backward()
        optimizer.step()                     another shape       is recorded too, beside the first
        return loss

A replayed step does what the recorded one did, on the arrays of that time: the results are bit for
bit the same as without compilation (for inputs in C order, to which others are copied). What Python
alone decides or computes (a branch, a loop's length, a number, NumPy on the side) is decided once,
when the step is recorded. So is who takes part: another layer, Parameter, buffer or optimizer in
the old one's place is not noticed (new values in the same ones are, and so are frozen parameters, a
model initialized again, and a `DataParallel` made or released).

On a device it makes the same calls of the array library and of nnmpi's kernels, one by one: it is
no CUDA graph, as CuPy refuses to call cuBLAS while one is captured. There every result keeps memory
of its own for as long as the recording is held, which is more than a step takes that is not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import update_wrapper
from threading import RLock
from types import MethodType
from typing import Any

import numpy as np

from nnmpi.backend.array import is_array, namespace
from nnmpi.backend.kernels import setting
from nnmpi.backend.memory import return_freed_memory
from nnmpi.backend.precision import precision
from nnmpi.backend.recording import Call, MemoryPool, Recorder, active
from nnmpi.errors import ShapeError, UsageError
from nnmpi.nn.mode import Mode, current, restore
from nnmpi.tensor.function import recording
from nnmpi.tensor.operand import whole_values
from nnmpi.tensor.tensor import Tensor

# an epoch has two or three batch sizes; more kinds of calls than this push out the oldest
MOST_RECORDINGS = 16


class Compiled:
    """A step that is recorded on its first call for some input shapes, and replayed later.

    Attributes:
        recordings: how many kinds of calls are held now.
        calls: of the last recording that was made or replayed, how many calls on arrays it makes.
        pool: the memory of all recordings: one is replayed at a time, and copies of its results go
            out.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        update_wrapper(self, step, updated=())
        self._step = step
        self._held: dict[Any, Recording] = {}
        self.pool = MemoryPool()
        self._lock = RLock()
        self.calls = 0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # a method gets its object

    @property
    def recordings(self) -> int:
        """The number of kinds of calls that are held."""
        return len(self._held)

    def __call__(self, *inputs: Any) -> Any:
        """Do one step. Of several threads one does so at a time.

        Args:
            inputs: arrays or Tensors, which the step gets as Tensors and which are read before this
                returns; and numbers, words and tuples of these, of which each value is recorded for
                itself, as is any other object that can be a dictionary's key (what is changed in it
                later is not noticed).

        Returns:
            What the step returns: None, a Tensor, or tuples, lists and dictionaries of these. The
                Tensors are copies,
            which later steps leave alone, and no part of a graph.

        Raises:
            UsageError: when the step asks a tensor for a number, returns something else, or is
                called by a compiled step; for an input that cannot be compared, or needs a
                gradient.
        """
        if active() is not None:
            raise UsageError(
                "a compiled step was called while another one is recorded; compile the outer one"
                " alone"
            )
        mode = current()
        if mode.observe is not None:
            return self.as_it_stands(inputs)  # who looks at modules wants them to run
        key = (mode.training, mode.fused, recording(), setting(), precision(), *map(_kind, inputs))
        with self._lock:
            try:
                held = self._held.get(key)
            except TypeError:
                kinds = ", ".join(type(x).__name__ for x in inputs)
                raise UsageError(
                    f"a compiled step got {kinds}; give arrays, Tensors, and values that can be"
                    " compared"
                ) from None
            if held is None or not held.recorder.holds():
                return self._record(key, inputs, mode)
            self.calls = len(held.recorder.calls)
            return held.replay(inputs, mode)

    def as_it_stands(self, inputs: tuple[Any, ...]) -> Any:
        """Do one step without recording or replaying anything."""
        return self._step(*map(_tensor, inputs))

    def _record(self, key: Any, inputs: tuple[Any, ...], mode: Mode) -> Any:
        self._held.pop(key, None)
        is_full = len(self._held) >= MOST_RECORDINGS
        if is_full:
            # each call may be recorded from now on: walking through malloc's memory would take
            # longer
            del self._held[next(iter(self._held))]
        else:
            return_freed_memory()  # replays will not ask for it again, as they have the pool
        recorder = Recorder(self.pool)
        try:
            held = self._note(recorder, inputs)
        finally:
            restore(mode)
            recorder.hand_out()
            if not is_full:
                return_freed_memory()  # where results were before they were copied to the pool
        self._held[key] = held
        self.calls = len(recorder.calls)
        return held.results()

    def _note(self, recorder: Recorder, inputs: tuple[Any, ...]) -> Recording:
        places = [_place(x) for x in inputs]
        with recorder.running():
            outputs = _outputs(self._step(*places))
        return Recording(recorder, places, outputs)


class Recording:
    """A step's recorded calls for certain input shapes, with its input buffers and result."""

    def __init__(self, recorder: Recorder, places: list[Any], outputs: Any) -> None:
        self.recorder, self._outputs = recorder, outputs
        self._places = [
            (i, place.data) for i, place in enumerate(places) if isinstance(place, Tensor)
        ]
        self._calls: tuple[Call, ...] = tuple(recorder.calls)

    def replay(self, inputs: tuple[Any, ...], mode: Mode) -> Any:
        """Make the calls again for these inputs."""
        for i, place in self._places:
            x = inputs[i]
            place[...] = x.data if isinstance(x, Tensor) else x
        make(self._calls, mode)
        if self.recorder.loose:
            self.recorder.hand_out()
        return self.results()

    def results(self) -> Any:
        """Return copies of the outputs."""
        return _mapped(_copied, self._outputs)


def make(calls: Iterable[Call], mode: Mode) -> None:
    """Make recorded calls again; what they change of the mode is forgotten.

    Raises:
        ShapeError: for an index that does not fit, which operations do not see in a replay.
    """
    try:
        for call in calls:
            call()
    except IndexError as error:
        raise ShapeError(f"an index within a compiled step does not fit: {error}") from None
    finally:
        restore(mode)


def compile(step: Callable[..., Any]) -> Compiled:
    """Return a step that is recorded once per input shape and replayed afterwards.

    The step gets Tensors, and must not look into them (`item`, comparisons): that is an error. What
    changes from step to step comes through its arguments, parameters, the optimizer's settings, and
    `nn.training`, which is entered outside of it when its `step` counts; anything else stays as it
    was recorded. Dropout, batch normalization, several losses and a `DataParallel` can be in it.
    `Worker` compiles by itself.

    Raises:
        UsageError: for something that cannot be called.

    Example:
        >>> model = models.mlp([4], 3, [8]).initialize(seed=0)
        >>> optimizer = optim.SGD(model.storage, lr=0.5)
        >>> @nnmpi.compile
        ... def step(x, y):
        ...     loss = ops.cross_entropy(model(x), y)
        ...     model.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> x, y = np.eye(4, dtype="float32"), np.array([0, 1, 2, 0])
        >>> [round(step(x, y).item(), 2) for _ in range(3)]
        [1.12, 1.05, 1.01]
    """
    if not callable(step):
        raise UsageError(f"compile needs a function that does one step, not {type(step).__name__}")
    return Compiled(step)


def _kind(x: Any) -> Any:
    """Return what recordings are told apart by: an array's library, shape and dtype, or a plain
    value itself.
    """
    array = x
    if isinstance(x, Tensor):
        array = x.data
        if x.requires_grad:
            return Tensor, array.shape, str(array.dtype)
    if type(array) is np.ndarray:
        return array.shape, array.dtype
    if isinstance(x, float | np.generic):  # 0.0 and -0.0 are equal, and NaN is not
        return type(x), np.asarray(x).tobytes()
    if is_array(array):
        return namespace(array).__name__, array.shape, str(array.dtype)
    return type(x), tuple(map(_kind, x)) if isinstance(x, tuple) else x


def _tensor(x: Any) -> Any:
    return Tensor(x) if is_array(x) else x


def _place(x: Any) -> Any:
    """Return a Tensor of an input's own, into which later inputs are copied; plain values as they
    are.
    """
    array = whole_values("a compiled step's input", x)
    if isinstance(x, Tensor) and x.requires_grad and recording():
        raise UsageError(
            "a compiled step got a tensor that needs a gradient, and works on a copy that needs"
            " none; give x.detach(), or let the step find the tensor outside of its arguments, as"
            " it does its parameters"
        )
    return _tensor(array.copy()) if is_array(array) else x


def _outputs(result: Any) -> Any:
    """Return what a step returned, refusing what would be that of the first step for ever."""

    def without_graph(item: Any) -> Tensor:
        if not isinstance(item, Tensor):
            raise UsageError(
                f"a compiled step returned a {type(item).__name__}, which would be that of the"
                " first step for ever; return Tensors and look into them outside"
            )
        return Tensor(whole_values("a compiled step's result", item))

    return _mapped(without_graph, result)


def _copied(x: Tensor) -> Tensor:
    """Return a tensor of the same values, and no part of a graph."""
    tensor = Tensor.blank()
    tensor.data = x.data.copy()
    return tensor


def _mapped(function: Callable[[Any], Tensor], outputs: Any) -> Any:
    """Return what a step returned, everything that is not None or holds others replaced by a
    function of it.
    """
    if outputs is None:
        return None
    if isinstance(outputs, dict):
        return {name: _mapped(function, output) for name, output in outputs.items()}
    if isinstance(outputs, tuple | list):
        parts = [_mapped(function, output) for output in outputs]
        if hasattr(outputs, "_make"):  # a tuple whose parts have names
            return outputs._make(parts)
        return tuple(parts) if isinstance(outputs, tuple) else parts
    return function(outputs)
