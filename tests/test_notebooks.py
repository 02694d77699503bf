"""The notebooks of the examples run from top to bottom, where there is no MPI library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
EXECUTE = """
import sys
import nbclient
import nbformat

nbclient.NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=60).execute()
"""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])
def test_a_notebook_runs_without_mpi(notebook: Path, tmp_path: Path) -> None:
    """A cell that raises ends it with the cell and its traceback."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('there is no MPI library here')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(notebook)], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
