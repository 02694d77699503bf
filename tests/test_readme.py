"""The README is true: its code runs, its map shows what is there, its options and scripts exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnmpi.comm.group import Group
from tests.layering.rules import Tree, dead_references

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = {"digits.py"}  # files of the reader's
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.mpi
@pytest.mark.host_only("a program of its own, in which nothing is said of a device")
def test_library_program_trains(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    """The first program, as it stands, on every number of ranks; it reaches 97 % and prints on rank 0 alone."""
    exec(compile(PROGRAMS[0], "README.md", "exec"), {"__name__": "__main__"})
    printed = [float(found) for found in re.findall(r"accuracy ([0-9.]+)%", capsys.readouterr().out)]
    everyone = group.gather(printed)
    assert len(everyone[0]) == 8 and everyone[0][-1] > 97, everyone
    assert not any(everyone[1:]), everyone


@pytest.mark.parametrize("program", PROGRAMS[1:], ids=lambda text: text.splitlines()[0])
def test_other_programs_run(program: str) -> None:
    """Each by itself, in a fresh interpreter."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


def test_map_shows_all_packages_and_modules() -> None:
    """In the order of the layers, with nothing left out and nothing that is not there."""
    block = README.split("## The map")[1].split("\n\n")[1]
    shown = {line.split()[0].rstrip("/") for line in block.splitlines() if re.match(r" {6}\S", line)}
    there = {path.stem for path in (ROOT / "nnmpi").iterdir() if path.suffix == ".py" and path.stem != "__init__"}
    there |= {path.name for path in (ROOT / "nnmpi").iterdir() if (path / "__init__.py").exists()}
    assert {name.removesuffix(".py") for name in shown} == there


def test_options_in_the_readme_exist() -> None:
    """Every option that a line with the train command or the table of algorithms uses."""
    helped = subprocess.run(
        [sys.executable, "-m", "nnmpi.train", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    commands = [
        line for line in README.splitlines() if "nnmpi.train" in line or line.lstrip().startswith("scripts/train")
    ]
    used = {
        word for line in commands for word in re.findall(r"(?<![-\w])--[a-z][-a-z]*", line.split("nnmpi.train")[-1])
    }
    assert len(used) > 8
    assert not {option for option in used - {"--help"} if not re.search(rf"{option}\b", helped)}


def test_files_that_the_readme_names_exist() -> None:
    """Paths in backquotes below the folders of the checkout, in this README and those of the benchmarks."""
    written = {"README.md": README, **{str(path): path.read_text() for path in (ROOT / "benchmarks").rglob("*.md")}}
    named = {
        (file, path)
        for file, text in written.items()
        for path in re.findall(r"`((?:nnmpi|tests|scripts|benchmarks)/[\w/.-]*)`", text)
    }
    assert len(named) >= 15
    assert not [(file, path) for file, path in named if not (ROOT / path).exists() and path not in EXAMPLES]


def test_modules_that_the_readme_names_exist() -> None:
    """In backquotes: paths such as `comm.steps`, and files without their folder."""
    assert not list(dead_references(Tree(ROOT), "README.md", README))
    there = {path.name for folder in ("nnmpi", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    assert not set(re.findall(r"`(\w+\.py)`", README)) - there - EXAMPLES


def test_ci_runs_what_the_readme_says() -> None:
    """As a user types it: each command is a line of its own in both, but for the README's comment."""
    given = {line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    scripts/")}
    run = {line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()}
    for command in ("scripts/train", "scripts/check", "scripts/test --all", "scripts/benchmark-check"):
        assert command in given and f"{command} || status=1" in run
    assert "scripts/test --backend fake --ranks 2 --quick --jobs 2" in given & run
