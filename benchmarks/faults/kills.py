"""Supervised trainings that are hit at random, beside undisturbed ones. See README.md.

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
from collections import Counter, defaultdict
from contextlib import nullcontext, suppress
from pathlib import Path

from benchmarks.harness import launch
from benchmarks.harness.command import Parser, add_options, list_of, one_of, positive_count
from benchmarks.netlab.lab import Speed, call, lab_of
from benchmarks.netlab.launch import environment

TRAIN = (
    "--model mlp --dataset digits --batch-size 64 --lr-schedule constant --lr 1e-4 --eval-every 0"
    " --stall-limit 10"
)
POLL_S, LIMIT_S, GONE_S, HEALED_S = 0.1, 1800.0, 3.0, 45.0
OF_TESTS = "nnmpi-test-"  # folders for temporary files of a test's process
ROLES = "rank", "launcher", "supervisor"
# a stopped supervisor can do nothing; "cut": the link of one of the hosts, for HEALED_S
FAULTS = [*(f"{verb}-{role}" for verb in ("kill", "term", "stop") for role in ROLES), "cut"]
FAULTS.remove("stop-supervisor")


def processes_of(place):
    """Return the PIDs of what was started in a folder, by role; "other" is launchers' helpers."""
    result, name = defaultdict(list), place.name.encode()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            program, named = Path(words[0].decode()).name, any(name in word for word in words)
            if named and program.startswith("python"):
                role = "rank" if b"nnmpi.train" in words else "supervisor"
            elif named and program.startswith(("mpi", "prte")):
                role = "launcher"
            elif program != "nsenter" and name in (path / "environ").read_bytes():
                role = "other"
            else:
                continue
            result[role].append(int(path.name))
    return result


class Disturbance:
    """Does something to a random process at a random moment after each start, `kills` times."""

    def __init__(self, folder, options, seed, lab):
        self.folder, self.options, self.lab = folder, options, lab
        self.left, self.draws = options.kills, random.Random(seed)
        self.starts, self.at_s, self.fault = -1, 0.0, ""
        self.host, self.healed_s = "", 0.0  # whose link is cut, and until when
        self.done = Counter()
        self.lost_s = []  # seconds from the last checkpoint to each

    def __call__(self):
        """Do it, if it is due."""
        now_s = time.monotonic()
        if self.host and now_s > self.healed_s:
            self.set_link("up")
            self.host = ""
        with suppress(OSError):
            starts = (self.folder / "starts.jsonl").read_bytes().count(b"\n")
            if starts != self.starts:  # a new start: draw what, and when
                self.starts = starts
                self.at_s = now_s + self.draws.uniform(0.2, 1.8) * self.options.every
                self.fault = self.draws.choice(self.options.faults)
            if self.left and now_s > self.at_s and not self.host:
                self.act()

    def act(self):
        """Do it, if there is a process for it."""
        verb, _, role = self.fault.partition("-")
        targets = processes_of(self.folder.parent)[role] if role else self.lab.names
        if not targets:
            return
        self.at_s = float("inf")
        self.left -= 1
        self.done[self.fault] += 1
        latest = self.folder / "checkpoints" / "latest"
        saved_s = (latest if latest.exists() else self.folder / "starts.jsonl").stat().st_mtime
        self.lost_s.append(time.time() - saved_s)
        target = self.draws.choice(sorted(targets))
        if role:
            os.kill(target, getattr(signal, f"SIG{verb.upper()}"))
        else:
            self.host, self.healed_s = target, time.monotonic() + HEALED_S
            self.set_link("down")

    def set_link(self, state):
        """Cut or mend the chosen host's link."""
        call((*self.lab._switch.enter("net"), "ip", "link", "set", "dev", self.host, state))

    def ends(self):
        """Return whether the last one may end a supervisor, once."""
        fault, self.fault = self.fault, ""
        return self.at_s == float("inf") and (fault == "kill-supervisor" or fault[:4] == "term")


def supervise(ranks, words, place, disturb, lab):
    """Run a training under supervisors; return the last one's status, all output and seconds."""
    begin, output = time.monotonic(), place / "output"
    command = [sys.executable, "-m", "nnmpi", "run", "-n", str(ranks)]
    env = launch.environment() | {"TMPDIR": str(place / "tmp")}
    if lab:
        command = [*lab.enter_head(), *command, "--hosts", ",".join(lab.names)]
        env = environment(lab.agent) | {"PRTE_MCA_hwloc_default_binding_policy": "none"}
    with output.open("w") as stream:
        again = True
        while again:
            job = subprocess.Popen(
                [*command, "--", *words.split()],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
            )
            while job.poll() is None:
                disturb()
                time.sleep(POLL_S)
                if time.monotonic() - begin > LIMIT_S:
                    for process in sum(processes_of(place).values(), []):
                        os.kill(process, signal.SIGKILL)
                    job.wait()
                    return "hung", output.read_text(errors="replace"), LIMIT_S
            again = job.returncode and disturb.ends()
    return job.returncode, output.read_text(errors="replace"), time.monotonic() - begin


def files_of(place, lab):
    """Return the files that are left in folders for temporary ones and for shared memory.

    Tests may run beside: what they make for themselves is not counted.
    """
    folders = [place / "tmp", Path("/tmp"), Path("/dev/shm")]
    for host in (lab._head, *lab._hosts) if lab else ():
        folders += [lab._tmp(host.name), Path(f"/proc/{host.pid}/root/dev/shm")]
    files = (file for folder in folders for file in folder.iterdir())
    return {str(file) for file in files if not file.name.startswith(OF_TESTS)}


def repeats(layout, ranks):
    """Return whether a disturbed run has an undisturbed one's bits, given all its starts' ranks.

    Without progress in two starts the supervisor leaves out a replica, and under asp and ssp the
    order of arrival decides.
    """
    of_arrival = re.search(r"--sync (asp|ssp)(?!.*--staleness 0)", layout)
    return "--reduction fixed" in layout or (len(ranks) == 1 and not of_arrival)


def last_files(folder):
    """Return the files of the last checkpoint's arrays, as bytes."""
    last = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    return [file.read_bytes() for file in sorted(last.glob("*.safetensors"))]


def compare(layout, options, seed, place, lab):
    """Run a layout disturbed and undisturbed; return (faults, whether all is well), and print."""
    (place / "tmp").mkdir()
    train = (
        f"{TRAIN} {layout} --epochs 1000000 --max-steps {options.steps} --save-every"
        f" {options.save_steps}steps --quiet"
    )
    disturb, before = Disturbance(place / "disturbed", options, seed, lab), files_of(place, lab)
    status, text, seconds = supervise(
        options.ranks, f"{train} --out {disturb.folder}", place, disturb, lab
    )
    if status or not disturb.lost_s:
        print(f"{layout}: status {status} after {dict(disturb.done)}:\n{text[-3000:]}", flush=True)
        return disturb.done, False
    starts = [float(item) for item in re.findall(r"ended after (\d+) s", text)]
    lost = sum(disturb.lost_s) / len(disturb.lost_s)
    print(
        f"{layout}: {', '.join(f'{number} {name}' for name, number in disturb.done.items())} in"
        f" {seconds:.0f} s; {text.splitlines()[-1]}\nstarts took {min(starts, default=0):.0f} to"
        f" {max(starts, default=0):.0f} s; {lost:.2f} s since the last checkpoint, on average",
        flush=True,
    )
    of_starts = {int(number) for number in re.findall(r"start \d+: (\d+) rank", text)}
    ranks = options.undisturbed_ranks or options.ranks
    status, text, seconds = supervise(ranks, f"{train} --out {place}/alone", place, bool, lab)
    time.sleep(GONE_S)
    left = [str(item) for item in processes_of(place).values()]
    left += sorted(files_of(place, lab) - before)
    print(f"undisturbed: {seconds:.0f} s; {text.splitlines()[-1]}\nleft: {left or 'nothing'}")
    same = not status and last_files(disturb.folder) == last_files(place / "alone")
    if not repeats(layout, of_starts):
        print(f"bits are not compared: sums had another order, on {sorted(of_starts)} ranks")
        return disturb.done, not status and not left
    bits = "equal bit for bit" if same else "DIFFERENT"
    print(f"the weights and the optimizer's state are {bits}", flush=True)
    return disturb.done, same and not left


def main(words):
    """Measure, and print the results."""
    parser = Parser("python -m benchmarks.faults kills", description=__doc__)
    add_options(
        parser,
        ("--ranks", positive_count, "4", "of the training"),
        ("--hosts", int, "0", "hosts of a lab, which needs root; 0: this machine"),
        ("--faults", list_of(one_of(*FAULTS)), FAULTS[0], f"to draw from: {', '.join(FAULTS)}"),
        ("--kills", positive_count, "20", "in all, for each layout"),
        ("--every", float, "10", "seconds from a start to its fault, on average"),
        ("--steps", positive_count, "30000", "of the training"),
        ("--save-steps", positive_count, "200", "from checkpoint to checkpoint"),
        ("--seed", int, "0", "of the faults"),
        ("--layout", list_of(str), "--reduction fixed", "of the training, as its options; several"),
        ("--undisturbed-ranks", positive_count, None, "of the run beside it (default: as many)"),
    )
    options, done, wrong = parser.parse_args(words), Counter(), 0
    with lab_of(options.hosts, Speed("1gbit")) if options.hosts else nullcontext() as lab:
        for number, layout in enumerate(options.layout):
            with tempfile.TemporaryDirectory(prefix="nnmpi-kills-") as name:
                faults, well = compare(layout, options, options.seed + number, Path(name), lab)
            done += faults
            wrong += not well
    print(f"{done.total()} in {len(options.layout)} layouts, {wrong} wrong: {dict(done)}")
    return int(wrong > 0)
