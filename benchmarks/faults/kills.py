"""A supervised training whose ranks are killed at random, beside an undisturbed one. See README.md.

python -m benchmarks.faults kills --ranks 4 --kills 20 --steps 30000
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.harness.command import Parser, add_options, positive_count
from nnmpi.base.launcher import read_launch

TRAIN = (
    "--model mlp --dataset digits --batch-size 64 --lr-schedule constant --lr 1e-4 --eval-every 0"
)
POLL_S = 0.1


def supervise(ranks, words, output, disturb):
    """Run a training under the supervisor; return its status, output and seconds."""
    begin = time.monotonic()
    with output.open("w") as stream:
        command = [sys.executable, "-m", "nnmpi", "run", "-n", str(ranks), "--", *words.split()]
        job = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        while job.poll() is None:
            disturb()
            time.sleep(POLL_S)
    return job.returncode, output.read_text(errors="replace"), time.monotonic() - begin


def ranks_of(folder):
    """Return the PIDs of the training in a folder, by rank."""
    result = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            named = any(word.endswith(str(folder).encode()) for word in words)  # --out=FOLDER
            if b"nnmpi.train" in words and named:
                entries = (
                    (path.parent / "environ").read_bytes().decode(errors="replace").split("\0")
                )
                launch = read_launch(dict(entry.partition("=")[::2] for entry in entries))
                if launch is not None:
                    result[launch.rank] = int(path.parent.name)
    return result


class Killer:
    """Kills a random rank at a random moment after each start, `kills` times."""

    def __init__(self, folder, kills, every_s, seed):
        self.folder, self.left, self.every_s = folder, kills, every_s
        self.draws = random.Random(seed)
        self.starts = -1
        self.at_s = 0.0
        self.lost_s = []  # seconds from the last checkpoint to each kill

    def __call__(self):
        """Kill a rank, if a kill is due."""
        with suppress(OSError):
            starts = (self.folder / "starts.jsonl").read_bytes().count(b"\n")
            if starts != self.starts:  # a new start: draw the time of its kill
                self.starts = starts
                self.at_s = time.monotonic() + self.draws.uniform(0.2, 1.8) * self.every_s
            ranks = ranks_of(self.folder) if self.left and time.monotonic() > self.at_s else {}
            if ranks:
                self.at_s = float("inf")
                self.left -= 1
                latest = self.folder / "checkpoints" / "latest"
                saved_s = (
                    (latest if latest.exists() else self.folder / "starts.jsonl").stat().st_mtime
                )
                self.lost_s.append(time.time() - saved_s)
                os.kill(self.draws.choice(sorted(ranks.values())), signal.SIGKILL)


def repeats(layout, ranks):
    """Return whether a killed run has an undisturbed one's bits, given all its starts' ranks.

    Without progress in two starts the supervisor leaves out a replica, and under asp and ssp the
    order of arrival decides.
    """
    of_arrival = re.search(r"--sync (asp|ssp)(?!.*--staleness 0)", layout)
    return "--reduction fixed" in layout or (len(ranks) == 1 and not of_arrival)


def last_files(folder):
    """Return the files of the last checkpoint's arrays, as bytes."""
    last = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    return [file.read_bytes() for file in sorted(last.glob("*.safetensors"))]


def main(words):
    """Measure, and print the results."""
    parser = Parser("python -m benchmarks.faults kills", description=__doc__)
    add_options(
        parser,
        ("--ranks", positive_count, "4", "of the training"),
        ("--kills", positive_count, "20", "in all"),
        ("--every", float, "10", "seconds from a start to its kill, on average"),
        ("--steps", positive_count, "30000", "of the training"),
        ("--save-steps", positive_count, "200", "from checkpoint to checkpoint"),
        ("--seed", int, "0", "of the kills"),
        ("--layout", str, "--reduction fixed", "of the training, as its options"),
        ("--undisturbed-ranks", positive_count, None, "of the run beside it (default: as many)"),
    )
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = (
            f"{TRAIN} {options.layout} --epochs 1000000 --max-steps {options.steps} --save-every"
            f" {options.save_steps}steps --quiet"
        )
        killer = Killer(folder / "killed", options.kills, options.every, options.seed)
        status, text, seconds = supervise(
            options.ranks, f"{train} --out {killer.folder}", folder / "output", killer
        )
        if status or not killer.lost_s:
            sys.exit(
                f"the supervised run ended with status {status} after {len(killer.lost_s)} kills:\n"
                f"{text[-3000:]}"
            )
        print(
            f"killed: {options.kills - killer.left} times in {seconds:.0f} s;"
            f" {text.splitlines()[-1]}",
            flush=True,
        )
        starts = [float(item) for item in re.findall(r"ended after (\d+) s", text)]
        print(f"starts that were killed took {min(starts):.0f} to {max(starts):.0f} s", flush=True)
        lost = sum(killer.lost_s) / len(killer.lost_s)
        print(f"work lost by a kill, on average: {lost:.2f} s", flush=True)
        ranks = {int(number) for number in re.findall(r"start \d+: (\d+) rank", text)}
        if not repeats(options.layout, ranks):
            print(f"bits are not compared: sums had another order, on {sorted(ranks)} ranks")
            return 0
        ranks = options.undisturbed_ranks or options.ranks
        status, text, seconds = supervise(
            ranks, f"{train} --out {folder}/undisturbed", folder / "output", bool
        )
        print(f"undisturbed: {seconds:.0f} s; {text.splitlines()[-1]}")
        same = last_files(killer.folder) == last_files(folder / "undisturbed")
        print(
            "the weights and the optimizer's state are"
            f" {'equal bit for bit' if same else 'DIFFERENT'}"
        )
        return 0 if same and not status else 1
