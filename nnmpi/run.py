"""`python -m nnmpi.run -n 4 -- --dataset mnist`: training that restarts after faults.

    start 1   ---- checkpoint ---- checkpoint --x          rank 2 is killed
    start 2                        checkpoint ---- x       at once: there was progress
    start 3                        checkpoint -x           1 s later
    start 4                        checkpoint - checkpoint ---- ... ---- finished.json

A start that brought a new checkpoint was worth it; so many in a row that brought none end it, and
two where data are damaged or a loss is not finite, as that comes again. Between those it waits,
twice as long each time, and after every second one it leaves out a replica, as far as the layout
allows: the machine may no longer have room for all. Hosts are asked before each start whether they
answer; who does not is left out, and its ranks with it. What runs is the train command with
--resume, which takes any number of ranks. It needs no MPI: a supervisor that took part in the job
would end with it.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from os import EX_DATAERR
from pathlib import Path
from shlex import quote
from types import FrameType

from nnmpi.comm.mpi.shutdown import STALLED
from nnmpi.command import options_of, printable, read_words, say
from nnmpi.errors import LaunchError, NnmpiError, UsageError, counted, raised_as
from nnmpi.files import appending, read_json
from nnmpi.launching import Launcher, find_launcher, given_hosts, kill, ranks_of, remove_segments
from nnmpi.train.checkpoint import STATE_FILE, steps
from nnmpi.train.cli import parse
from nnmpi.train.config import all_options, check_numbers, made
from nnmpi.train.folder import RunFolder, default_folder
from nnmpi.train.loop import STOPPING, catch, give_back

POLL_S = 0.05
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# the status of what no other start makes better, but where a job that was killed still has the
# folder
USAGE = 2
IN_VAIN = 2  # starts without progress before a replica is left out


@dataclass(frozen=True)
class SupervisedRun:
    """What is to be run.

    Attributes:
        words: of the train command, without --out and --resume.
        folder: of the run.
        resumes: whether the first start continues from what is there.
        ranks: to begin with.
        replica: how many ranks hold the model once.
        fewest: with how many ranks it can train at least.
        hosts: to choose from; none for the launcher's own choice.
        restarts: how many starts in a row may bring no checkpoint.
        start_limit_s: for the job to come up in; 0 for no limit.
    """

    words: tuple[str, ...]
    folder: Path
    resumes: bool
    ranks: int
    replica: int = 1
    fewest: int = 1
    hosts: tuple[str, ...] = ()
    restarts: int = 10
    start_limit_s: float = 600.0


@dataclass(frozen=True)
class StartEnd:
    """Host names, separated by commas. Each start asks them, and leaves out those that do not
    answer, with their ranks (default: the launcher's choice; under Slurm all of the job's).
    """

    status: int
    fault: str
    step: int
    seconds: float


class GaveUp(NnmpiError):
    """A training that does not continue, however often it is started."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.exit_status = status


class Supervisor:
    """Runs a plan.

    Args:
        plan: what is to be run.
        launcher: starts the job.
        say: prints a line.
    """

    def __init__(self, plan: SupervisedRun, launcher: Launcher, say: Callable[[str], None]) -> None:
        self._plan, self._launcher, self._say = plan, launcher, say
        self._files = RunFolder(plan.folder)
        self._asked = 0  # the signal that this process got
        self._insists = False
        self._ranks = plan.ranks
        self._slots = -(-plan.ranks // len(plan.hosts)) if plan.hosts else 0
        self._fewest = max(plan.replica, -(-plan.fewest // plan.replica) * plan.replica)
        self._began_with = _identity(self._files.finished)
        self._known_starts = _count_lines(self._files.starts)

    def run(self) -> str:
        """Start the training as often as it takes, and return what there is to say of it.

        Raises:
            GaveUp: when no start brings it on any more, or what is wrong is no fault, or a signal
                has ended it.
        """
        began_s, trained_s = time.monotonic(), self._trained_s()
        before = catch(self._note)
        try:
            starts = self._go_through()
        finally:
            give_back(before)
        seconds, progress_s = time.monotonic() - began_s, self._trained_s() - trained_s
        return (
            f"finished after {counted(starts, 'start')}; {progress_s / seconds:.0%} of"
            f" {seconds:.0f} s was progress (training that was kept); {self._files.finished} proves"
            " the end"
        )

    def _go_through(self) -> int:
        """Return how many starts it took."""
        in_vain, starts, best = 0, 0, self._step()
        while True:
            starts += 1
            outcome = self._start(starts)
            if self._is_finished():
                return starts
            self._check(outcome)
            in_vain, best = (0, outcome.step) if outcome.step > best else (in_vain + 1, best)
            self._write_down(starts, outcome)
            if in_vain > self._plan.restarts or (
                outcome.status in (USAGE, EX_DATAERR) and in_vain >= IN_VAIN
            ):
                raise GaveUp(self._report(in_vain, outcome), outcome.status or 1)
            if in_vain and in_vain % IN_VAIN == 0 and not self._plan.hosts:
                self._ranks = max(self._fewest, self._ranks - self._plan.replica)
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (in_vain - 1)) if in_vain else 0.0
            goes_on = f"from step {outcome.step}" if outcome.step else "at the beginning"
            when = f"in {pause_s:.0f} s" if pause_s else "now"
            self._say(
                f"start {starts} ended after {outcome.seconds:.0f} s: {outcome.fault}; again"
                f" {when}, {goes_on}"
            )
            self._sleep(pause_s)

    def _check(self, outcome: StartEnd) -> None:
        """Raise where another start would make nothing better."""
        resume = (
            f"go on with: python -m nnmpi.run -n {self._plan.ranks} -- --resume"
            f" {quote(str(self._plan.folder))}"
        )
        again = resume if self._files.config.exists() else "nothing was begun"
        if self._asked:
            raise GaveUp(
                f"ended by {signal.Signals(self._asked).name}, with a checkpoint of step"
                f" {outcome.step}; {again}",
                128 + self._asked,
            )
        if outcome.status in (USAGE, EX_DATAERR) and not self._was_up():
            what = "command itself is" if outcome.status == USAGE else "data are"
            raise GaveUp(f"the {what} refused, so the run is not started again", outcome.status)
        if outcome.status - 128 in STOPPING:
            name = signal.Signals(outcome.status - 128).name
            raise GaveUp(
                f"the ranks were told to stop ({name}), so they are not started again; {again}",
                outcome.status,
            )

    def _report(self, in_vain: int, outcome: StartEnd) -> str:
        since = f"beyond step {outcome.step}" if outcome.step else "at all"
        more = (
            f". python -m nnmpi.doctor {self._plan.folder} says more; all faults are in"
            f" {self._files.faults}"
        )
        return (
            f"gave up: {counted(in_vain, 'start')} in a row brought no checkpoint {since}; the last"
            f" one ended after {outcome.seconds:.0f} s:"
            f" {outcome.fault}{more if self._files.config.exists() else ''}"
        )

    # ---- one start ----

    def _start(self, number: int) -> StartEnd:
        """Start the job and wait for its end."""
        answering = self._launcher.answering(self._plan.hosts)
        hosts = dict.fromkeys(answering, self._slots)
        lost = [host for host in self._plan.hosts if host not in hosts]
        ranks, folder = self._ranks, self._plan.folder
        if hosts:
            room = min(self._plan.ranks, sum(hosts.values()))
            ranks = room - room % self._plan.replica
        if self._plan.hosts and (not hosts or ranks < self._fewest):
            left = ", ".join(hosts) or "none"
            return StartEnd(
                1,
                f"too few hosts answer ({left}) for at least {self._fewest} ranks",
                self._step(),
                0,
            )
        launcher = (
            Launcher("none")
            if ranks == 1 and not hosts and self._launcher.kind != "srun"
            else self._launcher
        )
        words = self._words(ranks)
        command = [*launcher.command(ranks, hosts), sys.executable, "-m", "nnmpi.train", *words]
        without = f" without {', '.join(lost)}" if lost else ""
        self._say(f"start {number}: {counted(ranks, 'rank')}{without}, into {folder}")
        begin_s, step = time.monotonic(), self._step()
        with raised_as(LaunchError, f"{command[0]} cannot be started"):
            job = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            status, fault = self._watch(job, launcher, begin_s)
        finally:
            kill(job.pid)  # what a launcher that was killed has left, or this program's own end
            job.wait()
            remove_segments()
        return StartEnd(status, fault, max(step, self._step()), time.monotonic() - begin_s)

    def _words(self, ranks: int) -> list[str]:
        """Return the train command's words: those that were given until a start has written them
        down.
        """
        folder, given = str(self._plan.folder), list(self._plan.words)
        if self._was_up():
            quiet = ["--quiet"] if "--quiet" in given else []
            # what it names has been executed already
            return [f"--resume={folder}", "--trust", "--dp", "auto", *quiet]
        there = self._plan.resumes or self._files.config.exists()
        layout = ["--dp", "auto"] if ranks != self._plan.ranks else []
        # whose name may begin with a dash
        return [*given, f"{'--resume' if there else '--out'}={folder}", *layout]

    def _watch(
        self, job: subprocess.Popen[bytes], launcher: Launcher, begin_s: float
    ) -> tuple[int, str]:
        """Return a job's status and what happened, once it has ended."""
        starts, text = _count_lines(self._files.starts), False
        limit_s, is_up = self._plan.start_limit_s, False
        while job.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                job.wait(POLL_S)
            if self._insists:
                kill(job.pid)
            is_up = is_up or _count_lines(self._files.starts) > starts
            if self._asked and not text and not self._insists:
                text = True
                self._pass_on(job, launcher, is_up)
            if not is_up and limit_s and time.monotonic() - begin_s > limit_s:
                kill(job.pid)
                job.wait()
                return 1, f"it had not come up in {limit_s:.0f} s"
        status = job.returncode if job.returncode >= 0 else 128 - job.returncode
        return status, describe_status(status, launcher)

    def _pass_on(self, job: subprocess.Popen[bytes], launcher: Launcher, is_up: bool) -> None:
        """Ask the ranks to save and end; the launcher where none is on this host.

        One rank that knows is enough. Open MPI's launcher would give them half a second. Before
        they are up there is nothing to save, and SIGINT would end Python's own start with a stack.
        """
        number = signal.SIGTERM if launcher.kind == "srun" or not is_up else self._asked
        for process in ranks_of(job.pid) or [job.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    # ---- what has come of it ----

    def _is_finished(self) -> bool:
        now = _identity(self._files.finished)
        return now is not None and now != self._began_with

    def _was_up(self) -> bool:
        return _count_lines(self._files.starts) > self._known_starts

    def _step(self) -> int:
        """Return the step of the last checkpoint; 0 where there is none."""
        result = steps(self._files.checkpoints)
        with suppress(IndexError, ValueError):
            return int(result[0].name.rpartition("-")[2])
        return 0

    def _trained_s(self) -> float:
        for item in steps(self._files.checkpoints)[:1]:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return float(read_json(item / STATE_FILE)["elapsed_s"])
        return 0.0

    def _write_down(self, number: int, outcome: StartEnd) -> None:
        """Add a line to the run's faults.jsonl; a disk that does not take it costs only that."""
        fault = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "start": number, **vars(outcome)}
        if self._plan.folder.is_dir():
            with suppress(OSError), appending(self._files.faults) as stream:
                stream.write(json.dumps(fault) + "\n")

    # ---- signals ----

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._insists = bool(self._asked)
        self._asked = number

    def _sleep(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self._asked:
            time.sleep(POLL_S)
        if self._asked:
            self._check(StartEnd(0, "", self._step(), 0.0))


PR_SET_PDEATHSIG = 1  # of Linux's prctl


def _end_with_parent() -> None:
    """Let the job end if this program is killed: nobody would start it again, and the next
    supervisor cannot.
    """
    with suppress(AttributeError):  # another system, on which it continues alone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_status(status: int, launcher: Launcher) -> str:
    """Return what a job's status says, as text.

    Args:
        status: as a shell has it.
        launcher: that ended with it.
    """
    if status == STALLED:
        return f"it stood still, and its watchdog ended it (status {status})"
    if status in (USAGE, EX_DATAERR):
        return f"it met what another start meets again (status {status})"
    if status == 0:
        return "it ended with status 0, but has not come to its end (there is no new finished.json)"
    number = (
        status - 128 if status > 128 else status if launcher.kind == "MPICH" and status > 2 else 0
    )
    with suppress(ValueError):
        if number:
            return f"a rank or its launcher got {signal.Signals(number).name} (status {status})"
    return f"a rank or its launcher failed (status {status})"


def without(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the words without these options and their values."""
    saved, drops = [], False
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            drops = word.partition("=")[0] in names
        if not drops:
            saved.append(word)
    return saved


def _identity(file: Path) -> tuple[int, int] | None:
    """Return what tells a file from one that is written anew in its place; None where there is
    none.
    """
    with suppress(OSError):
        result = file.stat()
        return result.st_ino, result.st_mtime_ns
    return None


def _count_lines(file: Path) -> int:
    with suppress(OSError):
        return file.read_bytes().count(b"\n")
    return 0


# ---- the command ----

PROGRAM = "python -m nnmpi.run"
DESCRIPTION = """python -m nnmpi.run [options] -- TRAIN OPTIONS

Train, and restart from the last checkpoint after each fault: a killed rank, a stalled job, a lost
host. The options after -- are those of python -m nnmpi.train. Under Slurm srun starts the ranks,
elsewhere mpirun."""


@dataclass(frozen=True)
class SupervisorConfig:
    """The supervisor."""

    ranks: int = 1
    """How many ranks train; also -n."""
    restarts: int = 10
    """How many starts in a row may bring no new checkpoint before it gives up."""
    hosts: str = ""
    """Host names with commas between them; before each start they are asked whether they answer,
    and those that do not are left out with their ranks (default: the launcher's choice; in a job of
    Slurm's all of its).
    """
    start_limit: float = 600.0
    """Seconds for the ranks to start and read their data before they are restarted. 0: no limit."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_numbers(self, "ranks", 1)
        check_numbers(self, "restarts start_limit", 0)


def main(words: Sequence[str]) -> str:
    """Supervise a training, and return what there is to say at its end.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong options, of this command or of the train command.
        GaveUp: see `Supervisor.run`.
    """
    at = [*words, "--"].index("--")
    train = words[at + 1 :]
    local = ["--ranks" if word == "-n" else word for word in words[:at]]
    if theirs := {*local} & {item.flag for item in all_options().values()}:
        raise UsageError(
            f"{min(theirs)} is an option of the training; write it behind --, as in {PROGRAM} -n 2"
            " -- ..."
        )
    options = made(
        SupervisorConfig, read_words(local, options_of(SupervisorConfig), PROGRAM, DESCRIPTION)
    )
    config = parse(train)
    if config.sync.simulate:
        raise UsageError(
            "--simulate trains in one process, which needs no supervisor; leave it out"
        )
    layout = config.parallel
    folder = config.run.resume or config.run.out or default_folder(config)
    replica = prod(ranks for ranks in (layout.pp, layout.tp, layout.sp) if isinstance(ranks, int))
    if isinstance(layout.dp, int):  # pp or tp may be what is missing
        replica = max(replica, options.ranks // layout.dp)
    if options.ranks % replica:
        raise UsageError(
            f"-n {options.ranks} is no multiple of the {replica} ranks that hold the model once"
        )
    hosts = tuple(filter(None, options.hosts.split(","))) or tuple(given_hosts())
    if any(host.startswith("-") for host in hosts):
        raise UsageError(
            f"--hosts {options.hosts} has a name that begins with a dash, an option of ssh; give"
            " hosts"
        )
    plan = SupervisedRun(
        words=tuple(without(("--out", "--resume"), train)),
        folder=Path(folder),
        resumes=config.run.resume is not None,
        ranks=options.ranks,
        replica=replica,
        fewest=2 if config.sync.sync == "gossip" else 1,
        hosts=hosts,
        restarts=options.restarts,
        start_limit_s=options.start_limit,
    )
    return "nnmpi.run: " + Supervisor(plan, find_launcher(options.ranks, hosts), _say).run()


def _say(text: str) -> None:
    with suppress(OSError):
        # a reader that has gone, or a log on a full disk, ends the words, not the supervision
        print(f"nnmpi.run: {printable(text)}", flush=True)


if __name__ == "__main__":
    sys.exit(say(main))
