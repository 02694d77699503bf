"""No file of the current folder is imported, whatever its name, unless the user names it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnmpi.base.custom import load_custom
from nnmpi.base.launcher import python_words
from nnmpi.commands.table import COMMANDS
from nnmpi.train.cli import main as train
from tests.harness.commands import on_ranks
from tests.harness.job import LAUNCH_VARIABLES
from tests.harness.slow import ONCE_MORE, cases

pytestmark = pytest.mark.host_only("commands that import nothing from the folder")

ROOT = Path(__file__).parents[2]
# of Python's library, of what nnmpi needs, of what it can use, and of users
NAMES = """
random queue select secrets statistics csv bisect heapq string json gzip zlib shelve sqlite3 socket
ssl email html http xml webbrowser platform tempfile textwrap difflib inspect tomllib zipfile array
numpy mpi4py safetensors filelock pooch threadpoolctl numba llvmlite cupy matplotlib PIL tokenizers
tensorboardX crc32c ml_dtypes onnx sitecustomize nets utils
"""
FLOWERS = "sepal_length_cm,sepal_width_cm,petal_length_cm,petal_width_cm\n5.1,3.5,1.4,0.2\n"
# what pip writes
SCRIPT = "import sys\nfrom nnmpi.__main__ import main\nsys.exit(main())\n"
SMALL = "--dataset iris --model mlp --hidden 8 --max-steps 12 --eval-every 0 --quiet"
COMMAND_LINES = f"""
train {SMALL} --out A
train {SMALL} --out B --ranks 2
train --resume .
train --config of-user.toml --out C
run -n 2 -- {SMALL} --out D
report .
report . A --out page.html
report . --tensorboard events
evaluate .
predict . flowers.csv
generate .
export . --out exported.safetensors
export . --format onnx --out exported.onnx
plan --dataset iris --model mlp --ranks 2 --network alpha_us=10,gbit=10
verify --dataset iris --model mlp --simulate 2 --steps 2
speedup --simulate --ranks 1 2 -- --dataset iris --model mlp --max-steps 20
doctor
doctor .
comm list --ranks 4
comm render ring --ranks 4 --svg ring.svg --html ring.html
schedule --pipeline gpipe --stages 2 --microbatches 4 --svg gpipe.svg
memory plan --layers 4 --svg plan.svg
exercise ring-all-reduce ring_all_reduce.py
grade assignment.toml . --as one
grade assignment.toml submissions --as class
simrun -n 2 program.py
"""
ASSIGNMENT = """
title = "one"
[[criteria]]
exercise = "ring-all-reduce"
name = "sums"
file = "ring_all_reduce.py"
points = 1
"""


def plant(folder):
    """Write the modules; each notes that it is executed, and fails."""
    executed = folder / "executed"
    for name in NAMES.split():
        note = f"open({str(executed)!r}, 'a').write('{name} ')\nraise SystemExit('{name}.py')\n"
        (folder / f"{name}.py").write_text(note)
    return executed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder of somebody, which is a class's folder of submissions, too."""
    folder = tmp_path_factory.mktemp("of-somebody")
    on_ranks(train, [*SMALL.split(), "--out", str(folder)])
    plant(folder)
    (folder / "script").mkdir()
    (folder / "script" / "nnmpi").write_text(SCRIPT)
    (folder / "flowers.csv").write_text(FLOWERS)
    (folder / "assignment.toml").write_text(ASSIGNMENT)
    (folder / "of-user.toml").write_text('dataset = "iris"\nmodel = "mlp"\nepochs = 1\n')
    solution = "def ring_all_reduce(rank, size):\n    return ()\n"
    (folder / "ring_all_reduce.py").write_text(solution)
    (folder / "program.py").write_text("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n")
    for student in ("ada", "bob"):
        (folder / "submissions" / student).mkdir(parents=True)
        (folder / "submissions" / student / "ring_all_reduce.py").write_text(solution)
        plant(folder / "submissions" / student)
    return folder


def call(folder, words):
    """Run `nnmpi` as pip's script, in a folder."""
    program = [sys.executable, str(folder / "script" / "nnmpi"), *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **LAUNCH_VARIABLES}
    environ.pop("PYTHONSAFEPATH", None)
    return subprocess.run(program, cwd=folder, env=environ, capture_output=True, text=True)


def test_every_command_is_among_them():
    named = {line.split()[0] for line in COMMAND_LINES.strip().splitlines()}
    assert named == {*COMMANDS}


@pytest.mark.parametrize("line", COMMAND_LINES.strip().splitlines())
def test_no_module_of_the_folder_is_executed(folder, line):
    ended = call(folder, line.split())
    executed = [file.read_text() for file in folder.rglob("executed")]
    assert executed == [], ended.stderr
    assert not re.search("Traceback|is not an? (option|command)", ended.stderr), ended.stderr


def test_help_and_a_word_that_is_no_command(folder):
    for words in ([], ["--help"], ["trian"], ["train", "--help", "all"], ["--version"]):
        call(folder, words)
    assert not (folder / "executed").exists()


NET = """
import helpers
from nnmpi import nn

def build(shape, classes):
    import later
    width = helpers.WIDTH
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, later.classes(classes)))
"""
NAMED = ("net.py:build", "package.net:build", "net:build")


@pytest.mark.parametrize(
    "name, ranks",
    cases(
        [(name, ranks) for name in NAMED for ranks in (1, 2)],
        lambda name, ranks: ranks == (2 if name.startswith("package") else 1),
        ONCE_MORE,
    ),
)
def test_named_code_imports_what_lies_beside_it(folder, tmp_path, name, ranks):
    """At once and later, and nothing else of the folder."""
    executed = plant(tmp_path)
    (tmp_path / "script").symlink_to(folder / "script")
    for place in (tmp_path, tmp_path / "package"):
        place.mkdir(exist_ok=True)
        (place / "net.py").write_text(NET)
    (tmp_path / "helpers.py").write_text("WIDTH = 6\n")
    (tmp_path / "later.py").write_text("def classes(count):\n    return count\n")
    words = ["train", "--dataset", "iris", "--max-steps", "2", "--out", "r", "--model", name]
    ended = call(tmp_path, [*words, "--ranks", str(ranks)])
    assert ended.returncode == 0, ended.stderr
    assert not executed.exists(), executed.read_text()
    evaluated = call(tmp_path, ["evaluate", "r", "--trust"])
    assert evaluated.returncode == 0 and not executed.exists(), evaluated.stderr


def test_a_sibling_comes_before_an_installed_package(tmp_path, monkeypatch):
    """As for `python FILE.py`, where the two have one name."""
    mine, installed = tmp_path / "mine", tmp_path / "installed"
    for place, value in ((mine, "mine"), (installed, "installed")):
        place.mkdir()
        (place / "tools_of_two.py").write_text(f"def which():\n    return {value!r}\n")
    (mine / "net_of_two.py").write_text("from tools_of_two import which\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    for name in ("tools_of_two", "nnmpi_custom_net_of_two"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert load_custom(f"{mine}/net_of_two.py:which", "--model", "()")() == "mine"
    assert sys.path[-1] == str(mine)
    monkeypatch.delitem(sys.modules, "tools_of_two")


def test_a_module_of_the_library_is_never_taken_from_the_folder(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise AssertionError('executed')\n")
    (tmp_path / "net_with_queue.py").write_text("import queue\nbuild = queue.Queue\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "queue", raising=False)
    load_custom(f"{tmp_path}/net_with_queue.py:build", "--model", "()")


def test_other_interpreters_do_not_look_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert python_words() == [sys.executable, "-P"]
    monkeypatch.chdir(ROOT)  # where a checkout that is not installed is found
    assert python_words() == [sys.executable]
