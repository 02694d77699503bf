"""Recording a training step and replaying it: `nnmpi.compile`.

    @nnmpi.compile
    def step(x, y):
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    call 1       runs the step and records every call on arrays
    call 2       does so again; the two recordings must be the same (see `program.compare`)
    call 3 on    copies x and y into input buffers and repeats the recorded calls: no graph, no
                 checks, no allocations
    audits       calls 4, 8, 16, 32 ... are recorded and compared, too

    another shape    gets a recording of its own

A replay repeats the recorded calls on the recorded arrays. Its results are bit for bit those of an
eager step (of inputs in C order; others are copied to it). What Python computes by itself is
constant in a recording: a branch, a loop's length, a number. Whatever it depends on, it shows in
the calls. So a step of which two recordings differ is done eagerly from then on; one that differs
in an audit is an error, since the replays before it may have used an old value. What is cheap to
look at is compared before each replay (see `Watch`): if it has changed, the step is recorded anew.

On a device the second call is captured, and later ones launch CUDA graphs (see `cuda.graph`), which
cannot be compared.
"""

import os
import random
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cached_property, update_wrapper
from itertools import chain
from operator import is_
from threading import RLock
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, is_array, is_on_device, namespace
from nnmpi.backend.cuda.graph import GraphMemory, GraphRecorder
from nnmpi.backend.kernels import setting
from nnmpi.backend.memory import return_freed_memory
from nnmpi.backend.precision import precision
from nnmpi.backend.program.call import owner_of
from nnmpi.backend.program.compare import Comparison, Reading, holders
from nnmpi.backend.program.replay import Arena, StepProgram
from nnmpi.backend.recording import Recorder, active
from nnmpi.base.errors import Settled, ShapeError, UsageError, is_own
from nnmpi.base.launcher import read_launch
from nnmpi.base.lines import is_users
from nnmpi.nn.mode import Mode, current, restore
from nnmpi.nn.module import Buffer, Module
from nnmpi.tensor.function import Variable, grad_enabled, kind_of
from nnmpi.tensor.operand import values_of, values_or_refuse
from nnmpi.tensor.tensor import Tensor

# An epoch has two or three batch sizes; beyond this number the oldest recording is dropped.
MOST_RECORDINGS = 16
# Captures of a step on a device; one that always changes what it computes with stays eager.
MOST_TRIES = 4
MOST_UNUSED = 16  # recordings in a row that are dropped before their first replay
MOST_KEYS = 256  # whose tries are counted
MOST_BYTES = 2**16  # of an array whose values are compared; longer ones are left to audits
MOST_PARTS = 2000  # that are compared, the nearest first; as many take 40 us


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
    _number = 0  # of the present call
    _name = "the step"

    def __init__(self, step: Callable[..., Any]) -> None:
        update_wrapper(self, step, updated=())
        self._step = step
        self._held: dict[Any, Recording] = {}
        self._spoiled: dict[Any, str] = {}  # why steps of a key are not recorded again
        self._unused = Counter[Any]()  # recordings of a key since the last one that was replayed
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
                Python's, uses an iterator, returns something else, changes an argument, or is
                called by a compiled step; for an input that is not hashable, or needs a gradient;
                when replays may have used an old value of something.
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
            self._number += 1
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
            held.count += 1
            moved = held.compares and held.moved()
            if moved or held.is_due():
                results, error = self._audit(key, held, inputs, mode, moved)
                if error is not None:
                    raise error
                return results
            if held.count > 2:
                self._unused.pop(key, None)
            return held.replay(inputs, mode)

    def _audit(
        self, key: Any, held: "Recording", inputs: tuple[Any, ...], mode: Mode, moved: bool = False
    ) -> tuple[Any, UsageError | None]:
        """Do one step, and compare what it does with its recording, which is dropped if it differs.

        Returns:
            The step's result, and an error if replays since the last audit may have been wrong.
        """
        recorder = Recorder()
        recorder.notes_lines, recorder.reads_mode = True, held.recorder.reads_mode
        new = self._do(recorder, inputs, mode)
        found = recorder.spoiled or held.difference(new)
        since, held.checked = held.checked + 1, self._number
        if not found:
            held.look_again(moved)
            return new.results(), None
        del self._held[key]
        self._refusal = f"{self._name} computes with what changes from call to call: {found}"
        if moved:
            self._count_unused(key)
            return new.results(), None
        self._spoil(key, self._refusal)
        if since < self._number:
            return new.results(), UsageError(
                f"{self._refusal}; calls since number {since} may have used an old value: give it as an"
                " argument, or do not compile this"
            )
        launch = read_launch(os.environ)
        if launch is None or launch.rank == 0:  # once for all ranks
            warnings.warn(f"{self._refusal}; it is not replayed", stacklevel=4)
        return new.results(), None

    def _count_unused(self, key: Any) -> None:
        """Note that a recording was dropped; stop to record what is never replayed."""
        if len(self._unused) >= MOST_KEYS:
            self._unused.clear()
        self._unused[key] += 1
        if self._unused[key] >= MOST_UNUSED:
            self._spoil(key, self._refusal)

    def _spoil(self, key: Any, reason: str) -> None:
        """Do steps of a key eagerly from now on."""
        if len(self._spoiled) >= MOST_KEYS:
            self._spoiled.clear()
        self._spoiled[key] = reason

    def _do(
        self, recorder: Recorder, inputs: tuple[Any, ...], mode: Mode, watch: "Watch | None" = None
    ) -> "Recording":
        """Do one step, and record it."""
        try:
            buffers = _mapped(_input_buffer, inputs)
            with recorder.running():
                outputs = _outputs(self._step(*buffers))
            return Recording(recorder, self.pool, inputs, buffers, outputs, watch)
        finally:
            restore(mode)
            recorder.copy_loose_grads()

    def _record(
        self,
        key: Any,
        inputs: tuple[Any, ...],
        mode: Mode,
        watch: "Watch | None" = None,
        xp: Any = np,
    ) -> Any:
        """Do one step, and record it; on a device, `xp`, the second time that this is called."""
        if self._held.pop(key, None) is not None:
            self._refusal = "the step computes with other things in each call"
            self._count_unused(key)
        is_full = len(self._held) >= MOST_RECORDINGS
        # Return malloc's free memory to the system: replays use the pool instead. Not once the
        # recordings are full, since then each call may record: trimming would take longer.
        if is_full:
            del self._held[next(iter(self._held))]
        elif xp is np:
            return_freed_memory()
        recorder = Recorder() if xp is np else self._device_recorder(key, xp)
        recorder.reads_mode = watch is not None
        memory = {name: copy(item) for name, item in (mode.memory or {}).items()}
        try:
            held = self._do(recorder, inputs, mode, watch)
        except Exception as error:
            if not (isinstance(recorder, GraphRecorder) and recorder.can_begin_again(error)):
                raise
            recorder.restore_grads()
            if mode.memory is not None:  # with the positions before this call
                mode.memory.clear()
                mode.memory.update(memory)
            self._tries[key], self._refusal = (MOST_TRIES, False), f"{error}"
            return self._record(key, inputs, mode, watch, xp)
        finally:
            if not is_full and xp is np:
                return_freed_memory()  # it held the results
        self.calls, held.checked = len(held.program.calls), self._number
        if not recorder.warms_up:
            self._refusal = recorder.spoiled
            if recorder.spoiled:
                self._spoil(key, recorder.spoiled)
            elif watch is not None and not watch.is_still(recorder):
                # a replay would leave out what the step has changed
                self._refusal = "the step changes what it computes with"
                self._count_unused(key)
            else:
                self._held[key] = held
        return held.results()

    def _eagerly(self, inputs: tuple[Any, ...], mode: Mode) -> Any:
        """Do one step without recording it."""
        buffers = _mapped(_input_buffer, inputs)
        try:
            results = _mapped(_copied, _outputs(self._step(*buffers)))
            _refuse_changed(inputs, buffers)
            return results
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
    """A step's recorded calls for certain input shapes, with its input buffers and result.

    Attributes:
        count: the calls of the step since it was made, with the first one.
        checked: the number of the last call that was compared.
        compares: whether another recording can be compared with it: not on a device.
    """

    count, checked = 1, 0

    def __init__(
        self,
        recorder: Recorder,
        arena: Arena,
        inputs: tuple[Any, ...],
        buffers: tuple[Any, ...],
        outputs: Any,
        watch: "Watch | None" = None,
    ) -> None:
        self.recorder, self._outputs, self._watch, self._arena = recorder, outputs, watch, arena
        self._buffers = [
            (i, buffer._data)
            for i, buffer in enumerate(_leaves(buffers))
            if isinstance(buffer, Tensor)
        ]
        self.compares = not recorder.captures
        _refuse_changed(inputs, buffers, recorder.written())
        if watch is not None:
            watch.refuse_drawn()

    @cached_property
    def program(self) -> StepProgram:
        """What is replayed."""
        return StepProgram(self.recorder, self._arena)

    def is_valid(self) -> bool:
        """True if a replay would do what the step does now."""
        return self.recorder.is_valid() and (self._watch is None or self._watch.is_unchanged())

    def is_due(self) -> bool:
        """True if this call is to be compared: the second, fourth, eighth ..., and those before the
        sixteenth and so on, since what changes in every third call would meet no power of two.
        """
        count = self.count
        return self.compares and (
            count & (count - 1) == 0 or (count > 8 and count & (count + 1) == 0)
        )

    def moved(self) -> bool:
        """True if watched arrays have other values."""
        return self._watch is not None and bool(self._watch.moved())

    def look_again(self, moved: bool) -> None:
        """Begin to watch arrays anew that have changed, unless recorded calls read them."""
        if moved and self._watch is not None:
            self._watch.look_again(self.recorder.read())

    def difference(self, new: "Recording") -> str:
        """Return the first difference to a new recording of the step, or nothing."""
        buffers = [[array for _, array in held._buffers] for held in (self, new)]
        results = [_mapped(values_of, held._outputs) for held in (self, new)]
        both = Comparison(self.recorder, new.recorder, (buffers[0], buffers[1]))
        return both.difference((results[0], results[1]))

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
        array = x._data
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
    """What a recorded step has at hand in Python, compared by identity, the nearest things first.

        a function                 what it closes over, the globals and modules' names in its code
        a module, an object        its attributes; and its class, if that is a user's
        tuples, lists, dicts ...   their items
        arrays                     their values, too, unless they are long or recorded calls write
                                   them
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
        copied = {id(leaf) for leaf in _leaves(inputs)}  # to a recording's buffers
        waiting = deque([root, inputs])
        seen: dict[int, object] = {}
        while waiting and len(seen) < MOST_PARTS:
            item = waiting.popleft()
            if id(item) not in seen:
                seen[id(item)] = item
                if isinstance(item, Buffer):
                    copied.add(id(item._data))  # operations write to it
                elif isinstance(item, np.ndarray) and item.nbytes <= MOST_BYTES:
                    self._values.append((item, item.tobytes()))
                for holder in self._parts_of(item):
                    waiting += holder
                    if not isinstance(holder, tuple | frozenset):  # these always hold the same
                        self._holders.append(holder)
        self._values = [item for item in self._values if id(item[0]) not in copied]
        self._parts = list(chain.from_iterable(self._holders))
        self._drawn = self._draws()

    def is_unchanged(self) -> bool:
        """True if everything is the same object as when the watch began."""
        now = list(chain.from_iterable(self._holders))
        return len(now) == len(self._parts) and all(map(is_, now, self._parts))

    def moved(self) -> list[Array]:
        """Return the arrays that have other values than then."""
        return [array for array, values in self._values if array.tobytes() != values]

    def look_again(self, read: set[int]) -> None:
        """Take the values that arrays have now; no more of those that have changed and are read.

        Args:
            read: the ids of the owners of arrays that recorded calls read.
        """
        gone = {id(array) for array in self.moved() if id(owner_of(array)) in read}
        self._values = [(x, x.tobytes()) for x, _ in self._values if id(x) not in gone]

    def is_still(self, recorder: Recorder) -> bool:
        """True if a step has changed nothing but by recorded calls, whose arrays are then left out."""
        written = recorder.written()
        self._values = [item for item in self._values if id(owner_of(item[0])) not in written]
        return self.is_unchanged() and not self.moved()

    def library(self, inputs: tuple[Any, ...]) -> Any:
        """Return the module of the first array on a device, or NumPy if there is none."""
        arrays: Iterable[Any] = (
            getattr(x, "_data", None) if isinstance(x, Variable | Buffer) else x
            for x in chain(_leaves(inputs), self._parts)
        )
        return next((namespace(x) for x in arrays if is_on_device(x)), np)

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

    def _parts_of(self, item: Any) -> Iterator[Iterable[object]]:
        kind = type(item)
        if isinstance(item, _GENERATORS):
            self._generators.append(item)
        elif isinstance(item, GeneratorType) or (
            kind.__module__ in ("builtins", "itertools") and "__next__" in vars(kind)
        ):
            raise UsageError(
                f"a compiled step uses {kind_of(item)}, an iterator, whose next item a replay would"
                " not take; call next outside of the step and give the item as an argument"
            )
        elif isinstance(item, FunctionType):
            if is_users(item.__code__.co_filename):
                parts = [*holders(item)]
                yield from parts
                yield vars(item).values()
                names = tuple(_names(item.__code__))
                scopes = [item.__globals__, *_scopes(parts[0])]
                for scope in scopes:  # which grows by the modules in it
                    yield _Names(scope, names)
                    found = _scopes(map(scope.get, names))
                    scopes += [new for new in found if all(new is not other for other in scopes)]
        elif isinstance(item, type):
            module = sys.modules.get(item.__module__)
            file = str(getattr(module, "__file__", None) or "")
            # an installed class has too many functions; its objects have attributes
            if is_users(file) and "-packages" not in file and item.__module__ != "builtins":
                yield vars(item).values()
        elif isinstance(item, Buffer):
            yield Reading(lambda: item._data)
        # an optimizer, also one of the user's, is read anew by each of its updates
        elif isinstance(item, Module) or not (is_array(item) or any(map(is_own, kind.__mro__))):
            yield from holders(item)
            yield (kind,)


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


def _scopes(things: Iterable[object]) -> list[dict[str, Any]]:
    """Return the names and values of those things that are modules of a user's."""
    modules = [vars(thing) for thing in things if isinstance(thing, ModuleType)]
    return [scope for scope in modules if is_users(str(scope.get("__file__") or ""))]


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code, and in functions within."""
    inner = (_names(item) for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*inner)


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


def _refuse_changed(
    given: Iterable[Any], after: Iterable[Any], written: Iterable[int] = ()
) -> None:
    """Refuse a step that has changed its arguments, or written to them.

    Args:
        given: to the compiled step.
        after: what the step got in place of them: copies.
        written: the ids of arrays that it wrote to.

    Raises:
        UsageError: when it has.
    """
    pairs = zip(_walked(given), _walked(after), strict=False)
    if len([*_walked(given)]) != len([*_walked(after)]) or any(
        isinstance(then, Tensor) is not (isinstance(x, Variable) or is_array(x))
        or (isinstance(then, Tensor) and id(owner_of(then._data)) in written)
        or not (isinstance(then, Tensor) or x is then or x == then)
        for x, then in pairs
    ):
        raise UsageError(
            "a compiled step changes one of its arguments, but works on copies, so the caller would"
            " never see it; return the new value, or do not compile this step"
        )


def _walked(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the leaves of a step's inputs, after the length and the names of each container."""
    for x in values:
        if isinstance(x, tuple | list | dict):
            yield len(x), *(x if isinstance(x, dict) else ())
            yield from _walked(x.values() if isinstance(x, dict) else x)
        else:
            yield x


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
    tensor._data = x._data.copy()
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
