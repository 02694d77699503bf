"""The doubles of CuPy's bindings.

As in CuPy, a module is asked for as an attribute of this one, which loads the library it is for; to
import it by its own name works only if that was done before, or if the system finds the library by
itself, which it does not here.
"""

import importlib
from typing import Any

LOADED: set[str] = set()


def __getattr__(name: str) -> Any:
    if name != "cublas":
        raise AttributeError(
            f"module 'cupy_backends.cuda.libs' has no attribute {name!r} in the double"
        )
    LOADED.add(name)
    return importlib.import_module(f"cupy_backends.cuda.libs.{name}")
