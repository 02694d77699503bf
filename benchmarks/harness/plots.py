"""Figures, which `nnmpi.pages.picture` makes and writes: whether they can be drawn, and their
colours.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from nnmpi.errors import UsageError


def check_can_draw(option: str) -> None:
    """Make sure that matplotlib is there, before anything is measured.

    Args:
        option: what asks for the picture, for the error.

    Raises:
        UsageError: when it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{option} needs matplotlib; install it (pip install matplotlib) or leave {option} out"
        )


def colours() -> Sequence[Any]:
    """Return ten colours that can be told apart."""
    return importlib.import_module("matplotlib").colormaps["tab10"].colors
