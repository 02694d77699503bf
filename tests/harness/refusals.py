"""What a rank is told: each catches its own error, so that no rank leaves the others waiting, and
all compare.
"""

from collections.abc import Callable

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
