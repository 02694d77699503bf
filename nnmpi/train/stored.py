"""What a checkpoint's state.json must hold: looked at once, as it is read, so that nothing after it has to doubt it.

Its checksum says that nobody has changed it, not that the program which wrote it was right.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from reprlib import repr as shortened
from sys import float_info
from typing import Any, NamedTuple

from nnmpi.errors import CheckpointError
from nnmpi.mesh import AXES
from nnmpi.train.totals import Totals


class _Kind(NamedTuple):
    """A kind of value: its name in messages, and whether a value is of it."""

    words: str
    fits: Callable[[Any], bool]


def check_stored(values: Mapping[str, Any], file: Path) -> None:
    """Check that these values are of the kinds that a run writes.

    Args:
        file: where they come from, for the message.

    Raises:
        CheckpointError: for a value that is missing or of another kind.
    """
    for name, kind in _KINDS.items():
        if name not in values:
            if name in _OPTIONAL or (name == "ranks" and "layout" in values):
                continue
            raise CheckpointError(f"{file} lacks {name}, {kind.words}; {_WAY}")
        if not kind.fits(values[name]):
            raise CheckpointError(f"{file} has {name} {shortened(values[name])}, not {kind.words}; {_WAY}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def _is_sum(value: Any) -> bool:
    """Return whether these are totals; a version that knew fewer of them has written fewer."""
    known = {each.name for each in fields(Totals)}
    return isinstance(value, dict) and value.keys() <= known and all(map(_is_number, value.values()))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_layout(value: Any) -> bool:
    return (
        isinstance(value, dict) and value.keys() == {*AXES} and all(_is_count(each) and each for each in value.values())
    )


def _are_algorithms(value: Any) -> bool:
    return _are_names(value) or (isinstance(value, dict) and all(map(_are_names, value.values())))


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("steps"))


def _are_clocks(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or not _is_number(value.get("now_s")):
        return False
    clocks = value.get("clocks")
    steps = all(_are_counts(value.get(name)) for name in ("steps", "taken"))
    return steps and isinstance(clocks, list) and all(map(_are_counts, clocks))


_WAY = "remove the folder with that file to go on from an older checkpoint"
_COUNT = _Kind("a whole number from 0 on", _is_count)
_NUMBER = _Kind("a number", _is_number)
_SUMS = _Kind("sums by name", _is_sum)
_KINDS = {
    **dict.fromkeys(("step", "epoch", "batch", "best_epoch", "samples"), _COUNT),
    **dict.fromkeys(("best_accuracy", "elapsed_s"), _NUMBER),
    **dict.fromkeys(("window", "in_epoch"), _SUMS),
    "virtual": _Kind("null, or the clocks of virtual workers", _are_clocks),
    "optimizer": _Kind('numbers by name with "steps"', _is_optimizer),
    "ranks": _Kind("a whole number from 1 on", lambda value: _is_count(value) and value > 0),
    "layout": _Kind("whole numbers from 1 on for dp, pp and tp", _is_layout),
    "algorithms": _Kind("names of all-reduces, or lists of them by part of the model", _are_algorithms),
    "cuts": _Kind("whole numbers from 0 on", _are_counts),
}
_OPTIONAL = ("virtual", "layout", "algorithms", "cuts")  # versions before them have not written them
