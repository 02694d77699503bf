"""Passes that a Worker records and replays, as `nnmpi.compile` does; and when that is safe.

    a batch of new shapes      1st time     eager
                               2nd, 3rd     eager, and every call on arrays is recorded; the two
                                            recordings must be the same (see `nn.compiled`)
                               later        the calls are replayed: the same bits, no graph, no
                                            checks
    on a device                1st time     eager, in the memory of its graphs (see `cuda.graph`)
                               2nd time     captured
                               later        the graphs are launched

A replay would freeze any decision that Python makes in a forward pass. So a model is replayed only
if nothing in it decides by values: if all of its modules, and the loss, are nnmpi's own, or declare
it (`Module.replayable`). Its parts are compared before each replay. With another layer, rate or
array in place of the old one the pass is eager, and recorded again. What a user declares may be
wrong: where code outside of nnmpi takes part, passes are recorded again from time to time, and
compared (see `nn.compiled`). Where none does, two recordings are all.

A recording is made while a pass computes real results, operation by operation. To trace the model
once with a stand-in for NumPy, and to compile the trace, was tried and dropped: its errors appeared
steps later, far from their cause.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from nnmpi.backend.kernels import setting
from nnmpi.backend.precision import precision
from nnmpi.backend.recording import active
from nnmpi.base.errors import is_own
from nnmpi.compose.layout import Layout
from nnmpi.nn.compiled import MOST_RECORDINGS, Compiled, OldValueError, Recording, Watch
from nnmpi.nn.hooks import ForwardHook, hooked
from nnmpi.nn.mode import Mode, current
from nnmpi.nn.module import Module

MOST_SHAPES = 256  # that are remembered: sentences may have any length
OBSERVED = "somebody looks at this pass: a trace, the count of memory, or an observer of layers"
MOST_CHANGES = 16  # of the model; recording does not pay if it changes all the time


class Walk(Protocol):
    """A pass, see `compose.walk`."""

    def walk(self) -> None:
        """Carry out its instructions."""


class Replay(Compiled):
    """An executor's passes, replayed from the third pass of an input shape on, if safe.

        recorded    F0 F1 B0 F2 B1 B2       each call on arrays, and the loop's other work between
                                            them: sends, receives, waits, sums. A later microbatch
                                            reuses memory that an earlier one has freed.
        replayed                            the same calls in the same order, so memory is reused
                                            in the recorded order, after the last use of its content

    Arrays from outside (inputs, seeds and messages) are copied to the recorded arrays; sent arrays
    are copies.

    Args:
        model: the model of the passes.
        refusal: why no pass may be replayed at all; otherwise empty.
        xp: the library of the model's arrays.

    Attributes:
        replays: the number of replayed passes.
        compares: whether passes are compared with their recordings. A trial of a layout, which
            changes nothing, does without.
        failed: an error that the last pass has found, which all ranks are to raise; or None.
    """

    _name, failed, compares = "the model", None, True
    # a Worker is dropped anywhere, with a model that may have changed since; it has a `release`
    _compares_when_dropped = False

    # it is written to in every step, and by nobody else
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def __init__(self, model: Module, refusal: str, xp: Any = np) -> None:
        super().__init__(_no_step)
        self._now: Walk | None = None
        self._xp, self._model, self._reason = xp, model, refusal
        self._refused = bool(self._reason)
        self._shapes: set[Any] = set()
        self._watch: Watch | None = None  # of the model
        self._new: Any = None  # the key of a pass with a new or changed model, which comes first
        self._modules: list[Module] = []  # of the model, when it was last looked at
        self._changes = self.replays = 0
        self._has_strangers = False  # whether code outside of nnmpi takes part

    def explain(self) -> str:
        """Return why the last pass was not replayed; nothing if it was."""
        return self._reason

    @property
    def held_bytes(self) -> int:
        """The memory that recordings hold between two passes, in bytes."""
        return self.pool.size_bytes + (self._graphs.size_bytes if self._graphs else 0)

    def on_pass(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the pass that is done now: a recording's calls outlive its own pass."""
        return method(self._now, *args)

    def takes(self, kind: tuple[Any, ...], now: Walk, refusal: str) -> bool:
        """Do a pass that is replayed, or recorded: its shapes were seen before. Else return False.

        The caller then walks, and calls `inspect`: an eager pass has no frame of this file.

        Args:
            kind: the recording's key: shapes, dtypes, and all else that the calls depend on.
            now: the pass.
            refusal: why this pass may not be recorded and replayed; otherwise empty.
        """
        mode, self._new = current(), None
        if mode.observe is not None or active() is not None:
            refusal = OBSERVED
        elif ForwardHook.alive and (module := hooked(self._modules)) is not None:
            refusal = f"a forward hook of {module.path or type(module).__name__} is called"
        if self._refused or refusal:
            self._reason = self._reason if self._refused else refusal
            return False
        key = (setting(), precision(), *kind)
        self._number += 1
        if self._watch is None or not self._watch.is_unchanged() or self._watch.moved():
            self._new = key
            return False
        self._now, self._step = now, now.walk
        try:
            return self._replays_or_records(key, mode)
        finally:
            self._now, self._step = None, _no_step

    def _replays_or_records(self, key: Any, mode: Mode) -> bool:
        recording = self._held.get(key)
        if recording is not None and recording.is_valid():
            if self.compares and recording.is_due(self._has_strangers):
                # a pass like any other for the ranks that replay: it sends the same messages
                self._reason = "the pass is compared with its recording"
                try:
                    self._audit(key, recording, (), mode)
                except OldValueError as error:
                    self.failed = error
                self._reason = self.refusal or self._reason
                return True
            self.replays, self._reason = self.replays + 1, ""
            recording.is_audited = self.compares and self._has_strangers
            if recording.is_audited:
                recording.walked = self._now
            recording.replay((), mode)
            return True
        self._reason = "inputs of these shapes have not come often enough"
        if recording is not None:  # a parameter got another array, or was frozen
            del self._held[key]
            self._reason = "a parameter has another array, or was frozen"
        elif refusal := self._known_of(key).refusal:
            self._reason = refusal
        elif (key in self._shapes or self._xp is not np) and len(self._held) < MOST_RECORDINGS:
            self._record(key, (), mode, xp=self._xp)
            self._reason = self.refusal or self._reason
            return True
        elif len(self._shapes) < MOST_SHAPES:
            self._shapes.add(key)
        return False

    def _rehearse(self, held: Recording) -> str:
        if self._watch is None or not self._watch.is_unchanged() or self._watch.moved():
            return ""  # the next pass would have walked
        if self._xp is not np:
            return ""  # a device's pass would bring its batch there anew
        self._now, self._step = held.walked, held.walked.walk
        return super()._rehearse(held)

    def inspect(self) -> None:
        """List the parts of a new or changed model, and decide whether it may be replayed.

        It comes after an eager pass: in that pass layers decide which of them are fused.
        """
        if self._new is None:
            return
        self._held.clear()
        self._shapes, self._new = {self._new}, None
        self._changes += 1
        modules = list(self._model.named_modules())
        self._modules = [module for _, module in modules]
        strangers = [
            f"{name} ({type(module).__name__})"
            for name, module in modules
            if not all(declared for _, declared in _strangers(module))
        ]
        self._has_strangers = any(_strangers(module) for _, module in modules)
        self._reason = "the model is new, or has changed"
        if strangers:
            self._reason = (
                f"{strangers[0]} is not nnmpi's own, or calls a function that is not; set"
                " replayable = True on the class or function if no value decides its operations"
            )
        elif self._changes > MOST_CHANGES:
            self._reason = "the model changes all the time"
        self._refused = bool(strangers) or self._changes > MOST_CHANGES
        if not self._refused:
            self._watch = Watch(self._model)
            self._refused = bool(self._watch.iterator)
            self._reason = self._watch.iterator or self._reason


def refusal_of(layout: Layout, in_segments: bool, strangers: Sequence[str], is_device: bool) -> str:
    """Return why no pass of a layout can be replayed; empty if they can.

    Args:
        in_segments: whether the model is cut.
        strangers: losses that are not nnmpi's own.
    """
    reasons = {
        "an update within a pass replaces the weights' arrays": layout.asynchronous,
        "gradients in a fixed order leave the device after each microbatch": (
            layout.fixed_order and is_device
        ),
        "offloaded arrays are loaded and released between layers": layout.offload is not None,
        "an activation plan has its own memory budget": (
            layout.limits_activations or (layout.activation_memory is not None and not in_segments)
        ),
        f"the loss {', '.join(strangers[:1])} is not nnmpi's own, and may decide by values": bool(
            strangers
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _no_step() -> None:
    """Stand for the step between two passes."""


def _strangers(module: Module) -> list[tuple[str, bool]]:
    """Return what a module computes with that is not nnmpi's own: its class, its callables.

    With each goes whether it declares that it decides nothing by values (`replayable`).
    """
    kind, local = type(module), vars(module)
    if not is_own(kind):
        declared = vars(kind).get("replayable") is True and "forward" not in local
        return [(kind.__name__, declared)]
    called = {
        name: getattr(item, "func", item)
        for name, item in local.items()
        if callable(item) and not isinstance(item, Module)
    }
    return [
        (name, name != "forward" and bool(getattr(item, "replayable", False)))
        for name, item in called.items()
        if not is_own(item)
    ]
