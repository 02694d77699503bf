"""Running the train command as a user does, in processes of its own, and killing it at bad
moments.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from tests.harness.job import mpirun, run

LIMIT_S = 90.0
ROOT = Path(__file__).parents[2]


def train(folder, words, ranks=1, is_lost=lambda: False):
    """Run the command in the folder on so many ranks; 1 is without mpirun. The folder's modules can
    be imported.
    """
    start = mpirun(ranks) if ranks > 1 else []
    command = [*start, sys.executable, "-m", "nnmpi.train", *words.split()]
    environ = {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    return run(command, folder / "output", LIMIT_S, environ, is_lost=is_lost, cwd=folder)


def unfolded(text):
    """Return a text with lines that are broken between words as one."""
    return " ".join(text.split())


def last_checkpoint(run):
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def arrays(run):
    """Return the last checkpoint's files of arrays: the model's, and the optimizer's."""
    return tuple(file.read_bytes() for file in sorted(last_checkpoint(run).glob("*.safetensors")))


def processes(mark):
    """Return the processes with this text among their arguments: those of one job, if the text
    names its folder.
    """
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark in path.read_text(errors="replace") and int(path.parent.name) != os.getpid():
                result.append(int(path.parent.name))
    return result


def send(number, mark, to="all", rank=None):
    """Send the signal to all of the job's processes, its "ranks" or its "launcher", or to one rank
    alone if given.
    """
    for process in processes(mark):
        with suppress(OSError):
            name = Path(f"/proc/{process}/comm").read_text()
            kind = "launcher" if "run" in name or "prte" in name else "ranks"
            if to in ("all", kind) and (rank is None or _rank(process) == rank):
                os.kill(process, number)


def _rank(process):
    """Return a process's rank, by what the launcher has told it; None for the launcher."""
    entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    text = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
    result = text.get(b"OMPI_COMM_WORLD_RANK", text.get(b"PMI_RANK"))
    return None if result is None else int(result)


def once(condition, action, ends):
    """Return a callback for `train`: it does the action when the condition holds first, and says
    whether to end.
    """
    done = False

    def callback():
        nonlocal done
        if not done and condition():
            done = True
            action()
        return done and ends

    return callback


def lines(file):
    """Return how many lines the file has; 0 if there is none."""
    return file.read_bytes().count(b"\n") if file.exists() else 0
