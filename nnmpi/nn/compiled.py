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
    audits       calls 4, 8, 15, 16, and then every 1,500th are recorded and compared, too
    the end      when the step is dropped or the program ends, it is compared once more, by doing it
                 without an effect (see `recording.Rehearsal`): a difference is printed, and the
                 program's status is not 0

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

import atexit
import gc
import os
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from contextvars import Context, ContextVar, copy_context
from copy import copy
from dataclasses import is_dataclass
from functools import lru_cache, partial, update_wrapper
from itertools import chain, starmap
from operator import attrgetter, call, is_, itemgetter
from threading import RLock
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np

from nnmpi.backend.array import Array, is_array, is_on_device, namespace
from nnmpi.backend.cuda.graph import GraphMemory, GraphRecorder
from nnmpi.backend.kernels import setting
from nnmpi.backend.precision import precision
from nnmpi.backend.program.call import Call, owner_of, rebuilt
from nnmpi.backend.program.compare import Comparison, referents
from nnmpi.backend.program.replay import Arena, StepProgram
from nnmpi.backend.recording import Recorder, Rehearsal, active, objects_of
from nnmpi.backend.storage import Storage
from nnmpi.base.ending import fail_at_end
from nnmpi.base.errors import ShapeError, UsageError, is_own
from nnmpi.base.launcher import read_launch
from nnmpi.base.lines import is_users
from nnmpi.base.settled import Settled
from nnmpi.nn.hooks import ForwardHook, hooked
from nnmpi.nn.mode import Mode, current, restore
from nnmpi.nn.module import Buffer, Module
from nnmpi.tensor.function import Variable, grad_enabled, kind_of
from nnmpi.tensor.operand import values_of, values_or_refuse
from nnmpi.tensor.tensor import Tensor

# An epoch has two or three batch sizes; beyond this number the oldest recording is dropped.
MOST_RECORDINGS = 16
# Captures of a step on a device; one that always changes what it computes with stays eager.
MOST_TRIES = 4
MOST_UNUSED = 16  # recordings in a row without a replay
MOST_KEYS = 256  # that are known
MOST_BYTES = 2**16  # of an array whose values are compared; longer ones are left to audits
MOST_OF_DATA = 2**20  # the same, of a `Dataset`'s
MOST_PARTS = 2000  # that are compared, the nearest first; as many take 20 us
# Calls of a recording: most of what changes does so soon. The fifteenth is there since what changes
# in every third call would meet no power of two.
EARLY_AUDITS = frozenset((2, 4, 8, 15, 16))
# An audit takes as long as 30 replays of a small step, and as fewer of a larger one. Audits may
# take 2 % of all replays. It is a count, as measured times would differ from rank to rank.
AUDIT_EVERY = 50 * 30


class OldValueError(UsageError):
    """Replays may have used an old value; raised when the step is done, and right."""


class Known:
    """What is known of the steps of a key.

    Attributes:
        refusal: why they are done eagerly from now on; empty if they are not.
        unused: recordings since the last replay.
        captures: on a device, how often they were captured.
        is_warm: whether the last one ran in the memory of the graphs, so that the next one may be
            captured.
        last: the last recording, if it is not replayed, but may be compared with the next one.
        pauses: of the last recording, see `recording.eager_while`.
    """

    refusal, unused, captures, is_warm = "", 0, 0, False
    last: "Recording | None" = None
    pauses: Iterable[Callable[[], bool]] = ()

    def is_paused(self) -> bool:
        """Whether the step is done by Python this time."""
        return bool(self.pauses) and any(is_due() for is_due in self.pauses)


class Compiled(Settled, read_once="pool"):
    """A step that is recorded on its first call for some input shapes, and replayed later.

    Attributes:
        pool: the memory of all recordings. They can share it: only one runs at a time, and callers
            get copies of its results.
    """

    _graphs: GraphMemory | None = None
    _refusal: str = ""
    _number = 0  # of the present call
    _name = "the step"
    _end: Callable[[], None] | None = None  # what `atexit` calls, once something may be replayed
    _compares_when_dropped = True

    def __init__(self, step: Callable[..., Any]) -> None:
        update_wrapper(self, step, updated=())
        self._step = step
        self._held: dict[Any, Recording] = {}  # by key
        self._known: dict[Any, Known] = {}
        self.pool = Arena()
        self._lock = RLock()

    def __del__(self) -> None:
        """Compare the step once more."""
        if self._end is not None and not sys.is_finalizing():
            atexit.unregister(self._end)
            if self._compares_when_dropped:
                self.compare_at_end()

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
    def calls(self) -> int:
        """The number of calls of `program`."""
        return 0 if self.program is None else len(self.program.calls)

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
            UsageError: when the step reads a tensor's number, returns something else, changes an
                argument, or is called by a compiled step; for an input that is not hashable, or
                needs a gradient; when replays may have used an old value of something.
        """
        if active() is not None:
            raise UsageError(
                "a compiled step was called while another one was being recorded; compile only the"
                " outer one"
            )
        mode = current()
        if mode.observe is not None:
            return self._step(*_mapped(_tensor, inputs))  # a replay would not call the modules
        # a method of the memory equals that of this memory alone, and keeps it
        memory = None if mode.memory is None else mode.memory.get
        key = (
            *(mode.training, mode.recomputing, mode.weight, memory),
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
                known = self._known_of(key)
                if known.refusal or known.is_paused():
                    self._refusal = known.refusal
                    return _mapped(_copied, self._do(inputs, mode)[1])
                watch = Watch(self._step, inputs, mode.memory)
                return self._record(key, inputs, mode, watch, watch.xp)
            if held.known.is_paused():
                return _mapped(_copied, self._do(inputs, mode)[1])
            if held.is_due():
                return self._audit(key, held, inputs, mode)
            return held.replay(inputs, mode)

    def compare_at_end(self) -> None:
        """Compare what was replayed since the last audit with the step as it is now.

        No call follows that would find what has changed since.
        """
        for held in [*self._held.values()]:
            context, held.unchecked = held.unchecked, None
            found = "" if context is None else context.run(self._rehearse, held)
            if found:
                fail_at_end(OldValueError(self._describe(found, held.checked + 1)))

    def _rehearse(self, held: "Recording") -> str:
        """Do a step without an effect, in the context of its last call; return how it differs.

        Nothing, if the next call would have recorded anew, or the step cannot be done any more.
        """
        recorder, recorded = Rehearsal(held.recorder), held.recorder
        # generation goes on where the last call has ended, and so does the gradient of a leaf that
        # no operation reads
        if current().memory is not None or any(
            id(leaf) not in recorded.leaves for leaf, _ in recorded.loose
        ):
            return ""
        inputs, outputs, is_whole = _mapped(_input_buffer, held.inputs), None, False
        with recorder.undone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorded.restore_grads()  # as they were before the last call, if not within it
            if not held.is_as_recorded():
                return ""
            with suppress(Exception), recorder.running():
                outputs = _outputs(self._step(*inputs))
                is_whole = True
        if not is_whole:  # leaving its blocks has added calls that no step makes
            return ""
        new = Recording(recorder, self.pool, held.known, inputs, outputs)
        return recorder.spoiled or held.difference(new)

    def _describe(self, found: str, since: int | None = None) -> str:
        """Return a sentence on what an audit has found, and the calls that it casts doubt on."""
        changes = f"{self._name} computes with what changes from call to call: {found}"
        if since is None:
            return changes
        return (
            f"{changes}; calls since number {since} may have used an old value: give it as an"
            " argument, or do not compile this"
        )

    def _known_of(self, key: Any) -> Known:
        if len(self._known) >= MOST_KEYS and key not in self._known:
            self._known.clear()
        return self._known.setdefault(key, Known())

    def _audit(self, key: Any, held: "Recording", inputs: tuple[Any, ...], mode: Mode) -> Any:
        """Do one step, and compare what it does with its recording, which is dropped if it differs.

        Raises:
            OldValueError: if replays since the last audit may have been wrong.
        """
        # so that a step's results are not in memory twice
        for recording in self._held.values():
            recording.program.release()
        self.pool.free()
        recorder = Recorder()
        recorder.notes_lines, recorder.reads_mode = True, held.recorder.reads_mode
        used = getattr(held._watch, "arrays", ())
        recorder.watch(used)
        new = Recording(recorder, self.pool, held.known, *self._do(inputs, mode, recorder))
        recorder.look(used)
        since, held.checked = held.checked + 1, self._number
        was_replayed, held.unchecked = held.unchecked is not None, None
        found = recorder.spoiled or held.difference(new)
        if not found:
            held.look_again()
            return new.results()
        del self._held[key]
        self._refusal = self._describe(found)
        if held.moved:  # what has changed is seen: the next call records anew
            return new.results()
        held.known.refusal = self._refusal
        if was_replayed:
            raise OldValueError(self._describe(found, since))
        launch = read_launch(os.environ)
        if launch is None or launch.rank == 0:  # once for all ranks
            warnings.warn(f"{self._refusal}; it is not replayed", stacklevel=3)
        return new.results()

    def _do(
        self, inputs: tuple[Any, ...], mode: Mode, recorder: Recorder | None = None
    ) -> tuple[Any, Any]:
        """Do one step, perhaps record it, and return the copies of its inputs, and its result."""
        buffers = _mapped(_input_buffer, inputs)
        leaves = [*_leaves(buffers)]
        try:
            with nullcontext() if recorder is None else recorder.running():
                outputs = _outputs(self._step(*buffers))
            written = set[int]() if recorder is None else recorder.outside(Call.target)
            _refuse_changed(leaves, [*_leaves(buffers)], written)
            return buffers, outputs
        finally:
            restore(mode)
            if recorder is not None:
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
        known = self._known_of(key)
        old, known.last = self._held.pop(key, known.last), None
        if len(self._held) >= MOST_RECORDINGS:
            del self._held[next(iter(self._held))]
        recorder = Recorder() if xp is np else self._device_recorder(known, xp)
        recorder.reads_mode = watch is not None
        memory = {name: copy(item) for name, item in (mode.memory or {}).items()}
        try:
            done = self._do(inputs, mode, recorder)
            new = Recording(recorder, self.pool, known, *done, watch)
        except Exception as error:
            if not (isinstance(recorder, GraphRecorder) and recorder.can_begin_again(error)):
                raise
            recorder.restore_grads()
            if mode.memory is not None:  # with the positions before this call
                mode.memory.clear()
                mode.memory.update(memory)
            known.captures, self._refusal = MOST_TRIES, f"{error}"
            return self._record(key, inputs, mode, watch, xp)
        known.pauses = recorder.pauses
        if recorder.warms_up:
            return new.results()
        known.unused += 1
        self._refusal = recorder.spoiled if watch is None else watch.refusal(recorder)
        if ForwardHook.alive and hooked(recorder.owners.values()) is not None:
            known.unused = 0  # a hook may be removed
        elif recorder.spoiled or known.unused >= MOST_UNUSED:
            known.refusal = self._refusal or "the step computes with other things in each call"
        if not self._refusal:
            self._held[key], new.checked = new, self._number
            if self._end is None and new.compares:
                self._end = partial(_compare_at_exit, ref(self))
                atexit.register(self._end)
            if old is not None and new.compares and not old.difference(new):
                new.count += old.count  # it was recorded twice already
        elif new.compares and not recorder.spoiled:
            known.last = new
        return new.results()

    def _device_recorder(self, known: Known, xp: Any) -> GraphRecorder:
        """Return the recorder of a step's next call; it captures every second one."""
        if self._graphs is None:
            self._graphs = GraphMemory(xp)
        captures = known.is_warm and known.captures < MOST_TRIES
        known.captures, known.is_warm = known.captures + captures, not captures
        return GraphRecorder(self._graphs, warms_up=not captures)


class Recording:
    """A step's recorded calls for certain input shapes, with its input buffers and result.

    Attributes:
        program: what is replayed.
        count: the calls of the step since it was made, with the first one.
        checked: the number of the last call that was compared.
        compares: whether another recording can be compared with it: not on a device.
        moved: whether watched arrays have other values in this call.
        inputs: of the step, to which replays copy theirs.
        is_audited: whether it is compared once more at the end.
        unchecked: the context of the last replay, until there is a comparison; None after it.
        walked: the pass that was replayed last, see `compose.replayed`.
    """

    count, checked, moved = 1, 0, False
    unchecked: Context | None = None
    walked: Any = None

    def __init__(
        self,
        recorder: Recorder,
        arena: Arena,
        known: Known,
        inputs: Any,
        outputs: Any,
        watch: "Watch | None" = None,
    ) -> None:
        self.recorder, self._outputs, self._watch = recorder, outputs, watch
        self.inputs, leaves = inputs, enumerate(_leaves(inputs))
        self._buffers = [(i, x._data) for i, x in leaves if isinstance(x, Tensor)]
        self.compares = self.is_audited = not recorder.captures
        self.known = known
        self.program = StepProgram(recorder, arena)

    def is_as_recorded(self) -> bool:
        """True if all that is watched, arrays too, is as it was."""
        return self.is_valid() and not (self._watch is not None and self._watch.moved())

    def is_valid(self) -> bool:
        """True if a replay would do what the step does now."""
        return self.recorder.is_valid() and (self._watch is None or self._watch.is_unchanged())

    def is_due(self, is_audited: bool = True) -> bool:
        """Return whether this call, which is counted, is to be compared.

        Ranks count alike, so they agree without a message.

        Args:
            is_audited: whether others than the second are: those of `EARLY_AUDITS` and
                `AUDIT_EVERY`, and each before which a watched array has changed.
        """
        self.count = count = self.count + 1
        if not is_audited:
            return self.compares and count == 2
        self.moved = self._watch is not None and bool(self._watch.moved())
        is_audit = self.moved or count in EARLY_AUDITS or count % AUDIT_EVERY == 0
        return self.compares and is_audit

    def look_again(self) -> None:
        """Begin to watch arrays anew that have changed, unless recorded calls read them."""
        if self.moved and self._watch is not None:
            self._watch.look_again(self.recorder.outside(Call.arrays))

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
        self.known.unused = 0
        self.unchecked = None  # if this one fails, its inputs say nothing about those before
        leaves = [*_leaves(inputs)]
        for i, buffer in self._buffers:
            buffer[...] = values_of(leaves[i])
        try:
            self.program.replay()
        except IndexError as error:
            raise ShapeError(f"an index within a compiled step does not fit: {error}") from None
        finally:
            restore(mode)
        if self.is_audited:
            self.unchecked = copy_context()
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
    array = values_of(x)
    if type(array) is np.ndarray and array is x:
        return array.shape, array.dtype
    if is_array(array):
        needs_grad = isinstance(x, Tensor) and x.requires_grad
        return namespace(array).__name__, array.shape, array.dtype, needs_grad
    if isinstance(x, float | np.generic):  # 0.0 and -0.0 are equal, and NaN is not
        return type(x), np.asarray(x).tobytes()
    if isinstance(x, tuple | list):
        return type(x), *map(_kind, x)
    if isinstance(x, dict):
        return type(x), *x, *map(_kind, x.values())
    return type(x), x


class Watch:
    """What a recorded step has at hand in Python, compared by identity, the nearest things first.

        a function                 what it closes over, the globals and modules' names in its code
        a class of a user's        its attributes
        an object of nnmpi's own   its settings: public attributes, numbers by their values; of one
                                   whose methods recorded calls call, such as an optimizer, those
                                   that the functions name, as its own are read anew by each replay
        an array                   its values, unless it is long or recorded calls write to it
        any other                  what it refers to

    Args:
        root: where the search begins.
        inputs: of the step, each of which is searched, too.
        memory: of `nn.continued`. Its numbers are positions, which replays advance.

    Attributes:
        xp: the library of the first array on a device, or NumPy.
        iterator: why a step with what was found cannot be replayed; empty if it may be.
        arrays: of NumPy's, of any length; after a recording those in its calls.
    """

    iterator = ""

    def __init__(
        self, root: Any, inputs: tuple[Any, ...] = (), memory: dict[str, Any] | None = None
    ) -> None:
        self.xp: Any = np
        self._looks: list[Callable[[], Iterable[object]]] = []  # each returns what is there now
        self._held: list[object] = []  # whose referents are compared
        # of nnmpi's objects, by id: their attributes, and the numbers among these as they were
        self._settings: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._named: set[str] = set()  # in the code of functions
        of_python: Any = random.random
        of_numpy: Any = np.random
        self._generators: list[Any] = [of_python.__self__, of_numpy.get_bit_generator()]
        self._values: list[tuple[Array, bytes]] = []
        self.arrays: list[Array] = []
        self._copied = {id(leaf) for leaf in _leaves(inputs)}  # to a recording's buffers
        if memory is not None:
            kept = [name for name, item in memory.items() if not isinstance(item, int)]
            self._looks += [partial(iter, memory), partial(map, memory.get, kept)]
        waiting = deque([root, inputs])
        seen: dict[int, object] = {}
        while waiting and len(seen) < MOST_PARTS:
            item = waiting.popleft()
            if id(item) not in seen:
                seen[id(item)] = item
                waiting += self._look_into(item)
        self._values = [item for item in self._values if id(item[0]) not in self._copied]
        self._looks.append(partial(gc.get_referents, *self._held))
        self._parts, self._drawn = self._look(), [*map(_state, self._generators)]
        self._read_settings()

    def is_unchanged(self) -> bool:
        """True if everything is the same object as when the watch began."""
        now = self._look()
        if len(now) != len(self._parts) or not all(map(is_, now, self._parts)):
            return False
        try:
            return [*starmap(call, self._readers)] == self._numbers
        except KeyError:  # an attribute is gone
            return False

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

    def refusal(self, recorder: Recorder) -> str:
        """Return why a step cannot be replayed that has changed more than arrays by recorded calls.

        Those arrays are then left out.
        """
        written = recorder.outside(Call.target)
        self._values = [item for item in self._values if id(owner_of(item[0])) not in written]
        for item in objects_of(recorder.calls):
            if id(item) in self._settings:
                held, numbers = self._settings[id(item)]
                named = {name: numbers[name] for name in self._named & numbers.keys()}
                self._settings[id(item)] = held, named
        self._read_settings()
        used = recorder.outside(Call.arrays)
        self.arrays = [x for x in self.arrays if id(owner_of(x)) in used]
        if self._drawn != [*map(_state, self._generators)]:
            recorder.spoil(
                "the step draws random numbers, which replays would repeat; draw them outside and"
                " give them as an argument, or use nn.Dropout"
            )
        elif self.iterator:
            recorder.spoil(self.iterator)
        is_still = self.is_unchanged() and not self.moved()
        return recorder.spoiled or ("" if is_still else "the step changes what it computes with")

    def _look(self) -> list[object]:
        return [*chain.from_iterable([look() for look in self._looks])]

    def _look_into(self, item: Any) -> Iterable[object]:
        """Look at an item from now on, and return what is to be looked at with it."""
        kind: Any = type(item)
        array = item
        if isinstance(item, Variable | Buffer):
            array = getattr(item, "_data", None)  # a parameter of another rank's stage has none
        if is_on_device(array) and self.xp is np:
            self.xp = namespace(array)
        if isinstance(item, Buffer):
            self._held.append(item)
            self._copied.add(id(array))  # operations write to it
        elif isinstance(item, np.ndarray):
            self.arrays.append(item)
            if item.nbytes <= MOST_BYTES:
                self._values.append((item, item.tobytes()))
        elif isinstance(item, FunctionType):
            return self._follow(item) if is_users(item.__code__.co_filename) else ()
        elif isinstance(item, type):
            file = str(getattr(sys.modules.get(item.__module__), "__file__", None) or "")
            is_built_in = item.__module__ in sys.builtin_module_names
            # an installed class has too many functions; its objects have attributes
            is_seen = is_users(file) and not is_built_in and "-packages" not in file
            return (vars(item),) if is_seen else ()
        elif isinstance(item, ContextVar):
            self._looks.append(partial(map, item.get, (None,)))
            return (item.get(None),)
        elif isinstance(item, ref):
            return (item(),)
        elif isinstance(item, _CACHING):  # what it has cached is its own
            return (vars(item),)
        elif _is_own_object(item) and not is_array(item):
            return self._look_into_own(item)
        elif not (is_array(item) or isinstance(item, ModuleType)):
            if hasattr(kind, "__next__"):
                self.iterator = (
                    f"{kind_of(item)} is an iterator, whose next item a replay would not take; call"
                    " next outside of the step and give the item as an argument"
                )
            if isinstance(item, np.random.BitGenerator | random.Random):
                self._generators.append(item)
            if not isinstance(item, tuple | partial):  # these always hold the same
                self._held.append(item)
            return referents(item)
        return ()

    def _look_into_own(self, item: Any) -> Iterable[object]:
        """Look at the settings of an object of nnmpi's; return arrays and others' within it."""
        if isinstance(item, Variable | Storage) or not hasattr(item, "__dict__"):
            return ()  # these change with each step, by recorded calls alone
        kind: Any = type(item)
        is_data = is_dataclass(kind)
        public = {name: value for name, value in vars(item).items() if name[0] != "_"}
        if not (is_data and kind.__dataclass_params__.frozen):
            numbers = {
                name: value
                for name, value in public.items()
                # what has a descriptor, such as an optimizer's rate, refuses to be read by a step
                if isinstance(value, _NUMBERS) and not hasattr(getattr(kind, name, 0), "__set__")
            }
            self._settings[id(item)] = vars(item), numbers
            if is_data:
                self._looks.append(partial(map, vars(item).get, public.keys() - numbers.keys()))
        if not is_data:
            return ()
        arrays = [value for value in public.values() if isinstance(value, np.ndarray)]
        self._values += [(x, x.tobytes()) for x in arrays if MOST_BYTES < x.nbytes <= MOST_OF_DATA]
        return [*arrays, *(value for value in public.values() if _is_own_object(value))]

    def _read_settings(self) -> None:
        """Make ready what compares the numbers of `_settings`."""
        held = [(vars_, numbers) for vars_, numbers in self._settings.values() if numbers]
        # by two names at least: in a tuple NaN equals itself
        reads = [itemgetter(*numbers, next(iter(numbers))) for _, numbers in held]
        self._readers = [(read, vars_) for read, (vars_, _) in zip(reads, held, strict=True)]
        self._numbers = [read(numbers) for read, (_, numbers) in zip(reads, held, strict=True)]

    def _follow(self, function: FunctionType) -> Iterator[object]:
        """Yield what a function has at hand; look at the names in its code from now on."""
        cells = referents(function.__closure__ or ())
        self._looks.append(partial(_PARTS, function))  # which a notebook's reload replaces
        yield from (*cells, *_PARTS(function)[1:], vars(function))
        names = _names(function.__code__)
        self._named |= names
        scopes = [function.__globals__, *_scopes(chain.from_iterable(map(referents, cells)))]
        for scope in scopes:  # which grows by the modules in it
            there = [name for name in names if name in scope]
            self._looks.append(partial(map, scope.get, there))
            found = [scope[name] for name in there]
            scopes += [new for new in _scopes(found) if all(new is not other for other in scopes)]
            yield from found


_CACHING = type(lru_cache(len))
_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")  # of a function
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


@lru_cache(1024)
def _is_ours(kind: Any) -> bool:
    """Whether a class's objects are nnmpi's own, but no modules: these hold a user's things."""
    return any(map(is_own, kind.__mro__)) and not issubclass(kind, Module)


def _is_own_object(item: object) -> bool:
    kind: Any = type(item)
    return _is_ours(kind)


def _scopes(things: Iterable[object]) -> list[dict[str, Any]]:
    """Return the names and values of those things that are modules of a user's."""
    modules = [vars(thing) for thing in things if isinstance(thing, ModuleType)]
    return [scope for scope in modules if is_users(str(scope.get("__file__") or ""))]


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code, and in functions within."""
    inner = (_names(item) for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*inner)


def _state(generator: Any) -> Any:
    """Return the state of a generator of random numbers, as a value."""
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)  # a stranger's own method might raise
    return rebuilt(generator.state, bytes, np.ndarray)


def _compare_at_exit(step: "ref[Compiled]") -> None:
    """Compare a step once more that lives to the interpreter's end; for `atexit`."""
    if (compiled := step()) is not None:
        compiled.compare_at_end()


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


def _refuse_changed(given: list[Any], after: list[Any], written: set[int]) -> None:
    """Refuse a step that has changed its arguments, or written to them.

    Args:
        given: the leaves of what the step got, which are copies of the caller's.
        after: the same after the step.
        written: the ids of arrays that it wrote to.

    Raises:
        UsageError: when it has.
    """
    if len(given) != len(after) or any(
        id(owner_of(x._data)) in written
        if x is now and isinstance(x, Tensor)
        else x is not now and (isinstance(now, Tensor) or x != now)
        for x, now in zip(given, after, strict=False)
    ):
        raise UsageError(
            "a compiled step changes one of its arguments, but works on copies, so the caller would"
            " never see it; return the new value, or do not compile this step"
        )


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
    """Yield the leaves of a step's inputs, after the length and the names of each container."""
    for x in inputs:
        if isinstance(x, tuple | list | dict):
            yield len(x)
            yield from x if isinstance(x, dict) else ()
            yield from _leaves(x.values() if isinstance(x, dict) else x)
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
