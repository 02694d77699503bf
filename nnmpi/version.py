"""Which nnmpi this is: setup.cfg has the same number, and a test compares them; and with what it computes."""

import platform

VERSION = "0.1.0"


def versions() -> dict[str, str]:
    """Return what numbers depend on besides the machine: versions by name."""
    from numpy import __version__ as numpy  # after the threads of its BLAS are set

    return {"nnmpi": VERSION, "python": platform.python_version(), "numpy": numpy}
