"""What a rank is told: each catches its own error, so that no rank leaves the others waiting, and
all compare.
"""

from functools import partial

import pytest

from nnmpi.base.errors import DataError, UsageError

Kind = type[BaseException] | tuple[type[BaseException], ...]


def caught(call, kind=Exception):
    """Return the error of a kind that a call raises; None if it raises none."""
    try:
        call()
    except kind as error:
        return error
    return None


def told(kind, call):
    """Return the sentence of the error of a kind that a call raises; nothing if it raises none."""
    error = caught(call, kind)
    return "" if error is None else str(error)


def told_on_all(group, call, kind):
    """Return the sentence of the error of a kind that a call raises on all ranks alike."""
    text = told(kind, call)
    assert text, "nothing was raised"
    assert group.gather(text) == [text] * group.size
    return text


def refuses(kind, match, call, /, *given, **options):
    """Fail unless a call raises an error of a kind, with this sentence."""
    with pytest.raises(kind, match=match):
        call(*given, **options)


usage_error, data_error = partial(refuses, UsageError), partial(refuses, DataError)
