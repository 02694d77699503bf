"""python tests/device/survey.py: write down the names and parameters of the installed CuPy, for the
fake one.

    name       as                                       of
    "sum"      "function a, axis=, dtype=, out=, ..."   anything called, without defaults' values
    "add"      "ufunc x1, x2, /, out=, *, casting=..."  an elementwise function
    "float32"  "type"                                   a class
    "linalg"   "module"
    "pi"       "value"

It asks the library only for its names, so it needs no device. `--print` writes to the standard
output instead.
"""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

SNAPSHOT = Path(__file__).parent / "fake" / "cupy" / "snapshot.json"
MODULES = (
    "cupy",
    "cupy.linalg",
    "cupy.random",
    "cupy.lib.stride_tricks",
    "cupy.cuda",
    "cupy.cuda.runtime",
    "cupyx",
)
CLASSES = (
    "cupy.ndarray",
    "cupy.ufunc",
    "cupy.cuda.Device",
    "cupy.cuda.Event",
    "cupy.cuda.MemoryPointer",
    "cupy.cuda.MemoryPool",
    "cupy.cuda.PinnedMemoryPool",
    "cupy.cuda.Stream",
    "cupy.cuda.UnownedMemory",
    "cupy.RawModule",
)
# Cython's first line of a docstring: NAME(PARAMETERS) or Class.NAME(PARAMETERS) -> RESULT.
HEAD = re.compile(r"^(?:\w+\.)?\w+\((?P<inside>.*)\)(?:\s*->.*)?$")


def main():
    """Write the snapshot."""
    text = json.dumps(survey(), indent=1, sort_keys=True) + "\n"
    if "--print" in sys.argv[1:]:
        sys.stdout.write(text)
    else:
        SNAPSHOT.write_text(text)
    return 0


def survey():
    """Return version, modules and classes of the installed CuPy."""
    cupy = importlib.import_module("cupy")
    result = {"version": cupy.__version__, "modules": {}, "classes": {}}
    for name in MODULES:
        module = importlib.import_module(name)
        names = [item for item in dir(module) if not item.startswith("_")]
        result["modules"][name] = {item: entry(getattr(module, item)) for item in names}
    for name in CLASSES:
        path, _, last = name.rpartition(".")
        kind = getattr(importlib.import_module(path), last)
        names = [item for item in dir(kind) if not item.startswith("_")]
        result["classes"][name] = {item: entry(getattr(kind, item)) for item in names}
    return result


def entry(value):
    """Return what a name stands for, in the words of this file's first lines."""
    if isinstance(value, type):
        return "type"
    if inspect.ismodule(value):
        return "module"
    if not callable(value):
        return "value"
    return f"{'ufunc' if type(value).__name__ == 'ufunc' else 'function'} {parameters(value)}"


def parameters(function):
    """Return the parameters, `name=` for one that has a default; "?" where nothing tells them."""
    try:
        return _of_signature(inspect.signature(function))
    except (TypeError, ValueError):
        first = (function.__doc__ or "").partition("\n")[0].strip()
    match = HEAD.match(first)
    return "?" if match is None else _of_text(match["inside"])


def _of_signature(signature):
    words = []
    before = None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if before is parameter.POSITIONAL_ONLY and parameter.kind is not parameter.POSITIONAL_ONLY:
            words.append("/")
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            words.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        words.append(star + parameter.name + ("" if parameter.default is parameter.empty else "="))
        before = parameter.kind
    return ", ".join(words + ["/"] * (before is inspect.Parameter.POSITIONAL_ONLY))


def _of_text(inside):
    """Return the same from Cython's text, in which types stand before names."""
    inside = re.sub(r"\[, (out1, out2)\]", "", inside.replace("\\*", "*")).replace(
        "[, out=(None, None)]", ", out=None"
    )
    words = []
    for part in re.split(r",\s*(?![^()]*\))", inside.replace(" / ,", " /,")):
        name, equals, _ = part.strip().partition("=")
        words.append(name.split()[-1] + equals if name.split() else "")
    return ", ".join(word for word in words if word not in ("", "self", "cls"))


if __name__ == "__main__":
    sys.exit(main())
