"""scripts/test-gpu: wheels that are added wherever a Python installs them, and why a Python is not used."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import pytest

ROOT = Path(__file__).parents[2]

# What Debian changes in the Python that it ships: what is installed by hand goes to PREFIX/local.
DEBIAN = """
import sysconfig
place = {name: "{base}/local/lib/python3/dist-packages" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
place |= {name: "{base}/local/include" for name in ("include", "platinclude")}
sysconfig._INSTALL_SCHEMES["posix_local"] = {**place, "scripts": "{base}/local/bin", "data": "{base}/local"}
others = sysconfig.get_preferred_scheme
sysconfig.get_preferred_scheme = lambda key: "posix_local" if key == "prefix" else others(key)
"""
# In the place of the checks: says what it finds.
MAIN = """
import json, os, shutil, planted
found = {name: os.environ.get(name) for name in ("NNMPI_MPIRUN", "MPI4PY_LIBMPI")}
print(json.dumps({**found, "mpirun": shutil.which("mpirun"), "planted": planted.__file__}))
"""


def checkout(folder: Path) -> Path:
    """Make a checkout of the scripts, with a blank in its name, and checks that only say what they find."""
    root = folder / "check out"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "tests/gpu").mkdir(parents=True)
    for package in ("tests", "tests/gpu"):  # as real ones, or an installed checkout's would come first
        (root / package / "__init__.py").touch()
    (root / "tests/gpu/__main__.py").write_text(MAIN)
    return root


def wheel(folder: Path) -> None:
    """Make a wheel of a module, a library and an mpirun."""
    files = {
        "planted.py": "",
        "planted-1.data/data/lib/libmpi.so.40": "",
        "planted-1.data/data/bin/mpirun": "#!/bin/sh\n",
        "planted-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: planted\nVersion: 1\n",
        "planted-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["planted-1.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files)
    folder.mkdir()
    with ZipFile(folder / "planted-1-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            info = ZipInfo(name)
            info.external_attr = 0o100755 << 16
            archive.writestr(info, text)


def run(root: Path, backend: str = "fake", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script, by default for the stand-in, which needs no CuPy."""
    command = [str(root / "scripts/test-gpu"), "--backend", backend]
    kept = {name: text for name, text in os.environ.items() if name not in ("NNMPI_MPIRUN", "MPI4PY_LIBMPI")}
    return subprocess.run(command, env={**kept, **environ}, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("below", ["", "local"], ids=["plain", "debian"])
def test_wheels_are_found_wherever_this_python_puts_them(tmp_path: Path, below: str) -> None:
    """Modules, the MPI library, and its mpirun: below the folder, or below its `local`."""
    pytest.importorskip("pip")
    root, place = checkout(tmp_path), tmp_path / "check out/.venv-wheels"
    wheel(tmp_path / "wheels")
    if below:
        (tmp_path / "sitecustomize.py").write_text(DEBIAN)
    environ = {"NNMPI_PYTHON": sys.executable, "NNMPI_WHEELS": str(tmp_path / "wheels"), "PYTHONPATH": str(tmp_path)}
    done = run(root, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    tree = place / below
    assert found.pop("planted").startswith(f"{tree}/lib")
    mpirun = str(tree / "bin/mpirun")
    assert found == {"NNMPI_MPIRUN": mpirun, "mpirun": mpirun, "MPI4PY_LIBMPI": str(tree / "lib/libmpi.so.40")}


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("Traceback ...\nModuleNotFoundError: No module named 'ml_dtypes'\n", "No module named 'ml_dtypes'"),
        ("ImportError:\n====\nOriginal error:\n  libcudart.so.13: not found\n====\n\n", "libcudart.so.13: not found"),
        ("", "it does not run"),
    ],
    ids=["plain", "framed", "silent"],
)
def test_why_a_python_is_not_used(tmp_path: Path, says: str, reason: str) -> None:
    """The last line with words of what the import said comes first; then the environment is prepared."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}END\nexit 1\n")
    python.chmod(0o755)
    done = run(checkout(tmp_path), NNMPI_PYTHON=str(python), NNMPI_MPI="none of them")
    first, *rest = done.stderr.splitlines()
    assert first.startswith(f"scripts/test-gpu: {python} is not used: ") and first.endswith(reason)
    assert done.returncode == 2 and rest == ["nnmpi: NNMPI_MPI is 'none of them'; give openmpi, mpich or system"]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists(), reason="there is a GPU")
def test_nothing_is_installed_where_there_is_no_gpu(tmp_path: Path) -> None:
    """Gigabytes came first, and then the sentence."""
    done = run(checkout(tmp_path), "cupy", NNMPI_PYTHON="/bin/false", NNMPI_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert "nnmpi: this machine has no NVIDIA GPU with a driver, so nothing was installed" in done.stderr
    assert not (tmp_path / "venv").exists()
