"""What a rank is told: each catches its own error, so that no rank leaves the others waiting, and
all compare.
"""

from collections.abc import Callable
from functools import partial

import pytest

from nnmpi import Group
from nnmpi.base.errors import DataError, UsageError

Kind = type[BaseException] | tuple[type[BaseException], ...]


def caught(call: Callable[[], object], kind: Kind = Exception) -> BaseException | None:
    """Return the error of a kind that a call raises; None if it raises none."""
    try:
        call()
    except kind as error:
        return error
    return None


def told(kind: Kind, call: Callable[[], object]) -> str:
    """Return the sentence of the error of a kind that a call raises; nothing if it raises none."""
    error = caught(call, kind)
    return "" if error is None else str(error)


def told_on_all(group: Group, call: Callable[[], object], kind: Kind) -> str:
    """Return the sentence of the error of a kind that a call raises on all ranks alike."""
    text = told(kind, call)
    assert text, "nothing was raised"
    assert group.gather(text) == [text] * group.size
    return text


def refuses(kind: Kind, match: str, call: Callable[..., object], /, *given, **options):
    """Fail unless a call raises an error of a kind, with this sentence."""
    with pytest.raises(kind, match=match):
        call(*given, **options)


usage_error, data_error = partial(refuses, UsageError), partial(refuses, DataError)
