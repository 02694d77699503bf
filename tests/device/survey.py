"""python tests/device/survey.py: write down the names and parameters of the installed CuPy, for the
fake one.

    name            as                                        of
    "sum"           "function a, axis=, dtype=, out=, ..."    anything that is called, without the defaults' values
    "add"           "ufunc x1, x2, /, out=, *, casting=..."   an elementwise function
    "float32"       "type"                                    a class
    "linalg"        "module"
    "pi"            "value"

It asks the library only for its names, so it needs no device. `--print` writes to the standard
output instead.
"""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

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


def main() -> int:
    """Write the snapshot."""
    text = json.dumps(survey(), indent=1, sort_keys=True) + "\n"
    if "--print" in sys.argv[1:]:
        sys.stdout.write(text)
    else:
        SNAPSHOT.write_text(text)
    return 0


def survey() -> dict[str, Any]:
    """Return version, modules and classes of the installed CuPy."""
    cupy = importlib.import_module("cupy")
    found: dict[str, Any] = {"version": cupy.__version__, "modules": {}, "classes": {}}
    for name in MODULES:
        module = importlib.import_module(name)
        names = [each for each in dir(module) if not each.startswith("_")]
        found["modules"][name] = {each: entry(getattr(module, each)) for each in names}
    for name in CLASSES:
        path, _, last = name.rpartition(".")
        kind = getattr(importlib.import_module(path), last)
        names = [each for each in dir(kind) if not each.startswith("_")]
        found["classes"][name] = {each: entry(getattr(kind, each)) for each in names}
    return found


def entry(value: Any) -> str:
    """Return what a name stands for, in the words of this file's first lines."""
    if isinstance(value, type):
        return "type"
    if inspect.ismodule(value):
        return "module"
    if not callable(value):
        return "value"
    return f"{'ufunc' if type(value).__name__ == 'ufunc' else 'function'} {parameters(value)}"


def parameters(function: Any) -> str:
    """Return the parameters, `name=` for one that has a default; "?" where nothing tells them."""
    try:
        return _of_signature(inspect.signature(function))
    except (TypeError, ValueError):
        first = (function.__doc__ or "").partition("\n")[0].strip()
    match = HEAD.match(first)
    return "?" if match is None else _of_text(match["inside"])


def _of_signature(signature: inspect.Signature) -> str:
    words: list[str] = []
    before = None
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if before is each.POSITIONAL_ONLY and each.kind is not each.POSITIONAL_ONLY:
            words.append("/")
        if each.kind is each.KEYWORD_ONLY and before not in (
            each.KEYWORD_ONLY,
            each.VAR_POSITIONAL,
        ):
            words.append("*")
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(star + each.name + ("" if each.default is each.empty else "="))
        before = each.kind
    return ", ".join(words + ["/"] * (before is inspect.Parameter.POSITIONAL_ONLY))


def _of_text(inside: str) -> str:
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
