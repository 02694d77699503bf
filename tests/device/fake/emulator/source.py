"""Reading CUDA C++: the kernels in a source, and the types of their parameters."""

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

# The types of C++ that parameters may have; the last two are those of nnmpi's own sources.
DTYPES: dict[str, Any] = {
    "bool": np.bool_,
    "char": np.int8,
    "signed char": np.int8,
    "unsigned char": np.uint8,
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned": np.uint32,
    "unsigned int": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "size_t": np.uint64,
    "float": np.float32,
    "double": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ALIAS = re.compile(r"^using (\w+) = (\w[\w ]*);", re.MULTILINE)
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)', re.DOTALL
)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        declared: its type as it stands in the source, without `__restrict__`.
        name: in the source.
        dtype: of the value, or of what it points to; None for `void*`.
        is_pointer: whether it is an address.
    """

    declared: str
    name: str
    dtype: np.dtype[Any] | None
    is_pointer: bool


def kernels(code: str, options: tuple[str, ...]) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of each `extern "C" __global__` function, with options' macros and `using` lines put in."""
    code = _COMMENT.sub(" ", code)
    macros = dict(option[2:].partition("=")[::2] for option in options if option.startswith("-D"))
    macros.update(_ALIAS.findall(code))
    found = {}
    for name, text in _KERNEL.findall(code):
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        found[name] = tuple(_parameter(part, macros) for part in parts)
    return found


def _parameter(text: str, macros: dict[str, str]) -> Parameter:
    text = text.replace("__restrict__", " ")
    declared, name = re.fullmatch(r"(.*?)(\w+)", " ".join(text.split())).groups()
    words = " ".join(word for word in declared.replace("*", " ").split() if word != "const")
    while words in macros:
        words = macros[words]
    is_pointer = "*" in declared
    if declared.count("*") > 1 or "&" in declared or (words not in DTYPES and not (is_pointer and words == "void")):
        raise TypeError(f"the emulator does not know the type of the parameter {text!r}")
    return Parameter(declared.strip(), name, None if words == "void" else np.dtype(DTYPES[words]), is_pointer)
