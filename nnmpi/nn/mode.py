"""The mode in which a model runs: training or evaluation, and what randomness depends on.

Outside of `training(...)` a model evaluates: dropout passes everything, batch normalization uses
running statistics.

    with nn.training(seed=0, step=17, first_row=batch.first_row):
        loss = ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ContextDecorator
from contextvars import ContextVar
from typing import Any, NamedTuple

from nnmpi.backend.recording import perform
from nnmpi.tensor.tensor import Tensor


class Mode(NamedTuple):
    """What layers may ask about the run that they are part of.

    Attributes:
        training: whether this is a training pass.
        seed: of the run.
        step: the number of the update; with seed and layer name it keys dropout masks.
        first_row: the place in the global batch of this rank's first sample.
        again: whether this pass repeats one that has been, whose results were not kept: what a
            layer updates on its way (running statistics) is left alone then.
        observe: called as observe(module, result) after every module's forward, or None.
        fused: whether layers that can be computed as one operation are (see `nn.container.fuse`).
        weight: what the gradient of a sum of losses is multiplied by; None where nobody has said
            so.
        memory: what layers keep of the tokens that came in earlier passes, by their full names;
            None where each pass is for itself.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    first_row: int = 0
    again: bool = False
    observe: Callable[[Any, Any], None] | None = None
    fused: bool = True
    weight: float | None = None
    memory: dict[str, Any] | None = None

    @property
    def joins(self) -> bool:
        """True if layers may be fused: no observer needs each layer's output."""
        return self.fused and self.observe is None


_EVALUATING = Mode()
_mode: ContextVar[Mode] = ContextVar("nnmpi_mode", default=_EVALUATING)


def current() -> Mode:
    """Return the mode that models run in now."""
    return _mode.get()


class within(ContextDecorator, AbstractContextManager[None]):
    """Context that changes the mode; a replayed step enters it again.

    Args:
        changes: asked, each time, for the attributes that are others.
    """

    def __init__(self, changes: Callable[[], Mapping[str, Any]]) -> None:
        self._changes = changes
        self._before: list[Mode] = []

    def _recreate_cm(self) -> within:
        return within(self._changes)  # a decorated function may be called by several threads

    def __enter__(self) -> None:
        perform(self._enter)

    def __exit__(self, *error: object) -> None:
        perform(self._leave)

    def _enter(self) -> None:
        mode = _mode.get()
        self._before.append(mode)
        _mode.set(mode._replace(**self._changes()))

    def _leave(self) -> None:
        _mode.set(self._before.pop())


def warn_later(x: Tensor) -> None:
    """Arrange a warning in the backward pass if dropout or batch norm ran in evaluation mode."""
    if x.tape is not None and current() is _EVALUATING:  # and no block's mode
        x.tape.find().warning = (
            "this model evaluates: dropout drops nothing and batch normalization uses its running"
            " statistics; compute the loss within `with nn.training(step=optimizer.steps):`, or"
            " within `with nn.evaluation():` to mean it"
        )


def training(
    seed: int = 0,
    step: int = 0,
    first_row: int = 0,
    again: bool = False,
    weight: float | None = None,
) -> AbstractContextManager[None]:
    """Run models in training mode: dropout drops, batch normalization uses batch statistics.

    Args:
        seed: of the run.
        step: the number of the update; with the seed and a layer's name it keys dropout masks.
        first_row: the place of this rank's first sample in the global batch.
        again: whether this pass repeats one whose results were not kept; running statistics are
            then left alone.
        weight: what the gradient of a sum of losses is multiplied by, such as 1 /
            batch.global_targets, for layers that have a loss of their own (`nn.MixtureOfExperts`);
            None for a mean over a pass.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).initialize(seed=0)
        >>> with nn.training():  # statistics of the batch; outside, running statistics
        ...     y = model(np.eye(3, dtype="float32"))
        >>> bool(abs(y.numpy().mean(axis=0)).max() < 1e-6)
        True
    """
    return _within(
        training=True, seed=seed, step=step, first_row=first_row, again=again, weight=weight
    )


def evaluation() -> AbstractContextManager[None]:
    """Run models in evaluation mode, even inside a `training` block."""
    return _within(training=False)


def continued(memory: dict[str, Any]) -> AbstractContextManager[None]:
    """Treat each pass as the continuation of the previous one, for token-by-token generation.

    The first pass is of the sequences' beginnings, (batch, time), and each later one of the next
    token, (batch, 1). Attention keeps its keys and values, recurrent layers keep their state, and
    positions are counted on; layers that work on each token by itself need nothing. Values are no
    part of the graph: there is no backward pass.

    Args:
        memory: where they keep it, by full name; an empty dictionary for new sequences.
    """
    return _within(training=False, memory=memory)


def observed(observe: Callable[[Any, Any], None]) -> AbstractContextManager[None]:
    """Call observe(module, result) after the forward of every module."""
    return _within(observe=observe)


def unfused() -> AbstractContextManager[None]:
    """Compute each layer by itself: a model cut between any layers then gives the same bits."""
    return _within(fused=False)


def _within(**changes: Any) -> within:
    return within(lambda: changes)


def restore(mode: Mode) -> None:
    """Set the mode permanently. Prefer the contexts above."""
    _mode.set(mode)
