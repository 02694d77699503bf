"""Where a run stands: what a checkpoint's state.json holds beside the optimizer's scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from sys import float_info
from typing import Any, NamedTuple

from nnmpi.compose.stats import EvalReport, Totals
from nnmpi.errors import CheckpointError, shortened
from nnmpi.mesh import AXES, SP


@dataclass(frozen=True)
class Extent:
    """How long a run is.

    Attributes:
        epochs, steps: passes over the training data, and updates; the run ends with whichever comes first.
        train_batches, test_batches: batches of one pass over the training data, and over the test data.
    """

    epochs: int
    steps: int
    train_batches: int
    test_batches: int

    def passes(self, state: RunState) -> float:
        """Return the passes over the training data so far, with the fraction of the present one."""
        return state.epoch + state.batch / self.train_batches


@dataclass
class RunState:
    """A run between two steps. (Making a frozen one takes longer, and an epoch has several.) Nobody writes to one.

    Attributes:
        step: updates done.
        epoch, batch: the next batch: its epoch (from 0), and its number in the epoch.
        window: sums since the last line of training metrics.
        in_epoch: sums since the epoch began.
        best, best_step: the accuracy of the best evaluation so far, of tokens and quantities its loss, and after how
            many steps it was; 0 for none.
        elapsed_s: seconds of training, evaluating and saving, over all parts of a resumed run.
        samples: rows of the training set, which `batch` counts in.
        data: what tells the data from others, see `Inputs.identity`; empty in checkpoints of older versions.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    window: Totals = field(default_factory=Totals)
    in_epoch: Totals = field(default_factory=Totals)
    best: float = 0.0
    best_step: int = 0
    elapsed_s: float = 0.0
    samples: int = 0
    data: str = ""

    def after(self, totals: Totals, window: Totals) -> RunState:
        """Return the state after the steps that have these sums, with those since the last line of metrics."""
        step, batch = self.step + totals.steps, self.batch + totals.steps
        return replace(self, step=step, batch=batch, in_epoch=self.in_epoch.plus(totals), window=window)

    def after_epoch(self) -> RunState:
        """Return the state at the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, batch=0, in_epoch=Totals())

    def after_evaluation(self, report: EvalReport, by_loss: bool) -> RunState:
        """Return the state with this evaluation of its weights as the best, if it is better."""
        value, sign = (report.loss, -1) if by_loss else (report.accuracy, 1)
        better = isfinite(value) and (not self.best_step or sign * value > sign * self.best)
        return replace(self, best=value, best_step=self.step) if better else self

    def check(self, extent: Extent, folder: Path) -> None:
        """Check that epoch and batch are those of the step.

        Raises:
            CheckpointError: when they are not.
        """
        batches = extent.train_batches
        if self.step != self.epoch * batches + self.batch or self.batch >= batches:
            raise CheckpointError(
                f"the last checkpoint in {folder} is of step {self.step}, epoch {self.epoch} and batch {self.batch}, "
                f"which do not go together with {batches} batches in an epoch; remove it to go on from an older one"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunState:
        """Return what `to_json` gave; other values in the mapping are left alone.

        Raises:
            CheckpointError: when a value is missing.
        """
        try:
            there = {**_LATER, **values}
            plain = {name: there[name] for name in cls.__dataclass_fields__}
            totals = {name: Totals.from_json(plain[name]) for name in ("window", "in_epoch")}
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's state.json lacks a value: {error}") from None
        return cls(**{**plain, **totals})


class _Kind(NamedTuple):
    """A kind of value: its name in messages, and whether a value is of it."""

    words: str
    fits: Callable[[Any], bool]


def check_stored(values: Mapping[str, Any], file: Path) -> None:
    """Check that these values are of the kinds that a run writes.

    Raises:
        CheckpointError: for a value that is missing or of another kind.
    """
    values = {**_LATER, **values}
    for name, kind in _KINDS.items():
        if name not in values:
            raise CheckpointError(f"{file} lacks {name}, {kind.words}; {_WAY}")
        if not kind.fits(values[name]):
            raise CheckpointError(f"{file} has {name} {shortened(repr(values[name]))}, not {kind.words}; {_WAY}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def _is_sum(value: Any) -> bool:
    """Return whether these are the fields of `Totals`."""
    known = {each.name for each in fields(Totals)}
    return isinstance(value, dict) and value.keys() == known and all(map(_is_number, value.values()))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_layout(value: Any) -> bool:
    known = isinstance(value, dict) and value.keys() | {SP} == {*AXES}  # runs of older versions have no sp
    return known and all(_is_count(each) and each for each in value.values())


def _are_algorithms(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_are_names, value.values()))


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("steps"))


_WAY = "remove the folder with that file to go on from an older checkpoint"
_LATER = {"data": ""}  # what checkpoints of older versions lack
_COUNT = _Kind("a whole number from 0 on", _is_count)
_NUMBER = _Kind("a number", _is_number)
_SUMS = _Kind("sums by name", _is_sum)
_KINDS = {
    **dict.fromkeys(("step", "epoch", "batch", "best_step", "samples"), _COUNT),
    **dict.fromkeys(("best", "elapsed_s"), _NUMBER),
    **dict.fromkeys(("window", "in_epoch"), _SUMS),
    "data": _Kind("a text", lambda value: isinstance(value, str)),
    "optimizer": _Kind('numbers by name with "steps"', _is_optimizer),
    "ranks": _Kind("a whole number from 1 on", lambda value: _is_count(value) and value > 0),
    "layout": _Kind("whole numbers from 1 on for dp, pp, tp and sp", _is_layout),
    "algorithms": _Kind("lists of names of all-reduces by part of the model", _are_algorithms),
    "cuts": _Kind("whole numbers from 0 on", _are_counts),
}
