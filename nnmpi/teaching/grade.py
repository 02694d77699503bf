"""`nnmpi grade`: grade solutions of exercises, one submission or a class.

nnmpi grade assignment.toml work/ --starter        # starter files
nnmpi grade assignment.toml my_ring.py
nnmpi grade assignment.toml submissions/ --json grades.json
nnmpi grade assignment.toml submissions/ --as class  # or one, if it may be both
nnmpi grade assignment.toml /autograder/submission --format gradescope

An assignment is a file in TOML:

    title = "My all-reduce"
    limit_s = 20                      # by the clock, of each criterion
    memory = "1GiB"                   # of each process

    [[criteria]]
    exercise = "ring-all-reduce"      # nnmpi exercise lists them
    points = 10

    [[criteria]]
    name = "six and seven ranks"      # default: the exercise's name
    exercise = "ring-all-reduce"
    points = 5
    hidden = true                     # students see neither its name nor why it failed
    sizes = [6, 7]                    # of ranks; of pipelines [[ranks, microbatches], ...]
    needs = ["ring-all-reduce"]       # blocked unless these have passed

    [[criteria]]
    name = "as fast as a ring"
    exercise = "ring-all-reduce"
    file = "fast.py"                  # in a submission's folder; default: ring_all_reduce.py
    points = 5
    measure = "seconds"               # or bytes, chunks (of the busiest rank), rounds, activations
                                      # (peak)
    machine = "cluster"
    of = "ring"                       # score: a multiple of nnmpi's ring; default: the number
                                      # itself
    at_most = 1.05                    # a score up to here has all points
    none_at = 2                       # from here on none, linear between; default: all or none

    [machines.cluster]
    ranks = 16
    network = "alpha_us=50,gbit=1"    # as --network of other commands; for nodes of several ranks
                                      # also per_node=8,inside_gbit=100; empty: messages are free
    bytes = "64MiB"                   # of a collective's buffer
    microbatches = 8                  # of a pipeline
    forward_s = 1                     # a microbatch in all stages of a rank; backward takes twice
                                      # as long
    message_s = 0                     # from stage to stage

A submission is a file, or a folder of files. Each submission of a class is graded in a process of
its own, and its solutions run in further processes. A criterion is passed, failed, blocked (its
file is missing, or a criterion it needs has not passed), or timeout (over its limit). Seconds are
those of simulated clocks, the same on every computer.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from xml.etree.ElementTree import Element, SubElement, tostring

from nnmpi.base.command import check_numbers, printable, read_command, require, say
from nnmpi.base.errors import NnmpiError, UsageError, raised_as, shortened
from nnmpi.base.files import OutputFile, json_text, parse_json, read_toml, rebuilt, write_atomically
from nnmpi.base.launcher import python_words
from nnmpi.base.units import Bytes, aligned
from nnmpi.teaching.exercise.exercise import Exercise, Setting
from nnmpi.teaching.exercise.exercises import EXERCISES, POWERS, SHAPES, find
from nnmpi.teaching.exercise.solution import Solution, TimedOut, how_to_give

PASSED, FAILED, BLOCKED, TIMEOUT = "passed", "failed", "blocked", "timeout"
MOST_TEXT = 2000  # characters of a sentence, which may quote a solution's exception
RANKS = range(1, 128 + 1)  # of a machine
LEAST_BYTES = 128 << 20  # of a process, which imports NumPy
ONE, CLASS = "one", "class"
CHILD = """
import pathlib, sys
from nnmpi.teaching.grade import as_json, grade, read_assignment
file, submission = map(pathlib.Path, sys.argv[1:])
assignment = read_assignment(file)
print(as_json(assignment, [grade(assignment, submission)]))
"""


@dataclass(frozen=True)
class Criterion:
    """One row of an assignment that earns points."""

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
    """An assignment: its criteria, limits and machines."""

    title: str = "assignment"
    limit_s: float = 20.0
    memory: Bytes = Bytes("1GiB")
    criteria: tuple[Criterion, ...] = ()
    machines: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a criterion.

    Attributes:
        name, hidden: of the criterion.
        status: passed, failed, blocked or timeout.
        points, of: earned and possible.
        text: the reason.
        drawing: of the solution's rounds or schedule.
        value: the measured number.
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
    def output(self) -> str:
        """The reason, and the drawing below it."""
        return f"{self.text}\n\n{self.drawing}".rstrip()


@dataclass(frozen=True)
class Grade:
    """The results of a submission."""

    submission: str
    outcomes: tuple[Outcome, ...]

    @property
    def total(self) -> str:
        """The points earned and possible: "7.5 of 10"."""
        points, of = (sum(getattr(o, name) for o in self.outcomes) for name in ("points", "of"))
        return f"{points:.4g} of {of:.4g}"

    @property
    def public(self) -> list[Outcome]:
        """The outcomes that students may see; see `_public`."""
        return _public(self.outcomes)


# ---- the assignment ----


def read_assignment(file: Path) -> Assignment:
    """Read and check an assignment.

    Raises:
        UsageError: naming the invalid entry.
    """
    with raised_as(UsageError, f"{file} cannot be read"):
        try:
            assignment: Assignment = rebuilt(Assignment, read_toml(file))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{file} is not an assignment: {error}") from None
    limits = 0 < assignment.limit_s < inf and assignment.memory >= LEAST_BYTES
    require(
        limits and bool(assignment.criteria),
        f"{file}: limit_s must be above 0, memory at least {LEAST_BYTES >> 20}MiB, and at least"
        " one criterion given",
    )
    for name, setting in assignment.machines.items():
        with _located(f"{file}, machine {name}"):
            _check_machine(setting)
    criteria: list[Criterion] = []
    for number, criterion in enumerate(assignment.criteria, 1):
        with _located(f"{file}, criterion {number}"):
            exercise = find(criterion.exercise)
            criterion = replace(
                criterion,
                name=criterion.name or exercise.name,
                file=criterion.file or f"{exercise.function}.py",
            )
            names = {other.name for other in criteria}
            _check_criterion(criterion, exercise, names, assignment.machines)
        criteria.append(criterion)
    return replace(assignment, criteria=tuple(criteria))


@contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except (NnmpiError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from None


def _check_machine(setting: Setting) -> None:
    require(
        setting.ranks in RANKS and setting.microbatches in RANKS,
        f"ranks and microbatches must be from 1 to {RANKS[-1]}",
    )
    require(
        0 <= setting.forward_s < inf and 0 <= setting.message_s < inf and setting.bytes > 0,
        "forward_s and message_s must not be below 0, and bytes must be above 0",
    )
    _ = setting.machine  # raises for an invalid network


def _check_criterion(
    criterion: Criterion, exercise: Exercise, before: set[str], machines: Mapping[str, Setting]
) -> None:
    measure, machine = criterion.measure, criterion.machine
    of, at_most = criterion.of, criterion.at_most
    require(
        criterion.name not in before and before.issuperset(criterion.needs),
        f"{criterion.name!r} must be a new name, and its needs names above it",
    )
    require(
        all(0 <= number < inf for number in (criterion.points, at_most, criterion.none_at)),
        "points, at_most and none_at must be numbers that are not below 0",
    )
    require(not 0 < criterion.none_at <= at_most, "none_at must be above at_most")
    require(
        Path(criterion.file).name == criterion.file and criterion.file.endswith(".py"),
        f"file must be the name of a .py file, without a folder, not {criterion.file!r}",
    )
    _check_sizes(exercise, criterion.sizes)
    if not measure:
        require(not (at_most or machine or of), "say what to measure, such as seconds")
        return
    require(
        exercise.measure is not None and machine in machines and at_most > 0,
        f"a measure needs at_most, a machine ({', '.join(machines)}), and an exercise on ranks,"
        " not a formula",
    )
    require(
        not of or of in exercise.references,
        f"of must be one of {', '.join(exercise.references)}",
    )
    setting = machines[machine]
    _check_sizes(exercise, [[setting.ranks, setting.microbatches][: 1 + _is_paired(exercise)]])
    numbers = _reference(exercise, of, setting)
    require(
        measure in numbers,
        f"{exercise.name} has the measures {', '.join(numbers)}, not {measure}",
    )
    require(
        not of or max(numbers[measure]) > 0,
        f"{of} has 0 {measure} on {machine}, which has no multiples",
    )


def _is_paired(exercise: Exercise) -> bool:
    """Return whether the exercise's sizes are pairs: ranks and microbatches."""
    return isinstance(exercise.sizes[0], tuple)


def _reference(exercise: Exercise, name: str, setting: Setting) -> Mapping[str, Sequence[float]]:
    """Return the measures of one of the package's solutions, or the limits on any solution."""
    assert exercise.measure is not None
    measures = (
        exercise.measure(exercise.references[name], setting) if name else exercise.best(setting)
    )
    return measures[1]


def _check_sizes(exercise: Exercise, sizes: Sequence[Any]) -> None:
    name, pair = exercise.name, _is_paired(exercise)
    require(
        not sizes or len(exercise.sizes) > 1, f"{name} has no sizes: it is judged on random cases"
    )
    for size in sizes:
        numbers = size if isinstance(size, list) else [size]
        require(
            len(numbers) == 1 + pair and all(type(n) is int and n in RANKS for n in numbers),
            f"a size of {name} is {'[ranks, microbatches]' if pair else 'a number of ranks'}, from"
            f" 1 to {RANKS[-1]}, not {size!r}",
        )
        require(
            exercise.sizes != POWERS or not numbers[0] & (numbers[0] - 1),
            f"a size of {name} must be a power of two, not {size}",
        )
        require(
            exercise.sizes != SHAPES or numbers[1] % numbers[0] == 0,
            f"in {name} microbatches must be a multiple of ranks, not {size}",
        )


# ---- judging ----


def grade(assignment: Assignment, submission: Path) -> Grade:
    """Grade a submission."""
    outcomes: list[Outcome] = []
    for criterion in assignment.criteria:
        # as students may read them: a hidden criterion's name is in no sentence of another's
        missing = [
            shown.name
            for outcome, shown in zip(outcomes, _public(outcomes), strict=True)
            if outcome.name in criterion.needs and outcome.status != PASSED
        ]
        outcomes.append(_judge(assignment, criterion, submission, missing))
    return Grade(_label(submission), tuple(outcomes))


def _label(submission: Path) -> str:
    """Return a submission's name on one line: a line break in it would forge another's row."""
    return printable(submission.name).replace("\n", r"\n").replace("\t", r"\t")


def _public(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes that students may see, hidden ones without name and reason."""
    return [
        replace(item, name=f"hidden {number}", text="", drawing="") if item.hidden else item
        for number, item in enumerate(outcomes, 1)
    ]


def _find_file(submission: Path, name: str) -> Path | None:
    """Return the file to judge; never a link, which may lead to another student's file."""
    if not submission.is_dir():
        return submission
    files = sorted(submission.glob("*.py"))
    file = files[0] if len(files) == 1 else submission / name
    return file if file.is_file() and file.resolve() == submission.resolve() / file.name else None


def _outcome(
    criterion: Criterion,
    status: str,
    text: str,
    share: float = 0.0,
    drawing: str = "",
    value: float | None = None,
) -> Outcome:
    return Outcome(
        criterion.name,
        criterion.hidden,
        status,
        round(share, 6) * criterion.points,
        criterion.points,
        printable(shortened(text, MOST_TEXT)),
        printable(drawing),
        value,
    )


def _judge(
    assignment: Assignment, criterion: Criterion, submission: Path, missing: Sequence[str]
) -> Outcome:
    exercise, file = EXERCISES[criterion.exercise], _find_file(submission, criterion.file)
    setting = assignment.machines.get(criterion.machine)
    outcome = partial(_outcome, criterion)
    if missing:
        return outcome(BLOCKED, f"it needs '{missing[0]}', which has not passed")
    if file is None:
        inside = sorted(submission.iterdir()) if submission.is_dir() else [submission]
        found = next(filter(None, map(how_to_give, inside)), "")
        return outcome(BLOCKED, f"there is no {criterion.file}{found and f', but {found}'}")
    folder = submission if submission.is_dir() else None
    limits = assignment.limit_s, assignment.memory
    try:
        with Solution(file, exercise.function, folder, *limits) as function:
            if setting is None or exercise.measure is None:
                return outcome(PASSED, exercise.check(function, criterion.sizes), 1.0)
            _, numbers, drawing = exercise.measure(function, setting)
    except NnmpiError as error:
        status = TIMEOUT if isinstance(error, TimedOut) else FAILED
        return outcome(status, str(error), drawing=getattr(error, "drawing", ""))
    except Exception as error:
        # an error of the checker: no success, and not the student's failure either
        return outcome(BLOCKED, f"the checker cannot judge it: {type(error).__name__}: {error}")
    measure, of = criterion.measure, criterion.of
    at_most, none_at = criterion.at_most, criterion.none_at
    value = max(numbers[measure])
    score = value / max(_reference(exercise, of, setting)[measure]) if of else value
    limit = f"the limit is {at_most:g}"
    sentence = f"{value:.6g} {measure} on {criterion.machine}" + (
        f", {score:.4g} times {of}'s; {limit} times" if of else f"; {limit}"
    )
    if score <= at_most * (1 + 1e-9):
        return outcome(PASSED, sentence, 1.0, value=value)
    share = max(0.0, (none_at - score) / (none_at - at_most)) if none_at else 0.0
    return outcome(FAILED, sentence, share, drawing, value)


def grade_class(
    assignment: Assignment,
    file: Path,
    submissions: Sequence[Path],
    jobs: int,
    keep: Callable[[Sequence[Grade]], object] = list,
) -> list[Grade]:
    """Grade a class: each submission in a process of its own, `jobs` at a time.

    A submission whose grading crashes or takes too long has a row that says so.

    Args:
        assignment: in `file`.
        file: of the assignment.
        submissions: files or folders.
        jobs: processes at a time.
        keep: called with all grades so far, in the order of the class, after each.
    """
    limit_s = 60 + 2 * assignment.limit_s * len(assignment.criteria)

    def grade_in_process(submission: Path) -> Grade:
        problem = (
            how_to_give(submission) or "it is neither a folder nor a file whose name ends in .py"
        )
        is_file = submission.is_file() and submission.suffix == ".py"
        if not submission.is_symlink() and (submission.is_dir() or is_file):
            try:
                command = [*python_words(), "-c", CHILD, str(file), str(submission)]
                done = subprocess.run(
                    command, capture_output=True, encoding="utf-8", timeout=limit_s, check=True
                )
                (result,) = rebuilt(tuple[Grade, ...], parse_json(done.stdout))
                return result
            except (subprocess.SubprocessError, TypeError, ValueError) as error:
                problem = f"its grading took too long, or ended by itself ({type(error).__name__})"
        outcomes = (_outcome(criterion, BLOCKED, problem) for criterion in assignment.criteria)
        return Grade(_label(submission), tuple(outcomes))

    grades: dict[int, Grade] = {}

    def so_far() -> list[Grade]:
        return [grades[number] for number in sorted(grades)]

    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(grade_in_process, item): n for n, item in enumerate(submissions)}
        try:
            for future in as_completed(running):
                grades[running[future]] = result = future.result()
                keep(so_far())
                if (many := len(submissions)) > 1:
                    about = f"{result.submission}: {result.total}"
                    print(f"{len(grades)} of {many}: {about}", file=sys.stderr)
        except BaseException:  # an unwritable file, or Ctrl-C: nobody waits for the rest
            pool.shutdown(cancel_futures=True)
            raise
    return so_far()


def find_submissions(assignment: Assignment, path: Path, kind: str) -> list[Path]:
    """Return the submissions of a path: itself, or all entries of a class's folder.

    Args:
        assignment: its criteria name the files of a submission.
        path: a file or a folder.
        kind: "one" or "class"; "": the folder's content decides.

    Raises:
        UsageError: for a missing path, and for a folder that could be both.
    """
    if not path.exists():
        raise UsageError(f"there is no {path}; give a file, a folder, or a folder of these")
    if path.is_file() or (kind == ONE and path.is_dir()):
        return [path.resolve()]
    require(path.is_dir(), f"{path} is neither a file nor a folder")
    inside = [entry for entry in sorted(path.iterdir()) if not entry.name.startswith((".", "__"))]
    asked = {item.file for item in assignment.criteria}
    others = [
        entry
        for entry in inside
        if entry.name not in asked and (entry.is_dir() or entry.suffix == ".py")
    ]
    if asked & {entry.name for entry in inside} and others and not kind:
        raise UsageError(
            f"{path} could be one submission or a class's folder; give --as one or --as class"
        )
    many = kind == CLASS or len(others) > 1 or any(entry.is_dir() for entry in others)
    return inside if many else [path.resolve()]


def write_starter(assignment: Assignment, folder: Path) -> list[str]:
    """Write the starter files of an assignment; return their names. Existing files stay.

    Raises:
        UsageError: if a file cannot be written.
    """
    written = []
    with raised_as(UsageError, f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for item in assignment.criteria:
            file = folder / item.file
            if not file.exists():
                file.write_text(EXERCISES[item.exercise].starter(file), encoding="utf-8")
                written.append(f"{file}")
    return written or [f"nothing is missing in {folder}"]


# ---- formats ----


def as_gradescope(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return one submission's results.json for Gradescope."""
    outcomes = _only(grades).outcomes
    tests = [
        {
            "name": item.name,
            "score": item.points,
            "max_score": item.of,
            "status": PASSED if item.status == PASSED else FAILED,
            "output": item.output,
            "visibility": "hidden" if item.hidden else "visible",
        }
        for item in outcomes
    ]
    board = [
        {"name": item.name, "value": item.value, "order": "asc"}
        for item in outcomes
        if item.value is not None and not item.hidden
    ]
    return json_text({"tests": tests, "leaderboard": board}, indent=2)


def as_classroom50(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return one submission's result.json for Classroom 50, points rounded down to integers."""
    tests: list[dict[str, Any]] = [
        {
            "test-name": item.name,
            "passed": item.status == PASSED,
            "score": int(item.points),
            "max-score": int(item.of),
            "output": item.output,
        }
        for item in _only(grades).public
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
        **{name: sum(test[name] for test in tests) for name in ("score", "max-score")},
        "tests": tests,
    }
    return json_text(result, indent=2)


def as_junit(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return JUnit XML, a suite per submission."""
    suites = Element("testsuites", name=assignment.title)
    for result in grades:
        suite = SubElement(suites, "testsuite", name=result.submission)
        for item in result.public:
            case = SubElement(suite, "testcase", name=item.name, classname=result.submission)
            if item.status != PASSED:
                kind = "skipped" if item.status == BLOCKED else "failure"
                text = SubElement(case, kind, message=item.text, type=item.status)
                text.text = item.drawing
    return tostring(suites, "unicode")


def as_table(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return a submission's criteria with reasons; for a class, a line each and a leaderboard."""
    if len(grades) == 1:
        lines = [f"{assignment.title}, {grades[0].submission}: {grades[0].total}", ""]
        for item in grades[0].outcomes:
            hidden = " (hidden)" if item.hidden else ""
            lines.append(f"{item.status:<8} {item.points:.4g} of {item.of:g}  {item.name}{hidden}")
            lines += [f"    {line}".rstrip() for line in item.output.splitlines()]
        return "\n".join(lines)
    rows = [["", *map(str, range(1, len(assignment.criteria) + 1)), "points"]]
    for result in grades:
        text = (
            outcome.status if outcome.status in (BLOCKED, TIMEOUT) else f"{outcome.points:.4g}"
            for outcome in result.outcomes
        )
        rows.append([result.submission, *text, result.total])
    lines = [*aligned(rows), ""]
    lines += [f"{number}  {item.name}" for number, item in enumerate(assignment.criteria, 1)]
    for number, criterion in enumerate(assignment.criteria):
        board = [(result.outcomes[number].value, result.submission) for result in grades]
        ranked = sorted((value, who) for value, who in board if value is not None)
        if ranked:
            lines += [
                "",
                f"{criterion.name}, {criterion.measure}:",
                *(f"{value:12.6g}  {who}" for value, who in ranked),
            ]
    return "\n".join([assignment.title, "", *lines])


def as_json(assignment: Assignment, grades: Sequence[Grade]) -> str:
    """Return all results as JSON, with sentences and drawings."""
    return json_text([asdict(result) for result in grades], indent=2)


def _only(grades: Sequence[Grade]) -> Grade:
    if len(grades) != 1:
        raise UsageError(
            f"this format is for one submission, but there are {len(grades)}; take table, junit or"
            " json"
        )
    return grades[0]


FORMATS: Mapping[str, Callable[[Assignment, Sequence[Grade]], str]] = MappingProxyType(
    {
        function.__name__[3:]: function
        for function in (as_table, as_gradescope, as_classroom50, as_junit, as_json)
    }
)


@dataclass(frozen=True)
class GradeConfig:
    """Grading and output."""

    starter: bool = False
    """Write starter files into DIR."""
    json: OutputFile | None = None
    """File for all results, with sentences and drawings, written after each submission."""
    replace: bool = False
    """Replace a file that is there."""
    format: Literal["table", "gradescope", "classroom50", "junit", "json"] = "table"
    """Output format."""
    as_: Literal["one", "class"] | None = None
    """How to read DIR if it could be one submission, and a class's folder (default: refuse)."""
    jobs: int = 2
    """Submissions graded in parallel."""

    def __post_init__(self) -> None:
        check_numbers(self, "jobs", 1)


def main(words: Sequence[str]) -> str:
    """Return the grades as text.

    Raises:
        UsageError: for an invalid assignment or submission.
    """
    description = (__doc__ or "").split("An assignment is")[0]
    file, path, given = read_command(
        "ASSIGNMENT.toml DIR_OR_FILE", "nnmpi grade", description, (GradeConfig,), words
    )
    assignment = read_assignment(file)
    if given.starter:
        return "\n".join(write_starter(assignment, path))
    kind = given.as_ or ONE * (given.format in ("gradescope", "classroom50"))

    def keep(grades: Sequence[Grade]) -> None:
        """Write what there is: if the grading ends early, nothing graded is lost."""
        if given.json is not None:
            with raised_as(UsageError, f"{given.json} cannot be written"):
                write_atomically(given.json, as_json(assignment, grades).encode())

    submissions = find_submissions(assignment, path, kind)
    grades = grade_class(assignment, file, submissions, given.jobs, keep)
    return FORMATS[given.format](assignment, grades)


if __name__ == "__main__":
    sys.exit(say(main))
