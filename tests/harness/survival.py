"""Trainings that are started again after faults, in the simulated world: what must hold of each,
whatever the seed.

    python -m tests.harness.survival 0 10000        # seeds 0 to 9999 on all cores; tells the first
                                                    that fails

A seed draws how ranks train (in step, with servers, averaging, by gossip), how many hosts answer
before each start, and what goes wrong in it: a rank that is killed or stops in some call, a kill in
the middle of some operation of the disk, with or without what was not synced, a disk that fills up,
a supervisor that is killed itself; slow ranks and late messages besides. After the last fault
nothing more happens. The supervisor is the real one. Then

    each start ends with an error that has a name, or well
    no checkpoint is lost that was written
    the supervisor proves the end, with whole metrics
    ranks that train in step, in a fixed order of sums, end with the bits of an undisturbed run
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import threadpoolctl

from nnmpi.backend import blas
from nnmpi.base.errors import CheckpointError, NnmpiError
from nnmpi.base.launcher import usable_cores
from nnmpi.comm.mpi.shutdown import STALLED
from nnmpi.comm.simulated.scheduler import Faults
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.lab import run as supervisor
from nnmpi.lab.launching import Launcher
from nnmpi.lab.run import GaveUp, SupervisedRun, Supervisor
from nnmpi.train import checkpoint, inputs
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.harness.disk import FaultyDisk

STEPS = 4
WORDS = (
    f"--model mlp --hidden 3 --dataset iris --batch-size 60 --max-steps {STEPS} --save-every 2steps"
)
WORDS += " --eval-every 0 --lr-schedule constant --log-every 1 --quiet --backend numpy"
FIXED = "--reduction fixed"
WAYS = (
    FIXED,
    FIXED,
    "--sync asp",
    "--sync ssp --staleness 1",
    "--sync local --local-steps 2",
    "--sync gossip",
)
HOSTS, MOST_FAULTS = ("one", "two", "three"), 3
CALLS, OPERATIONS = 400, 150  # about as many as such a run has
EXPECTED_ERRORS = ("was killed", "has stopped", "No space left on device")
KILLED = 137


def draw_faults(seed, ranks, calls):
    """Return one kill, stop or neither, with slow ranks and late messages, as a seed draws them.

    Args:
        ranks: how many there are.
        calls: how many a rank makes, about: in one of them it falls.
    """
    draws = Random(seed)
    fate, rank, call = (
        draws.choice(("kill", "stop", "none")),
        draws.randrange(ranks),
        draws.randrange(1, calls + 1),
    )
    slow = {other: draws.uniform(1, 20) for other in range(ranks) if draws.random() < 0.3}
    late, falls = draws.choice((0.0, 0.0, 0.1, 0.5)), {rank: call}
    return Faults(falls if fate == "kill" else {}, falls if fate == "stop" else {}, slow, late)


@contextmanager
def quick_trainings():
    """Leave out what takes longer than such a small run, and do once what is always the same."""
    with pytest.MonkeyPatch.context() as patch:
        start = []
        describe = inputs._describe_start
        patch.setattr(
            inputs,
            "_describe_start",
            lambda *given: start[0] if start else start.append(describe(*given)) or start[0],
        )
        for module in (threadpoolctl, blas):
            patch.setattr(module, "threadpool_info", cache(threadpoolctl.threadpool_info))
        yield


def undisturbed(folder):
    """Return the arrays that a run in step ends with to which nothing happens."""
    simulate(partial(main, [*f"{WORDS} {FIXED}".split(), "--out", str(folder)]), 2)
    return arrays_of(folder)


def arrays_of(run):
    """Return the arrays of a run's last checkpoint."""
    return [file.read_bytes() for file in sorted(_last(run).glob("*.safetensors"))]


def _last(run):
    """Return the checkpoint that a resume would take: a kill may have come between its name and
    `latest`.
    """
    loaded = checkpoint.load_checkpoint(run / "checkpoints")
    assert loaded is not None
    return loaded.folder


def survive(seed, run, wanted):
    """Let a run go through what a seed draws.

    Args:
        seed: of all that happens.
        run: a new folder for it.
        wanted: see `undisturbed`.

    Returns:
        What was wrong; nothing if all was well.
    """
    draws, promised = Random(seed), _Promised()
    way = draws.choice(WAYS)
    machine = _Machine(run, draws, promised, left=draws.randint(1, MOST_FAULTS))
    fewest = 2 if "gossip" in way else 1
    words = (*WORDS.split(), *way.split())
    plan = SupervisedRun(words, run, resumes=False, ranks=len(HOSTS), fewest=fewest, hosts=HOSTS)
    with promised.watched(), machine.taking_part():
        for _ in range(MOST_FAULTS + 1):
            try:
                Supervisor(plan, _AnsweringHosts(machine), lambda text: None).run()
                break
            except _SupervisorKilled:
                if machine.wrong:
                    break
                # else the batch system starts it again
            except GaveUp as error:
                return machine.wrong or f"the supervisor gave up: {error}"
            except Exception as error:
                return machine.wrong or f"the supervisor: {type(error).__name__}: {error}"
    try:
        return machine.wrong or _judge_end(run, wanted if way == FIXED else None)
    except (OSError, ValueError, KeyError) as error:
        return f"files of a run that has ended are gone or damaged: {error!r}"


class _SupervisorKilled(BaseException):
    """Its host is gone."""


@dataclass
class _Machine:
    """What stands for launcher, hosts and clock of a supervisor: each start is a simulation, with a
    fault.

    Attributes:
        left: how many starts will have one.
        wrong: what was not as it must be.
    """

    run: Path
    draws: Random
    promised: _Promised
    left: int
    wrong: str = ""
    now_s: float = 0.0

    @contextmanager
    def taking_part(self):
        """Let supervisors start simulations instead of processes."""
        popen = SimpleNamespace(**{**vars(subprocess), "Popen": self.start})
        times = SimpleNamespace(
            monotonic=lambda: self.now_s, sleep=self.sleep, strftime=time.strftime
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "subprocess", popen)
            patch.setattr(supervisor, "time", times)
            patch.setattr(supervisor, "kill", lambda session: None)
            yield

    def sleep(self, seconds):
        """Let time pass."""
        self.now_s += seconds

    def start(self, command, **kwargs):
        """Do what a launcher does, up to the end; return what stands for its process."""
        at = command.index("nnmpi.train")
        ranks = int(command[command.index("-n") + 1]) if "-n" in command[:at] else 1
        status = self._train(command[at + 1 :], ranks)
        self.now_s += 1.0
        self.wrong = self.wrong or self.promised.find_lost(self.run)
        if self.wrong or (self.left and self.draws.random() < 0.1):
            raise _SupervisorKilled
        return SimpleNamespace(
            pid=0, returncode=status, poll=lambda: status, wait=lambda limit_s=None: status
        )

    def _train(self, words, ranks):
        """Train, and let something go wrong; return the job's status."""
        draws, faulty = self.draws, self.left > 0
        self.left -= faulty
        fault = draws.choice(("ranks", "kill", "power", "full")) if faulty else "none"
        faults = draw_faults(draws.randrange(2**32), ranks, CALLS) if fault == "ranks" else None
        at = draws.randint(1, OPERATIONS)
        disk = FaultyDisk(
            self.run, draws, at if fault in ("kill", "power") else 0, at if fault == "full" else 0
        )
        try:
            with disk:
                simulate(
                    partial(main, list(words)),
                    ranks,
                    seed=draws.randrange(2**32),
                    check=False,
                    faults=faults,
                )
        except NnmpiError as error:
            text = str(error)
            if (
                not faulty
                or "Traceback" in text
                or not any(item in text for item in EXPECTED_ERRORS)
            ):
                self.wrong = (
                    f"start with {self.left} faults to come: {type(error).__name__}: {error}"
                )
            if "was killed" in text and draws.random() < 0.2:
                return 0  # as MPICH's launcher has it where a rank leaves by itself
            return (
                KILLED
                if "was killed" in text
                else STALLED
                if "has stopped" in text
                else error.exit_status
            )
        except Exception as error:
            self.wrong = f"start with {self.left} faults to come: {type(error).__name__}: {error}"
            return 1
        finally:
            if fault == "power":
                disk.lose()
        return 0


class _AnsweringHosts(Launcher):
    """A launcher of whose hosts some answer."""

    def __init__(self, machine):
        super().__init__("Open MPI", "mpirun")
        object.__setattr__(self, "machine", machine)

    def answering(self, hosts):
        """Return at least one of the hosts, as the seed draws them."""
        draws = self.machine.draws  # type: ignore[attr-defined]
        return sorted(draws.sample(list(hosts), draws.choice((1, 2, 3, 3))))


class _Promised:
    """The newest checkpoint of which the program was told that it is safe."""

    def __init__(self):
        self.step = 0

    @contextmanager
    def watched(self):
        """Note each checkpoint that is finished."""
        finish = checkpoint.CheckpointWriter.finish

        def noting(writer, *args):
            name = finish(writer, *args)  # type: ignore[arg-type]
            self.step = checkpoint.step_of(Path(name))
            return name

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.CheckpointWriter, "finish", noting)
            yield

    def find_lost(self, run):
        """Return what has become of it, if it is gone."""
        try:
            loaded = checkpoint.load_checkpoint(run / "checkpoints")
        except CheckpointError as error:
            return f"a checkpoint of step {self.step} was written: {error}" if self.step else ""
        step = 0 if loaded is None else loaded.values["step"]
        return (
            f"the checkpoint of step {self.step} was written, and that of step {step} is left"
            * (step < self.step)
        )


def _judge_end(run, wanted):
    """Return what is wrong with a run that has ended; where ranks are not in step, its bits are its
    own.
    """
    records = read_metrics(run / "metrics.jsonl")
    trained = [record["global_step"] for record in records if record["kind"] == "train"]
    if (
        trained != sorted(set(trained))
        or trained[-1:] != [STEPS]
        or (wanted and len(trained) != STEPS)
    ):
        return f"metrics of the steps {trained}"
    if not (run / "finished.json").exists():
        return "there is no finished.json"
    end = json.loads((run / "finished.json").read_text())
    if end["step"] != STEPS:
        return "finished.json is of another step"
    state = json.loads((_last(run) / "state.json").read_text())
    if state["files"]["model.safetensors"]["sha256"] != end["weights_sha256"]:
        return "finished.json is of other weights"
    return "" if wanted is None or arrays_of(run) == wanted else "the run ends with other bits"


def sweep(first, last):
    """Return the first seed of a range that fails, and how; None where all is well."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as name, quick_trainings():
        expected = undisturbed(Path(name) / "undisturbed")
        for seed in range(first, last):
            run = Path(name) / f"run-{seed}"
            if wrong := survive(seed, run, expected):
                return seed, wrong
            shutil.rmtree(run, ignore_errors=True)
    return None


def fast_folder():
    """Return where files are memory, if that is known; what is lost with the power is a matter of
    `FaultyDisk`.
    """
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


BATCH = 50  # seeds that a process takes at once


def _stay_on_core(cores):
    """Keep this process on a core of its own, as ranks take turns thousands of times in a second:
    1.2 times as fast.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[cores.get()]})


def main_sweep(low, high):
    """Go through a range of seeds on all cores, and return what there is to say."""
    begin = time.monotonic()
    firsts = range(low, high, BATCH)
    context = get_context("spawn")
    cores = context.SimpleQueue()
    count = usable_cores()[0]
    for core in range(count):
        cores.put(core)
    with ProcessPoolExecutor(count, context, _stay_on_core, (cores,)) as pool:
        for failed in pool.map(sweep, firsts, [min(first + BATCH, high) for first in firsts]):
            if failed is not None:
                pool.shutdown(cancel_futures=True)
                raise SystemExit(f"seed {failed[0]}: {failed[1]}")
    seconds = time.monotonic() - begin
    return (
        f"seeds {low} to {high - 1}: all ended well, in {seconds:.0f} s,"
        f" {(high - low) / seconds:.1f} in a second"
    )


if __name__ == "__main__":
    print(main_sweep(*map(int, sys.argv[1:3])))
