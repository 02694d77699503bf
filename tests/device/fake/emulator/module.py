"""`RawModule` as CuPy has it, for sources with extern C kernels."""

from functools import partial
from typing import Any

from .build import library
from .launch import launch


class RawModule:
    """All kernels of a source. Compiled when the first one is asked for."""

    def __init__(self, code: str, *, options: tuple[str, ...] = ()) -> None:
        if not isinstance(options, tuple) or not all(isinstance(option, str) for option in options):
            raise TypeError(f"options are a tuple of str, not {options!r}")
        self.code, self.options = code, options

    def get_function(self, name: str) -> Any:
        """Return one of its kernels, which is called with grid, block and arguments; see `launch`.

        Raises:
            CompileError: when g++ refuses the source or warns of it.
            LookupError: when the source has no such kernel.
        """
        compiled, found = library(self.code, self.options)
        if name not in found:
            raise LookupError(f"the source has no kernel {name}; it has {', '.join(sorted(found))}")
        return partial(launch, compiled[f"emulated_launch_{name}"], name, found[name])
