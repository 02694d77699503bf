"""Without the folder of a wing, the core trains on, and says what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

import nnmpi
from nnmpi.base.wings import NEEDS, OFFERS, WINGS
from nnmpi.commands.table import COMMANDS, find_command
from tests.layering import layers

ROOT = Path(__file__).parents[2]
TRAIN = "train --dataset iris --model mlp --epochs 1 --simulate 2 --out run"
# what needs a wing, by its words
ASKS = {
    "asynchronous": f"{TRAIN}2 --sync local --local-steps 2",
    "lab": f"{TRAIN}2 --layout auto",
    "teaching": "exercise ring solution.py",
}
# all names that the library offers, then a command
PROGRAM = """
import runpy
import nnmpi
from nnmpi import data, models, optim
for name in nnmpi.__all__:
    try:
        getattr(nnmpi, name)
    except nnmpi.NnmpiError as error:
        print("name:", name, error, flush=True)
runpy.run_module("nnmpi", run_name="__main__")
"""


def run(folder, *words):
    """Run Python in a folder with its own copy of the package; return its status and output."""
    ending = subprocess.run(
        [sys.executable, "-W", "error", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ending.returncode, ending.stdout + ending.stderr


@pytest.mark.parametrize("wing", WINGS)
def test_the_core_trains_without_a_wing(wing, tmp_path):
    (tmp_path / "nnmpi").mkdir()
    for item in (ROOT / "nnmpi").iterdir():  # linked, so that what is compiled is there
        if item.name not in (wing, "__pycache__"):
            (tmp_path / "nnmpi" / item.name).symlink_to(item)
    status, text = run(tmp_path, "-m", "nnmpi", *TRAIN.split())
    assert status == 0, text
    assert "test accuracy" in text
    status, text = run(tmp_path, "-c", PROGRAM, *ASKS[wing].split())
    lacks = f"lacks its folder nnmpi/{wing}, which is for {WINGS[wing]}"
    assert status == 2, text
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if lacks in line]
    assert lines.pop().startswith("nnmpi: ")
    assert [line.split()[1] for line in lines] == [
        name
        for name, path in OFFERS.items()
        if wing in ((of := path.partition(".")[0]), *NEEDS.get(of, ())) and name in nnmpi.__all__
    ]


def test_the_tables_name_what_there_is():
    assert set(WINGS) == layers.WINGS
    for name in COMMANDS:
        path = find_command(name).replace(".", "/")
        assert (ROOT / f"{path}.py").is_file() or (ROOT / path / "__main__.py").is_file()
