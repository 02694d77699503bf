"""Fourteen faults of one rank, by exchange and MPI: whether the rank is named, and after how long.

python -m benchmarks.faults table --python .venv/bin/python --python mpich/bin/python --json t.json
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults.victim import ACTS, GUILTY
from benchmarks.harness import command, tables
from benchmarks.harness.command import Parser
from benchmarks.harness.launch import environment, spawn
from nnmpi.lab.launching import kill

FAULTS = [*ACTS, "stop at start-up", "asleep in build", "other data", "slow by 20x"]
WAYS = {
    "ring": "--allreduce ring",
    "native": "--allreduce native",
    "shared": "--allreduce shared",
    "pipeline": "--pp 4",
    "servers": "--sync asp",
}
GONE = rf"nnmpi: .*rank {GUILTY} has gone"
BY_LAUNCHER = rf"prterun noticed that process rank {GUILTY} .*|PID \d+ RUNNING AT .*"
BY_LAUNCHER += rf"|Process name: \[\S+,{GUILTY}\]"
RANKS, STALL_LIMIT_S, HANGS_S = 4, 10.0, 60.0
TRAIN = (
    "--dataset data.npz --epochs 400 --max-steps 40 --batch-size 32 --save-every 5steps"
    " --eval-every 0"
)
TRAIN += " --log-every 1"
# prefixes of faults that only the stall limit detects; all others are detected at once
LIMITED = ("stop", "asleep", "wrong order", "extra")
ENDS_WELL = ("slow by 20x",)
POLL_S, DISTURBED_S, MOST_TRIES = 0.02, 0.5, 5
LATEST_S = 1.0, 2.0  # seconds to the name: after the limit; after a fault detected at once
OF_THE_FILES = ("full disk", "deleted folder", "other data")  # these disturb no collective
RUN_DISK = "size=1m"


def make_data(folder):
    """Write the data set, and another one of the same shape for the guilty rank."""
    import numpy as np

    for seed, target in enumerate((folder, folder / "other")):
        target.mkdir(parents=True)
        draws = np.random.default_rng(seed)
        x, y = draws.normal(size=(128, 4)).astype(np.float32), draws.integers(0, 3, 128)
        np.savez(target / "data.npz", x_train=x, y_train=y, x_test=x[:32], y_test=y[:32])


def inject(python, way, fault, folder):
    """Run the training in a folder, and return the observation.

    Returns:
        status: of the launcher; None if it hung.
        output: of the job.
        named_s: seconds from the fault to the first line that names it, or None.
        ended_s: seconds from the fault to the end of the job.
        longest_s: the longest interval between two polls: a long one means that the machine was
            busy, and the times are void.
    """
    make_data(folder / "work")
    run, at = folder / "run", folder / "at"
    words = f"{TRAIN} {WAYS[way]} --stall-limit {STALL_LIMIT_S} --out {run}/it"
    if fault == "slow by 20x":
        words = words.replace(f"limit {STALL_LIMIT_S}", "limit 60")
    mpirun = str(Path(python).with_name("mpirun"))
    victim = "benchmarks.faults.victim"
    words_of_job = [mpirun, "-n", str(RANKS), python, "-m", victim, *words.split()]
    environ = environment() | {"NNMPI_FAULT": fault, "NNMPI_FAULT_FILE": str(at)}
    environ |= {"NNMPI_START_LIMIT_S": str(STALL_LIMIT_S)} if fault == "stop at start-up" else {}
    run.mkdir()
    mounted = fault == "full disk"
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", RUN_DISK, "none", str(run)], check=True)
    try:
        return _watch(words_of_job, environ, folder, at, fault)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(run)], check=True)


def _watch(words, environ, folder, at, fault):
    begin = polled_s = time.time()
    seen_s, longest_s = None, 0.0
    with (folder / "output").open("wb") as sink, (folder / "output").open("rb") as source:
        job = spawn(words, sink, environ, cwd=folder / "work")
        text = ""
        while job.poll() is None and time.time() - begin < HANGS_S + longest_s:
            text += source.read().decode(errors="replace")
            if seen_s is None and at.exists() and find_name(text, fault):
                seen_s = time.time()
            time.sleep(POLL_S)
            longest_s, polled_s = max(longest_s, time.time() - polled_s), time.time()
        ended_s, status = time.time(), job.poll()
        kill(job.pid)
        job.wait()
        text += source.read().decode(errors="replace")
    if seen_s is None and find_name(text, fault):
        seen_s = ended_s
    happened = float(at.read_text()) if at.exists() else begin
    return {
        "status": status,
        "output": text,
        "named_s": None if seen_s is None else round(seen_s - happened, 2),
        "ended_s": round(ended_s - happened, 2),
        "longest_s": round(longest_s, 2),
    }


def find_name(text, fault):
    """Return nnmpi's line that names the fault, else the launcher's, else ""."""
    patterns = {
        "exit": rf"{GONE}|rank {GUILTY} of {RANKS}: os\._exit",
        "raise": rf"rank {GUILTY} of {RANKS}.*a fault on purpose",
        "full disk": r"no checkpoint of step \d+ .*No space left|No space left on device",
        "deleted folder": r"metrics.jsonl was removed",
        "other data": rf"rank {GUILTY}\b.*data|data.*rank {GUILTY}\b",
        "slow by 20x": rf"nnmpi: waiting for .*rank {GUILTY} is",
    }
    limited = fault.startswith(LIMITED)
    default = (
        rf"the job is ended: .*(rank {GUILTY}\b|all ranks wait for one another.*)"
        if limited
        else GONE
    )
    result = re.search(
        patterns.get("exit" if fault.startswith("exit") else fault, default),
        text,
        re.DOTALL if fault == "raise" else 0,
    )
    if result is None and not limited:
        # the launcher may end the job before a rank can report
        result = re.search(BY_LAUNCHER, text)
    return result[0] if result else ""


def judge(way, fault, seen):
    """Return the defects of an observation as text; "" for none."""
    wrong = []
    if seen["status"] is None:
        wrong.append("HUNG")
    elif (seen["status"] == 0) != fault.startswith(ENDS_WELL):
        wrong.append(f"status {seen['status']}")
    if seen["named_s"] is None:
        return ", ".join([*wrong, "not named"])
    line = next(
        item
        for item in seen["output"].splitlines()
        if find_name(seen["output"], fault).splitlines()[-1] in item
    )
    by_launcher = re.match(BY_LAUNCHER, find_name(seen["output"], fault))
    stepless = (
        fault in ("stop at start-up", "asleep in build", "other data", "deleted folder")
        or by_launcher
    )
    if not stepless and not re.search(r"step \d+", seen["output"]):
        wrong.append("no step")
    if fault.startswith(LIMITED) and not re.search(
        r" at \S+:\d+| in an? |in MPI's start|not been heard of", line
    ):
        wrong.append("no operation")
    late_s = seen["named_s"] - (STALL_LIMIT_S if fault.startswith(LIMITED) else 0.0)
    if (
        not fault.startswith((*ENDS_WELL, *OF_THE_FILES))
        and late_s > LATEST_S[not fault.startswith(LIMITED)]
    ):
        wrong.append(f"{late_s:.1f} s late")
    return ", ".join(wrong)


def name_mpi(python):
    """Return the MPI beside a Python."""
    text = subprocess.run(
        [Path(python).with_name("mpirun"), "--version"], capture_output=True, text=True, check=True
    )
    return "MPICH" if "HYDRA" in text.stdout else "Open MPI"


def render(rows):
    """Return the rows as a table: seconds from the fault to its name, or the defects."""
    columns = list(dict.fromkeys((row["mpi"], row["way"]) for row in rows))
    result = {(row["mpi"], row["way"], row["fault"]): row for row in rows}
    return tables.render(
        [
            ("fault", str),
            *(
                (f"{mpi}, {way}", lambda fault, key=(mpi, way): _cell(result.get((*key, fault))))
                for mpi, way in columns
            ),
        ],
        dict.fromkeys(row["fault"] for row in rows),
    )


def _cell(row):
    if row is None:
        return ""
    if row["wrong"]:
        return f"**{row['wrong']}**"
    limited = row["fault"].startswith(LIMITED)
    by_launcher = not limited and re.match(BY_LAUNCHER, find_name(row["output"], row["fault"]))
    name = "launcher, " if by_launcher else ""
    return (
        f"limit + {row['named_s'] - STALL_LIMIT_S:.1f}"
        if limited
        else f"{name}{row['named_s']:.1f}"
    )


def main(words):
    """Run the missing cells of the table, and print it."""
    parser = Parser("python -m benchmarks.faults table", description=__doc__)
    parser.add_argument(
        "--python", action="append", help="beside which an mpirun lies; one for each MPI"
    )
    parser.add_argument("--check", action="store_true", help="one fault in one way")
    text = "file for the results; what it holds already is not done again"
    command.add_options(
        parser,
        ("--faults", str, ",".join(FAULTS), "which"),
        ("--ways", str, ",".join(WAYS), "of talking"),
        ("--json", command.file, None, text),
    )
    options = parser.parse_args(words)
    if options.check:
        options.faults, options.ways = "raise", "ring"
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    rows = {(row["mpi"], row["way"], row["fault"]): row for row in before}
    for python in (str(Path(item).absolute()) for item in options.python or [sys.executable]):
        mpi = name_mpi(python)
        for fault in options.faults.split(","):
            for way in options.ways.split(","):
                if (mpi, way, fault) in rows and not rows[mpi, way, fault]["wrong"]:
                    continue
                for _ in range(MOST_TRIES):
                    with tempfile.TemporaryDirectory() as folder:
                        seen = inject(python, way, fault, Path(folder))
                    if seen["longest_s"] < DISTURBED_S:
                        break
                row = {
                    "mpi": mpi,
                    "way": way,
                    "fault": fault,
                    "wrong": judge(way, fault, seen),
                    **seen,
                }
                rows[mpi, way, fault] = row
                print(
                    f"{mpi}, {way}, {fault}: {row['named_s']} s, {row['ended_s']} s {row['wrong']}",
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(list(rows.values()), indent=1))
    print(render(list(rows.values())))
    # a check is also run on busy machines
    wrong = [row["wrong"] for row in rows.values() if not options.check or row["named_s"] is None]
    return 1 if any(wrong) else 0
