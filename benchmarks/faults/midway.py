"""What befalls a training of two ranks after its first checkpoint. See README.md.

python -m benchmarks.faults midway
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.harness import tables
from benchmarks.harness.command import Parser
from benchmarks.harness.launch import ROOT, environment, spawn
from nnmpi.lab.launching import find_mpirun, kill

TRAIN = "--dataset digits --model mlp --epochs 9999 --max-steps 600 --save-every 50steps --quiet"
WAIT_S = 240.0  # of a machine that others use, too
# imported by Python at its start: the clock goes to and fro by a year, twice a second
CLOCK = """
import time
now = time.time
time.time = lambda: now() + (0, 31536000, -31536000)[int(2 * now()) % 3]
"""
LIMITS = {
    "32 descriptors": "ulimit -n 32",
    "400 MB of addresses": "ulimit -v 400000",
    "files of 10 KB": "ulimit -f 20",
}


def to_link(name):
    """Return what puts a link to the precious folder in place of a file or folder of the run."""

    def act(run, package):
        (run / name).rename(run / "moved")
        (run / name).symlink_to(run.parent / "precious")

    return act


def to_pipe(name):
    """Return what puts a pipe in place of a file of the run."""

    def act(run, package):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return act


def swap(run, package):
    """Put a link in place of the checkpoints' folder and take it away, again and again."""
    until, folder = time.monotonic() + 3, run / "checkpoints"
    while time.monotonic() < until:
        with suppress(OSError):
            folder.rename(run / "moved")
            folder.symlink_to(run.parent / "precious")
            folder.unlink()
            (run / "moved").rename(folder)


def upgrade(run, package):
    """Replace every file of nnmpi by one that cannot be imported."""
    for file in package.rglob("*.py"):
        file.write_text("raise RuntimeError('another version')\n")


def start_another(run, package):
    """Begin a run in the same folder; the first must not notice."""
    words = [sys.executable, "-m", "nnmpi", "train", "--out", str(run)]
    assert subprocess.run(words, capture_output=True, env=environment()).returncode == 2


# {what happens: (act(run, package), whether the run goes on)}
ACTS = {
    "checkpoints is a link": (to_link("checkpoints"), False),
    "checkpoints is a link now and then": (swap, None),
    "metrics.jsonl is a link": (to_link("metrics.jsonl"), False),
    "metrics.jsonl is a pipe": (to_pipe("metrics.jsonl"), False),
    "console.txt is a pipe": (to_pipe("console.txt"), True),
    "checkpoints are removed": (lambda run, _: shutil.rmtree(run / "checkpoints"), None),
    "the run's folder is moved": (lambda run, _: run.rename(run.with_name("moved")), False),
    "the lock is removed": (lambda run, _: (run / ".lock").unlink(missing_ok=True), True),
    "a second run in its folder": (start_another, True),
    "another nnmpi is installed": (upgrade, True),
    "the clock jumps": (lambda run, package: None, True),
    **{name: (lambda run, package: None, None) for name in LIMITS},
}


def befall(name, place):
    """Run the training with one of ACTS; return (status, defects, seconds from act to end)."""
    act, goes_on = ACTS[name]
    run, package, output = place / "run", place / "package", place / "output"
    (place / "precious").mkdir()
    shutil.copytree(ROOT / "nnmpi", package / "nnmpi")
    if name == "the clock jumps":
        (package / "sitecustomize.py").write_text(CLOCK)
    ranks = "1" if name.startswith("files") else "2"  # Open MPI's own files are larger
    words = [find_mpirun(), "-n", ranks, sys.executable, "-m", "nnmpi", "train", *TRAIN.split()]
    limit = ["sh", "-c", f'{LIMITS[name]}; exec "$@"', "sh"] if name in LIMITS else []
    env = environment() | {"PYTHONPATH": str(package)}
    with output.open("w") as sink:
        job = spawn([*limit, *(words[3:] if ranks == "1" else words), "--out", str(run)], sink, env)
    until = time.monotonic() + WAIT_S
    while not (run / "checkpoints" / "latest").exists() and job.poll() is None:
        time.sleep(0.02)
    began = time.monotonic()
    act(run, package)
    with suppress(subprocess.TimeoutExpired):
        job.wait(until - time.monotonic())
    status, text = job.poll(), output.read_text(errors="replace")
    kill(job.pid)
    wrong = ["hung"] if status is None else []
    sentences = len(re.findall("^nnmpi: ", text, re.MULTILINE))
    if "Traceback" in text or sentences != bool(status):
        wrong.append(f"{sentences} sentences: {text[-500:]}")
    if goes_on is not None and goes_on != (status == 0):
        wrong.append(f"status {status}")
    if [*(place / "precious").iterdir()]:
        wrong.append("written elsewhere")
    return status, ", ".join(wrong), time.monotonic() - began


def main(words):
    """Do all, and print the table."""
    parser = Parser("python -m benchmarks.faults midway", description=__doc__)
    parser.add_argument("--only", default="", help="those with this in their names")
    options, rows = parser.parse_args(words), []
    for name in (name for name in ACTS if options.only in name):
        with tempfile.TemporaryDirectory() as place:
            rows.append((name, *befall(name, Path(place))))
        print(*rows[-1], flush=True)
    columns = [("what happens", 0), ("status", 1), ("wrong", 2)]
    print(tables.render([(head, lambda row, i=i: str(row[i])) for head, i in columns], rows))
    return int(any(row[2] for row in rows))
