"""Starting an emulated kernel: the arguments as CuPy passes them, each compared with the kernel's own parameters."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from .source import Parameter

_LIMITS = (2**31 - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)


class LaunchError(Exception):
    """A launch that CUDA would refuse, that would silently compute nonsense, or that went wrong."""


def launch(function: Any, name: str, parameters: Sequence[Parameter], grid: Any, block: Any, args: Any) -> None:
    """Run a kernel to its end.

    Raises:
        LaunchError: for arguments that do not fit the parameters in number, size or kind, sizes that CUDA refuses, and
            whatever the emulator finds while it runs.
    """
    if not all(isinstance(each, tuple) for each in (grid, block, args)):
        raise LaunchError(f"{name}: grid, block and arguments are tuples")
    if len(args) != len(parameters):
        raise LaunchError(f"{name} takes {len(parameters)} arguments, not {len(args)}")
    # as CuPy has it, which makes 1 of 0
    sizes = [max(1, int(size)) for each in (grid, block) for size in (*each, 1, 1)[:3]]
    threads = sizes[3] * sizes[4] * sizes[5]
    if any(a > b for a, b in zip(sizes, (*_LIMITS, *_BLOCK_LIMITS), strict=True)) or threads > 1024:
        raise LaunchError(f"{name}: a grid of {grid} blocks of {block} threads is too large")
    values = [_value(name, each, parameter) for each, parameter in zip(args, parameters, strict=True)]
    message = ctypes.create_string_buffer(400)
    addresses = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
    if function((ctypes.c_uint * 6)(*sizes), addresses, 0, message, ctypes.c_size_t(400)):
        raise LaunchError(f"{name}: {message.value.decode()}")


def is_device_array(x: Any) -> bool:
    """Return whether x is an array of a fake device: its memory has a real address."""
    return hasattr(getattr(x, "data", None), "ptr")


def _value(name: str, x: Any, parameter: Parameter) -> Any:
    """Return an argument as what ctypes passes: an address, or a number of the size that CuPy gives it."""
    where = f"{name}'s argument {parameter.name} ({parameter.declared})"
    if is_device_array(x):
        if not parameter.is_pointer:
            raise LaunchError(f"{where} got an array")
        if not x.flags.c_contiguous:
            raise LaunchError(f"{where} got an array with gaps")
        if parameter.dtype is not None and x.dtype != parameter.dtype:
            raise LaunchError(f"{where} got an array of {x.dtype}")
        return ctypes.c_uint64(x.data.ptr)
    if isinstance(x, bool | int | float):  # of Python: CuPy makes 1, 8 and 8 bytes of them
        x = np.bool_(x) if isinstance(x, bool) else np.int64(x) if isinstance(x, int) else np.float64(x)
    if not isinstance(x, np.generic):
        raise LaunchError(f"{where} got a {type(x).__name__}")
    if parameter.is_pointer:
        if x.dtype != np.uint64 or x != 0:
            raise LaunchError(f"{where} is an address, and got {x!r}; numpy.uint64(0) stands for none")
        return ctypes.c_uint64(0)
    kinds = {"b": "b", "i": "iu", "u": "iu", "f": "f", "V": "V"}[x.dtype.kind]
    if parameter.dtype.itemsize != x.dtype.itemsize or parameter.dtype.kind not in kinds:
        raise LaunchError(f"{where} got {x!r} of {x.dtype}")
    return (ctypes.c_char * x.dtype.itemsize).from_buffer_copy(x.tobytes())
