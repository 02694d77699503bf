"""Whether a solution is nnmpi's own text: functions are compared without names, comments and types."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from nnmpi.errors import UsageError, raised_as
from nnmpi.exercise.exercise import WrongAnswer

PACKAGE = Path(__file__).resolve().parents[1]
ANSWERS = ("comm/algorithms", "schedule", "synchrony", "parallel", "exercise", "comm/group.py", "shard.py")
LEAST = 65  # nodes of a function's tree: what is shorter, as GPipe is, anybody may write so
MOST_BYTES = 1 << 20


def refuse_own_text(file: Path) -> None:
    """Refuse a file in which a function is one of nnmpi's own but for its names.

    Raises:
        UsageError: for a file that cannot be read.
        WrongAnswer: naming both functions.
    """
    with raised_as(UsageError, f"{file} cannot be read"), file.open("rb") as stream:
        text = stream.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise WrongAnswer(f"{file.name} has more than {MOST_BYTES:,} bytes; hand in what you wrote")
    try:
        found = dict(_functions(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # as its import will say
    for shape, name in found.items():
        if shape in _own():
            raise WrongAnswer(f"{name} is, but for names, nnmpi's own {_own()[shape]}; write one of your own")


@cache
def _own() -> dict[str, str]:
    files = [file for name in ANSWERS for file in sorted({PACKAGE / name, *(PACKAGE / name).rglob("*.py")})]
    return {
        shape: f"{name} ({file.relative_to(PACKAGE.parent).as_posix()})"
        for file in files
        if file.suffix == ".py"
        for shape, name in _functions(file.read_bytes())
    }


def _functions(text: bytes) -> Iterator[tuple[str, str]]:
    """Yield the shape and the name of each function in a program that is long enough."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            shape = ast.dump(_Nameless().visit(ast.parse(ast.unparse(node)).body[0]))
            if shape.count("(") >= LEAST:
                yield shape, node.name


class _Nameless(ast.NodeTransformer):
    """Numbers names in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self._numbers.setdefault(name, str(len(self._numbers)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.name, node.returns, node.decorator_list = "", None, []
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> Any:
        return ast.arg(self._number(node.arg))

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.Name(self._number(node.id), ast.Load())

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return self.generic_visit(ast.Assign([node.target], node.value or ast.Constant(None)))
