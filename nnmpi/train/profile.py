"""`nnmpi train --profile`: the seconds of a step by layer, forward and backward, and what is left.

A forward hook of each layer notes when its result is there, and puts an operation behind it which
notes when the result's gradient is there. Between two such times lies a layer's work:

    forward    | 0 | 1 | 2 | loss |          a layer ends with its result
    backward   | loss | 2 | 1 | 0 |          and begins with its result's gradient

The timeline of the step has the ends of both passes, and the exchanges and the update. Layers that
are computed again within a backward pass have a row of their own. What is in none of them is named
as the rest, so the rows add up to the step.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import nnmpi.base.clock as clock
from nnmpi.backend.array import Array
from nnmpi.base.errors import counted
from nnmpi.base.timeline import Timeline, TraceEvent, tracing
from nnmpi.base.units import aligned, format_seconds
from nnmpi.nn.module import Module
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.placement import Placement
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import NotExported, Traits
from nnmpi.train.run import TrainingRun

WARM_UP, PROFILED = 3, 10  # steps before those that are measured, and these
LOSS, AGAIN = "loss", "recomputed layers"
FORWARD, BACKWARD = "forward", "backward"  # categories of the timeline
KINDS = {"update": "update", "reduce": "sums of gradients", "waiting": "waiting", "input": "input"}


class Noted(Function):
    """x itself; it notes when its gradient is there."""

    __slots__ = ("note",)

    traits = Traits(onnx=NotExported(), tested_in="tests/train/test_profile.py")

    views = True

    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement."""
        placement: Placement = inputs[0].shard.placement
        return placement

    def forward(self, x: Array) -> Array:
        return x

    def backward(self, grad: Array) -> Grads:
        self.note()
        return (grad,)


class Profiler:
    """Measure some steps of a run with --profile, one by one; without it do nothing.

    Args:
        run: whose layers are measured, on this rank.
        say: prints lines.
    """

    def __init__(self, run: TrainingRun, say: Callable[[Sequence[str]], None]) -> None:
        self._run, self._say = run, say
        self._left = WARM_UP + PROFILED if run.config.run.profile else 0
        self._seconds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._others: defaultdict[str, float] = defaultdict(float)
        self._notes: list[tuple[float, str, str]] = []  # time, pass, layer
        self._step_s, self._measured = 0.0, 0

    @property
    def left(self) -> int:
        """The number of steps in the next segment, or 0."""
        return int(self._left > 0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the body's step; after the last one print the table."""
        if not self._left:
            yield
            return
        self._left -= 1
        timeline, model = Timeline(), self._run.trainer.model
        hooks = [
            module.register_forward_hook(partial(self._after, path or "model"))
            for path, module in model.named_modules()
            if not any(True for _ in module.children())
        ]
        self._notes.clear()
        begin_s = self._now()
        try:
            with tracing(timeline):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        if self._left < PROFILED:
            self._step_s += self._now() - begin_s
            self._measured += 1
            self._account(timeline.events)
        if not self._left:
            self._show()

    def finish(self) -> None:
        """Print the table of a run that ended before, or say that there is none."""
        if self._left:
            self._left = 0
            self._show()

    def _show(self) -> None:
        few = f"no profile: the first {WARM_UP} steps are not measured, and no more were made"
        if self._run.group.is_root:
            self._say(self.lines() if self._measured else [few])

    def _now(self) -> float:
        """Return the time at which the device's work is done."""
        self._run.backend.synchronize()
        return clock.now()

    def _after(self, path: str, module: Module, inputs: Any, result: Any) -> Any:
        """Note a layer's result; return it so that its gradient is noted."""
        self._notes.append((self._now(), FORWARD, path))
        if not (isinstance(result, Tensor) and result.requires_grad):
            return None
        return Noted(lambda: self._notes.append((self._now(), BACKWARD, path)))(result)

    def _account(self, events: Sequence[TraceEvent]) -> None:
        covered: list[tuple[float, float]] = []  # what is counted already, such as a whole pass
        for event in events:
            if event.category in (FORWARD, BACKWARD):
                covered.append((event.begin_s, event.end_s))
            if event.category == FORWARD:
                self._account_forward(event)
            elif event.category == BACKWARD:
                self._account_backward(event)
        for event in events:
            if event.category in KINDS:
                self._others[KINDS[event.category]] += _uncovered_s(event, covered)
                covered.append((event.begin_s, event.end_s))

    def _within(self, event: TraceEvent) -> list[tuple[float, str, str]]:
        return [note for note in self._notes if event.begin_s <= note[0] <= event.end_s]

    def _has_loss(self, event: TraceEvent) -> bool:
        """Return whether a pass, such as "2F0", is of the last stage."""
        segments = [*chain.from_iterable(self._run.trainer.arrangement.segments)]
        return int(re.split("[A-Z]", event.name)[0]) == max(len(segments) - 1, 0)

    def _account_forward(self, event: TraceEvent) -> None:
        last_s = event.begin_s
        for at, _, path in self._within(event):
            self._seconds[path][0] += at - last_s
            last_s = at
        if self._has_loss(event):
            self._seconds[LOSS][0] += event.end_s - last_s

    def _account_backward(self, event: TraceEvent) -> None:
        last_s, layer = event.begin_s, LOSS if self._has_loss(event) else ""
        for at, kind, path in [*self._within(event), (event.end_s, BACKWARD, "")]:
            if layer == AGAIN:
                self._others[AGAIN] += at - last_s
            elif layer:
                self._seconds[layer][1] += at - last_s
            last_s, layer = at, path if kind == BACKWARD else AGAIN

    def lines(self) -> list[str]:
        """Return the table of a step's mean times."""
        kinds = {
            path or "model": type(module).__name__
            for path, module in self._run.trainer.model.named_modules()
        }
        rows = list[tuple[str, float, float, float]]()
        for path in (*kinds, LOSS):
            if path in self._seconds:
                forward, backward = self._seconds[path]
                name = f"{path} {kinds.get(path, '')}".strip()
                rows.append((name, forward, backward, forward + backward))
        rows += [(name, 0.0, 0.0, seconds) for name, seconds in self._others.items()]
        rest_s = self._step_s - sum(both for *_, both in rows)
        rows += [("the rest", 0.0, 0.0, rest_s), ("step", 0.0, 0.0, self._step_s)]
        table = [("layer", FORWARD, BACKWARD, "both", "share")]
        for name, *seconds in rows:
            shown = [self._text(value) for value in seconds]
            table.append((name, shown[0], shown[1], shown[2], self._share(seconds[2])))
        size = self._run.group.size
        ranks = f" on rank 0 of {size}" if size > 1 else ""
        return [
            f"seconds of a step by layer{ranks}, the mean of {counted(self._measured, 'step')};",
            "a layer has what is computed since the one before it; no step is replayed",
            *aligned(table),
        ]

    def _share(self, seconds: float) -> str:
        return f"{100 * seconds / self._step_s:.1f} %"

    def _text(self, seconds: float) -> str:
        return format_seconds(seconds / self._measured, 3) if seconds else ""


def _uncovered_s(event: TraceEvent, covered: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of an event that are in none of these intervals."""
    left_s, at = 0.0, event.begin_s
    for begin_s, end_s in sorted(covered):
        if end_s > at and begin_s < event.end_s:
            left_s += max(begin_s - at, 0.0)
            at = max(at, end_s)
    return left_s + max(event.end_s - at, 0.0)
