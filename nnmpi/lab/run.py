"""`nnmpi run -n 4 -- --dataset mnist`: training that restarts after faults.

    start 1   ---- checkpoint ---- checkpoint --x          rank 2 is killed
    start 2                        checkpoint ---- x       at once: there was progress
    start 3                        checkpoint -x           1 s later
    start 4                        checkpoint - checkpoint ---- ... ---- finished.json

Each start runs the train command, with --resume after the first: it accepts any number of ranks.

A start makes progress if it writes a new checkpoint. `--restarts` starts in a row without progress
end the run. One suffices if it ends as the one before it, by damaged data, a loss that is not
finite or a full disk: these recur. Starts without progress are followed by a pause that doubles
each time. After every second one the job leaves out a replica, as far as the layout allows: the
machine may have lost memory or cores. Hosts are probed before each start; a host that does not
answer is left out with its ranks.

The supervisor does not use MPI: an MPI process would be killed with the job.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, prod
from os import EX_CANTCREAT, EX_DATAERR
from pathlib import Path
from types import FrameType

from nnmpi.base.command import check_numbers, printable, read_command, say
from nnmpi.base.errors import LaunchError, NnmpiError, UsageError, counted, raised_as
from nnmpi.base.files import check_ordinary, is_locked, json_text, opened_to_write, read_json
from nnmpi.base.launcher import python_words
from nnmpi.comm.mpi.shutdown import STALLED
from nnmpi.lab.launching import (
    Launcher,
    find_launcher,
    given_hosts,
    kill,
    ranks_of,
    remove_segments,
    temporary_folder,
)
from nnmpi.train.checkpoint import STATE_FILE, candidates, step_of
from nnmpi.train.cli import RANKS, parse, without
from nnmpi.train.config import all_options
from nnmpi.train.folder import RunFolder, code_of, default_folder, read_run, resume_words
from nnmpi.train.loop import STOPPING, handling

POLL_S = 0.05
# A launcher whose ranks have gone ends at once, but for Open MPI's after a link was cut: it waits
# for the other host's daemon, 95 to 195 s and longer, also after a SIGTERM. Ranks of a stopped one
# wait for it when they have finished. The first rank's lock is seen from a host without ranks, too.
# srun ends by itself, after Slurm's limits: without it the step would keep the nodes.
LAUNCHER_S, LOOK_S = 10.0, 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# Status of errors that a restart does not cure. One exception: a killed job may still hold the
# run's folder for a moment.
USAGE = 2
RECURRING = (USAGE, EX_DATAERR, EX_CANTCREAT)
IN_VAIN = 2  # starts without progress before a replica is left out


@dataclass(frozen=True)
class SupervisedRun:
    """A training to supervise.

    Attributes:
        words: of the train command, without --out and --resume.
        folder: of the run.
        resumes: whether the first start resumes a run.
        ranks: of the first start.
        replica: ranks per replica of the model.
        fewest: the fewest ranks that can train.
        hosts: to choose from; empty for the launcher's choice.
        restarts: the most starts in a row without a new checkpoint.
        start_limit_s: for the ranks to start; 0 for no limit.
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
class StartOutcome:
    """The end of one start.

    Attributes:
        status: of the launcher, as a shell reports it.
        fault: the cause, in words.
        step: of the last checkpoint; 0 for none.
        seconds: from start to end.
    """

    status: int
    fault: str
    step: int
    seconds: float


class GaveUp(NnmpiError):
    """The supervisor has ended a training before its end."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.exit_status = status


class Supervisor:
    """Start a training again until it finishes.

    Args:
        plan: the training.
        launcher: of its jobs.
        say: prints a line.
    """

    def __init__(self, plan: SupervisedRun, launcher: Launcher, say: Callable[[str], None]) -> None:
        self._plan, self._launcher, self._say = plan, launcher, say
        self._files = RunFolder(plan.folder)
        self._signal = 0  # the last signal received
        self._insists = False  # whether there was a second one
        self._ranks = plan.ranks
        self._slots = -(-plan.ranks // len(plan.hosts)) if plan.hosts else 0
        self._fewest = max(plan.replica, -(-plan.fewest // plan.replica) * plan.replica)
        self._began_with = _identity(self._files.finished)
        self._known_starts = count_lines(self._files.starts)

    def run(self) -> str:
        """Train to the end, and return a sentence about it.

        Raises:
            GaveUp: after too many starts without progress, after an error that a restart does not
                cure, and after a signal.
        """
        began_s, trained_s = time.monotonic(), self._trained_s()
        with handling(self._note), temporary_folder() as self._temporary:
            starts = self._start_until_finished()
        how = "finished after"
        with suppress(OSError, ValueError, KeyError, TypeError):
            end = read_json(self._files.finished)
            if end["step"] < end["of_steps"]:
                why = end.get("stopped", "the limit of --stop-after")
                how = f"stopped after {end['step']} of {end['of_steps']} steps, {why}, and"
        seconds, progress_s = time.monotonic() - began_s, self._trained_s() - trained_s
        return (
            f"{how} {counted(starts, 'start')}; {progress_s / seconds:.0%} of"
            f" {seconds:.0f} s was progress (training that was kept); {self._files.finished} proves"
            " the end"
        )

    def _start_until_finished(self) -> int:
        """Return the number of starts."""
        in_vain, starts, best, before = 0, 0, self._step(), 0
        while True:
            starts += 1
            outcome = self._start(starts)
            if self._is_finished():
                return starts
            self._check(outcome)
            in_vain, best = (0, outcome.step) if outcome.step > best else (in_vain + 1, best)
            self._log_fault(starts, outcome)
            recurs = in_vain and outcome.status in RECURRING and outcome.status == before
            before = outcome.status
            if in_vain > self._plan.restarts or recurs:
                raise GaveUp(self._report(in_vain, outcome), outcome.status or 1)
            if in_vain and in_vain % IN_VAIN == 0 and not self._plan.hosts:
                self._ranks = max(self._fewest, self._ranks - self._plan.replica)
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (in_vain - 1)) if in_vain else 0.0
            origin = f"from step {outcome.step}" if outcome.step else "at the beginning"
            when = f"in {pause_s:.0f} s" if pause_s else "now"
            self._say(
                f"start {starts} ended after {outcome.seconds:.0f} s: {outcome.fault}; again"
                f" {when}, {origin}"
            )
            self._sleep(pause_s)

    def _check(self, outcome: StartOutcome) -> None:
        """Raise GaveUp if another start would not help."""
        again = "nothing had started"
        if self._files.config.exists():
            words = resume_words(self._plan.folder)
            with suppress(UsageError):  # its ranks say what is wrong with it
                # the code has been executed by this supervisor's ranks
                words += " --trust" if code_of(read_run(self._plan.folder, "the run")) else ""
            again = f"continue with: nnmpi run -n {self._plan.ranks} -- {words}"
        if self._signal:
            held = (
                f"with a checkpoint of step {outcome.step}"
                if outcome.step
                else "without a checkpoint"
            )
            raise GaveUp(
                f"ended by {signal.Signals(self._signal).name}, {held}; {again}",
                128 + self._signal,
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

    def _report(self, in_vain: int, outcome: StartOutcome) -> str:
        since = f"beyond step {outcome.step}" if outcome.step else "at all"
        more = (
            f". nnmpi doctor {self._plan.folder} says more; all faults are in {self._files.faults}"
        )
        return (
            f"gave up: {counted(in_vain, 'start')}{' in a row' if in_vain > 1 else ''}"
            f" brought no checkpoint {since}; the last"
            f" one ended after {outcome.seconds:.0f} s:"
            f" {outcome.fault}{more if self._files.config.exists() else ''}"
        )

    # ---- one start ----

    def _start(self, number: int) -> StartOutcome:
        hosts = dict.fromkeys(self._launcher.answering(self._plan.hosts), self._slots)
        lost = [host for host in self._plan.hosts if host not in hosts]
        ranks, folder = self._ranks, self._plan.folder
        if hosts:
            room = min(self._plan.ranks, sum(hosts.values()))
            ranks = room - room % self._plan.replica
        if self._plan.hosts and (not hosts or ranks < self._fewest):
            left = ", ".join(hosts) or "none"
            return StartOutcome(
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
        command = [*launcher.command(ranks, hosts), *python_words(), "-m", "nnmpi.train", *words]
        without = f" without {', '.join(lost)}" if lost else ""
        self._say(f"start {number}: {counted(ranks, 'rank')}{without}, into {folder}")
        begin_s, step, starts = time.monotonic(), self._step(), count_lines(self._files.starts)
        environ = dict(os.environ)
        if launcher.kind != "srun":  # whose ranks are on other nodes, which have no such folder
            # a folder per start: what Open MPI's killed launcher leaves stops one of its process id
            environ["TMPDIR"] = str(self._temporary / str(number))
            os.mkdir(environ["TMPDIR"])
        with raised_as(LaunchError, f"{command[0]} cannot be started"):
            job = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            status, fault = self._watch(job, launcher, begin_s, starts)
        finally:
            # ranks outlive a killed launcher; and an error here must not leave the job running
            kill(job.pid)
            job.wait()
            remove_segments()
        return StartOutcome(status, fault, max(step, self._step()), time.monotonic() - begin_s)

    def _words(self, ranks: int) -> list[str]:
        """Return the words of the train command.

        Once the ranks have written starts.jsonl, the run's folder holds the options: --resume and
        the layout suffice.
        """
        folder, given = str(self._plan.folder), list(self._plan.words)
        if self._was_up():
            quiet = ["--quiet"] if "--quiet" in given else []
            # --trust: the user code that the run names has been executed by the first start
            return [f"--resume={folder}", "--trust", "--dp", "auto", *quiet]
        resumes = self._plan.resumes or self._files.config.exists()
        if ranks != self._plan.ranks:
            given = [*without(("--dp",), given), "--dp", "auto"]
        # "=", since the folder's name may begin with a dash
        return [*given, f"{'--resume' if resumes else '--out'}={folder}"]

    def _watch(
        self, job: subprocess.Popen[bytes], launcher: Launcher, begin_s: float, starts: int
    ) -> tuple[int, str]:
        """Wait for a job's end; return its status and the cause in words.

        Args:
            job, launcher: the started job.
            begin_s: when it was started.
            starts: lines of starts.jsonl before it was.
        """
        limit_s, is_up, is_passed_on = self._plan.start_limit_s, False, False
        looked_s, seen_s, watches = begin_s, inf, launcher.kind != "srun"
        killed = memory_kills()
        while job.poll() is None:
            if watches and is_up and (now_s := time.monotonic()) - looked_s > LOOK_S:
                looked_s = now_s
                if is_locked(self._plan.folder):
                    seen_s = now_s
                elif now_s - seen_s > LAUNCHER_S:
                    kill(job.pid)
                    job.wait()
                    return 1, "its first rank had gone, and its launcher did not end"
            with suppress(subprocess.TimeoutExpired):
                job.wait(POLL_S)
            if self._insists:
                kill(job.pid)
            is_up = is_up or count_lines(self._files.starts) > starts
            if self._signal and not is_passed_on and not self._insists:
                is_passed_on = True
                self._pass_on(job, launcher, is_up)
            if not is_up and limit_s and time.monotonic() - begin_s > limit_s:
                kill(job.pid)
                job.wait()
                return 1, f"it had not come up in {limit_s:.0f} s"
        status = job.returncode if job.returncode >= 0 else 128 - job.returncode
        killed = memory_kills() - killed
        short = (
            f"; memory was short meanwhile, and the kernel ended {killed} of this node's processes"
        )
        return status, f"{describe_status(status, launcher)}{short if status and killed else ''}"

    def _pass_on(self, job: subprocess.Popen[bytes], launcher: Launcher, is_up: bool) -> None:
        """Send the signal to this host's ranks, so that they save and end; else to the launcher.

        One rank with the signal is enough: the ranks agree to stop. They get it directly because
        Open MPI's launcher kills them half a second after its own signal. Before the ranks have
        started there is nothing to save, and SIGINT would print a traceback of Python's start.
        """
        number = signal.SIGTERM if launcher.kind == "srun" or not is_up else self._signal
        for process in ranks_of(job.pid) or [job.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    # ---- the state of the run's folder ----

    def _is_finished(self) -> bool:
        now = _identity(self._files.finished)
        return now is not None and now != self._began_with

    def _was_up(self) -> bool:
        return count_lines(self._files.starts) > self._known_starts

    def _step(self) -> int:
        """Return the step of the last checkpoint; 0 without one."""
        return next(map(step_of, candidates(self._files.checkpoints)), 0)

    def _trained_s(self) -> float:
        for item in candidates(self._files.checkpoints)[:1]:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return float(read_json(item / STATE_FILE)["elapsed_s"])
        return 0.0

    def _log_fault(self, number: int, outcome: StartOutcome) -> None:
        """Append a line to the run's faults.jsonl; a full disk loses only this line."""
        fault = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "start": number, **vars(outcome)}
        if self._plan.folder.is_dir():
            with suppress(OSError), opened_to_write(self._files.faults, "a") as stream:
                stream.write(json_text(fault) + "\n")

    # ---- signals ----

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._insists = bool(self._signal)
        self._signal = number

    def _sleep(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self._signal:
            time.sleep(POLL_S)
        if self._signal:
            self._check(StartOutcome(0, "", self._step(), 0.0))


PR_SET_PDEATHSIG = 1  # of Linux's prctl
VMSTAT = Path("/proc/vmstat")


def _end_with_parent() -> None:
    """Have Linux kill the job if the supervisor dies.

    Otherwise the orphan would hold the run's folder, and the next supervisor could not start.
    """
    with suppress(AttributeError):  # no prctl on other systems: the job continues alone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_status(status: int, launcher: Launcher) -> str:
    """Explain a job's status in words.

    Args:
        status: of the launcher, as a shell reports it.
        launcher: MPICH's mpirun reports a signal's number itself, others 128 more.
    """
    if status == STALLED:
        return f"it stalled, and its watchdog ended it (status {status})"
    if status == EX_CANTCREAT:
        return f"its disk is full, over its quota, or read-only (status {status})"
    if status in RECURRING:
        return f"it failed in a way that a new start would repeat (status {status})"
    if status == 0:
        return "it ended with status 0, but is not finished (there is no new finished.json)"
    number = (
        status - 128 if status > 128 else status if launcher.kind == "MPICH" and status > 2 else 0
    )
    with suppress(ValueError):
        if number:
            return f"a rank or its launcher got {signal.Signals(number).name} (status {status})"
    return f"a rank or its launcher failed (status {status})"


def memory_kills() -> int:
    """Return how many processes Linux has ended on this machine for want of memory, be it a
    container's or a batch job's; 0 on other systems.
    """
    with suppress(OSError):
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


def _identity(file: Path) -> tuple[int, int] | None:
    """Return inode and time of a file, which change when it is replaced; None without a file."""
    with suppress(OSError):
        result = file.stat()
        return result.st_ino, result.st_mtime_ns
    return None


def count_lines(file: Path) -> int:
    """Return the number of a file's lines; 0 if it cannot be read."""
    with suppress(OSError):
        check_ordinary(file)
        return file.read_bytes().count(b"\n")
    return 0


# ---- the command ----

PROGRAM = "nnmpi run"
DESCRIPTION = """\
Train, and restart from the last checkpoint after each fault: a killed rank, a stalled job, a lost
host.

nnmpi run -n 4 -- --dataset mnist --save-every 100steps --out runs/mine

The options after -- are nnmpi train's. Under Slurm srun starts the ranks, elsewhere
mpirun."""


@dataclass(frozen=True)
class SupervisorConfig:
    """The supervisor."""

    ranks: int = 1
    """How many ranks train; also -n."""
    restarts: int = 10
    """How many starts in a row may bring no new checkpoint before it gives up."""
    hosts: str = ""
    """Host names, separated by commas. Each start probes them and leaves out those that do not
    answer, with their ranks (default: the launcher's choice; under Slurm all of the job's).
    """
    start_limit: float = 600.0
    """Seconds for the ranks to start and read their data before they are restarted. 0: no limit."""

    def __post_init__(self) -> None:
        check_numbers(self, "ranks", 1)
        check_numbers(self, "restarts start_limit", 0)


def main(words: Sequence[str]) -> str:
    """Supervise a training to its end, and return a sentence about it.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong options, of this command or of the train command.
        GaveUp: see `Supervisor.run`.
    """
    at = [*words, "--"].index("--")
    train = words[at + 1 :]
    if misplaced := {*words[:at]} & {item.flag for item in all_options().values()} - {*RANKS}:
        raise UsageError(
            f"{min(misplaced)} is an option of the train command; write it after --, as in"
            f" {PROGRAM} -n 2 -- ..."
        )
    (options,) = read_command("", PROGRAM, DESCRIPTION, (SupervisorConfig,), words[:at])
    config = parse(train)
    if config.sync.simulate:
        raise UsageError(
            "--simulate trains in one process, which needs no supervisor; leave it out"
        )
    if config.run.ranks is not None:
        raise UsageError(f"{PROGRAM} starts the ranks; write -n 4 before --")
    layout = config.parallel
    folder = config.run.resume or config.run.out or default_folder(config)
    replica = prod(layout.shape[1:])
    if isinstance(layout.dp, int):  # pp, tp or sp may be "auto" and fill up to the ranks
        replica = max(replica, options.ranks // layout.dp)
    if options.ranks % replica:
        raise UsageError(
            f"-n {options.ranks} is not a multiple of the {replica} ranks of one replica"
        )
    hosts = tuple(filter(None, options.hosts.split(","))) or tuple(given_hosts())
    if any(host.startswith("-") for host in hosts):
        raise UsageError(
            f"--hosts {options.hosts} has a name that ssh would read as an option; give host names"
        )
    plan = SupervisedRun(
        words=tuple(without(("--out", "--resume"), train)),
        folder=Path(folder),
        resumes=config.run.resume is not None,
        ranks=options.ranks,
        replica=replica,
        fewest=config.sync.mode.fewest,
        hosts=hosts,
        restarts=options.restarts,
        start_limit_s=options.start_limit,
    )
    return "nnmpi run: " + Supervisor(plan, find_launcher(options.ranks, hosts), _say).run()


def _say(text: str) -> None:
    with suppress(OSError):
        # a closed pipe or a full disk must not end the supervision
        print(f"nnmpi run: {printable(text)}", flush=True)


if __name__ == "__main__":
    sys.exit(say(main))
