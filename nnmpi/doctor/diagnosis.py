"""What has become of a run, read from what it left in its folder, without MPI.

finished.json            it came to its end
a lock on the folder     it still runs
flight/rank-N.txt        it stood still, and where each rank was
metrics.jsonl            how far it came; whether its loss was a number
faults.jsonl             what its supervisor saw, and when
starts.jsonl             when it was started last: what is older is of an earlier start; what each start took
checkpoints/             what it can go on from
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from pathlib import Path
from shlex import quote
from typing import Any

from nnmpi.errors import CheckpointError, counted
from nnmpi.files import is_locked
from nnmpi.reading import parse_json, read_json, read_text
from nnmpi.train.checkpoint_files import MODEL_FILE, STATE_FILE, load_checkpoint, steps
from nnmpi.train.cli import read_run
from nnmpi.train.folder import FAULTS_FILE, RunFolder
from nnmpi.train.log import describe_measures

REACHED = ("process", "imports", "MPI", "data and model", "checkpoint")  # of a start, as starts.jsonl has them
PARTS = ("launcher", *REACHED[1:], "first steps")


@dataclass(frozen=True)
class Diagnosis:
    """What is to be said of a run.

    Attributes:
        happened: in a sentence.
        advice: what to do, in another.
        facts: lines with what that rests on.
    """

    happened: str
    advice: str
    facts: tuple[str, ...]

    def __str__(self) -> str:
        """Return it as it is printed."""
        return "\n".join([self.happened, f"what to do: {self.advice}", "", *(f"  {each}" for each in self.facts)])


def diagnose(path: Path) -> Diagnosis:
    """Return what has become of the run in a folder.

    Raises:
        UsageError: when there is no run.
    """
    read_run(path, str(path))
    folder = RunFolder(path)
    step, checkpoint, notices = _last_checkpoint(folder)
    starts, records = _lines(folder.starts), _metrics(folder)
    reached = max((each["global_step"] for each in records), default=0)
    facts = (
        *_describe_starts(starts),
        *_describe_restarts(restart_parts(folder)),
        f"metrics reach step {reached}" if records else "no metrics",
        f"last good checkpoint: step {step}, in {checkpoint}" if checkpoint else "no checkpoint that is whole",
        *notices,
        *(f"start {each.get('start')}: {each.get('fault')}" for each in _lines(path / FAULTS_FILE)[-5:]),
    )
    happened, advice = _judge(folder, starts, records, reached, step, checkpoint)
    return Diagnosis(happened, advice, facts)


def _judge(
    folder: RunFolder,
    starts: list[Any],
    records: list[dict[str, Any]],
    reached: int,
    step: int,
    checkpoint: Path | None,
) -> tuple[str, str]:
    path = folder.path
    resume = f"go on with: {_command(starts, path)}"
    if checkpoint is None and steps(folder.checkpoints):
        resume = "no checkpoint is whole: bring one back from a copy, or start a new run with another --out"
    loses = f"; the {reached - step} steps since the checkpoint of step {step} are done again" if reached > step else ""
    if is_locked(path):
        return f"The run still goes on; it is at step {reached} or later.", "wait, or watch its metrics.jsonl"
    if folder.finished.exists():
        return _judge_end(folder, checkpoint)
    flight = _flight(folder)
    if flight is not None:
        happened, record = flight
        return f"The run stood still and was ended: {happened}", f"read the stacks in {record}, then {resume}{loses}"
    trained = [each for each in records if each.get("kind") == "train"]
    if trained and trained[-1].get("loss", 0.0) is None:
        return (
            f"The loss was no longer a finite number at step {trained[-1]['global_step']}.",
            f"go on with a smaller --lr, or --clip, from an earlier checkpoint: {_command(starts, path)} --lr ...",
        )
    fault = _newer(_lines(path / FAULTS_FILE), path / FAULTS_FILE, folder.starts)
    why = (
        f"its supervisor saw: {fault.get('fault')}"
        if fault
        else "it did not say why (killed, or out of memory or time)"
    )
    if not starts:
        return "The run ended while it was set up, before its first step.", f"read what it printed; {resume}"
    if not records and checkpoint is None:
        return f"The run came up and ended before a line of metrics was written; {why}.", resume
    if reached == step:
        return f"The run ended after step {step}, which is saved; it is not finished.", resume
    return f"The run ended at about step {reached}; {why}.", f"{resume}{loses}"


def _judge_end(folder: RunFolder, checkpoint: Path | None) -> tuple[str, str]:
    """Judge a run that says that it is finished."""
    try:
        end = read_json(folder.finished)
        step, ranks, wanted = (end[key] for key in ("step", "ranks", "weights_sha256"))
    except (OSError, ValueError, KeyError, TypeError):
        again = f"prove the end again: python -m nnmpi.train --resume {quote(str(folder.path))}"
        return f"{folder.finished} is damaged.", again
    with suppress(OSError, ValueError, KeyError, TypeError):
        if checkpoint is not None and read_json(checkpoint / STATE_FILE)["files"][MODEL_FILE]["sha256"] == wanted:
            return (
                f"The run is finished: {step} steps on {counted(ranks, 'rank')}{_result(end)}; the weights are those "
                "of its end.",
                f"nothing; use it: python -m nnmpi.evaluate {quote(str(folder.path))}",
            )
    return (
        f"The run was finished after {step} steps, but its last whole checkpoint has other weights than those.",
        f"bring the checkpoint back, or train its end again: python -m nnmpi.train --resume {quote(str(folder.path))}",
    )


def _result(end: dict[str, Any]) -> str:
    """Return how good the model was at the end; nothing where that is not told, as after a text."""
    known: dict[str, float] = {name: nan if end[name] is None else end[name] for name in ("rmse", "r2") if name in end}
    if end.get("accuracy") is not None:
        known = {"accuracy": end["accuracy"]}
    return f", test {describe_measures(known)}" if known else ""


def _last_checkpoint(folder: RunFolder) -> tuple[int, Path | None, list[str]]:
    """Return the step and folder of the last good checkpoint, and what is wrong with newer ones."""
    try:
        loaded = load_checkpoint(folder.checkpoints)
    except (CheckpointError, OSError) as error:
        return 0, None, [str(error)]
    if loaded is None:
        return 0, None, []
    checkpoint, place, notices = loaded
    step = checkpoint.state.get("step")
    return step if isinstance(step, int) else 0, place, notices


def _flight(folder: RunFolder) -> tuple[str, Path] | None:
    """Return what the watchdog said at the end of the last start, and the record of the rank that it was about."""
    place = folder.path / "flight"
    records = sorted(place.glob("rank-*.txt"), key=lambda file: int(re.sub(r"[^0-9]", "", file.stem) or 0))
    began = folder.starts.stat().st_mtime if folder.starts.exists() else 0.0
    fresh = [file for file in records if file.stat().st_mtime >= began]
    for file in fresh:
        first = ""
        with suppress(OSError, ValueError):
            first = read_text(file).partition("\n")[0]
        if first and not first.startswith("{"):
            guilty = re.search(r"s: rank (\d+) ", first)
            blamed = place / f"rank-{guilty[1]}.txt" if guilty else file
            words = first.removeprefix("the job is ended: ")
            return f"{words}.", blamed if blamed in fresh else file
    return None


def _describe_starts(starts: list[Any]) -> list[str]:
    if not starts:
        return ["never started"]
    last = starts[-1]
    where = f"{counted(last.get('ranks'), 'rank')} on {last.get('host')}"
    return [f"started {counted(len(starts), 'time')}, last at {last.get('time')}: {where}"]


def restart_parts(folder: RunFolder) -> list[dict[str, float]]:
    """Return, for each start that followed a fault, the seconds that its parts took, from the fault's end on.

    The last part ends with the first line of metrics; one that did not come so far is left out.
    """
    records = [each["time"] for each in _metrics(folder) if isinstance(each.get("time"), float)]
    ends = [each["ended"] for each in _lines(folder.path / FAULTS_FILE) if isinstance(each.get("ended"), float)]
    found = []
    for start in _lines(folder.starts):
        reached = start.get("reached")
        known = reached if isinstance(reached, dict) else {}
        times = [at for at in map(known.get, REACHED) if isinstance(at, float)]
        if len(times) < len(REACHED):
            continue
        before, after = [at for at in ends if at <= times[1]], [at for at in records if at >= times[-1]]
        if before and after:
            ended_s = max(before)  # the process's beginning is known to a hundredth of a second
            times = [ended_s, max(ended_s, times[0]), *times[1:], min(after)]
            found.append({name: end - begin for name, begin, end in zip(PARTS, times, times[1:], strict=False)})
    return found


def _describe_restarts(found: list[dict[str, float]]) -> list[str]:
    if not found:
        return []
    means = [f"{name} {sum(each[name] for each in found) / len(found):.2f} s" for name in PARTS]
    return [f"from a fault to training again, on average of {counted(len(found), 'start')}: {', '.join(means)}"]


def _command(starts: list[Any], path: Path) -> str:
    ranks = starts[-1].get("ranks", 1) if starts else 1
    return f"python -m nnmpi.run -n {ranks} -- --resume {quote(str(path))}"


def _metrics(folder: RunFolder) -> list[dict[str, Any]]:
    return [each for each in _lines(folder.metrics) if isinstance(each.get("global_step"), int)]


def _lines(file: Path) -> list[Any]:
    """Return the JSON objects of a file with one in each line, as far as they can be read."""
    found = []
    with suppress(OSError, ValueError):
        for line in read_text(file).splitlines():
            with suppress(ValueError):
                found.append(parse_json(line))
    return [each for each in found if isinstance(each, dict)]


def _newer(lines: list[Any], file: Path, other: Path) -> dict[str, Any] | None:
    """Return the last of a file's lines, if it was written later than another file."""
    if not lines or (other.exists() and file.stat().st_mtime < other.stat().st_mtime):
        return None
    last: dict[str, Any] = lines[-1]
    return last
