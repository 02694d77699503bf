"""The notebooks of the examples run from top to bottom, where there is no MPI library; the lessons'
are current.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
EXECUTE = """
import sys
import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=60).execute()
print(nbformat.writes(notebook))
"""


@pytest.mark.slow("a kernel of Jupyter's for each")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])
def test_a_notebook_runs_without_mpi(notebook, tmp_path):
    """A cell that raises ends it with the cell and its traceback, but for exercises: nothing is
    written there yet.
    """
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(
        "raise ImportError('there is no MPI library here')\n"
    )
    environ = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "JUPYTER_RUNTIME_DIR": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(notebook)],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    cells = [cell for cell in json.loads(run.stdout)["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        if "raises-exception" in cell["metadata"].get("tags", ()):
            (output,) = cell["outputs"]
            assert output["ename"] == "WrongAnswer" and "NotImplementedError" in output["evalue"]
            # nor the answer
            assert not re.search("Traceback|As few", "".join(output["traceback"]))
        if cell["source"][-1].startswith("print(render("):
            assert re.match("all-reduce by ring|time    0  1", cell["outputs"][0]["text"][0])


def test_every_lesson_has_a_notebook_that_is_made_from_it():
    """`scripts/notebooks` writes them anew."""
    run = subprocess.run(
        [sys.executable, "scripts/notebooks", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(NOTEBOOKS) == 1 + len(list((ROOT / "examples" / "lessons").glob("*.py")))
