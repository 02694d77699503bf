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
eager step (of inputs in C order; others are copied to it). What Python computes by itself is
constant in a recording: a branch, a loop's length, a number, NumPy outside of operations. So before
each replay everything is compared that Python can compute with (see `Watch`): the inputs, what the
step closes over, the globals that it names, the attributes of its objects and modules. If anything
is another object than when the recording began, the step is recorded again. A step that changes
such a value itself is recorded in every call: right, and slower than an eager step.

On a device the second call is captured, and later ones launch CUDA graphs (see `cuda.graph`).
"""

import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from copy import copy
from functools import partial, update_wrapper
from itertools import chain
from operator import is_
from threading import RLock
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ref

import numpy as np

from nnmpi.backend.array import Array, is_array, namespace
from nnmpi.backend.cuda.graph import GraphMemory, GraphRecorder
from nnmpi.backend.kernels import setting
from nnmpi.backend.memory import return_freed_memory
from nnmpi.backend.precision import precision
from nnmpi.backend.program.call import owner_of
from nnmpi.backend.program.replay import Arena, StepProgram
from nnmpi.backend.recording import Recorder, active
from nnmpi.base.errors import Settled, ShapeError, UsageError, is_own
from nnmpi.nn.mode import Mode, current, restore
from nnmpi.nn.module import Buffer, Module
from nnmpi.tensor.function import grad_enabled, kind_of
from nnmpi.tensor.operand import values_of, values_or_refuse
from nnmpi.tensor.tensor import Tensor

# An epoch has two or three batch sizes; beyond this number the oldest recording is dropped.
MOST_RECORDINGS = 16
# Captures of a step on a device; one that always changes what it computes with stays eager.
MOST_TRIES = 4
MOST_KEYS = 256  # whose tries are counted
MOST_BYTES = 4096  # of an array whose values are all compared
SOME = 256  # of a longer one: what changes it as a whole is seen


class Compiled(Settled, fixed="pool"):
    """A step that is recorded on its first call for some input shapes, and replayed later.

    Attributes:
        recordings: the number of recordings.
        calls: the number of calls in the last recording that was made or replayed.
        pool: the memory of all recordings. They can share it: only one runs at a time, and callers
            get copies of its results.
    """

    _graphs: GraphMemory | None = None
    _refusal: str = ""

    def __init__(self, step: Callable[..., Any]) -> None:
        update_wrapper(self, step, updated=())
        self._step = step
        self._held: dict[Any, Recording] = {}
        self._spoiled: dict[Any, str] = {}  # why steps of a key are not recorded again
        # of steps on a device, by key: how often they were captured, and whether the last call ran
        # in the memory of the graphs, so that the next one may be captured
        self._tries: dict[Any, tuple[int, bool]] = {}
        self.pool = Arena()
        self._lock = RLock()
        self.calls = 0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # a method gets its object

    @property
    def recordings(self) -> int:
        """The number of recordings."""
        return len(self._held)

    @property
    def program(self) -> StepProgram | None:
        """The calls of the last recording; print it to read them. None if there is none."""
        held = next(reversed(self._held.values()), None)
        return None if held is None else held.program

    @property
    def refusal(self) -> str:
        """Why the last recording was dropped; empty if it was not."""
        return self._refusal

    def __call__(self, *inputs: Any) -> Any:
        """Do one step. A lock lets one thread at a time in.

        Args:
            inputs: arrays and Tensors, passed to the step as Tensors, also within tuples, lists and
                dictionaries; they are read before this returns. Other hashable values (numbers,
                strings) are constants of a recording: each value gets its own.

        Returns:
            The step's result: None, a Tensor, or tuples, lists and dictionaries of these. The
            Tensors are copies without history in a graph; later steps do not overwrite them.

        Raises:
            UsageError: when the step reads a tensor's number, draws random numbers of NumPy's or
                Python's, uses an iterator, returns something else, or is called by a compiled
                step; for an input that is not hashable, or needs a gradient.
        """
        if active() is not None:
            raise UsageError(
                "a compiled step was called while another one was being recorded; compile only the"
                " outer one"
            )
        mode = current()
        if mode.observe is not None:
            return self._step(*_mapped(_tensor, inputs))  # a replay would not call the modules
        memory = None if mode.memory is None else _Same(mode.memory)
        key = (
            *(mode.training, mode.fused, mode.again, mode.weight, memory),
            *(grad_enabled(), setting(), precision(), *map(_kind, inputs)),
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
            if held is None or not held.is_valid():
                if key in self._spoiled:
                    self._refusal = self._spoiled[key]
                    return self._eagerly(inputs, mode)
                watch = Watch(self._step, mode.memory, inputs)
                return self._record(key, inputs, mode, watch, watch.library(inputs))
            self.calls = len(held.program.calls)
            return held.replay(inputs, mode)

    def _record(
        self,
        key: Any,
        inputs: tuple[Any, ...],
        mode: Mode,
        watch: "Watch | None" = None,
        xp: Any = np,
    ) -> Any:
        """Do one step, and record it; on a device, `xp`, the second time that this is called."""
        self._held.pop(key, None)
        is_full = len(self._held) >= MOST_RECORDINGS
        # Return malloc's free memory to the system: replays use the pool instead. Not once the
        # recordings are full, since then each call may record: trimming would take longer.
        if is_full:
            del self._held[next(iter(self._held))]
        elif xp is np:
            return_freed_memory()
        recorder = Recorder() if xp is np else self._device_recorder(key, xp)
        memory = {name: copy(item) for name, item in (mode.memory or {}).items()}
        try:
            buffers = _mapped(_input_buffer, inputs)
            with recorder.running():
                outputs = _outputs(self._step(*buffers))
            held = Recording(recorder, self.pool, buffers, outputs, watch)
            if watch is not None:
                watch.refuse_drawn()
        except Exception as error:
            if not (isinstance(recorder, GraphRecorder) and recorder.can_begin_again(error)):
                raise
            restore(mode)
            recorder.restore_grads()
            if mode.memory is not None:  # with the positions before this call
                mode.memory.clear()
                mode.memory.update(memory)
            self._tries[key], self._refusal = (MOST_TRIES, False), f"{error}"
            return self._record(key, inputs, mode, watch, xp)
        finally:
            restore(mode)
            recorder.copy_loose_grads()
            if not is_full and xp is np:
                return_freed_memory()  # it held the results
        self.calls = len(held.program.calls)
        if not recorder.warms_up:
            self._refusal = recorder.spoiled
            if watch is not None and not watch.is_still(recorder):
                # a replay would leave out what the step has changed
                self._refusal = "the step changes what it computes with"
            if not self._refusal:
                self._held[key] = held
            elif recorder.spoiled:
                if len(self._spoiled) >= MOST_KEYS:
                    self._spoiled.clear()
                self._spoiled[key] = recorder.spoiled
        return held.results()

    def _eagerly(self, inputs: tuple[Any, ...], mode: Mode) -> Any:
        """Do one step without recording it."""
        try:
            return _mapped(_copied, _outputs(self._step(*_mapped(_input_buffer, inputs))))
        finally:
            restore(mode)

    def _device_recorder(self, key: Any, xp: Any) -> GraphRecorder:
        """Return the recorder of a step's next call; it captures every second one."""
        if self._graphs is None:
            self._graphs = GraphMemory(xp)
        if len(self._tries) >= MOST_KEYS:
            self._tries.clear()
        count, is_ready = self._tries.get(key, (0, False))
        captures = is_ready and count < MOST_TRIES
        self._tries[key] = count + captures, not captures
        return GraphRecorder(self._graphs, warms_up=not captures)


class Recording:
    """A step's recorded calls for certain input shapes, with its input buffers and result."""

    def __init__(
        self,
        recorder: Recorder,
        arena: Arena,
        buffers: tuple[Any, ...],
        outputs: Any,
        watch: "Watch | None" = None,
    ) -> None:
        self.recorder, self._outputs, self._watch = recorder, outputs, watch
        self._buffers = [
            (i, buffer.data)
            for i, buffer in enumerate(_leaves(buffers))
            if isinstance(buffer, Tensor)
        ]
        self.program = StepProgram(recorder.calls, arena, recorder.errors)

    def is_valid(self) -> bool:
        """True if a replay would do what the step does now."""
        return self.recorder.is_valid() and (self._watch is None or self._watch.is_unchanged())

    def replay(self, inputs: tuple[Any, ...], mode: Mode) -> Any:
        """Repeat the calls for these inputs, then restore the mode, which they may change.

        Raises:
            ShapeError: for an index that does not fit; in a replay no operation checks it.
        """
        leaves = list(_leaves(inputs))
        for i, buffer in self._buffers:
            buffer[...] = values_of(leaves[i])
        try:
            self.program.replay()
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

    The step gets Tensors; reading their values (`item`, comparisons), and the optimizer's `lr` and
    `steps`, is an error. Values change between steps without a new recording through arrays, the
    parameters, the optimizer's settings, and `nn.training` entered outside of the step. Another
    number, layer or object that the step uses gets a new recording. Dropout, batch normalization,
    several losses and a `DataParallel` may be in the step. `Worker` compiles by itself.

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
    if isinstance(x, tuple | list):
        return type(x), tuple(map(_kind, x))
    if isinstance(x, dict):
        return type(x), tuple((name, _kind(item)) for name, item in x.items())
    return type(x), x


class _Same:
    """A part of a key that equals only itself; it keeps its object, so that no other gets its id."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


class Watch:
    """The objects that a recorded step can compute with in Python, besides its arrays' values.

        a function                 what it closes over, the globals and modules' names in its code
        a module, a user's object  its attributes; and its class, if that is a user's
        tuples, lists, dicts ...   their items
        arrays                     their values, of long ones some, unless recorded calls read them
                                   anew
        any other                  itself: a number, a Tensor, an optimizer

    Args:
        root: where the search begins.
        memory: of `nn.continued`. Its numbers are positions, which replays advance.
        inputs: of the step, each of which is searched, too.

    Raises:
        UsageError: for an iterator, whose next item a replay would not take.
    """

    def __init__(
        self, root: Any, memory: dict[str, Any] | None = None, inputs: tuple[Any, ...] = ()
    ) -> None:
        # each container comes before its items
        self._holders: list[Iterable[object]] = [] if memory is None else [_Entries(memory)]
        self._generators: list[Any] = []
        self._values: list[tuple[Array, bytes]] = []
        seen: dict[int, object] = {}
        waiting = [root, inputs]
        copied = {id(leaf) for leaf in _leaves(inputs)}  # to a recording's buffers
        while waiting:
            item = waiting.pop()
            if id(item) not in seen:
                seen[id(item)] = item
                if isinstance(item, Buffer):
                    copied.add(id(item.data))  # operations write to it
                if type(item) is np.ndarray:
                    self._values.append((item, _seen(item)))
                for holder in self._holders_of(item):
                    waiting += holder
                    if not isinstance(holder, tuple | frozenset):  # these always hold the same
                        self._holders.append(holder)
        self._values = [item for item in self._values if id(item[0]) not in copied]
        self._parts = list(chain.from_iterable(self._holders))
        self._drawn = self._draws()

    def is_unchanged(self) -> bool:
        """True if everything is the same object as when the watch began."""
        now = list(chain.from_iterable(self._holders))
        if len(now) != len(self._parts) or not all(map(is_, now, self._parts)):
            return False
        return all(_seen(array) == values for array, values in self._values)

    def is_still(self, recorder: Recorder) -> bool:
        """True if a step has changed nothing but by recorded calls; from now on, ignore values that
        these read.
        """
        self._values = [item for item in self._values if not recorder.writes(item[0])]
        if not self.is_unchanged():
            return False
        if self._values:
            read = recorder.read()
            self._values = [item for item in self._values if id(owner_of(item[0])) not in read]
        return True

    def library(self, inputs: tuple[Any, ...]) -> Any:
        """Return the module of the first array on a device, or NumPy if there is none."""
        # a class is no array, although NumPy's have the arrays' attributes
        parts = (x for x in chain(_leaves(inputs), self._parts) if not isinstance(x, type))
        arrays: Iterable[Any] = (x if is_array(x) else getattr(x, "data", x) for x in parts)
        return next((namespace(x) for x in arrays if is_array(x) and type(x) is not np.ndarray), np)

    def refuse_drawn(self) -> None:
        """Refuse a step that has drawn random numbers since the watch began.

        Raises:
            UsageError: when it has.
        """
        if self._draws() != self._drawn:
            raise UsageError(
                "random numbers that a compiled step draws itself would always be the first"
                " step's; draw them outside and give them as an argument, or use nn.Dropout"
            )

    def _draws(self) -> list[Any]:
        old = np.random.get_state(legacy=False)
        states = [_state(item) for item in self._generators]
        return [random.getstate(), old["state"]["key"].tobytes(), old["state"]["pos"], *states]

    def _holders_of(self, item: Any) -> Iterator[Iterable[object]]:
        if isinstance(item, tuple | list | set | frozenset | deque | bytearray | array):
            yield item
        elif isinstance(item, dict | MappingProxyType):
            yield item
            yield item.values()
        elif isinstance(item, _VIEWS):
            yield (item.mapping,)
        elif isinstance(item, ref):
            yield _Content(item)
        elif isinstance(item, FunctionType) and not _is_library(item):
            cells = _Cells(item.__closure__ or ())
            yield cells
            yield item.__defaults__ or ()
            yield tuple((item.__kwdefaults__ or {}).values())
            names = tuple(_names(item.__code__))
            yield vars(item).values()
            scopes = [item.__globals__, *_scopes(cells)]
            for scope in scopes:  # which grows by the modules in it
                yield _Names(scope, names)
                found = _scopes(map(scope.get, names))
                scopes += [new for new in found if all(new is not other for other in scopes)]
        elif isinstance(item, MethodType):
            yield (item.__func__, item.__self__)
        elif isinstance(item, BuiltinMethodType):
            yield (item.__self__,)
        elif isinstance(item, partial):
            yield (item.func, item.args, item.keywords)
        elif isinstance(item, Buffer):
            yield _Attributes(item, ("data",))
        elif isinstance(item, staticmethod | classmethod):
            yield (item.__func__,)
        elif isinstance(item, property):
            yield (item.fget,)
        elif isinstance(item, ContextVar):
            yield _Content(partial(item.get, None))
        elif isinstance(item, _GENERATORS):
            self._generators.append(item)
        elif isinstance(item, type):
            if not _is_library(item):
                yield vars(item).values()
        elif hasattr(type(item), "__next__") and _package(type(item)) in ("builtins", "itertools"):
            raise UsageError(
                f"a compiled step uses {kind_of(item)}, an iterator, whose next item a replay would"
                " not take; call next outside of the step and give the item as an argument"
            )
        elif (
            isinstance(item, Module)
            or _package(type(item)) in _NAMESPACES
            or not (
                # an optimizer, also one of the user's, is read anew by each of its updates
                _is_library(type(item)) or any(map(is_own, type(item).__mro__))
            )
        ):
            yield getattr(item, "__dict__", {}).values()
            yield type(item).__mro__
            slots = (
                name
                for kind in type(item).__mro__
                if not _is_library(kind)
                for name, member in vars(kind).items()
                if isinstance(member, MemberDescriptorType)
            )
            if names := tuple(slots):
                yield _Attributes(item, names)


def _seen(array: Array) -> bytes:
    """Return an array's values; of a long one those of elements an odd number apart."""
    if array.nbytes <= MOST_BYTES:
        return array.tobytes()
    return array.flat[:: array.size // SOME | 1].tobytes()


class _Cells:
    """Iterates over what a closure's variables hold now, without those not assigned yet."""

    def __init__(self, cells: tuple[Any, ...]) -> None:
        self._cells = cells

    def __iter__(self) -> Iterator[object]:
        for cell in self._cells:
            try:
                yield cell.cell_contents
            except ValueError:
                continue


class _Content:
    """Iterates over what a function returns now."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[object]:
        yield self._read()


class _Entries:
    """Iterates over the values of a dictionary that are no whole numbers."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[object]:
        return (value for value in self._entries.values() if not isinstance(value, int))


class _Names:
    """Iterates over the current values of some names."""

    def __init__(self, scope: dict[str, Any], names: tuple[str, ...]) -> None:
        self._scope, self._names = scope, names

    def __iter__(self) -> Iterator[object]:
        return map(self._scope.get, self._names)


class _Attributes:
    """Iterates over the current values of some attributes of an object."""

    def __init__(self, item: object, names: tuple[str, ...]) -> None:
        self._item, self._names = item, names

    def __iter__(self) -> Iterator[object]:
        return iter([getattr(self._item, name, None) for name in self._names])


def _scopes(things: Iterable[object]) -> list[dict[str, Any]]:
    """Return the names and values of those things that are modules of a user's."""
    modules = [thing for thing in things if isinstance(thing, ModuleType)]
    return [vars(module) for module in modules if not _is_library(module)]


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code, and in functions within."""
    inner = (_names(item) for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*inner)


OWN = "nnmpi"
# Libraries of containers and wrappers for a user's objects
_NAMESPACES = ("types", "argparse", "collections", "weakref", "functools")
_VIEWS: tuple[type[Any], ...] = type({}.keys()), type({}.values()), type({}.items())
_GENERATORS = (
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
)


def _state(generator: Any) -> str:
    """Return the state of a generator of random numbers, as text."""
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state())
    return repr(getattr(generator, "bit_generator", generator).state)


_LIBRARIES = sys.stdlib_module_names | {OWN, "numpy", "cupy"}


def _is_library(thing: Any) -> bool:
    """Whether a function, class or module is of a library, which holds no values of the step's."""
    package = _package(thing)
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in _LIBRARIES or "-packages" in file  # site-packages, dist-packages


def _package(thing: Any) -> str:
    name = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
    return str(name or "").partition(".")[0]


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


def _leaves(inputs: Iterable[Any]) -> Iterator[Any]:
    """Yield the leaves of a step's inputs, in the order of `_mapped`."""
    for x in inputs:
        if isinstance(x, tuple | list):
            yield from _leaves(x)
        elif isinstance(x, dict):
            yield from _leaves(x.values())
        else:
            yield x


def _mapped(function: Callable[[Any], Any], outputs: Any) -> Any:
    """Map a function over the leaves of dicts, tuples and lists; None stays None."""
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
