"""What the repository holds as a program is run by a check: nobody finds out first that it died.

A program is run where a command of the checks' shell scripts names it, or where one that is run
starts it: its folder's modules name its file or its module.
"""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.test_notebooks import NOTEBOOKS

ROOT = Path(__file__).parents[2]
SHELL = ".ci/run", "scripts/benchmark-check", "scripts/check"


def find_programs():
    """Return the paths of all programs."""
    files = [file for name in ("benchmarks", "examples") for file in (ROOT / name).rglob("*.py")]
    mains = {
        file for file in files if re.search(r'^if __name__ == "__main__"', file.read_text(), re.M)
    }
    notebooks = {*(ROOT / "examples").rglob("*.ipynb")}
    scripts = {file for file in (ROOT / "scripts").iterdir() if file.read_bytes()[:2] == b"#!"}
    return {file.relative_to(ROOT).as_posix() for file in mains | notebooks | scripts}


def words_of_shell(name):
    """Return the words of a script's commands."""
    lines = (ROOT / name).read_text().splitlines()
    return {word.strip("\"';()") for line in lines for word in line.partition("#")[0].split()}


def words_of_python(folder):
    """Return the words of all texts in a folder's modules, but for docstrings and unused ones."""
    trees = [ast.parse(file.read_text()) for file in folder.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return {
        word
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
        for word in node.value.split()
    }


def spellings(program):
    """Return how a command names a program: by its path, or as a module."""
    path = program.removesuffix("/__main__.py")
    return {path, path.removesuffix(".py").replace("/", ".")}


def find_unused(programs, words):
    """Return the programs that are not run, where `words` are those of the commands."""
    left = set(programs)
    while True:
        found = {
            program
            for program in left
            if spellings(program) & words  # a glob is of examples
            or any(fnmatch(program, word) for word in words if word.startswith("examples/"))
        }
        if not found:
            return left
        left -= found
        for folder in {(ROOT / program).parent for program in found if program.endswith(".py")}:
            inside = words_of_python(folder)
            words = (
                words
                | inside
                | {f"{folder.relative_to(ROOT)}/{word.strip('/')}" for word in inside}
            )


@pytest.fixture(scope="module")
def words():
    """What the checks run: words of the shell, and scripts and notebooks that tests start."""
    started = {word for word in words_of_python(ROOT / "tests") if word.startswith("scripts/")}
    started |= {file.relative_to(ROOT).as_posix() for file in NOTEBOOKS}
    return started.union(*map(words_of_shell, SHELL))


def test_every_program_is_run_by_a_check(words):
    programs = find_programs()
    assert len(programs) > 60
    assert find_unused(programs, words) == set()


@pytest.mark.parametrize("program", ["survey", "netlab"])
def test_a_program_that_no_check_runs_is_found(program, words):
    left = find_unused(find_programs(), words - {f"benchmarks/{program}"})
    assert f"benchmarks/{program}/__main__.py" in left
