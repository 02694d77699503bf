"""Passes that a Worker records and replays, as `nnmpi.compile` does; and when it may.

    a batch of new shapes      1st time     computed as it stands
                               2nd time     computed, and every call on arrays noted (see
                                            `nn.compiled`)
                               later        the calls made again: the same bits, no graph, no checks

What Python decides in a forward pass would be decided once for ever. So a model is replayed only
where nothing in it decides by values: where all of its modules, and the loss, are nnmpi's own, or
say so (`Module.replayable`). What it is made of is looked at before each replay. With another
layer, rate or array in the old one's place it is computed as it stands again, and recorded anew.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

from nnmpi.backend.kernels import setting
from nnmpi.backend.precision import precision
from nnmpi.backend.recording import active
from nnmpi.nn.compiled import MOST_RECORDINGS, Compiled
from nnmpi.nn.mode import current
from nnmpi.nn.module import Buffer, Module

OWN = "nnmpi"
MOST_SHAPES = 256  # that are remembered: sentences may have any length
LOOKED_AT = "somebody looks at this pass: a trace, the count of memory, or an observer of layers"
MOST_CHANGES = 16  # of the model; one that changes all the time is not worth recording


class Replay(Compiled):
    """An executor's passes, replayed from the third pass of an input shape on, if safe.

        recorded    F0 F1 B0 F2 B1 B2       each call on arrays, and between them what else the loop does: sending,
                                            receiving, waiting, sums; what a microbatch has let go of in memory, a later
                                            one takes
        replayed                            the same calls in the same order: so memory is used
                                            again in the recorded order, after its old content was
                                            last needed

    Arrays that come from outside, inputs, seeds and messages, are copied to their places; what is
    sent is a copy.

    Args:
        model: that runs.
        refusal: why no pass may be replayed, whatever it is; else empty.

    Attributes:
        replays: how many passes were replayed so far.
    """

    def __init__(self, model: Module, refusal: str = "") -> None:
        super().__init__(lambda: None)
        self._model, self._reason = model, refusal
        self._refused = bool(self._reason)
        self._seen: set[Any] = set()
        self._holders: list[Iterable[object]] = []  # what holds what the model is made of
        self._parts: list[object] | None = None
        self._changes = self.replays = 0

    def explain(self) -> str:
        """Return why the last pass was not replayed; nothing if it was."""
        return self._reason

    @property
    def held_bytes(self) -> int:
        """What the recordings keep of memory between two passes."""
        return self.pool.size_bytes

    def go(self, kind: tuple[Any, ...], run: Callable[[], None], refusal: str = "") -> None:
        """Do a pass: replayed if there is a recording, recorded if these shapes were seen before.

        Args:
            kind: what tells recordings apart: shapes, dtypes, and what else the calls depend on.
            run: the loop over the pass's program.
            refusal: why this one may not be recorded and replayed; else empty.
        """
        self._step, mode = run, current()
        if mode.observe is not None or active() is not None:
            refusal = LOOKED_AT
        if self._refused or refusal:
            self._reason = self._reason if self._refused else refusal
            run()
            return
        key = (mode.fused, setting(), precision(), *kind)
        if self._parts is None or not self._is_unchanged():
            run()  # first: layers find out in it which of them are computed as one
            self._begin_anew(key)
            return
        held = self._held.get(key)
        if held is not None and held.recorder.is_valid():
            self.replays, self._reason = self.replays + 1, ""
            held.replay((), mode)
            return
        self._reason = "inputs of these shapes have not come often enough"
        if held is not None:  # somebody has put another array in a parameter's place, or frozen it
            del self._held[key]
            self._reason = "a parameter has another array, or was frozen"
        elif key in self._seen and len(self._held) < MOST_RECORDINGS:
            self._record(key, (), mode)
            return
        elif len(self._seen) < MOST_SHAPES:
            self._seen.add(key)
        run()

    def _begin_anew(self, key: Any) -> None:
        """Look what a model is made of that is not known yet, or has changed."""
        self._held.clear()
        self._seen = {key}
        self._changes += 1
        modules = list(self._model.named_modules())
        strangers = [
            f"{name} ({type(module).__name__})"
            for name, module in modules
            if not _is_replayable(module)
        ]
        self._reason = "the model is new, or has changed"
        if strangers:
            self._reason = (
                f"{strangers[0]} is not nnmpi's own, or calls a function that is not; let the class"
                " or the function say replayable = True if values decide nothing"
            )
        elif self._changes > MOST_CHANGES:
            self._reason = "the model changes all the time"
        self._refused = bool(strangers) or self._changes > MOST_CHANGES
        self._holders = [holder for _, module in modules for holder in _holders(module)]
        self._parts = list(chain.from_iterable(self._holders))

    def _is_unchanged(self) -> bool:
        """Return whether the model is made of the same objects as before."""
        before, now = self._parts or [], list(chain.from_iterable(self._holders))
        return len(now) == len(before) and all(map(is_, now, before))


def is_own(thing: Any) -> bool:
    """Return whether a class or a function is nnmpi's own."""
    return (thing.__module__ or "").partition(".")[0] == OWN


def _is_replayable(module: Module) -> bool:
    """Return whether a module decides nothing by values: all that it calls is nnmpi's own, or
    itself says so.
    """
    kind, local = type(module), vars(module)
    if not is_own(kind):
        return vars(kind).get("replayable") is True and "forward" not in local
    called = [
        getattr(item, "func", item)
        for item in local.values()
        if callable(item) and not isinstance(item, Module)
    ]
    return "forward" not in local and all(
        is_own(item) or getattr(item, "replayable", False) for item in called
    )


def _holders(module: Module) -> Iterator[Iterable[object]]:
    """Yield what goes through what a module is made of, as it is at that time; where each begins is
    told, too.
    """
    local = vars(module)
    yield from ((local,), local.values())
    for value in local.values():
        if isinstance(value, list):
            yield from ((value,), value)
        elif isinstance(value, dict):
            yield from ((value,), value.values())
        elif isinstance(value, Buffer):
            yield _ArrayOf(value)


class _ArrayOf:
    """Goes through the one array that a buffer has now."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __iter__(self) -> Iterator[object]:
        return iter((self._buffer.data,))
