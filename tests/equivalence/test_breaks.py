"""What breaks off in the middle of a pipeline ends the job, with a sentence, and nobody waits for
ever.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.harness.job import mpirun, run
from tests.harness.slow import once_more

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from nnmpi.comm.mpi.start import start
group = start()
from nnmpi.compose.layout import Layout
from tests.equivalence import own
from tests.equivalence.reference import Setup, run
layout = Layout(pp=group.size, pipeline=sys.argv[2], split=(2, 1, 1))
run(Setup(own.faulty(getattr(own, sys.argv[1])), microbatches=4), group, layout)
"""


def train(folder, model, schedule):
    """Train on three ranks, in processes of their own."""
    script = folder / "job.py"
    script.write_text(SCRIPT)
    environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return run(
        [*mpirun(3), sys.executable, str(script), model, schedule],
        folder / "output",
        LIMIT_S,
        environ,
    )


@pytest.mark.parametrize("schedule", [once_more("gpipe"), "1f1b"])
def test_an_activation_whose_shape_depends_on_the_data_is_a_sentence(tmp_path, schedule):
    ending = train(tmp_path, "Selecting", schedule)
    assert ending.status == 1, ending.output
    assert (
        "stage 0 gave float64 (8, " in ending.output or "stage 0 gave float64 (7, " in ending.output
    )
    assert "shapes at a cut must depend only on the input's shape" in ending.output


def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    ending = train(tmp_path, "Dying", "1f1b")
    assert ending.status not in (None, 0), ending.output
    assert ending.seconds < LIMIT_S / 2
