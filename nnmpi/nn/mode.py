"""The mode in which a model runs: training or evaluation, and what randomness depends on.

Outside of `training(...)` a model evaluates: dropout passes everything, batch normalization uses running statistics.

    with nn.training(seed=0, step=17, first_row=batch.first_row):
        loss = ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Mode:
    """What layers may ask about the run that they are part of.

    Attributes:
        training: whether this is a training pass.
        seed: of the run.
        step: the number of the update; with seed and layer name it keys dropout masks.
        first_row: the place in the global batch of this rank's first sample.
        again: whether this pass repeats one that has been, whose results were not kept: what a layer updates on its way
            (running statistics) is left alone then.
        observe: called as observe(module, result) after every module's forward, or None.
    """

    training: bool = False
    seed: int = 0
    step: int = 0
    first_row: int = 0
    again: bool = False
    observe: Callable[[Any, Any], None] | None = None


_EVALUATING = Mode()
_mode: ContextVar[Mode] = ContextVar("nnmpi_mode", default=_EVALUATING)


def current() -> Mode:
    """Return the mode that models run in now."""
    return _mode.get()


@contextmanager
def training(seed: int = 0, step: int = 0, first_row: int = 0, again: bool = False) -> Iterator[None]:
    """Run models in training mode: dropout drops, batch normalization uses the batch and updates its statistics.

    The arguments are `Mode`'s.
    """
    token = _mode.set(Mode(True, seed, step, first_row, again, _mode.get().observe))
    try:
        yield
    finally:
        _mode.reset(token)


@contextmanager
def evaluation() -> Iterator[None]:
    """Run models in evaluation mode, also inside a `training` block."""
    token = _mode.set(replace(_mode.get(), training=False))
    try:
        yield
    finally:
        _mode.reset(token)


@contextmanager
def observed(observe: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call observe(module, result) after the forward of every module."""
    token = _mode.set(replace(_mode.get(), observe=observe))
    try:
        yield
    finally:
        _mode.reset(token)
