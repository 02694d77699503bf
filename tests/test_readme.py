"""The README is true: its code runs, its map shows what is there, its options and scripts exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnmpi.comm.group import Group

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
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
    """Paths in backquotes below the folders of the checkout."""
    named = re.findall(r"`((?:nnmpi|tests|scripts|benchmarks)/[\w/.-]*)`", README)
    assert len(named) >= 5
    assert not [path for path in named if not (ROOT / path).exists()]
