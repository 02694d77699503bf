"""`nnmpi doctor [RUN]`: diagnose a run, or a machine and its MPI.

A run is diagnosed from the files in its folder, without MPI:

finished.json            it has ended
a lock on the folder     it still runs
flight/rank-N.txt        it stalled; the status of each rank then
metrics.jsonl            its last step; whether its loss was finite
faults.jsonl             the supervisor's reports, with times
starts.jsonl             the last start: older files belong to earlier starts
checkpoints/             the states to resume from
"""

import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import threadpoolctl

from nnmpi.backend import onednn
from nnmpi.backend.blas import blas_pool, find_older, name_blas, read_cpu
from nnmpi.base.command import read_command, say
from nnmpi.base.errors import (
    CheckpointError,
    UsageError,
    counted,
    group_ranks,
    name_ranks,
    shortened,
)
from nnmpi.base.files import cache_folder, is_locked, parse_json, read_json, read_text, rebuilt
from nnmpi.base.launcher import read_launch, start_words, usable_cores
from nnmpi.base.units import format_bytes
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.start import start
from nnmpi.data.cache import UNUSED_DAYS, entries, free_bytes
from nnmpi.train.checkpoint import MODEL_FILE, STATE_FILE, Checkpoint, load_checkpoint, steps
from nnmpi.train.folder import LAST_WORDS, RunFolder, Start, code_of, read_run, resume_words
from nnmpi.train.log import describe_metrics
from nnmpi.train.metrics import checked_record
from nnmpi.train.signature import versions

PROGRAM = "nnmpi doctor"
DESCRIPTION = """With RUN: diagnose a run and say what to do. Without: describe this machine and its
MPI, and what is slow or wrong with them: mpirun -n 4 nnmpi doctor. (nnmpi verify checks
whether ranks compute what one rank does.)"""
WARNING_S, LIMIT_S = 10.0, 60.0  # of a wait for other ranks
SHM = Path("/dev/shm")  # MPI libraries' folder of shared memory
SIDE, TURNS = 1024, 5  # of the product that is timed: some 0.2 s
LITTLE_SHM_BYTES = 64 << 20  # Docker's default; a model of 16 million float32 fills it


def main(words: Sequence[str]) -> str:
    """Return the diagnosis of a run, or of the machine.

    Raises:
        UsageError: for a folder without a run.
        LaunchError: when MPI cannot be started.
    """
    (run,) = read_command("[RUN]", PROGRAM, DESCRIPTION, (), words)
    if run is not None:
        return str(diagnose(run))
    group = start()
    group.comm.world.watch(WARNING_S, LIMIT_S)
    by_rank = inspect_machine(group)
    faults = find_faults(by_rank)
    end = f"{counted(len(faults), 'problem')}" if faults else "nothing is slow or wrong"
    tried = f"to compare the ranks with one: {start_words(max(2, group.size))} nnmpi verify"
    return "\n".join(
        [*describe(by_rank), *(f"slow or wrong: {fault}" for fault in faults), f"{end}; {tried}"]
    )


# ---- a run ----


T = TypeVar("T")


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run.

    Attributes:
        happened: a sentence about its end.
        advice: the user's next command or action.
        facts: lines with the evidence.
    """

    happened: str
    advice: str
    facts: tuple[str, ...]

    def __str__(self) -> str:
        """Return the printed form."""
        return "\n".join(
            [self.happened, f"what to do: {self.advice}", "", *(f"  {fact}" for fact in self.facts)]
        )


@dataclass(frozen=True)
class Evidence:
    """What the files of a run say.

    Attributes:
        folder: of the run.
        code: the user's code that it names.
        checkpoint: its last complete one.
        starts, faults, records: the readable lines of its files.
        notices: what cannot be read.
    """

    folder: RunFolder
    code: str
    checkpoint: Checkpoint | None
    starts: Sequence[Start]
    faults: Sequence[tuple[int, str]]
    records: Sequence[Mapping[str, Any]]
    notices: Sequence[str]

    @property
    def step(self) -> int:
        """The checkpoint's step."""
        known = 0 if self.checkpoint is None else self.checkpoint.values.get("step")
        return known if isinstance(known, int) else 0

    @property
    def reached(self) -> int:
        """The last step of which there are metrics."""
        return max((item["global_step"] for item in self.records), default=0)

    @property
    def trust(self) -> str:
        """What is said of code: whether it may be executed is the user's decision."""
        return f" (and --trust, which executes {self.code})" if self.code else ""

    @property
    def command(self) -> str:
        """The command that goes on.

        The user will paste it, and the folder may come from someone else: so its values are checked
        and quoted.
        """
        ranks = self.starts[-1].ranks if self.starts else 1
        return f"nnmpi run -n {ranks} -- {resume_words(self.folder.path)}"

    @property
    def resume(self) -> str:
        """The advice to go on."""
        if self.checkpoint is None and steps(self.folder.checkpoints):
            return (
                "no checkpoint is complete: restore one from a copy, or start a new run with"
                " another --out"
            )
        return f"continue with: {self.command}{self.trust}"

    @property
    def loses(self) -> str:
        """What is said of the steps that are not saved."""
        lost = self.reached - self.step
        if lost <= 0:
            return ""
        return f"; the {lost} steps since the checkpoint of step {self.step} are done again"

    @property
    def facts(self) -> tuple[str, ...]:
        """It in lines."""
        started = "never started"
        if self.starts:
            last, times = self.starts[-1], counted(len(self.starts), "time")
            where = f"{counted(last.ranks, 'rank')} on {shortened(last.host)}"
            started = f"started {times}, last at {shortened(last.time)}: {where}"
        saved = "no complete checkpoint"
        if self.checkpoint is not None:
            saved = f"last good checkpoint: step {self.step}, in {self.checkpoint.folder}"
        return (
            started,
            f"metrics reach step {self.reached}" if self.records else "no metrics",
            saved,
            *self.notices,
            *(f"start {start}: {fault}" for start, fault in self.faults[-5:]),
        )


def diagnose(path: Path) -> Diagnosis:
    """Diagnose the run in a folder.

    Raises:
        UsageError: for a folder without a run.
    """
    evidence = read_evidence(path)
    return Diagnosis(*_judge(evidence), evidence.facts)


def read_evidence(path: Path) -> Evidence:
    """Read the files of a run, as far as they can be read.

    Raises:
        UsageError: for a folder without a run.
    """
    code, folder = code_of(read_run(path, str(path))), RunFolder(path)
    checkpoint, notices = None, list[str]()
    try:
        checkpoint = load_checkpoint(folder.checkpoints)
    except (CheckpointError, OSError) as error:
        notices.append(str(error))
    if checkpoint is not None:
        notices += checkpoint.notices
    starts = _readable(folder.starts, partial(rebuilt, Start), notices)
    faults = _readable(folder.faults, _fault, notices)
    records = _readable(folder.metrics, checked_record, notices)
    return Evidence(folder, code, checkpoint, starts, faults, records, notices)


def _judge(evidence: Evidence) -> tuple[str, str]:
    """Return what happened, and the advice."""
    folder = evidence.folder
    if is_locked(folder.path):
        return (
            f"The run is still going; it is at step {evidence.reached} or later.",
            "wait, or watch its metrics.jsonl",
        )
    if folder.finished.exists():
        return _judge_end(folder, evidence.checkpoint, evidence.trust)
    if (flight := _flight(folder)) is not None:
        happened, record = flight
        return (
            f"The run stood still and was ended: {happened}",
            f"read the stacks in {record}, then {evidence.resume}{evidence.loses}",
        )
    trained = [item for item in evidence.records if item.get("kind") == "train"]
    if trained and trained[-1].get("loss", 0.0) is None:
        return (
            f"The loss was no longer a finite number at step {trained[-1]['global_step']}.",
            "continue with a smaller --lr, or --clip, from an earlier checkpoint:"
            f" {evidence.command} --lr ...{evidence.trust}",
        )
    return _judge_stop(evidence)


def _judge_stop(evidence: Evidence) -> tuple[str, str]:
    """Diagnose a run that ended without a word in its own files of why."""
    folder, resume = evidence.folder, evidence.resume
    why = "it gave no reason (killed, or out of memory or time)"
    if said := _last_words(folder.console):
        why, resume = f"its last words were: {said}", f"mend that, and {resume}"
    if evidence.faults and _written(folder.faults) >= _written(folder.starts):
        why = f"its supervisor saw: {evidence.faults[-1][1]}"
    if not evidence.starts:
        return (
            "The run ended while it was set up, before its first step.",
            f"read what it printed; {resume}",
        )
    if not evidence.records and evidence.checkpoint is None:
        return f"The run came up and ended before a line of metrics was written; {why}.", resume
    reached = evidence.reached
    if reached == evidence.step:
        return f"The run ended after step {reached}, which is saved; it is not finished.", resume
    return f"The run ended at about step {reached}; {why}.", f"{resume}{evidence.loses}"


def _judge_end(folder: RunFolder, checkpoint: Checkpoint | None, trust: str) -> tuple[str, str]:
    """Diagnose a run with `finished.json`.

    Args:
        folder: of the run.
        checkpoint: its last complete one.
        trust: what is said of code that the next command would execute.
    """
    resume = f"nnmpi train {resume_words(folder.path)}{trust}"
    try:
        end = read_json(folder.finished)
        step, ranks, expected = (end[key] for key in ("step", "ranks", "weights_sha256"))
        total = max(step, end.get("of_steps", step))
        resume = f"nnmpi train {resume_words(folder.path, int(ranks))}{trust}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder.finished} is damaged.", f"prove the end again: {resume}"
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        files = read_json(checkpoint.folder / STATE_FILE)["files"] if checkpoint is not None else {}
        if files[MODEL_FILE]["sha256"] == expected:
            # (a language model has neither)
            names = ("accuracy",) if end.get("accuracy") is not None else ("rmse", "r2")
            known = {name: nan if end[name] is None else end[name] for name in names if name in end}
            result = f", test {describe_metrics(known)}" if known else ""
            if step < total:
                return (
                    (
                        f"The run is not finished: it stopped after {step} of {total} steps,"
                        f" {end.get('stopped', 'the limit of --stop-after')}."
                    ),
                    f"continue with: {resume}",
                )
            return (
                (
                    f"The run is finished: {step} steps on {counted(ranks, 'rank')}{result}; the"
                    " weights are the final ones."
                ),
                f"nothing; use it: nnmpi evaluate {quote(str(folder.path))}{trust}",
            )
    return (
        (
            f"The run was finished after {step} steps, but its last complete checkpoint has"
            " different weights."
        ),
        f"bring the checkpoint back, or train its end again: {resume}",
    )


def _flight(folder: RunFolder) -> tuple[str, Path] | None:
    """Return the watchdog's sentence about the last start, and the file of the rank it blames."""
    flight = folder.flight
    records = sorted(
        flight.glob("rank-*.txt"), key=lambda file: int(re.sub(r"[^0-9]", "", file.stem) or 0)
    )
    fresh = [file for file in records if _written(file) >= _written(folder.starts)]
    for file in fresh:
        first = ""
        with suppress(OSError, ValueError):
            first = read_text(file).partition("\n")[0]
        if first and not first.startswith("{"):
            guilty = re.search(r"s: rank (\d+) ", first)
            blamed = flight / f"rank-{guilty[1]}.txt" if guilty else file
            sentence = first.removeprefix("the job is ended: ")
            return f"{sentence}.", blamed if blamed in fresh else file
    return None


def _written(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _last_words(console: Path) -> str:
    """Return the sentence with which the last start ended, or ""."""
    with suppress(OSError, ValueError):
        last = read_text(console).rstrip().rpartition("\n")[2]
        return shortened(last.removeprefix(LAST_WORDS), 300) if last.startswith(LAST_WORDS) else ""
    return ""


def _readable(file: Path, read: Callable[[Any], T], notices: list[str]) -> list[T]:
    """Return the values of the readable lines of a file of JSON; a notice names one that is not."""
    result: list[T] = []
    if not file.exists():
        return result
    try:
        *lines, rest = read_text(file).split("\n")
    except (OSError, ValueError) as error:
        notices.append(f"{file} cannot be read ({error})")
        return result
    damaged = []
    for number, line in enumerate([*lines, rest], 1):
        try:
            result.append(read(parse_json(line)))
        except (AttributeError, KeyError, TypeError, ValueError):
            damaged.append(number)
    damaged = [number for number in damaged if number <= len(lines)]  # a kill cuts the last line
    if damaged:
        notices.append(
            f"{file}: {counted(len(damaged), 'damaged line')}, the first is {damaged[0]}"
        )
    return result


def _fault(record: Any) -> tuple[int, str]:
    """Return a start's number and the fault that ended it."""
    return rebuilt(int, record["start"]), shortened(rebuilt(str, record["fault"]))


# ---- machines ----

Facts = Mapping[str, Any]
"""A rank's description of its processor, BLAS and MPI as JSON values; see `inspect_machine`."""


def inspect_machine(group: Group) -> list[Facts]:
    """Return each rank's facts about its machine, by rank. Collective."""
    pool = blas_pool(threadpoolctl.threadpool_info())
    local, node = usable_cores()
    launch = read_launch(os.environ)
    facts = {
        "host": platform.node(),
        "processor": read_cpu("model name") or platform.processor() or platform.machine(),
        "cores": [local, node],
        "bound": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "load": os.getloadavg()[0],
        "versions": ", ".join(map(" ".join, versions().items())),
        "mpi": group.comm.world.library,
        "launcher": f"by {launch.name}" if launch is not None else "without a launcher",
        "blas": name_blas(pool),
        "threads": int(pool.get("num_threads", 1)),
        "bfloat16": describe_bfloat16(),
        "older": find_older(),
        "shm": shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        "cache": describe_cache() if group.local_rank() == 0 else "",
    }
    return group.gather(facts)


def describe_bfloat16() -> str:
    """Return what multiplies bfloat16 here, and how fast; or what is missing."""
    library, reason = onednn.find()
    if reason:
        flags = read_cpu("flags").split()
        units = [name for name in onednn.UNITS if name in flags]
        has = f"the processor has {units[0]}, but " if units else ""
        return f"slower than float32: {has}oneDNN {reason}"
    a, out = np.ones((SIDE, SIDE), np.float32), np.empty((SIDE, SIDE), np.float32)
    ways = partial(np.dot, a, a, out), partial(onednn.multiply, a, a, out, False)
    exact, low = np.min([[_seconds(way) for way in ways] for _ in range(TURNS)], axis=0)
    return f"{library}; products of {SIDE} x {SIDE} take 1/{exact / low:.1f} of float32's time"


def describe_cache() -> str:
    """Return the size of the cache of data sets, and how it is emptied."""
    try:
        folder, found = cache_folder(), entries()
        free = format_bytes(free_bytes())
    except (UsageError, OSError) as error:
        return f"prepared data: none ({error})"
    total = format_bytes(sum(entry.nbytes for entry in found))
    text = f"prepared data: {counted(len(found), 'set')}, {total}, in {folder}; {free} free there"
    unused = sum(entry.nbytes for entry in found if entry.unused_days > UNUSED_DAYS)
    if unused:
        text += f"; {format_bytes(unused)} not used for {UNUSED_DAYS} days go when room is needed"
    if found:
        kinds = sorted({entry.folder.parent for entry in found})
        names = " ".join(quote(str(kind)) for kind in kinds)
        text += f"; to empty it: rm -r {names}"
    return text


def _seconds(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def describe(by_rank: Sequence[Facts]) -> list[str]:
    """Return lines about the machine: once for all ranks, then node by node."""
    first = by_rank[0]
    lines = [
        f"{counted(len(by_rank), 'rank')}, started {first['launcher']}; MPI: {first['mpi']}",
        first["versions"],
    ]
    for host, ranks in _by_host(by_rank).items():
        node = by_rank[ranks[0]]
        shm = "none" if node["shm"] is None else f"{format_bytes(node['shm'])} free"
        lines += [
            (
                f"{host}: {name_ranks(ranks)}; {node['processor']}, {node['cores'][1]} cores,"
                f" load {node['load']:.1f}"
            ),
            f"  BLAS: {node['blas']}, {counted(node['threads'], 'thread')} per rank",
            f"  --precision bf16: {node['bfloat16']}",
            (
                "  cores of each rank:"
                f" {', '.join(dict.fromkeys(_spans(by_rank[rank]['bound']) for rank in ranks))}"
            ),
            f"  shared memory: {shm}",
            f"  {node['cache']}",
        ]
    return lines


def find_faults(by_rank: Sequence[Facts]) -> list[str]:
    """Return a sentence for each problem of the machines, with its remedy."""
    result = []
    for key, what in (("versions", "versions"), ("mpi", "MPI libraries")):
        if len({facts[key] for facts in by_rank}) > 1:
            result.append(f"ranks have different {what}; install the same on all nodes")
    for host, ranks in _by_host(by_rank).items():
        result += [
            f"{host}: {sentence}" for sentence in _faults_of([by_rank[rank] for rank in ranks])
        ]
    return result


def _faults_of(node: Sequence[Facts]) -> list[str]:
    """Return the problems of one node."""
    first, ranks, cores, result = node[0], len(node), node[0]["cores"][1], []
    if ranks > cores:
        result.append(
            f"{ranks} ranks share {cores} cores and wait for one another; start at most {cores}"
            " there"
        )
    sharing = Counter(tuple(facts["bound"]) for facts in node)
    bound, most = max(sharing.items(), key=lambda item: item[1], default=((), 0))
    if bound and len(bound) < most <= cores:
        result.append(
            f"{most} ranks are bound to the cores {_spans(bound)}, others are idle; give --bind-to"
            " none"
        )
    if ranks * first["threads"] > max(cores, ranks):
        result.append(
            f"{ranks} ranks with {first['threads']} BLAS threads each need more than {cores} cores;"
            " unset OMP_NUM_THREADS, or set it to 1"
        )
    if first["load"] > 1.5 * cores:
        result.append(
            f"its load is {first['load']:.1f} on {cores} cores: other programs use them, so"
            " times are unreliable"
        )
    if first["older"]:
        result.append(first["older"])
    if ranks > 1 and first["shm"] is not None and first["shm"] < LITTLE_SHM_BYTES:
        result.append(
            f"{SHM} has {format_bytes(first['shm'])} free; large models will exchange gradients by"
            " messages, which is slower (docker run --shm-size)"
        )
    return result


def _by_host(by_rank: Sequence[Facts]) -> dict[str, list[int]]:
    return group_ranks(enumerate(facts["host"] for facts in by_rank))


def _spans(cores: Sequence[int]) -> str:
    """Return core numbers as text: "0-3, 8"."""
    return name_ranks(cores).partition(" ")[2] if cores else "any"


if __name__ == "__main__":
    sys.exit(say(main))
