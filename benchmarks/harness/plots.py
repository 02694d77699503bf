"""Colours of figures, and a check for matplotlib; `nnmpi.base.picture` makes the figures."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from nnmpi.base.errors import UsageError


def check_can_draw(option: str) -> None:
    """Refuse to start a measurement whose pictures could not be drawn.

    Args:
        option: the option that asks for pictures, for the error.

    Raises:
        UsageError: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{option} needs matplotlib; install it (pip install matplotlib) or leave {option} out"
        )


def colours() -> Sequence[Any]:
    """Return ten colours that can be told apart."""
    return importlib.import_module("matplotlib").colormaps["tab10"].colors
