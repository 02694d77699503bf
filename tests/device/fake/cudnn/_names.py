"""What the real frontend takes."""

import enum
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


data_type = enum.Enum("data_type", snapshot()["enums"]["data_type"])
heur_mode = enum.Enum("heur_mode", snapshot()["enums"]["heur_mode"])
numerical_note = enum.Enum("numerical_note", snapshot()["enums"]["numerical_note"])
