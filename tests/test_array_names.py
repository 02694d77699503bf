"""Every function of an array library that the engine asks for is in both, with the keywords that it
gives.

A walk over the syntax: `xp.NAME(keyword=...)`, `self.xp.NAME`, `xp.add.reduce`, and `np.NAME`,
which asks the arrays. CuPy's side is the snapshot of its names.
"""

import ast
import inspect
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.device.survey import SNAPSHOT

ROOT = Path(__file__).parents[1]
CUPY = json.loads(SNAPSHOT.read_text())["modules"]
OF_UFUNC = {"where", "casting", "order", "dtype", "subok", "out"}
# What stands behind a question for the library, by file: NumPy alone has it, or does it otherwise
# there.
NUMPY_ALONE = {
    ("nnmpi/backend/plain.py", "take(mode=)"),
    ("nnmpi/backend/array.py", "ma.MaskedArray is not in CuPy"),
    ("nnmpi/backend/gemm.py", "errstate is not in CuPy"),
    ("nnmpi/backend/sums.py", "vecdot is not in CuPy"),
    ("nnmpi/ops/norm.py", "errstate is not in CuPy"),
    ("nnmpi/ops/conv/winograd_numpy.py", "logical_or.reduce"),
    ("nnmpi/ops/conv/winograd_numpy.py", "void is not in CuPy"),
}
# What only CuPy has, and who may use it: files that have to do with a device alone.
BOTH = "tensor", "ops", "ops/conv", "backend"  # rooms whose arrays may be either library's
# NumPy's own `like` does not reach CuPy; its other makers add a keyword that CuPy's do not take
LIKE = "empty", "zeros", "ascontiguousarray"
DEVICE_FILES = (
    "nnmpi/backend/",
    "nnmpi/comm/buffers.py",
    "nnmpi/comm/execution.py",
    "nnmpi/ops/conv",
    "nnmpi/memory/store.py",
)


@dataclass(frozen=True)
class Use:
    """One name that is asked for.

    Attributes:
        file: where.
        name: with its parts: "add.reduce".
        keywords: with which it is called there.
    """

    file: str
    line: int
    name: str
    keywords: tuple[str, ...]


def uses(path, text):
    """Yield what a file asks of `xp`."""
    tree = ast.parse(text)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) and id(node) not in inner else None
        if name:
            call = calls.get(id(node))
            keywords = (
                tuple(
                    word.arg
                    for word in call.keywords
                    if word.arg and not (word.arg == "like" and name in LIKE)
                )
                if call
                else ()
            )
            yield Use(str(path), node.lineno, name, keywords)


def dotted(node):
    """Return "add.reduce" for xp.add.reduce and self.xp.add.reduce, None for anything else."""
    parts = []
    while isinstance(node, ast.Attribute) and not (
        node.attr == "xp" and isinstance(node.value, ast.Name)
    ):
        parts.append(node.attr)
        node = node.value
    is_xp = isinstance(node, ast.Attribute) or (
        isinstance(node, ast.Name) and node.id in ("xp", "np")
    )
    return ".".join(reversed(parts)) if is_xp and parts and not parts[-1].startswith("__") else None


def problems(use):
    """Return what is wrong with a use, in words."""
    first, _, rest = use.name.partition(".")
    entry = CUPY["cupy"].get(first)
    result = []
    if entry is None:
        result.append(f"{use.name} is not in CuPy")
    elif not hasattr(np, first):
        if not use.file.startswith(DEVICE_FILES):
            result.append(f"{use.name} is not in NumPy")
    elif entry.startswith("ufunc") and rest:
        if rest == "reduce" and first not in ("add", "multiply"):
            result.append(use.name)
        result += [
            f"{use.name}({key}=)"
            for key in use.keywords
            if key not in ("axis", "dtype", "out", "keepdims")
        ]
    else:
        theirs = set(entry.partition(" ")[2].replace("=", "").replace(" ", "").split(","))
        open_ended = any(word.startswith("**") for word in theirs)
        result += [
            f"{use.name}({key}=)" for key in use.keywords if not open_ended and key not in theirs
        ]
        result += [
            f"{use.name}({key}=) in NumPy" for key in use.keywords if not numpy_takes(first, key)
        ]
    return result


def numpy_takes(name, keyword):
    """Return whether NumPy's function takes a keyword."""
    function = getattr(np, name)
    if isinstance(function, np.ufunc):
        return keyword in OF_UFUNC
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # NumPy does not say
        return True
    return keyword in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


@cache
def everything():
    """Return all uses of the engine."""
    paths = [path for room in BOTH for path in sorted((ROOT / "nnmpi").glob(f"{room}/*.py"))]
    return [use for path in paths for use in uses(path.relative_to(ROOT), path.read_text())]


def test_every_name_and_keyword_is_in_both_libraries():
    wrong = [
        f"{use.file}:{use.line}: {words}"
        for use in everything()
        for words in problems(use)
        if (use.file, words) not in NUMPY_ALONE
    ]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_needed():
    result = {(use.file, words) for use in everything() for words in problems(use)}
    assert result >= NUMPY_ALONE


@pytest.mark.parametrize(
    "code, words",
    [
        ("xp.vecdot(a, b)", "vecdot is not in CuPy"),
        ("self.xp.unstack(a)", "unstack is not in CuPy"),
        ("xp.sum(a, initial=0)", "sum(initial=)"),
        ("xp.take(a, b, mode='clip')", "take(mode=)"),
        ("xp.var(a, correction=1)", "var(correction=)"),
        ("xp.maximum.reduce(a)", "maximum.reduce"),
        ("xp.add.reduce(a, where=b)", "add.reduce(where=)"),
        ("xp.asnumpy(a)", "asnumpy is not in NumPy"),
        ("xp.full(3, 0, blocking=True)", "full(blocking=)"),
        ("np.full(3, 0, like=x)", "full(like=)"),
    ],
)
def test_what_one_library_lacks_is_found(code, words):
    (use,) = uses(Path("nnmpi/ops/planted.py"), code)
    assert words in problems(use)
