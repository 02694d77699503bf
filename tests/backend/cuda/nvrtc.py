"""CUDA's run-time compiler by its C interface, from NVIDIA's wheel or the system: neither driver
nor CuPy is needed.
"""

import ctypes
import ctypes.util
import importlib.util
from functools import cache
from pathlib import Path

import pytest


class CompileError(Exception):
    """What the compiler said."""


@cache
def library():
    """Return the compiler's library, or skip the test where it is not installed."""
    package = importlib.util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or ()) if package else []
    wheels = [
        path for folder in folders for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))
    ]
    for name in (*map(str, wheels), ctypes.util.find_library("nvrtc")):
        if name and "alt" not in name:
            for beside in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                # 13.0 does not look where it lies itself
                ctypes.CDLL(str(beside), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
    pytest.skip("CUDA's run-time compiler is not installed: nvidia-cuda-nvrtc")


def compiled(source, name, options, form):
    """Return a compiled program, as "CUBIN" or "PTX", and what the compiler said.

    Raises:
        CompileError: when it refuses the source or an option.
    """
    program = ctypes.c_void_p()
    _call(
        "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None
    )
    try:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library().nvrtcCompileProgram(program, len(options), texts)
        log = _text(program, "nvrtcGetProgramLog").decode().rstrip("\0")
        if failed:
            raise CompileError(f"{log}\nwith {' '.join(options)}")
        return _text(program, f"nvrtcGet{form}"), log
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


def _text(program, function):
    size = ctypes.c_size_t()
    _call(f"{function}Size", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _call(function, program, text)
    return text.raw


def _call(function, *args):
    code = getattr(library(), function)(*args)
    if code:
        raise CompileError(f"{function} gives {code}")
