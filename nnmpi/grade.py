"""`python -m nnmpi.grade`: grade solutions of exercises by an assignment, one of them or a class.

python -m nnmpi.grade assignment.toml work/ --starter        # the files to begin with
python -m nnmpi.grade assignment.toml my_ring.py
python -m nnmpi.grade assignment.toml submissions/ --json grades.json
python -m nnmpi.grade assignment.toml /autograder/submission --format gradescope

An assignment is a file in TOML:

    title = "My all-reduce"
    limit_s = 20                      # by the clock, of each criterion
    memory = "1GiB"                   # of each process

    [[criteria]]
    exercise = "ring-all-reduce"      # python -m nnmpi.exercise lists them
    points = 10

    [[criteria]]
    name = "six and seven ranks"      # the exercise's own name, if none is given
    exercise = "ring-all-reduce"
    points = 5
    hidden = true                     # students see neither its name nor why it failed
    sizes = [6, 7]                    # of ranks; of pipelines [[ranks, microbatches], ...]
    needs = ["ring-all-reduce"]       # blocked unless these have passed

    [[criteria]]
    name = "as fast as a ring"
    exercise = "ring-all-reduce"
    file = "fast.py"                  # in a submission's folder; ring_all_reduce.py, if none is given
    points = 5
    measure = "seconds"               # or bytes, chunks (of the busiest rank), rounds, activations (peak)
    machine = "cluster"
    of = "ring"                       # as a multiple of what nnmpi's own takes there; else as it is
    at_most = 1.05                    # for all points
    none_at = 2                       # from there on none, and evenly between; without it, all or none

    [machines.cluster]
    ranks = 16
    network = "alpha_us=50,gbit=1"    # between nodes
    inside = "alpha_us=1,gbit=100"    # within a node; nothing costs nothing
    per_node = 1
    bytes = "64MiB"                   # of a collective's buffer
    microbatches = 8                  # of a pipeline
    forward_s = 1                     # of a rank's stages for one; a backward takes twice as long
    message_s = 0                     # from stage to stage

A submission is a file, or a folder of files. In a folder of submissions each one is graded by a
process of its own, and its solutions run in further ones. A criterion has passed or failed, or it is
blocked (its file is not there, or what it needs has not passed), or it took too long (timeout).
Seconds are those of simulated clocks: they are the same on every computer.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from nnmpi.command import Parser, positive_count, say, suggest
from nnmpi.errors import NnmpiError, UsageError, raised_as, shortened
from nnmpi.exercise.exercise import Setting
from nnmpi.exercise.exercises import EXERCISES
from nnmpi.exercise.solution import Solution, TimedOut
from nnmpi.files import parse_json, read_text, rebuilt, write_atomically
from nnmpi.units import Bytes

PASSED, FAILED, BLOCKED, TIMEOUT = "passed", "failed", "blocked", "timeout"
MOST_TEXT = 2000  # characters of a sentence, in which a solution's exception may have a part
UNPRINTABLE = re.compile(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]")  # what XML cannot have


@dataclass(frozen=True)
class Criterion:
    """What points are given for."""

    exercise: str = ""
    name: str = ""
    file: str = ""
    points: float = 1.0
    hidden: bool = False
    sizes: tuple[Any, ...] = ()
    needs: tuple[str, ...] = ()
    measure: str = ""
    machine: str = ""
    of: str = ""
    at_most: float = 0.0
    none_at: float = 0.0


@dataclass(frozen=True)
class Assignment:
    """What is asked for."""

    title: str = "assignment"
    limit_s: float = 20.0
    memory: Bytes = Bytes("1GiB")
    criteria: tuple[Criterion, ...] = ()
    machines: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What has become of a criterion.

    Attributes:
        name, hidden: of the criterion.
        status: passed, failed, blocked or timeout.
        points, of: given, and to be had.
        text: why.
        drawing: of the solution's own rounds or schedule.
        value: what was measured.
    """

    name: str
    hidden: bool
    status: str
    points: float
    of: float
    text: str
    drawing: str = ""
    value: float | None = None

    @property
    def told(self) -> str:
        """Why, and the drawing below it."""
        return f"{self.text}\n\n{self.drawing}".rstrip()


@dataclass(frozen=True)
class Grade:
    """What has become of a submission."""

    submission: str
    outcomes: tuple[Outcome, ...]

    @property
    def total(self) -> str:
        """The points given and to be had: "7.5 of 10"."""
        return f"{sum(each.points for each in self.outcomes):.4g} of {sum(each.of for each in self.outcomes):.4g}"

    @property
    def public(self) -> list[Outcome]:
        """The outcomes as students may see them."""
        return [
            replace(each, name=f"hidden {number}", text="", drawing="") if each.hidden else each
            for number, each in enumerate(self.outcomes, 1)
        ]


# ---- the assignment ----


def read_assignment(file: Path) -> Assignment:
    """Return the assignment in a file.

    Raises:
        UsageError: naming what in it means nothing.
    """
    with raised_as(UsageError, f"{file} cannot be read"):
        try:
            found: Assignment = rebuilt(Assignment, tomllib.loads(read_text(file)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{file} is no assignment: {error}") from None
    criteria: list[Criterion] = []
    for number, one in enumerate(found.criteria, 1):
        one = replace(one, name=one.name or one.exercise, file=one.file or f"{one.exercise.replace('-', '_')}.py")
        wrong = _find_wrong(one, {other.name for other in criteria}, found.machines)
        if wrong:
            raise UsageError(f"{file}, criterion {number}: {wrong}")
        criteria.append(one)
    return replace(found, criteria=tuple(criteria))


def _find_wrong(one: Criterion, before: set[str], places: Mapping[str, Setting]) -> str:
    """Return why a criterion cannot be judged."""
    exercise = EXERCISES.get(one.exercise)
    if exercise is None:
        return f"there is no exercise {one.exercise!r}{suggest(one.exercise, EXERCISES)}"
    if one.name in before or not before.issuperset(one.needs):
        return f"{one.name!r} must be a new name, and need only names above it"
    if one.points < 0 or (0 < one.none_at <= one.at_most):
        return "points must not be below 0, and none_at must be above at_most"
    if not one.measure:
        return "say what to measure, such as seconds" if one.at_most or one.machine or one.of else ""
    if exercise.measure is None or one.machine not in places or not one.at_most > 0:
        return (
            f"to measure takes at_most, a machine ({', '.join(places)}), and an exercise on ranks, which is no formula"
        )
    return f"of must be one of {', '.join(exercise.own)}" if one.of and one.of not in exercise.own else ""


# ---- judging ----


def grade(assignment: Assignment, submission: Path) -> Grade:
    """Return what a submission is worth."""
    outcomes: list[Outcome] = []
    for one in assignment.criteria:
        missing = {*one.needs} - {each.name for each in outcomes if each.status == PASSED}
        outcomes.append(_judge(assignment, one, submission, missing))
    return Grade(submission.stem, tuple(outcomes))


def _find_file(submission: Path, name: str) -> Path | None:
    """Return the file that is to be judged; no link, which may lead to another's."""
    if not submission.is_dir():
        return submission
    alone = sorted(submission.glob("*.py"))
    file = alone[0] if len(alone) == 1 else submission / name
    return file if file.is_file() and file.resolve() == submission.resolve() / file.name else None


def _judge(assignment: Assignment, one: Criterion, submission: Path, missing: set[str]) -> Outcome:
    exercise, file = EXERCISES[one.exercise], _find_file(submission, one.file)
    setting, folder = assignment.machines.get(one.machine), submission if submission.is_dir() else None

    def outcome(status: str, text: str, share: float = 0.0, *more: Any) -> Outcome:
        points, told = share * one.points, shortened(text, MOST_TEXT)
        return Outcome(one.name, one.hidden, status, points, one.points, told, *more)

    if missing:
        return outcome(BLOCKED, f"it needs {min(missing)}, which has not passed")
    if file is None:
        return outcome(BLOCKED, f"there is no {one.file}")
    try:
        with Solution(file, exercise.function, folder, assignment.limit_s, assignment.memory) as function:
            if setting is None or exercise.measure is None:
                return outcome(PASSED, exercise.check(function, one.sizes), 1.0)
            _, numbers, drawing = exercise.measure(function, setting)
    except NnmpiError as error:
        status = TIMEOUT if isinstance(error, TimedOut) else FAILED
        return outcome(status, str(error), 0.0, getattr(error, "drawing", ""))
    except Exception as error:  # what the checks had not foreseen is no success, and no fault of the solution's
        return outcome(BLOCKED, f"the checker cannot judge it: {type(error).__name__}: {error}")
    if one.measure not in numbers:
        raise UsageError(f"{one.name}: of {one.exercise} one can measure {', '.join(numbers)}, not {one.measure}")
    value = max(numbers[one.measure])
    found = value / (max(exercise.measure(exercise.own[one.of], setting)[1][one.measure]) if one.of else 1.0)
    times = f" times what {one.of} takes" if one.of else ""
    told = (
        f"{value:.6g} {one.measure} on {one.machine}, {found:.4g}{times}; at most {one.at_most:g}{times} is asked for"
    )
    if found <= one.at_most * (1 + 1e-9):
        return outcome(PASSED, told, 1.0, "", value)
    share = (one.none_at - found) / (one.none_at - one.at_most) if one.none_at else 0.0
    return outcome(FAILED, told, max(0.0, share), drawing, value)


def grade_class(assignment: Assignment, file: Path, submissions: Sequence[Path], jobs: int) -> list[Grade]:
    """Return what each submission is worth, each graded by a process of its own, so many at a time.

    Raises:
        UsageError: for an assignment that cannot be graded by.
    """
    limit_s = 60 + 2 * assignment.limit_s * len(assignment.criteria)

    def one(submission: Path) -> Grade:
        command = [sys.executable, "-m", "nnmpi.grade", str(file), str(submission), "--format", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            if done.returncode == UsageError.exit_status:
                raise UsageError(done.stderr.removeprefix("nnmpi: ").strip())
            done.check_returncode()
            (found,) = rebuilt(tuple[Grade, ...], parse_json(done.stdout))
            return found
        except subprocess.SubprocessError as error:
            told = f"its grading took too long, or ended by itself ({type(error).__name__})"
            ended = (Outcome(each.name, each.hidden, BLOCKED, 0.0, each.points, told) for each in assignment.criteria)
            return Grade(submission.stem, tuple(ended))

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, submissions))


def find_submissions(assignment: Assignment, path: Path) -> list[Path]:
    """Return the submissions in a folder: its folders and files, unless it has itself what the assignment asks for."""
    if not path.exists():
        raise UsageError(f"there is no {path}; give a file, a folder, or a folder of these")
    if path.is_file() or any((path / one.file).is_file() for one in assignment.criteria):
        return []
    inside = [each for each in sorted(path.iterdir()) if not each.name.startswith((".", "_"))]
    folders = [each for each in inside if each.is_dir()]
    found = [each for each in inside if each in folders or each.suffix == ".py"]
    return found if folders or len(found) > 1 else []


def write_starter(assignment: Assignment, folder: Path) -> list[str]:
    """Write the files that an assignment begins with, and return which; what is there stays.

    Raises:
        UsageError: where one cannot be written.
    """
    written = []
    with raised_as(UsageError, f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, exercise in {folder / one.file: one.exercise for one in assignment.criteria}.items():
            if not file.exists():
                file.write_text(EXERCISES[exercise].starter())
                written.append(f"{file}")
    return written or [f"nothing is missing in {folder}"]


# ---- what is said of it ----


def as_gradescope(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return one submission's results.json for Gradescope."""
    outcomes = _only(grades).outcomes
    tests = [
        {
            "name": each.name,
            "score": each.points,
            "max_score": each.of,
            "status": PASSED if each.status == PASSED else FAILED,
            "output": each.told,
            "visibility": "hidden" if each.hidden else "visible",
        }
        for each in outcomes
    ]
    ahead = [each for each in outcomes if each.value is not None and not each.hidden]
    board = [{"name": each.name, "value": each.value, "order": "asc"} for each in ahead]
    return json.dumps({"tests": tests, "leaderboard": board}, indent=2)


def as_classroom50(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return one submission's result.json for Classroom 50, where points are whole; parts of one are dropped."""
    tests: list[dict[str, Any]] = [
        {
            "test-name": each.name,
            "passed": each.status == PASSED,
            "score": int(each.points),
            "max-score": int(each.of),
            "output": each.told,
        }
        for each in _only(grades).public
    ]
    names = ("CLASSROOM", "ASSIGNMENT", "SUBMISSION_TAG", "COMMIT_URL", "RELEASE_URL", "REVIEW_URL")
    classroom, title, tag, commit, release, review = (os.environ.get(name, "") for name in names)
    result = {
        "schema": "classroom50/result/v1",
        "classroom": classroom,
        "assignment": title or assignment.title,
        "submission": tag,
        "commit": commit,
        "release": release,
        "review": review or commit,
        "datetime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        **{name: sum(each[name] for each in tests) for name in ("score", "max-score")},
        "tests": tests,
    }
    return json.dumps(result, indent=2)


def as_junit(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return JUnit's XML, a suite for each submission."""
    suites = Element("testsuites", name=assignment.title)
    for each in grades:
        suite = SubElement(suites, "testsuite", name=each.submission)
        for one in each.public:
            case = SubElement(suite, "testcase", name=one.name, classname=each.submission)
            if one.status != PASSED:
                kind = "skipped" if one.status == BLOCKED else "failure"
                told = SubElement(case, kind, message=UNPRINTABLE.sub("?", one.text), type=one.status)
                told.text = UNPRINTABLE.sub("?", one.drawing)
    return tostring(suites, "unicode")


def as_table(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return a submission's criteria, each with why; of a class a line for each submission, and who is ahead."""
    if len(grades) == 1:
        lines = [f"{assignment.title}, {grades[0].submission}: {grades[0].total}", ""]
        for each in grades[0].outcomes:
            hidden = " (hidden)" * each.hidden
            lines.append(f"{each.status:<8} {each.points:g} of {each.of:g}  {each.name}{hidden}")
            lines += [f"    {line}".rstrip() for line in each.told.splitlines()]
        return "\n".join(lines)
    names = [one.name for one in assignment.criteria]
    rows = [["", *map(str, range(1, len(names) + 1)), "points"]]
    for found in grades:
        told = (one.status if one.status in (BLOCKED, TIMEOUT) else f"{one.points:.4g}" for one in found.outcomes)
        rows.append([found.submission, *told, found.total])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += ["", *(f"{number}  {name}" for number, name in enumerate(names, 1))]
    for number, name in enumerate(names):
        board = [(found.outcomes[number].value, found.submission) for found in grades]
        ranked = sorted((value, who) for value, who in board if value is not None)
        lines += ["", f"{name}:", *(f"{value:12.6g}  {who}" for value, who in ranked)] if ranked else []
    return "\n".join([assignment.title, "", *lines])


def as_json(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return all of it, sentences and drawings."""
    return json.dumps([asdict(each) for each in grades], indent=2)


def _only(grades: Sequence[Grade]) -> Grade:
    if len(grades) != 1:
        raise UsageError(f"this format is for one submission, and there are {len(grades)}; take table, junit or json")
    return grades[0]


FORMATS: Mapping[str, Callable[[Assignment, Sequence[Grade]], str]] = MappingProxyType(
    {each.__name__[3:]: each for each in (as_table, as_gradescope, as_classroom50, as_junit, as_json)}
)


def main(words: Sequence[str]) -> str:
    """Return the grades.

    Raises:
        UsageError: for an assignment or a submission that is none.
    """
    parser = Parser("python -m nnmpi.grade", description=(__doc__ or "").split("An assignment is")[0])
    parser.add_argument("assignment", type=Path, metavar="ASSIGNMENT.toml", help="what is asked for")
    parser.add_argument("submission", type=Path, metavar="DIR_OR_FILE", help="a submission, or a folder of some")
    parser.add_argument("--starter", action="store_true", help="write the files to begin with into DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there, sentences and drawings")
    parser.add_argument("--format", choices=FORMATS, default="table", help="what is printed (default: table)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="submissions at once (default: 2)")
    given = parser.parse_args(words)
    assignment = read_assignment(given.assignment)
    if given.starter:
        return "\n".join(write_starter(assignment, given.submission))
    if submissions := find_submissions(assignment, given.submission):
        grades = grade_class(assignment, given.assignment, submissions, given.jobs)
    else:
        grades = [grade(assignment, given.submission)]
    told = FORMATS[given.format](assignment, grades)
    if given.json is not None:
        with raised_as(UsageError, f"{given.json} cannot be written"):
            write_atomically(given.json, as_json(assignment, grades).encode())
    return told


if __name__ == "__main__":
    sys.exit(say(main))
