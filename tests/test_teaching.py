"""The commands of docs/teaching.md and of the assignments run as they stand there, in an empty
folder.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnmpi.teaching.exercise.exercises import EXERCISES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "teaching.md").read_text()
ASSIGNMENTS = ROOT / "examples" / "assignments"
PLACES = {
    "docs/teaching.md": ROOT,
    "parallel-training/README.md": ASSIGNMENTS,
    "my-all-reduce/README.md": ASSIGNMENTS,
}
# nothing is written there yet; a deadlock
FAILS = "nnmpi exercise [a-z-]+ \\S+.py$|simrun|comm render work"


@pytest.mark.slow("forty commands, one after the other")
@pytest.mark.timeout(500)  # forty processes and more, one after the other
@pytest.mark.parametrize("page", PLACES)
def test_commands_run(page, tmp_path):
    text, folder = (PLACES[page] / page).read_text(), (PLACES[page] / page).parent
    folder = ROOT if folder.name == "docs" else folder
    for name in ("examples", "assignment.toml"):
        if (folder / name).exists():
            (tmp_path / name).symlink_to(folder / name)
    for program in re.findall(r"```py\n(.*?)```", text, re.DOTALL):
        (tmp_path / "ring.py").write_text(program)
    commands = re.findall(r"^    ((?:nnmpi \w|python examples).*?)(?:  +#.*)?$", text, re.MULTILINE)
    assert len(commands) >= 3
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` is this one
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    for command in commands:
        ran = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert ran.returncode == bool(re.search(FAILS, command)), f"{command}\n{ran.stderr}"
        assert ran.returncode == 0 or re.search("write it here|deadlock", ran.stderr), ran.stderr
        for file in re.findall(r"--(?:svg|html) (\S+)|> (\S+)", command):
            assert (tmp_path / "".join(file)).stat().st_size > 500


def test_the_plan_names_exercises_that_there_are():
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", PAGE.split("## A homework")[0]))
    assert len(named) > 30 and named <= set(EXERCISES)
