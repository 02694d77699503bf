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
    measure = "seconds"               # or bytes (of the busiest rank), rounds, activations (peak)
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
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from xml.etree.ElementTree import Element, SubElement, tostring

from nnmpi.command import Parser, convert, options_of, positive_count, say, suggest
from nnmpi.errors import NnmpiError, UsageError, raised_as, shortened
from nnmpi.exercise.exercise import Setting
from nnmpi.exercise.exercises import EXERCISES
from nnmpi.exercise.solution import Solution, TimedOut
from nnmpi.files import read_json, read_text, rebuilt, write_atomically
from nnmpi.units import Bytes

T = TypeVar("T")
PASSED, FAILED, BLOCKED, TIMEOUT = "passed", "failed", "blocked", "timeout"
MOST_TEXT = 2000  # characters of a sentence, in which a solution's exception may have a part
UNPRINTABLE = re.compile(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]")  # what XML cannot have


@dataclass(frozen=True)
class Criterion:
    """What points are given for."""

    exercise: str
    name: str = ""
    file: str = ""
    points: float = 1.0
    hidden: bool = False
    sizes: list[Any] = field(default_factory=list)
    needs: list[Any] = field(default_factory=list)
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
    criteria: list[Any] = field(default_factory=list)
    machines: dict[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Grade:
    """What has become of a submission."""

    submission: str
    outcomes: tuple[Outcome, ...]

    @property
    def total(self) -> str:
        """The points given and to be had: "7.5 of 10"."""
        points, of = (sum(getattr(each, name) for each in self.outcomes) for name in ("points", "of"))
        return f"{points:.4g} of {of:.4g}"


# ---- the assignment ----


def read_assignment(file: Path) -> Assignment:
    """Return the assignment in a file.

    Raises:
        UsageError: naming what in it means nothing.
    """
    with raised_as(UsageError, f"{file} cannot be read"):
        try:
            table = tomllib.loads(read_text(file))
        except ValueError as error:
            raise UsageError(f"{file} is no TOML: {error}") from None
    found = _read(Assignment, table, f"{file}")
    places = {name: _read(Setting, each, f"{file}, machines.{name}") for name, each in found.machines.items()}
    criteria: list[Criterion] = []
    for number, each in enumerate(found.criteria, 1):
        one = _read(Criterion, each, f"{file}, criterion {number}")
        one = replace(one, name=one.name or one.exercise, file=one.file or f"{one.exercise.replace('-', '_')}.py")
        wrong = _find_wrong(one, {other.name for other in criteria}, places)
        if wrong:
            raise UsageError(f"{file}, criterion {number}: {wrong}")
        criteria.append(one)
    return replace(found, criteria=criteria, machines=places)


def _read(kind: type[T], table: dict[str, Any], where: str) -> T:
    """Return a table as a dataclass."""
    options = {each.name: each for each in options_of(kind)}
    values = {}
    for name, value in table.items():
        if name not in options:
            raise UsageError(f"{where}: {name} means nothing{suggest(name, options)}")
        plain = {list[Any]: list, dict[str, Any]: dict}.get(options[name].type)
        if plain is not None and not isinstance(value, plain):
            raise UsageError(f"{where}: {name} is {shortened(repr(value))}; it must be a {plain.__name__}")
        values[name] = value if plain else convert(value, options[name], f"{where}: {name}")
    if kind is Criterion and "exercise" not in values:
        raise UsageError(f"{where}: it has no exercise; python -m nnmpi.exercise lists them")
    return kind(**values)


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
        able = ", ".join(name for name, each in EXERCISES.items() if each.measure)
        return f"to measure takes at_most, a machine ({', '.join(places) or 'there is none'}), and one of {able}"
    return f"of must be one of {', '.join(exercise.own)}" if one.of and one.of not in exercise.own else ""


# ---- judging ----


def grade(assignment: Assignment, submission: Path) -> Grade:
    """Return what a submission is worth."""
    outcomes: list[Outcome] = []
    for one in assignment.criteria:
        passed = {each.name for each in outcomes if each.status == PASSED}
        missing = [name for name in one.needs if name not in passed]
        file = _find_file(submission, one.file)
        if missing:
            told = f"it needs {missing[0]}, which has not passed"
        elif file is None:
            told = f"there is no {one.file}"
        else:
            outcomes.append(_judge(assignment, one, file, submission))
            continue
        outcomes.append(Outcome(one.name, one.hidden, BLOCKED, 0.0, one.points, told))
    return Grade(submission.stem, tuple(outcomes))


def _find_file(submission: Path, name: str) -> Path | None:
    """Return the file that is to be judged; no link, which may lead to another's."""
    if not submission.is_dir():
        return submission
    alone = sorted(submission.glob("*.py"))
    file = alone[0] if len(alone) == 1 else submission / name
    return file if file.is_file() and file.resolve() == submission.resolve() / file.name else None


def _judge(assignment: Assignment, one: Criterion, file: Path, submission: Path) -> Outcome:
    exercise = EXERCISES[one.exercise]
    sizes = {"sizes": [tuple(each) if isinstance(each, list) else each for each in one.sizes]} if one.sizes else {}
    setting = assignment.machines.get(one.machine)
    folder = submission if submission.is_dir() else None
    limits = assignment.limit_s, assignment.memory

    def outcome(status: str, text: str, share: float = 0.0, **more: Any) -> Outcome:
        return Outcome(one.name, one.hidden, status, share * one.points, one.points, shortened(text, MOST_TEXT), **more)

    try:
        with Solution(file, exercise.function, folder, *limits) as function:
            if setting is None or exercise.measure is None:
                return outcome(PASSED, exercise.check(function, **sizes), 1.0)
            numbers, drawing = exercise.measure(function, setting)
    except TimedOut as error:
        return outcome(TIMEOUT, str(error))
    except NnmpiError as error:
        return outcome(FAILED, str(error), drawing=getattr(error, "drawing", ""))
    except Exception as error:  # what the checks had not foreseen is no success, and no fault of the solution's
        return outcome(BLOCKED, f"the checker cannot judge it: {type(error).__name__}: {error}")
    if one.measure not in numbers:
        raise UsageError(f"{one.name}: of {one.exercise} one can measure {', '.join(numbers)}, not {one.measure}")
    value = numbers[one.measure]
    unit = exercise.measure(exercise.own[one.of], setting)[0][one.measure] if one.of else 1.0
    found, most, none = value / unit, one.at_most, one.none_at
    times = f" times what {one.of} takes" if one.of else ""
    told = f"{value:.6g} {one.measure} on {one.machine}, {found:.4g}{times}; at most {most:g}{times} is asked for"
    if found <= most * (1 + 1e-9):
        return outcome(PASSED, told, 1.0, value=value)
    share = max(0.0, (none - found) / (none - most)) if none else 0.0
    return outcome(FAILED, told, share, drawing=drawing, value=value)


def grade_class(assignment: Assignment, file: Path, submissions: Sequence[Path], jobs: int) -> list[Grade]:
    """Return what each submission is worth, each graded by a process of its own, so many at a time.

    Raises:
        UsageError: for an assignment that cannot be graded by.
    """
    limit_s = 60 + 2 * assignment.limit_s * len(assignment.criteria)

    def one(number: int, submission: Path) -> Grade:
        result = Path(folder) / f"{number}.json"
        command = [sys.executable, "-m", "nnmpi.grade", str(file), str(submission), "--json", str(result)]
        told = "its grading took too long, and was ended"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            if done.returncode == UsageError.exit_status:
                raise UsageError(done.stderr.removeprefix("nnmpi: ").strip())
            told = f"its grading ended with the status {done.returncode}"
            return rebuilt(tuple[Grade, ...], read_json(result))[0]
        except (subprocess.TimeoutExpired, OSError):
            ended = [Outcome(each.name, each.hidden, BLOCKED, 0.0, each.points, told) for each in assignment.criteria]
            return Grade(submission.stem, tuple(ended))

    with tempfile.TemporaryDirectory(prefix="nnmpi-grades-") as folder, ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, range(len(submissions)), submissions))


def find_submissions(assignment: Assignment, path: Path) -> list[Path]:
    """Return the submissions in a folder: its folders and files, unless it has itself what the assignment asks for."""
    if not path.exists():
        raise UsageError(f"there is no {path}; give a file, a folder, or a folder of these")
    if path.is_file() or any((path / one.file).is_file() for one in assignment.criteria):
        return []
    inside = [each for each in sorted(path.iterdir()) if not each.name.startswith((".", "_"))]
    found = [each for each in inside if each.is_dir() or each.suffix == ".py"]
    return found if len(found) > 1 or any(each.is_dir() for each in found) else []


def write_starter(assignment: Assignment, folder: Path) -> list[str]:
    """Write the files that an assignment begins with, and return which; what is there stays.

    Raises:
        UsageError: where one cannot be written.
    """
    written = []
    with raised_as(UsageError, f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, exercise in {one.file: one.exercise for one in assignment.criteria}.items():
            if not (folder / file).exists():
                (folder / file).write_text(EXERCISES[exercise].starter())
                written.append(f"{folder / file}")
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
            "status": "passed" if each.status == PASSED else "failed",
            "output": _told(each),
            "output_format": "text",
            "visibility": "hidden" if each.hidden else "visible",
        }
        for each in outcomes
    ]
    board = [
        {"name": each.name, "value": each.value, "order": "asc"}
        for each in outcomes
        if each.value is not None and not each.hidden
    ]
    return json.dumps({"tests": tests, "leaderboard": board}, indent=2)


def as_classroom50(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return one submission's result.json for Classroom 50, where points are whole; parts of one are dropped."""
    tests = [
        {
            "test-name": each.name,
            "passed": each.status == PASSED,
            "score": int(each.points),
            "max-score": int(each.of),
            "output": _told(each),
        }
        for each in _public(_only(grades))
    ]
    given = {name: os.environ.get(name, "") for name in ("CLASSROOM", "ASSIGNMENT", "SUBMISSION_TAG")}
    links = {name.lower(): os.environ.get(f"{name}_URL", "") for name in ("COMMIT", "RELEASE", "REVIEW")}
    result = {
        "schema": "classroom50/result/v1",
        "classroom": given["CLASSROOM"],
        "assignment": given["ASSIGNMENT"] or assignment.title,
        "submission": given["SUBMISSION_TAG"],
        **links,
        "review": links["review"] or links["commit"],
        "datetime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        **{name: sum(each[name] for each in tests) for name in ("score", "max-score")},  # type: ignore[misc]
        "tests": tests,
    }
    return json.dumps(result, indent=2)


def as_junit(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return JUnit's XML, a suite for each submission."""
    suites = Element("testsuites", name=assignment.title)
    for each in grades:
        counts = {
            name: str(sum(one.status in status for one in each.outcomes))
            for name, status in (("failures", (FAILED, TIMEOUT)), ("skipped", (BLOCKED,)))
        }
        counts |= {"name": each.submission, "tests": str(len(each.outcomes))}
        suite = SubElement(suites, "testsuite", counts)
        for one in _public(each):
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
            lines += [f"    {line}".rstrip() for line in _told(each).splitlines()]
        return "\n".join(lines)
    names = [one.name for one in assignment.criteria]
    rows = [["", *map(str, range(1, len(names) + 1)), "points"]]
    rows += [[each.submission, *map(_short, each.outcomes), each.total] for each in grades]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += ["", *(f"{number}  {name}" for number, name in enumerate(names, 1)), f"b  {BLOCKED}", f"t  {TIMEOUT}"]
    for number, name in enumerate(names):
        board = [(each.outcomes[number].value, each.submission) for each in grades]
        ranked = sorted((value, who) for value, who in board if value is not None)
        lines += ["", f"{name}:", *(f"{value:12.6g}  {who}" for value, who in ranked)] if ranked else []
    return "\n".join([assignment.title, "", *lines])


def _short(each: Outcome) -> str:
    return {BLOCKED: "b", TIMEOUT: "t"}.get(each.status, f"{each.points:.4g}")


def _told(each: Outcome) -> str:
    return f"{each.text}\n\n{each.drawing}".rstrip()


def _public(grade: Grade) -> list[Outcome]:
    """Return the outcomes as students may see them."""
    return [
        replace(each, name=f"hidden {number}", text="", drawing="") if each.hidden else each
        for number, each in enumerate(grade.outcomes, 1)
    ]


def _only(grades: Sequence[Grade]) -> Grade:
    if len(grades) != 1:
        raise UsageError(f"this format is for one submission, and there are {len(grades)}; take table, junit or --json")
    return grades[0]


FORMATS: Mapping[str, Callable[[Assignment, Sequence[Grade]], str]] = MappingProxyType(
    {"table": as_table, "gradescope": as_gradescope, "classroom50": as_classroom50, "junit": as_junit}
)


def main(words: Sequence[str]) -> str:
    """Return the grades.

    Raises:
        UsageError: for an assignment or a submission that is none.
    """
    given = _parser().parse_args(words)
    assignment = read_assignment(given.assignment)
    if given.starter:
        return "\n".join(write_starter(assignment, given.submission))
    submissions = find_submissions(assignment, given.submission)
    if submissions:
        grades = grade_class(assignment, given.assignment, submissions, given.jobs)
    else:
        grades = [grade(assignment, given.submission)]
    told = FORMATS[given.format](assignment, grades)
    if given.json is not None:
        with raised_as(UsageError, f"{given.json} cannot be written"):
            write_atomically(given.json, json.dumps([asdict(each) for each in grades], indent=2).encode())
    return told


def _parser() -> Parser:
    parser = Parser("python -m nnmpi.grade", description=(__doc__ or "").split("An assignment is")[0])
    parser.add_argument("assignment", type=Path, metavar="ASSIGNMENT.toml", help="what is asked for")
    parser.add_argument("submission", type=Path, metavar="DIR_OR_FILE", help="a submission, or a folder of some")
    parser.add_argument("--starter", action="store_true", help="write the files to begin with into DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there, sentences and drawings")
    parser.add_argument("--format", choices=FORMATS, default="table", help="what is printed (default: table)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="submissions at once (default: 2)")
    return parser


if __name__ == "__main__":
    sys.exit(say(main))
