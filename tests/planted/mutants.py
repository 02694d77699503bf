"""Plant random mutants in changed files, and list those that no test finds.

    scripts/mutants 10                           in files of nnmpi that the last commit changed
    scripts/mutants 20 --seed 3 --since v1.0     in those that differ from an older commit
    scripts/mutants 5 nnmpi/comm/cost.py         in given files

A mutant is one changed operator, number or truth value: `<` for `<=`, `+` for `-`, `and` for `or`,
a dropped `not`, n + 1 for n. The tests that name its module run on it, or those of its package. One
that survives is a hole in the tests, or makes no difference: judge it.
"""

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path

from tests.planted.__main__ import ROOT, find
from tests.planted.faults import Fault

OPERATORS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "*",
    "%": "//",
}
LONGEST_FIRST = sorted(OPERATORS, key=len, reverse=True)
OPERATOR = re.compile(rf"[\s)]({'|'.join(map(re.escape, LONGEST_FIRST))})[\s(]".encode())
FILES = 6  # of tests for a mutant, those that name its module most often


def mutants(text):
    """Yield the line of each mutant of a source file, and the file with it."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    source = text.encode()

    def place(node, end=False):
        line, column = (
            (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)  # type: ignore[attr-defined]
        )
        return int(starts[line - 1] + column)

    def replaced(node, begin, end, new):
        return node.lineno, (source[:begin] + new.encode() + source[end:]).decode()  # type: ignore[attr-defined]

    for node in ast.walk(ast.parse(text)):
        pairs = []
        if isinstance(node, ast.Compare):
            pairs = [*pairwise([node.left, *node.comparators])]
        elif isinstance(node, ast.BoolOp):
            pairs = [*pairwise(node.values)][:1]
        elif isinstance(node, ast.BinOp):
            pairs = [(node.left, node.right)]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield replaced(node, place(node), place(node.operand), "")
        elif isinstance(node, ast.Constant) and isinstance(value := node.value, int):
            new = not value if isinstance(value, bool) else value + 1
            yield replaced(node, place(node), place(node, end=True), f"{new}")
        for left, right in pairs:
            begin, end = place(left, end=True) - 1, place(right) + 1
            if found := OPERATOR.search(source, begin, end):
                yield replaced(node, *found.span(1), OPERATORS[found[1].decode()])


def _is_program(text):
    with suppress(SyntaxError):
        return bool(ast.parse(text))
    return False


@cache
def finders_of(file):
    """Return the tests that name a file's module most often; those of its package if none does."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    named = re.compile(rf"{re.escape(module)}[ .]")
    counts = {
        str(path.relative_to(ROOT)): len(named.findall(path.read_text()))
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    chosen = sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])
    return " ".join(chosen[:FILES] or [f"tests/{file.split('/')[1]}"])


def main():
    """Plant the mutants; return 1 if one survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int, help="how many")
    parser.add_argument("files", nargs="*", help="where; otherwise in the changed ones")
    parser.add_argument("--seed", type=int, default=0, help="of their choice (default: 0)")
    parser.add_argument("--since", default="HEAD~1", help="the commit before the changes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at once")
    given = parser.parse_intermixed_args()
    words = ["git", "diff", "--name-only", "--diff-filter=d", given.since, "--", "nnmpi"]
    names = given.files or subprocess.check_output(words, cwd=ROOT, text=True).split()
    texts = {name: (ROOT / name).read_text() for name in names if name.endswith(".py")}
    # Each is made again where it is chosen: all texts of many files do not fit into memory.
    every = [(name, i) for name, text in texts.items() for i, _ in enumerate(mutants(text))]
    random.Random(given.seed).shuffle(every)
    chosen = ((name, *next(islice(mutants(texts[name]), place, None))) for name, place in every)
    faults = [
        Fault(f"{name}:{line}", name, texts[name], text, finders_of(name))
        for name, line, text in islice(
            filter(lambda item: _is_program(item[2]), chosen), given.count
        )
    ]
    survivors = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.jobs) as pool:
        results = pool.map(partial(find, scratch=Path(scratch)), faults)
        for fault, result in zip(faults, results, strict=True):
            old, new = fault.before.splitlines(), fault.after.splitlines()
            changed = next((b for a, b in zip(old, new, strict=False) if a != b), "")
            lives = result.startswith("NOT")
            survivors += lives
            print(f"{'SURVIVES' if lives else 'found   '} {fault.name:45} {changed.strip()}")
            print(f"         {fault.tests if lives else result}", flush=True)
    print(f"{len(faults) - survivors} of {len(faults)} mutants are found, of {len(every)} possible")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
