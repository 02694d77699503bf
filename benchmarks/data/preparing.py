"""What large data cost before the first step: memory of ranks, first and second starts, preparing.

    python benchmarks/data/preparing.py                          # all parts
    python benchmarks/data/preparing.py --check                  # small ones, one round
    python benchmarks/data/preparing.py --peers-python PYTHON    # the one that has pandas

    memory     a training on 4 ranks: what is private to a rank, and all ranks' proportional share
    starts     seconds until the first step is done: first and second start, less those with
               digits; and of reading the file once, as NumPy does
    pictures   seconds of preparing a folder on 1 and on 2 ranks
    table      seconds and private memory of preparing a CSV file, beside pandas.read_csv

Contestants take turns, each in processes of its own and with a cache of its own. Shown are medians.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

RANKS = 4
FEW_MB = 3  # pictures of the large sets' shape
GROWTH_MB = 60  # of what is private to a rank, at most
TABLE_MB = 300
COLUMNS = 20


def write_archive(path: Path, megabytes: int) -> None:
    """Write pictures of 32 x 32 x 3 bytes, without compression."""
    import numpy as np

    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (megabytes * 10**6 // 3072, 32, 32, 3), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(len(x)) % 10)


def write_pictures(folder: Path, count: int) -> None:
    """Write pictures of 48 x 48 in 10 classes."""
    import numpy as np
    from PIL import Image

    for number in range(count):
        place = folder / str(number % 10)
        place.mkdir(parents=True, exist_ok=True)
        draws = np.random.default_rng(number)
        pixels = draws.integers(0, 256, (12, 12, 3), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
        Image.fromarray(pixels).save(place / f"{number}.png")


def write_table(path: Path, rows: int) -> None:
    """Write a table of numbers, the last column 5 classes."""
    import numpy as np

    draws = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join(f"c{number}" for number in range(COLUMNS - 1)) + ",kind\n")
        for first in range(0, rows, 10_000):
            values = draws.normal(size=(min(10_000, rows - first), COLUMNS - 1))
            for number, row in enumerate(values.tolist()):
                file.write(",".join(f"{value:.6f}" for value in row) + f",{number % 5}\n")


def command(folder: Path, data: str, ranks: int, steps: int = 1) -> list[str]:
    """Return the words that start a training."""
    from nnmpi.lab.launching import find_mpirun

    words = f"--model mlp --dataset {data} --max-steps {steps} --log-every {steps} --batch-size 64"
    out = tempfile.mkdtemp(dir=folder)
    program = [sys.executable, "-m", "nnmpi", "train", *words.split(), "--out", f"{out}/run"]
    return [find_mpirun(), "-n", str(ranks), *program]


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a training, with a cache in the folder."""
    return {**os.environ, "NNMPI_DATA": str(folder / "cache"), "PYTHONPATH": sys.path[0]}


def seconds(folder: Path, data: str, ranks: int = RANKS) -> float:
    """Return the seconds of a training's start: until the line that reports its one step.

    The test part is evaluated behind that, which takes the longer the more samples it has.
    """
    words, begin, taken = command(folder, data, ranks), time.perf_counter(), 0.0
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=environment(folder), cwd=folder
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("epoch") and not taken:
                taken = time.perf_counter() - begin
    if job.returncode or not taken:
        raise SystemExit(f"{' '.join(words)} ended with status {job.returncode}")
    return taken


def memory(folder: Path, data: str, steps: int) -> tuple[float, float]:
    """Return the most that was private to a rank, and that all ranks had together, in MB."""
    private, together = 0.0, 0.0
    words = command(folder, data, RANKS, steps)
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, env=environment(folder), cwd=folder
    ) as job:
        while job.poll() is None:
            sizes = [
                _sizes(file)
                for file in Path("/proc").glob("[0-9]*/cmdline")
                if _is_rank(file, words[-1])
            ]
            private = max([private, *(item[0] for item in sizes)])
            together = max(together, sum(item[1] for item in sizes))
            time.sleep(0.1)
    if job.returncode:
        raise SystemExit(f"{' '.join(words)} ended with status {job.returncode}")
    return private, together


def _is_rank(file: Path, out: str) -> bool:
    try:
        words = file.read_text().split("\0")
    except OSError:
        return False
    return out in words and "python" in words[0]


def _sizes(file: Path) -> tuple[float, float]:
    """Return what is private to a process and is no page of a file, and its proportional share."""
    try:
        lines = file.with_name("smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended
        return 0.0, 0.0
    fields = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines}
    return fields["Pss_Anon"], fields["Pss"]


PREPARE = """
import sys, threading, time
from nnmpi.data import load
most = 0
def watch():
    global most
    while True:
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon"):
                most = max(most, int(line.split()[1]))
        time.sleep(0.05)
threading.Thread(target=watch, daemon=True).start()
begin = time.perf_counter()
load(sys.argv[1])
print(time.perf_counter() - begin, most / 1e3)
"""
PANDAS = """
import sys, time, pandas
begin = time.perf_counter()
pandas.read_csv(sys.argv[1])
print(time.perf_counter() - begin)
"""
READ = """
import sys, time, numpy
begin = time.perf_counter()
numpy.load(sys.argv[1])["x"]
print(time.perf_counter() - begin)
"""


def told(folder: Path, program: str, path: Path, python: str = sys.executable) -> list[float]:
    """Return the numbers that a program prints of a file."""
    words = [python, "-c", program, str(path)]
    result = subprocess.run(
        words, check=True, stdout=subprocess.PIPE, text=True, env=environment(folder)
    )
    return [float(word) for word in result.stdout.split()]


def forget(folder: Path) -> None:
    """Remove what was prepared."""
    shutil.rmtree(folder / "cache", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="small sets, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-python", default="", help="a Python that has pandas")
    options = parser.parse_args()
    sizes, pictures, rows = ([465, 4000], 20_000, 2_000_000)
    rounds, steps = options.rounds, 100
    if options.check:
        sizes, pictures, rows, rounds, steps = [40], 400, 20_000, 1, 20
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, all_small = memory(folder, "digits", steps)
        print(f"digits: {small:.0f} MB private to a rank, {all_small:.0f} MB of {RANKS} together")
        file = folder / "set.npz"
        write_archive(file, FEW_MB)  # as large a model as the large set's
        few, all_few = memory(folder, str(file), steps)
        print(f"{FEW_MB} MB: {few:.0f} MB private to a rank, {all_few:.0f} MB together")
        for size in sizes:
            write_archive(file, size)
            private, together = memory(folder, str(file), steps)
            bound = size + all_small * 1.05
            print(
                f"{size} MB: {private - small:+.0f} MB private to a rank (at most {GROWTH_MB}),"
                f" {together:.0f} MB together (at most {bound:.0f};"
                f" {together - all_few:.0f} more than with {FEW_MB} MB)"
            )
            is_grown = private - small > GROWTH_MB or together > bound + RANKS * GROWTH_MB
            if options.check and is_grown:
                raise SystemExit("a rank's memory grows with the data")
            if size == sizes[0]:
                turns = []
                for _ in range(rounds):
                    forget(folder)
                    (read,) = told(folder, READ, file)
                    parts = [seconds(folder, data) for data in (str(file), "digits", str(file))]
                    turns.append((read, parts[0] - parts[1], parts[2] - parts[1]))
                read, first, second = map(median, zip(*turns, strict=True))
                print(
                    f"{size} MB: first start {first:+.2f} s beside digits', second {second:+.2f} s;"
                    f" reading the file takes {read:.2f} s"
                )
            file.unlink()
        write_pictures(folder / "pictures", pictures)
        shares = []
        for _ in range(rounds):
            taken = []
            for ranks in (1, 2):
                forget(folder)
                first = seconds(folder, str(folder / "pictures"), ranks)
                taken.append(first - seconds(folder, str(folder / "pictures"), ranks))
            shares.append((taken[1] / taken[0], *taken))
        share, one, two = map(median, zip(*shares, strict=True))
        print(f"{pictures} pictures: {one:.1f} s on 1 rank, {two:.1f} s on 2: {share:.2f}")
        table = folder / "table.csv"
        write_table(table, rows)
        takes = []
        for _ in range(rounds):
            forget(folder)
            ours, private = told(folder, PREPARE, table)
            theirs = (
                told(folder, PANDAS, table, options.peers_python) if options.peers_python else [0]
            )
            takes.append((ours, private, theirs[0]))
        ours, private, theirs = map(median, zip(*takes, strict=True))
        print(
            f"{rows} rows of CSV: {ours:.1f} s and {private:.0f} MB; pandas.read_csv {theirs:.1f} s"
        )
        if private > TABLE_MB:
            raise SystemExit(f"a table takes more than {TABLE_MB} MB")


if __name__ == "__main__":
    main()
