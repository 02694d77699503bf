"""Hostile files, each given to its command. See README.md.

python -m benchmarks.faults attacks --cases 1000 --seed 1
"""

import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from random import Random
from runpy import run_module

from benchmarks.faults.inputs import KINDS
from benchmarks.harness import tables
from benchmarks.harness.command import Parser, add_options, positive_count
from nnmpi.base.errors import UsageError
from nnmpi.commands.table import find_command
from nnmpi.train.config import all_options

LIMIT_S, HANGS_S, LIMIT_MIB = 10, 240, 2500  # seconds of a processor; of the clock
GOOD = "train --dataset DATA --model mlp --hidden 4 --max-steps 2 --out DATA --quiet --simulate 1"
COLUMNS = ("files", "accepted", "refused", "wrong", "seconds at most", "MiB at most")


def attempt(words, folder):
    """Run a command in a fork, in a folder; return (status, output, seconds, MiB).

    The status is negative for a signal.
    """
    output = folder.parent / "output"
    if not (pid := os.fork()):
        _become(words, folder, output)
    timer = threading.Timer(HANGS_S, os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status, usage = os.wait4(pid, 0)
    timer.cancel()
    seconds = usage.ru_utime + usage.ru_stime
    text = output.read_text(errors="replace")
    return os.waitstatus_to_exitcode(status), text, seconds, usage.ru_maxrss >> 10


def _become(words, folder, output):
    """Run a command as `python -m nnmpi` would, and end this process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(folder)
    os.environ["NNMPI_DATA"] = str(folder / "cache")
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
    status = 1
    try:
        sys.argv = [f"nnmpi {words[0]}", *map(str, words[1:])]
        run_module(find_command(words[0]), run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def judge(seen, root):
    """Return what is wrong with an observation; "" for nothing."""
    status, text, _, mib = seen
    if status < 0:
        return signal.Signals(-status).name  # SIGXCPU: too long; SIGKILL: hung
    if "Traceback" in text:
        return text.splitlines()[-1]
    if mib > LIMIT_MIB:
        return f"{mib} MiB"
    if (sentences := text.count("nnmpi: ")) != bool(status):
        return f"status {status}, {sentences} sentences"
    outside = [*root.rglob("*escaped*"), *Path(tempfile.gettempdir()).glob("*escaped*")]
    return f"wrote {outside[0]}" if outside else ""


def main(words):
    """Run the cases, and print the table."""
    parser = Parser("python -m benchmarks.faults attacks", description=__doc__)
    add_options(
        parser,
        ("--cases", positive_count, "140", "hostile files in all"),
        ("--first", int, "0", "number of the first"),
        ("--seed", int, "0", "of the files"),
    )
    options = parser.parse_args(words)
    names = [option.flag[2:] for option in all_options().values()]
    rows = {kind: dict.fromkeys(COLUMNS, 0) for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (good := root / "good").mkdir()
        for data in ("iris", "digits"):
            for line in (GOOD.replace("DATA", data), f"export {data}"):
                status, text, *_ = attempt(line.split(), good)
                if status:
                    raise UsageError(f"{line}: {text}")
        for number in range(options.first, options.first + options.cases):
            draw, place = Random(f"{options.seed}-{number}"), root / "case"
            kind = draw.choice([*KINDS])
            shutil.copytree(good, place)
            command = [*KINDS[kind](draw, place, names), "--simulate", "1"]
            command += ["--out", "new", "--quiet"] if command[0] == "train" else []
            seen = attempt(command, place)
            wrong, row = judge(seen, root), rows[kind]
            row["files"] += 1
            row["wrong" if wrong else "refused" if seen[0] else "accepted"] += 1
            for column, value in zip(COLUMNS[-2:], (round(seen[2], 1), seen[3]), strict=True):
                row[column] = max(row[column], value)
            if wrong:
                print(f"{number} {kind}: {wrong}", flush=True)
            shutil.rmtree(place)
    columns = [(name, lambda item, name=name: str(item[1][name])) for name in COLUMNS]
    print(tables.render([("kind", lambda item: item[0]), *columns], rows.items()))
    return int(any(row["wrong"] for row in rows.values()))
