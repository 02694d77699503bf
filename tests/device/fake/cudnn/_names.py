"""What the real frontend takes."""

import functools
import json
from pathlib import Path
from typing import Any


@functools.cache
def snapshot() -> dict[str, Any]:
    """Return what survey.py wrote down."""
    read: dict[str, Any] = json.loads((Path(__file__).parent / "snapshot.json").read_text())
    return read


def check(function: str, given: dict[str, Any]) -> None:
    """Refuse names of arguments that the real function does not take."""
    unknown = set(given) - set(snapshot()["functions"][function])
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument {sorted(unknown)[0]!r}")
