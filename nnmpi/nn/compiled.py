"""Recording a training step once and replaying it: `nnmpi.compile`.

    @nnmpi.compile
    def step(x, y):
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    first call       runs the step and records every call on arrays
    later calls      copy x and y into input buffers and repeat the recorded calls:
                     no graph, no checks, no allocations
    another shape    gets a recording of its own

A replay repeats the recorded calls on the recorded arrays. Its results are bit for bit those of an
eager step (of inputs in C order; others are copied to it). Everything that Python computes by
itself is constant after the recording: a branch, a loop's length, a number, NumPy outside of
operations. A replay detects new values in the same arrays, frozen parameters, a model initialized
again, a `DataParallel` made or released, and another number, text or flag in an attribute of a
module, such as `dropout.p`. It does not detect that a layer, Parameter, buffer or optimizer was
replaced by another object.

On a device a replay makes the same calls of the array library and of nnmpi's kernels, one by one.
It is no CUDA graph: CuPy refuses to call cuBLAS during a capture. There each result has its own
memory as long as the recording exists, so a recorded step needs more memory than an eager one.
"""

from collections.abc import Callable
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
from nnmpi.base.errors import Settled, ShapeError, UsageError
from nnmpi.nn.mode import Mode, current, restore
from nnmpi.tensor.function import grad_enabled, kind_of
from nnmpi.tensor.operand import values_of, values_or_refuse
from nnmpi.tensor.tensor import Tensor

# An epoch has two or three batch sizes; beyond this number the oldest recording is dropped.
MOST_RECORDINGS = 16


class Compiled(Settled, fixed="pool"):
    """A step that is recorded on its first call for some input shapes, and replayed later.

    Attributes:
        recordings: the number of recordings.
        calls: the number of calls in the last recording that was made or replayed.
        pool: the memory of all recordings. They can share it: only one runs at a time, and callers
            get copies of its results.
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
        """The number of recordings."""
        return len(self._held)

    def __call__(self, *inputs: Any) -> Any:
        """Do one step. A lock lets one thread at a time in.

        Args:
            inputs: arrays and Tensors, passed to the step as Tensors; they are read before this
                returns. Other hashable values (numbers, strings, tuples of them) are constants of
                a recording: each value gets its own. Later changes inside them go unnoticed.

        Returns:
            The step's result: None, a Tensor, or tuples, lists and dictionaries of these. The
            Tensors are copies without history in a graph; later steps do not overwrite them.

        Raises:
            UsageError: when the step reads a tensor's number, returns something else, or is called
                by a compiled step; for an input that is not hashable, or needs a gradient.
        """
        if active() is not None:
            raise UsageError(
                "a compiled step was called while another one was being recorded; compile only the"
                " outer one"
            )
        mode = current()
        if mode.observe is not None:
            return self._step(*map(_tensor, inputs))  # a replay would not call the modules
        key = (
            mode.training,
            mode.fused,
            grad_enabled(),
            setting(),
            precision(),
            *map(_kind, inputs),
        )
        with self._lock:
            try:
                held = self._held.get(key)
            except TypeError:
                kinds = ", ".join(type(x).__name__ for x in inputs)
                raise UsageError(
                    f"a compiled step got {kinds}; give arrays, Tensors, and values that can be"
                    " compared"
                ) from None
            if held is None or not held.recorder.is_valid():
                return self._record(key, inputs, mode)
            self.calls = len(held.recorder.calls)
            return held.replay(inputs, mode)

    def _record(self, key: Any, inputs: tuple[Any, ...], mode: Mode) -> Any:
        self._held.pop(key, None)
        is_full = len(self._held) >= MOST_RECORDINGS
        # Return malloc's free memory to the system: replays use the pool instead. Not once the
        # recordings are full, since then each call may record: trimming would take longer.
        if is_full:
            del self._held[next(iter(self._held))]
        else:
            return_freed_memory()
        recorder = Recorder(self.pool)
        try:
            buffers = [_input_buffer(x) for x in inputs]
            with recorder.running():
                outputs = _outputs(self._step(*buffers))
            held = Recording(recorder, buffers, outputs)
        finally:
            restore(mode)
            recorder.copy_loose_grads()
            if not is_full:
                return_freed_memory()  # held results until they were copied to the pool
        self._held[key] = held
        self.calls = len(recorder.calls)
        return held.results()


class Recording:
    """A step's recorded calls for certain input shapes, with its input buffers and result."""

    def __init__(self, recorder: Recorder, buffers: list[Any], outputs: Any) -> None:
        self.recorder, self._outputs = recorder, outputs
        self._buffers = [
            (i, buffer.data) for i, buffer in enumerate(buffers) if isinstance(buffer, Tensor)
        ]
        self._calls: tuple[Call, ...] = tuple(recorder.calls)

    def replay(self, inputs: tuple[Any, ...], mode: Mode) -> Any:
        """Repeat the calls for these inputs, then restore the mode, which they may change.

        Raises:
            ShapeError: for an index that does not fit; in a replay no operation checks it.
        """
        for i, buffer in self._buffers:
            buffer[...] = values_of(inputs[i])
        try:
            for call in self._calls:
                call()
        except IndexError as error:
            raise ShapeError(f"an index within a compiled step does not fit: {error}") from None
        finally:
            restore(mode)
        if self.recorder.loose:
            self.recorder.copy_loose_grads()
        return self.results()

    def results(self) -> Any:
        """Return copies of the outputs."""
        return _mapped(_copied, self._outputs)


def compile(step: Callable[..., Any]) -> Compiled:
    """Return a step that is recorded once per input shape and replayed afterwards.

    The step gets Tensors; reading their values (`item`, comparisons) is an error. Values may change
    between steps through the arguments, the parameters, `optimizer.lr`, settings of layers (then
    the step is recorded again), and `nn.training`
    (entered outside of the step if its `step` changes). Everything else stays as recorded. Dropout,
    batch normalization, several losses and a `DataParallel` may be in the step. `Worker` compiles
    by itself.

    Raises:
        UsageError: for an object that is not callable.

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
    """Return an input's part of a recording's key.

    An array contributes its library, shape and dtype, a plain value itself.
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


def _input_buffer(x: Any) -> Any:
    """Return a Tensor into which replays copy their input; plain values pass unchanged."""
    array = values_or_refuse("a compiled step's input", x)
    if isinstance(x, Tensor) and x.requires_grad and grad_enabled():
        raise UsageError(
            "a compiled step got a tensor that needs a gradient, but works on a copy that needs"
            " none; give x.detach(), or let the step use the tensor without passing it, as it uses"
            " parameters"
        )
    return _tensor(array.copy()) if is_array(array) else x


def _outputs(result: Any) -> Any:
    """Return a step's result, with Tensors detached; refuse values that replays cannot update."""

    def without_graph(item: Any) -> Tensor:
        if not isinstance(item, Tensor):
            raise UsageError(
                f"a compiled step returned {kind_of(item)}, which would always be the first"
                " step's; return Tensors and read them outside"
            )
        return Tensor(values_or_refuse("a compiled step's result", item))

    return _mapped(without_graph, result)


def _copied(x: Tensor) -> Tensor:
    tensor = Tensor.blank()
    tensor.data = x.data.copy()
    return tensor


def _mapped(function: Callable[[Any], Tensor], outputs: Any) -> Any:
    """Map a function over the leaves of a step's result (dicts, tuples, lists; None stays None)."""
    if outputs is None:
        return None
    if isinstance(outputs, dict):
        return {name: _mapped(function, output) for name, output in outputs.items()}
    if isinstance(outputs, tuple | list):
        parts = [_mapped(function, output) for output in outputs]
        if hasattr(outputs, "_make"):  # a named tuple
            return outputs._make(parts)
        return tuple(parts) if isinstance(outputs, tuple) else parts
    return function(outputs)
