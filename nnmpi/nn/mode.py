"""The mode of a pass: training or evaluation, and the keys of its random numbers.

Outside of `training(...)` a model evaluates: dropout drops nothing, batch normalization uses
running statistics.

    with nn.training(seed=0, step=17, first_row=batch.first_row):
        loss = ...
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from nnmpi.backend.recording import active, call
from nnmpi.base.launcher import read_launch
from nnmpi.tensor.tensor import Tensor

__all__ = ["continued", "current", "evaluation", "observed", "training"]


class Mode(NamedTuple):
    """The settings of a pass that layers read.

    A context variable rather than an argument of `forward`: so users' modules pass them on without
    mentioning them.

    Attributes:
        training: whether this is a training pass.
        seed: of the run.
        step: the number of the update; with seed and layer name it keys dropout masks.
        first_row: the index in the global batch of this rank's first sample.
        recomputing: whether this pass recomputes an earlier one. Layers then leave their running
            statistics unchanged.
        observe: called as observe(module, result) after every module's forward, or None.
        weight: the factor of the gradient of a sum of losses; None if not set.
        memory: the layers' state from earlier tokens, by full name; None outside of generation.
        dropped: the layers whose dropout masks this pass has drawn; None outside of training, and
            in a recomputation.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    first_row: int = 0
    recomputing: bool = False
    observe: Callable[[Any, Any], None] | None = None
    weight: float | None = None
    memory: dict[str, Any] | None = None
    dropped: set[Any] | None = None


_EVALUATING = Mode()
_mode: ContextVar[Mode] = ContextVar("nnmpi_mode", default=_EVALUATING)
# the last one that was left in which masks were drawn: a loss may be used outside of its block
_left: ContextVar[Mode] = ContextVar("nnmpi_left_mode", default=_EVALUATING)


class _ReadMode(Mode):
    """The mode in a step that is recorded: which of its numbers Python reads is noted."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        self._note(*_NUMBERS)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self._note(*_NUMBERS)
        return super().__iter__()

    def _note(self, *names: str) -> None:
        recorder = active()
        if recorder is not None:
            for name in names:
                recorder.note_mode(name, partial(_read, name))


def _read(name: str) -> Any:
    return getattr(_mode.get(), name)


_NUMBERS = "seed", "step", "first_row"  # which change from call to call


def _noted(name: str) -> Any:
    plain = vars(Mode)[name]

    def read(self: _ReadMode) -> Any:
        self._note(name)
        return plain.__get__(self)

    return property(read)


for _name in _NUMBERS:
    setattr(_ReadMode, _name, _noted(_name))


def current() -> Mode:
    """Return the current mode."""
    mode = _mode.get()
    return mode if active() is None else _ReadMode._make(tuple(mode))


class within(ContextDecorator, AbstractContextManager[None]):
    """Context that changes the mode; a replay of a step enters it again.

    Args:
        change: the mode before -> the mode within; called at each entry, also in replays.
    """

    varies = ("_before",)  # see `program.compare`: what a failed step has left

    def __init__(self, change: Callable[[Mode], Mode]) -> None:
        self._change = change
        self._before: list[tuple[Mode, Mode]] = []  # of each entry: the mode before, and within

    def _recreate_cm(self) -> within:
        return within(self._change)  # threads that call a decorated function share no state

    def __enter__(self) -> None:
        call(self._enter, writes=())

    def __exit__(self, *error: object) -> None:
        try:
            call(self._leave, writes=())
        except BaseException:  # Ctrl-C meanwhile: a model must not stay in training mode
            if self._before and _mode.get() is self._before[-1][1]:
                self._leave()
            raise

    def _enter(self) -> None:
        before = _mode.get()
        mode = self._change(before)
        self._before.append((before, mode))
        _mode.set(mode)

    def _leave(self) -> None:
        left = _mode.get()
        _mode.set(self._before[-1][0])  # first, see __exit__
        self._before.pop()
        if left.dropped:
            _left.set(left)


def warn_later(x: Tensor) -> None:
    """Arrange a warning in the backward pass if dropout or batch norm ran in evaluation mode."""
    if x.tape is not None and _mode.get() is _EVALUATING:  # the default, set by no context
        x.tape.find().warning = _warn_of_evaluation


def _warn_of_evaluation() -> None:
    launch = read_launch(os.environ)
    if launch is None or launch.rank == 0:  # once for all ranks
        warnings.warn(
            "this model evaluates: dropout drops nothing and batch normalization uses its running"
            " statistics; compute the loss within `with nn.training(step=optimizer.steps):`, or"
            " within `with nn.evaluation():` to mean it",
            stacklevel=3,  # the caller of Tensor.backward
        )


def training(
    seed: int = 0,
    step: int = 0,
    first_row: int = 0,
    recomputing: bool = False,
    weight: float | None = None,
) -> AbstractContextManager[None]:
    """Run models in training mode: dropout drops, batch normalization uses batch statistics.

    Args:
        seed: of the run.
        step: the number of the update; with the seed and a layer's name it keys dropout masks.
        first_row: the index of this rank's first sample in the global batch.
        recomputing: whether this pass recomputes an earlier one; running statistics then stay
            unchanged.
        weight: the factor of the gradient of a sum of losses, such as 1 / batch.global_targets, for
            layers with a loss of their own (`nn.MixtureOfExperts`); None for a mean over a pass.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).initialize(seed=0)
        >>> with nn.training():  # statistics of the batch; outside, running statistics
        ...     y = model(np.eye(3, dtype="float32"))
        >>> bool(abs(y.numpy().mean(axis=0)).max() < 1e-6)
        True
    """

    def changed(mode: Mode) -> Mode:
        return mode._replace(
            training=True,
            seed=seed,
            step=step,
            first_row=first_row,
            recomputing=recomputing,
            weight=weight,
            dropped=None if recomputing else set(),
        )

    return within(changed)


def evaluation() -> AbstractContextManager[None]:
    """Run models in evaluation mode, even inside a `training` block."""
    return _within(training=False)


def continued(memory: dict[str, Any]) -> AbstractContextManager[None]:
    """Treat each pass as the continuation of the previous one, for token-by-token generation.

    The first pass reads the prompts, (batch, time), each later one the next token, (batch, 1).
    Attention caches its keys and values, recurrent layers store their state, and positions continue
    from the last pass. Layers that process each token by itself store nothing. The stored values
    have no graph, so there is no backward pass.

    Args:
        memory: receives the stored values by full name; an empty dictionary for new sequences.
    """
    return _within(training=False, memory=memory)


def observed(observe: Callable[[Any, Any], None]) -> AbstractContextManager[None]:
    """Call observe(module, result) after the forward of every module."""
    return _within(observe=observe)


def _within(**changes: Any) -> within:
    return within(lambda mode: mode._replace(**changes))


def restore(mode: Mode) -> None:
    """Set the mode permanently, for a pass from its beginning. Prefer the contexts above."""
    begins = not mode.recomputing and mode.dropped
    _mode.set(mode._replace(dropped=set()) if begins else mode)


def note_mask(layer: Any) -> None:
    """Warn of a layer that draws its dropout mask a second time in a pass: it is the same mask."""
    dropped = _mode.get().dropped
    if dropped is None:
        return
    if layer in dropped:
        warnings.warn(
            f"the dropout of {layer.path!r} is used twice in a pass, and drops the same elements"
            " both times: a mask depends on the layer's name and the step; make a layer for each"
            " use, or a block with nn.training(step=...) for each pass",
            stacklevel=3,
        )
    dropped.add(layer)


def last_masks(model: Any) -> Mode | None:
    """Return the mode in which a model drew the last dropout masks; None if another one drew them.

    It is the present mode, or the one that was left last.
    """
    layers = {layer for _, layer in model.named_modules()}
    for mode in (_mode.get(), _left.get()):
        if mode.dropped and not layers.isdisjoint(mode.dropped):
            return mode
    return None
