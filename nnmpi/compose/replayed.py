"""Passes that a Worker records and replays, as `nnmpi.compile` does for a loop of one's own; and when it may.

    a batch of new shapes      1st time     computed as it stands
                               2nd time     computed, and every call on arrays noted (see `nn.compiled`)
                               later        the calls made again: the same bits, no graph, no checks

What Python decides in a forward pass would be decided once for ever. So a model is replayed only where nothing in it
decides by values: where all of its modules, and the loss, are nnmpi's own, or say so (`Module.replayable`). What it is
made of is looked at before each replay. With another layer, rate or array in the old one's place it is computed as it
stands again, and recorded anew.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import setting
from nnmpi.backend.memory_pool import MemoryPool, alias
from nnmpi.backend.precision import precision
from nnmpi.backend.recording import Call, Recorder, active
from nnmpi.compose.losses import SumError
from nnmpi.compose.runner import SumCrossEntropy, SumLoss
from nnmpi.nn.compiled import MOST_RECORDINGS, Compiled, Recording, make
from nnmpi.nn.mode import Mode, current
from nnmpi.nn.module import Buffer, Module
from nnmpi.parallel.pipeline.stage import Part, Work, as_it_stands

OWN = "nnmpi"
MOST_SHAPES = 256  # that are remembered: sentences may have any length
MOST_CHANGES = 16  # of the model; one that changes all the time is not worth recording


class ReplayedPass(Compiled):
    """A pass through a model, replayed from the third time on that inputs of some shapes come, where that is safe.

    Args:
        run: the pass: called with Tensors of NumPy's arrays, and plain values; it returns nothing.
        model: that it runs.
        loss: that it ends with.
        pool: the memory of the recordings, where other passes have them there, too.

    Attributes:
        replays: how many passes were replayed so far.
    """

    def __init__(self, run: Callable[..., None], model: Module, loss: SumLoss, pool: MemoryPool | None = None) -> None:
        super().__init__(run, pool)
        self._model, self._is_safe = model, _is_own_loss(loss)
        self._seen: set[Any] = set()
        self._holders: list[Iterable[object]] = []  # what holds what the model is made of
        self._parts: list[object] | None = None
        self._changes = self.replays = 0

    def go(self, arrays: tuple[Array, ...], flags: tuple[Any, ...], may_replay: bool) -> None:
        """Do a pass: replayed if there is a recording, recorded if these shapes were seen before.

        Args:
            arrays: what `run` gets first, as Tensors.
            flags: what it gets after them; a recording is of these alone.
            may_replay: whether passes may be recorded and replayed.
        """
        mode, inputs = current(), (*arrays, *flags)
        if not may_replay or not self._is_safe or mode.observe is not None or active() is not None:
            self.as_it_stands(inputs)
            return
        kinds = [(array.shape, array.dtype) for array in arrays]
        key = (mode.training, mode.fused, setting(), precision(), flags, *kinds)
        if self._parts is None or not self._is_unchanged():
            self._begin_anew(key, inputs)
            return
        held = self._held.get(key)
        if held is not None and held.recorder.holds():
            self.replays += 1
            held.replay(inputs, mode)
        elif held is not None:  # somebody has put another array in a parameter's place, or frozen it
            del self._held[key]
            self.as_it_stands(inputs)
        elif key in self._seen and len(self._held) < MOST_RECORDINGS:
            self._record(key, inputs, mode)
        else:
            if len(self._seen) < MOST_SHAPES:
                self._seen.add(key)
            self.as_it_stands(inputs)

    @property
    def held_bytes(self) -> int:
        """What the recordings keep of memory between two passes."""
        return self.pool.size_bytes

    def _begin_anew(self, key: Any, inputs: tuple[Any, ...]) -> None:
        """Do a pass of a model that is not known yet, or has changed; and look what it is made of."""
        self._held.clear()
        self._seen = {key}
        self._changes += 1
        self.as_it_stands(inputs)  # first: layers find out in it which of them are computed as one
        modules = [module for _, module in self._model.named_modules()]
        self._is_safe = all(map(_is_replayable, modules)) and self._changes <= MOST_CHANGES
        self._holders = [holder for module in modules for holder in _holders(module)]
        self._parts = list(chain.from_iterable(self._holders))

    def _is_unchanged(self) -> bool:
        """Return whether the model is made of the same objects as before."""
        before, now = self._parts or [], list(chain.from_iterable(self._holders))
        return len(now) == len(before) and all(map(is_, now, before))


class ReplayedParts(ReplayedPass):
    """The same for a pass in parts, between which this rank sends, receives and waits: the stages of a pipeline.

        recorded    F0 F1 B0 F2 B1 B2       each part notes its calls; all results share one memory: what a microbatch
                                            has let go of, a later one takes
        replayed    F0 F1 B0 F2 B1 B2       the same parts in the same order, as the schedule has it: so what lies in a
                                            place when it is taken again is not needed any more, as in the recorded pass

    What comes into a part, and what goes out, is copied: messages are not done when a part is.
    """

    _now: Part = staticmethod(as_it_stands)

    def part(self, work: Work, arrays: Sequence[Array]) -> tuple[Sequence[Array], Any]:
        """Return what work makes of some arrays, by the recording of this pass if there is one."""
        return self._now(work, arrays)

    def as_it_stands(self, inputs: tuple[Any, ...], part: Part = as_it_stands) -> Any:
        """Do the pass, its parts as said."""
        self._now = part
        try:
            return super().as_it_stands(inputs)
        finally:
            self._now = as_it_stands

    def _note(self, recorder: Recorder, inputs: tuple[Any, ...]) -> Recording:
        held = _RecordedParts(recorder, self.as_it_stands)
        self.as_it_stands(inputs, held.note)
        return held


class _RecordedParts(Recording):
    """The parts of a pass, in their order: where inputs go, the calls, where results lie, and what else there was."""

    def __init__(self, recorder: Recorder, run: Callable[[tuple[Any, ...], Part], Any]) -> None:
        super().__init__(recorder, [], None)
        self._run = run
        self._parts: list[tuple[list[Array], tuple[Call, ...], list[Array], Any]] = []

    def note(self, work: Work, arrays: Sequence[Array]) -> tuple[Sequence[Array], Any]:
        """Do a part, and note it."""
        recorder = self.recorder
        first, places = len(recorder.calls), list(map(recorder.copy, arrays))
        with recorder.running():
            results, rest = work(*places)
        recorder.loose.clear()  # gradients of what came in: they go out as copies
        calls = tuple(recorder.calls[first:])
        self._parts.append((list(map(alias, places)), calls, list(map(alias, results)), rest))
        return [each.copy(order="K") for each in results], rest

    def replay(self, inputs: tuple[Any, ...], mode: Mode) -> Any:
        """Do the pass again, its parts by their calls."""
        coming = iter(self._parts)

        def again(_work: Work, arrays: Sequence[Array]) -> tuple[Sequence[Array], Any]:
            places, calls, results, rest = next(coming)
            for place, array in zip(places, arrays, strict=True):
                place[...] = array
            make(calls, current())
            return [each.copy(order="K") for each in results], rest

        return self._run(inputs, again)


def _is_own_loss(loss: SumLoss) -> bool:
    """Return whether a loss is nnmpi's own."""
    return type(loss) is SumError or (type(loss) is SumCrossEntropy and loss.is_own)


def _is_replayable(module: Module) -> bool:
    """Return whether a module decides nothing by values: it is nnmpi's own, or its class itself says so."""
    kind = type(module)
    own = kind.__module__.partition(".")[0] == OWN or vars(kind).get("replayable") is True
    return own and "forward" not in vars(module)


def _holders(module: Module) -> Iterator[Iterable[object]]:
    """Yield what goes through what a module is made of, as it is at that time; where each begins is told, too."""
    own = vars(module)
    yield from ((own,), own.values())
    for value in own.values():
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
