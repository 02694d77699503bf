"""Recording a step: what operations, layers and strategies say to the recorder.

    first time    y = np.matmul(x, w)       computes, and notes the call (see `program.record`)
    later         for call in calls: call()

What operations do to arrays is noted by itself. Work outside the array library (an optimizer's
step, an exchange between ranks, a compiled kernel) is recorded as one call by `call`.
It gets its arrays as arguments: a replay has others in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import itemgetter
from types import MethodType, ModuleType
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np

from nnmpi.backend.array import Array, asarray, is_array, is_result, namespace
from nnmpi.backend.program.call import Call, items_of, owner_of
from nnmpi.backend.program.record import CallList, Makers, active_calls, bare
from nnmpi.base.errors import UsageError, is_own

_SETTINGS = (bool, int, float, str, tuple, type(None))


# Returns the active recorder, or None. Operations ask so often that a function of Python's would be
# a tenth of the calls of a small step.
active: Callable[[], Recorder | None] = active_calls.get


def call(function: Any, reads: Any = (), writes: Any = None, when: str = "each") -> Any:
    """Call a function, and return its result; a recording notes the call.

    Args:
        reads, writes: its arguments: those that it only reads, and then the arrays that it may
            write to. It uses no other array of the step, and keeps none, so their memory serves
            others after their last use: in a graph of a device it is a part of that; without
            arrays it is the host's work. None, if it may do anything, such as send: a graph ends
            before it.
        when: "each" replay repeats it at this place. "before": the same, but what it returns comes
            from outside of the step, or from such a call, so that no graph ends: its array is a
            buffer, and its numbers are one on a device. "once": no replay repeats it, such as one
            that takes memory for later. "if": the recording is replayed only while it is True.
    """
    recorder = active()
    if recorder is None:
        return function(*reads, *writes) if writes else function(*reads)
    return recorder.call(function, reads, writes, when)


def eager_while(is_due: Callable[[], bool]) -> None:
    """Let a step that is recorded be done by Python, not replayed, while a function returns True.

    For work that is not done in each step, such as a comparison of ranks: no recording has it.
    """
    recorder = active()
    if recorder is not None:
        recorder.pauses.append(is_due)
        recorder.warms_up = recorder.warms_up or is_due()


class Box:
    """What one recorded call leaves to a later one; each replay fills it anew."""

    content: Any = None


def to_library(xp: Any, values: Any) -> Array:
    """Return values as a library's array; a recording on a device copies them in each replay."""
    if isinstance(values, np.ndarray):
        here = xp.__name__ == "numpy"
        return values if here else call(xp.asarray, (values,), when="before")
    return xp.asarray(asarray(values))


def refuse(
    what: str,
    remedy: str = "return the tensor and read it outside, or do not compile this step",
) -> None:
    """Refuse to return a Python number while recording: it would stay the first step's.

    Raises:
        UsageError: when a step is being recorded.
    """
    if (recorder := active()) is not None:
        raise UsageError(recorder.refusal(what, remedy))


def refuse_inside(what: str) -> None:
    """Refuse a function that runs steps of its own inside a recording, which would miss them.

    Raises:
        UsageError: when a step is being recorded.
    """
    if active() is not None:
        raise UsageError(
            f"{what} cannot be part of a compiled step, whose replays would leave it out; call it"
            " outside"
        )


class Recorder(CallList):
    """Records calls in their order.

    Attributes:
        leaves: by id, the state of the leaf tensors that the calls read, which `is_valid` compares:
            the leaf, its data, its gradient's buffer, whether it needs a gradient, its hook and
            guard, and its gradient (False if the step clears it first: any gradient is then
            valid).
        loose: leaves without flat storage, and the arrays in which calls compute their gradients.
        made: the results of the step's operations.
        cleared: the ids of leaves whose gradients the step itself clears.
        owners: the objects, by id, whose settings the calls depend on: numbers, texts and flags
            among their attributes, and in dictionaries that are attributes.
        conditions: functions of which all must return True before a replay.
        pauses: functions, see `eager_while`.
        reads_mode: whether the mode of the call is that of the step, so that a replay may compare
            it; a Worker's passes enter their own.
        captures: whether it records graphs of a device, see `cuda.graph`.
        warms_up: whether the step is only done, and recorded another time.
    """

    captures: ClassVar[bool] = False
    warms_up = False

    def __init__(self) -> None:
        super().__init__()
        self.leaves: dict[int, tuple[Any, Array, Array | None, bool, Any, Any, Any]] = {}
        self.loose: list[tuple[Any, Array]] = []
        self.made: WeakSet[Any] = WeakSet()
        self.cleared: set[int] = set()
        self.owners: dict[int, Any] = {}
        self.conditions: list[Callable[[], bool]] = []
        self.pauses: list[Callable[[], bool]] = []
        self.reads_mode = False
        self._settings: list[tuple[dict[str, Any], int, Callable[[Any], Any], Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the computations in this block."""
        token = active_calls.set(self)
        try:
            yield
        finally:
            active_calls.reset(token)
            self.active.clear()
            self.made.clear()
            for owner in self.owners.values():
                for held in (vars(owner), *vars(owner).values()):
                    self._note_settings(held)

    def _note_settings(self, held: Any) -> None:
        names = [
            name
            for name, value in (held.items() if isinstance(held, dict) else ())
            if isinstance(value, _SETTINGS) and not str(name).startswith("_") and name != "path"
        ]
        if names:
            read = itemgetter(*names)  # the fastest look at several attributes
            self._settings.append((held, len(held), read, read(held)))

    def module(self, xp: ModuleType) -> Any:
        """Return the array library for operations: NumPy's new arrays are recorded ones."""
        if xp is not np and not self.captures:
            self.spoil("the step brings arrays to a device; give it some that are there")
        return Makers(self) if xp is np and not self.spoiled else xp

    def enter(self, module: Any) -> None:
        """Note a module that is called, and those within it."""
        if id(module) not in self.owners:
            self.owners.update((id(item), item) for _, item in module.named_modules())

    def apply(self, function: Any, inputs: Any, values: list[Any]) -> Any:
        """Run an operation's forward and record it; return its array."""
        return function.recorded(self, inputs, values)

    def refusal(self, what: str, remedy: str) -> str:
        """Return why a Python number may not be read."""
        return f"{what} inside a compiled step would always be the first step's; {remedy}"

    def record(self, function: Callable[..., object], *args: Any) -> None:
        """Add a call to the list, without making it now."""
        self.append(function, bare(args, deep=False), writes=None)

    def record_leaf(self, leaf: Any) -> None:
        """Store the state of a leaf of the graph at its first use, see `leaves`."""
        if id(leaf) not in self.leaves:
            grad = False if id(leaf) in self.cleared else leaf._grad
            self.leaves[id(leaf)] = (
                leaf,
                leaf._data,
                leaf.buffer,
                leaf.requires_grad,
                leaf.hook,
                leaf.guard,
                grad,
            )

    def note_mode(self, name: str, read: Callable[[], Any]) -> None:
        """Note that Python reads a number of the mode: a replay needs the same one."""
        if not self.reads_mode:
            self.spoil(f"Python reads nn.current().{name}")
        value = read()
        self.conditions.append(lambda: read() == value)

    def is_valid(self) -> bool:
        """True if all leaves and settings are as they were recorded."""
        if not all(condition() for condition in self.conditions):
            return False
        for held, count, read, values in self._settings:
            if len(held) != count or read(held) != values:
                return False
        for leaf, data, buffer, needed, hook, guard, grad in self.leaves.values():
            if (
                leaf._data is not data
                or leaf.buffer is not buffer
                or leaf.hook is not hook
                or leaf.guard is not guard
            ):
                return False
            if leaf.requires_grad is not needed or grad is not False and leaf._grad is not grad:
                return False
        return True

    def restore_grads(self) -> None:
        """Give each leaf the gradient it had, before a step that was not done is done again."""
        for leaf, *_, grad in self.leaves.values():
            if grad is not False:  # else the step clears it first
                leaf._grad = grad

    def copy_loose_grads(self) -> None:
        """Replace the gradients of `loose` leaves by copies, which the next replay won't change."""
        for leaf, buffer in self.loose:
            if type(leaf._grad) is type(buffer) and namespace(buffer).may_share_memory(
                leaf._grad, buffer
            ):
                leaf._grad = leaf._grad.copy()

    def run_eagerly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function without recording."""
        token = active_calls.set(None)
        try:
            return function(*bare(args, deep=False))
        finally:
            active_calls.reset(token)

    def call(self, function: Any, reads: Any, writes: Any, when: str) -> Any:
        """See `call`."""
        args = bare((*reads, *(writes or ())), writes is not None)
        if when == "if":
            self.conditions.append(partial(function, *args))
            return function(*args)

        def first() -> Any:
            value = function(*args)
            return Recorder._copied(self, value) if when == "before" and is_array(value) else value

        result = self.run_eagerly(first)
        if when == "each":
            self.append(function, args, writes=writes)
        elif when == "before" and is_array(result):  # numbers need it on a device alone
            self.append(function, args, result=result, writes=None)
        return result

    def whole(
        self, compute: Callable[..., Any], inputs: Sequence[Any], buffers: Sequence[Any] = ()
    ) -> Any:
        """Call a function that returns arrays; replays repeat it and copy its results.

        Args:
            compute: returns an array, or a tuple or list of arrays and None.
            inputs: its arguments.
            buffers: arrays of which a result may be a view.
        """
        known = list(filter(is_array, buffers))
        inputs = bare(tuple(inputs))

        def first() -> tuple[Any, Any]:
            results = compute(*inputs)
            if is_result(results):
                return results, self._own(results, known)
            if not isinstance(results, tuple | list) or not all(
                item is None or is_result(item) for item in results
            ):
                return results, None
            return results, tuple(
                None if item is None else self._own(item, known) for item in results
            )

        results, arrays = self.run_eagerly(first)
        if arrays is None:
            return results  # the caller refuses it
        self.append(compute, inputs, result=arrays, writes=None)
        return arrays

    def _own(self, result: Any, known: Sequence[Array]) -> Array:
        """Return an array with a result's values, to which replays can write theirs.

        A view of a buffer stays one. Any other result is copied: its array may be part of another
        one, such as a row of a table or an input, which replays must not overwrite.
        """
        array = np.asarray(result) if isinstance(result, np.generic) else result
        # `writeable` alone is not enough: a device's arrays have no such flag
        is_read_only = 0 in array.strides and array.size > 1
        is_read_only = is_read_only or isinstance(array, np.ndarray) and not array.flags.writeable
        if not is_read_only and any(
            type(item) is type(array) and namespace(array).may_share_memory(item, array)
            for item in known
        ):
            return array
        return self._copied(array)

    def _copied(self, array: Array) -> Array:
        """Return a copy of a result, as the step's own memory."""
        array = array.copy(order="K")
        return self.adopt(array) if isinstance(array, np.ndarray) else array


class Rehearsal(Recorder):
    """Records a step that leaves nothing behind: after its last call, to compare it once more.

    Operations compute. A call that may do anything, such as an update or a message, is noted and
    not made; nobody waits for other ranks, which may have ended.

    Args:
        recorded: the recording with which it will be compared.
    """

    is_rehearsal = True

    def __init__(self, recorded: Recorder) -> None:
        super().__init__()
        self._recorded = recorded
        self.notes_lines, self.reads_mode = True, recorded.reads_mode

    def call(self, function: Any, reads: Any, writes: Any, when: str) -> Any:
        """See `call`."""
        if when == "each" and writes is None:
            return self.append(function, bare(tuple(reads), deep=False), writes=None)
        return None if when == "once" else super().call(function, reads, writes, when)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Give back, after the block, what its step has written to outside of it."""
        recorded = self._recorded
        held = chain.from_iterable(vars(module).values() for module in recorded.owners.values())
        buffers = [getattr(item, "_data", None) for item in held if _is_ours(item)]
        written = [(call.target(), call.writes, call.result) for call in recorded.calls]
        found = map(owner_of, items_of([*written, buffers], np.ndarray))
        arrays = {id(owner): owner for owner in found if owner.flags.writeable}.values()
        values = [owner.copy() for owner in arrays]
        leaves = [leaf for leaf, *_ in recorded.leaves.values()]
        grads = [leaf._grad for leaf in leaves]
        objects = [*recorded.owners.values(), *objects_of(recorded.calls)]
        attributes = [dict(vars(item)) for item in objects]
        try:
            yield
        finally:
            for array, before in zip(arrays, values, strict=True):
                if array.tobytes() != before.tobytes():  # else others may have it in shared memory
                    array[...] = before
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf._grad = grad
            for item, names in zip(objects, attributes, strict=True):
                for name in vars(item).keys() - names.keys():
                    del vars(item)[name]
                vars(item).update(names)


def objects_of(calls: Sequence[Call]) -> list[Any]:
    """Return nnmpi's objects whose methods are called, with their storages: they set flags."""
    functions = [x.func if isinstance(x := call.function, partial) else x for call in calls]
    callers = [x.__self__ for x in functions if isinstance(x, MethodType) and _is_ours(x.__self__)]
    several = [*callers, *(getattr(item, "storage", None) for item in callers)]
    own = [item for item in several if _is_ours(item) and hasattr(item, "__dict__")]
    return [*{id(item): item for item in own}.values()]


def _is_ours(item: object) -> bool:
    """Whether an object is nnmpi's, perhaps of a user's class: a stranger may answer every name."""
    return any(map(is_own, type(item).__mro__))
