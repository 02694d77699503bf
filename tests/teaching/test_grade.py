"""Grades: what is right earns its points; cheats and defects earn none, and are told what they
are.
"""

import json
import os
import py_compile
import re
import time
from importlib.util import cache_from_source
from pathlib import Path
from textwrap import indent
from xml.etree import ElementTree

import pytest

from nnmpi.teaching import grade as module
from nnmpi.teaching.exercise.exercises import EXERCISES
from nnmpi.teaching.grade import Assignment, Criterion, grade, main, read_assignment
from tests.harness.refusals import usage_error
from tests.teaching.exercise.cheats import CHEATS
from tests.teaching.exercise.sealed import unseal

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.host_only("solutions are written in NumPy")


def test_there_are_fifty():
    assert len(CHEATS) >= 50 and len({cheat.what for cheat in CHEATS}) == len(CHEATS)


@pytest.mark.slow("a process and more for each of a hundred, some until their limit of time")
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.what)
def test_a_cheat_earns_nothing_and_is_told(cheat, tmp_path):
    other, file = (
        tmp_path / "other" / "other.py",
        tmp_path / "mine" / f"{EXERCISES[cheat.exercise].function}.py",
    )
    for item, text in ((other, "SECRET = 1\n"), (file, cheat.source)):
        item.parent.mkdir()
        item.write_text(text.replace("PACKAGE", str(ROOT)).replace("OTHER", str(other)))
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    first = Criterion(cheat.exercise, cheat.what, file.name, 1.0, **cheat.more)
    assignment = Assignment(limit_s=3.0 if cheat.status != "failed" else 20.0, criteria=[first])
    (outcome,) = grade(assignment, file.parent).outcomes
    assert outcome.points == 0 and outcome.status in (
        cheat.status,
        *["failed", "blocked", "timeout"] * (cheat.status == "*"),
    )
    assert re.search(cheat.told, outcome.text, re.DOTALL), outcome.text
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before


RIGHT = """
from nnmpi.comm.collective import Step


def ring_all_reduce(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    for sums, turns in ((True, size - 1), (False, size - 1)):
        for turn in range(turns):
            sent = (rank - turn + (not sums)) % size
            yield Step(after, [sent], before, [(sent - 1) % size], reduce=sums)
"""
# Python 3.12 and later add floats with a smaller error
TAKES = pytest.approx(0.013821823999999998, rel=1e-12)
ASSIGNMENT = """
title = "My all-reduce"
limit_s = 20

[[criteria]]
exercise = "ring-all-reduce"
points = 4

[[criteria]]
name = "other sizes"
exercise = "ring-all-reduce"
points = 2
hidden = true
sizes = [6, 7]
needs = ["ring-all-reduce"]

[[criteria]]
name = "fast"
exercise = "ring-all-reduce"
points = 4
measure = "seconds"
machine = "cluster"
of = "ring"
at_most = AT_MOST
none_at = 1.25

[machines.cluster]
ranks = 5
network = "alpha_us=50,gbit=1"
bytes = "1MiB"
"""


@pytest.fixture
def assignment(tmp_path):
    file = tmp_path / "assignment.toml"
    file.write_text(ASSIGNMENT.replace("AT_MOST", "1.05"))
    return file


def test_what_is_right_earns_its_points_and_what_is_slow_loses_the_number_alone(
    assignment, tmp_path
):
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    assert [
        (outcome.status, outcome.points)
        for outcome in grade(read_assignment(assignment), file).outcomes
    ] == [("passed", 4), ("passed", 2), ("passed", 4)]
    assignment.write_text(ASSIGNMENT.replace("AT_MOST", "0.75"))  # of what a ring takes
    right, sizes, slow = grade(read_assignment(assignment), file).outcomes
    assert (right.status, sizes.status, slow.status, slow.points) == (
        "passed",
        "passed",
        "failed",
        pytest.approx(2),
    )
    assert re.search(
        r"0\.01\d+ seconds on cluster, 1 times ring's; the limit is 0\.75 times", slow.text
    )
    assert "step 0" in slow.drawing and "<+ 4" in slow.drawing
    assert slow.value == TAKES  # on every computer


@pytest.mark.slow("25 exercises, on up to six processes each")
def test_the_archive_of_solutions_is_a_submission_that_earns_all(tmp_path):
    file = tmp_path / "all.py"
    file.write_text(unseal())
    names = {*re.findall(r"^def (\w+)", unseal(), re.MULTILINE)}
    criteria = [Criterion(name, name) for name, item in EXERCISES.items() if item.function in names]
    assert len(criteria) >= 25
    failed = [
        outcome
        for outcome in grade(Assignment(criteria=criteria), file).outcomes
        if outcome.status != "passed"
    ]
    assert not failed


def test_a_table_of_answers_fails_where_sizes_are_others(assignment, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        f"{RIGHT}\nright = ring_all_reduce\nTABLE = {{}}\nfor n in (1, 2, 3, 4, 5, 8):\n    for r"
        " in range(n):\n        TABLE[r, n] = [*right(r, n)]\ndef ring_all_reduce(rank, size):\n  "
        "  return TABLE[rank, size]\n"
    )
    right, sizes, _ = grade(read_assignment(assignment), file).outcomes
    assert (right.status, sizes.status) == ("passed", "failed") and "KeyError" in sizes.text


@pytest.mark.parametrize("name", ["comm/algorithms/ring.py", "schedule/schedules.py"])
def test_nnmpis_own_text_is_told_so(name, assignment, tmp_path):
    file = tmp_path / "mine.py"
    text = (
        (ROOT / "nnmpi" / name)
        .read_text()
        .replace("rank", "me")
        .replace("size", "p")
        .replace("microbatches", "count")
    )
    file.write_text(text + "\n\ndef ring_all_reduce(me, p):\n    return ring(me, p)\n")
    for outcome in grade(read_assignment(assignment), file).outcomes:
        assert outcome.points == 0
        assert outcome.status == "blocked" or re.search(rf"is nnmpi's .*{name}", outcome.text)


@pytest.mark.slow("a class of a dozen, one of which never ends")
def test_a_class_is_graded_and_nobody_touches_another(assignment, tmp_path, capsys):
    submissions = {
        "ann": RIGHT,
        "bob": RIGHT.replace("(not sums)", "0"),
        "eve": "import os, pathlib\nos.killpg(0, 9)\n",
        "fay": f"{RIGHT}\nwhile True:\n    pass\n",
        "guy": "",
        "kim": RIGHT,
    }
    folder = tmp_path / "class"
    for name, text in submissions.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "ring_all_reduce.py").write_text(text)
    (folder / "kim" / "ring_all_reduce.py").unlink()
    (folder / "kim" / "ring_all_reduce.py").symlink_to(folder / "ann" / "ring_all_reduce.py")
    assignment.write_text(assignment.read_text().replace("limit_s = 20", "limit_s = 5"))
    message = main([str(assignment), str(folder), "--json", str(tmp_path / "all.json")])
    result = {
        load["submission"]: load["outcomes"]
        for load in json.loads((tmp_path / "all.json").read_text())
    }
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == [f"{n} of 6" for n in range(1, 7)]
    assert sum(line.endswith("ann: 10 of 10") for line in told) == 1
    assert {name: sum(element["points"] for element in item) for name, item in result.items()} == {
        name: 10 * (name == "ann") for name in submissions
    }
    assert [
        element["status"]
        for name in ("bob", "eve", "guy", "fay", "kim")
        for element in result[name]
    ] == [
        *("failed", "blocked", "failed") * 3,
        *("timeout", "blocked", "timeout"),
        *("blocked", "blocked", "blocked"),
    ]
    assert indent(message, "    ") in (ROOT / "docs" / "grading.md").read_text()
    suites = ElementTree.fromstring(main([str(assignment), str(folder), "--format", "junit"]))
    assert [(suite.get("name"), len(suite.findall("*/failure"))) for suite in suites][:2] == [
        ("ann", 0),
        ("bob", 2),
    ]
    assert [suite.get("name") for suite in suites[0]] == ["ring-all-reduce", "hidden 2", "fast"]


def test_helpers_are_read_as_the_file_is(assignment, tmp_path):
    """Own text is told of there, compiled files are not loaded, and links and heaps of files are
    refused.
    """
    ring, mine = ROOT / "nnmpi" / "comm" / "algorithms" / "ring.py", tmp_path / "mine"
    mine.mkdir()
    file, helper = mine / "ring_all_reduce.py", mine / "helper.py"
    file.write_text("from helper import ring as ring_all_reduce\n")
    item, *_ = read_assignment(assignment).criteria
    only = Assignment(criteria=(item,))

    def told():
        (outcome,) = grade(only, mine).outcomes
        assert outcome.points == 0
        return outcome.text

    helper.write_text(ring.read_text())
    assert "is nnmpi's" in told()
    for place in (Path(cache_from_source(helper)), mine / "helper.pyc"):
        helper.write_text(RIGHT.replace("ring_all_reduce", "ring"))
        py_compile.compile(
            str(helper), str(place), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
        helper.write_text("def ring(rank, size):\n    return ()\n")
        if place.parent == mine:
            helper.unlink()
        assert re.search("ends without the part|may not use marshal", told())
    helper.symlink_to(ring)
    assert told() == "helper.py is a link; hand in the file itself"
    helper.unlink()
    for number in range(9):
        (mine / f"{number}.py").write_text("#" * 2**16)
    assert told().endswith("has more than 524,288 bytes of code; hand in only your own")
    for number in range(9):
        (mine / f"{number}.py").unlink()
    for number in range(200):
        (mine / f"{number}.txt").write_text("")
    assert told().endswith("has more than 200 files; hand in only your own")


def test_what_is_graded_is_kept_when_the_grading_ends(assignment, tmp_path, monkeypatch):
    """After each submission, in the order of the class."""
    folder, out = tmp_path / "class", tmp_path / "all.json"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.py").write_text(RIGHT)
    seen = []
    real = module.write_atomically

    def killed(file, content):
        real(file, content)
        seen.append([item["submission"] for item in json.loads(out.read_text())])
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_atomically", killed)
    monkeypatch.setattr(module, "CHILD", "print('no')")
    with pytest.raises(KeyboardInterrupt):
        main([str(assignment), str(folder), "--json", str(out), "--jobs", "1"])
    assert [len(names) for names in seen] == [1, 2] and seen[1] == sorted(seen[1])


def test_a_hidden_criterions_name_is_nobodys(tmp_path):
    """Also where another criterion needs it."""
    file, mine = tmp_path / "assignment.toml", tmp_path / "mine.py"
    file.write_text(
        '[[criteria]]\nexercise = "data-split"\nname = "SECRET"\nhidden = true\n'
        '[[criteria]]\nexercise = "ring-cost"\nneeds = ["SECRET"]\n'
    )
    mine.write_text("def data_split(*_): ...\n")
    result = grade(read_assignment(file), mine)
    assert "SECRET" not in repr(result.public)
    assert result.outcomes[1].text == "it needs 'hidden 1', which has not passed"


def test_what_has_no_end_is_not_opened(assignment, tmp_path):
    """Pipes, in a class, in a folder and alone."""
    folder = tmp_path / "class"
    (folder / "ann").mkdir(parents=True)
    (folder / "ann" / "ring_all_reduce.py").write_text(RIGHT)
    for pipe in ("ann/helper.py", "bob.py", "eve"):
        os.mkfifo(folder / pipe)
    only = Assignment(criteria=read_assignment(assignment).criteria[:1])
    (outcome,) = grade(only, folder / "ann").outcomes
    assert outcome.text.startswith("helper.py is no ordinary file")
    (outcome,) = grade(only, folder / "bob.py").outcomes
    assert outcome.text.startswith("bob.py is no ordinary file")
    for name in ("bob.py", "eve"):
        usage_error("is neither a file nor a folder", main, [str(assignment), str(folder / name)])
    text = main([str(assignment), str(folder), "--as", "class"])
    assert re.search(r"bob.py +blocked", text) and re.search(r"eve +blocked", text)


@pytest.mark.parametrize(
    "more, told",
    [
        ("x = " + "a." * 3000 + "b\n", "is nested too deeply to be read"),
        ("x = [" + "1," * 70_000 + "]\n", "has more than 131,072 bytes"),
        (
            "".join(f"{' ' * n}def f{n}():\n" for n in range(90))
            + f"{' ' * 90}return [{'1,' * 6000}]\n",
            "is nnmpi's",
        ),
    ],
    ids=["deep", "long", "nested"],
)
def test_what_is_hard_to_read_hides_no_copy_and_takes_no_time(assignment, tmp_path, more, told):
    file = tmp_path / "mine.py"
    ring = (ROOT / "nnmpi/comm/algorithms/ring.py").read_text()
    file.write_text(f"{more}\n{ring}")
    only = Assignment(criteria=read_assignment(assignment).criteria[:1])
    began = time.monotonic()
    (outcome,) = grade(only, file).outcomes
    assert told in outcome.text and time.monotonic() - began < 10


@pytest.mark.slow("a process for each entry of a class")
def test_whatever_lies_in_a_class_is_a_row_of_its_own(assignment, tmp_path):
    folder, out = tmp_path / "class", tmp_path / "all.json"
    for name in (
        "ann/work/x.py",
        "bob.py",
        "eve/a/ring_all_reduce.py",
        "ring_all_reduce.py",
        "two/a.py",
        "zip.zip",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(RIGHT)
    (folder / "two" / "b.py").write_text(RIGHT)
    (folder / "loop.py").symlink_to(folder / "loop.py")
    (folder / "zoe").symlink_to(folder / "two")
    (folder / "\x1b[2J.py").write_text("")
    (folder / "x\nbob.py   10 of 10\t.py").write_text("")
    usage_error("give --as one or --as class", main, [str(assignment), str(folder)])
    text = main([str(assignment), str(folder), "--as", "class", "--json", str(out)])
    assert text.count("\nbob.py") == 1  # no name has a row for another
    result = {load["submission"]: load["outcomes"] for load in json.loads(out.read_text())}
    earned = {name: sum(element["points"] for element in item) for name, item in result.items()}
    nothing = (
        r"\x1b[2J.py",
        r"x\nbob.py   10 of 10\t.py",
        "ann",
        "eve",
        "loop.py",
        "two",
        "zip.zip",
        "zoe",
    )
    assert earned == {**dict.fromkeys(nothing, 0), "bob.py": 10, "ring_all_reduce.py": 10}
    for name in ("loop.py", "zoe"):
        assert result[name][0]["text"] == "it is neither a folder nor a file whose name ends in .py"
    assert result["zip.zip"][0]["text"] == (
        "zip.zip is an archive; unpack it, and give the folder: unzip zip.zip -d zip"
    )


def test_what_makes_a_submission_of_a_notebook_is_said(assignment, tmp_path):
    """Whether it is given alone or in the submission's folder."""
    (tmp_path / "work").mkdir()
    notebook = tmp_path / "work" / "my work.ipynb"
    notebook.write_text("{}")
    for given, start in ((notebook, ""), (notebook.parent, "there is no ring_all_reduce.py, but ")):
        text = main([str(assignment), str(given), "--as", "one"])
        assert f"    {start}my work.ipynb is a notebook; save its code" in text
        assert "jupyter nbconvert --to script 'my work.ipynb'" in text


def test_a_grader_that_ends_is_a_row(assignment, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(RIGHT)
    monkeypatch.setattr("nnmpi.teaching.grade.CHILD", "import os; os.kill(os.getpid(), 9)")
    text = main([str(assignment), str(tmp_path / "mine.py")])
    assert (
        "0 of 10" in text
        and "its grading took too long, or ended by itself (CalledProcessError)" in text
    )


def test_formats(assignment, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    gradescope = json.loads(main([str(assignment), str(file), "--format", "gradescope"]))
    assert [(item["name"], item["score"], item["visibility"]) for item in gradescope["tests"]] == [
        ("ring-all-reduce", 4, "visible"),
        ("other sizes", 2, "hidden"),
        ("fast", 4, "visible"),
    ]
    assert gradescope["leaderboard"] == [{"name": "fast", "value": TAKES, "order": "asc"}]
    classroom = json.loads(main([str(assignment), str(file), "--format", "classroom50"]))
    assert (classroom["schema"], classroom["score"], classroom["max-score"]) == (
        "classroom50/result/v1",
        10,
        10,
    )
    assert "other sizes" not in json.dumps(classroom)


@pytest.mark.parametrize(
    "old, new, told",
    [
        (
            '"ring-all-reduce"\npoints = 4',
            '"ring-all-reduse"',
            "no exercise 'ring-all-reduse'; did you mean ring-all",
        ),
        (
            "points = 4",
            "point = 4",
            "is not an assignment: .*point is not one of exercise, name, file, points",
        ),
        ("points = 4", 'points = "many"', "'many' is given for float"),
        ('needs = ["ring', 'needs = ["rong', "its needs names above it"),
        ('of = "ring"', 'of = "rang"', "of must be one of "),
        ('machine = "cluster"', 'machine = "cloister"', r"a machine \(cluster\)"),
        ('"seconds"', '"minutes"', "has the measures chunks, bytes, rounds, seconds, not minutes"),
        ("[[criteria]]", "[[criteria", "is not an assignment: Expected"),
        ("limit_s = 20", f"limit_s = {'[' * 5000}", "nested too deeply"),
        ("limit_s = 20", "limit_s = -1", "limit_s must be above 0"),
        ("limit_s = 20", 'memory = "1"', "memory at least 128MiB"),
        ("points = 4", "points = nan", "is no finite number"),
        ("at_most = 1.05", "at_most = inf", "is no finite number"),
        (
            "points = 4",
            'points = 4\nfile = "../zoe/x.py"',
            "file must be the name of a .py file, without a folder",
        ),
        ("points = 4", 'points = 4\nfile = "passwd"', "file must be the name of a .py file"),
        ("sizes = [6, 7]", "sizes = [0]", "is a number of ranks, from 1 to 128, not 0"),
        ("sizes = [6, 7]", "sizes = [2.5]", "is a number of ranks, from 1 to 128, not 2.5"),
        (
            "sizes = [6, 7]",
            "sizes = [[2, 2]]",
            r"is a number of ranks, from 1 to 128, not \[2, 2\]",
        ),
        ("sizes = [6, 7]", "sizes = [100000]", "is a number of ranks, from 1 to 128, not 100000"),
        (
            "points = 4",
            'points = 4\nname = "g"\n[[criteria]]\nexercise = "gpipe"\nsizes = [4]',
            r"is \[ranks, microb.*not 4",
        ),
        (
            "points = 4",
            'points = 4\n[[criteria]]\nexercise = "halving-doubling"\nsizes = [6]',
            "must be a power of two, not 6",
        ),
        (
            "points = 4",
            'points = 4\n[[criteria]]\nexercise = "interleaved"\nsizes = [[2, 3]]',
            r"microbatches must be a multiple of ranks, not \[2, 3\]",
        ),
        (
            "points = 4",
            'points = 4\n[[criteria]]\nexercise = "ring-cost"\nsizes = [4]',
            "has no sizes",
        ),
        ('"alpha_us=50,gbit=1"', '"fast"', "machine cluster: .*fast"),
        ("ranks = 5", "ranks = 1", "ring has 0 seconds on cluster, which has no multiples"),
        ("ranks = 5", "ranks = 0", "machine cluster: ranks and microbatches must be from 1"),
        (
            "ranks = 5",
            "message_s = -1",
            "machine cluster: forward_s and message_s must not be below 0",
        ),
        ('needs = ["ring-all-reduce"]', "needs = [[1]]", "is not an assignment: "),
        (
            "[machines.cluster]",
            "[machines]\nc = 3\n[machines.cluster]",
            "is not an assignment: 3 is given for",
        ),
        ("ranks = 5", "ranks = 5\nweight = 2", "weight is not one of ranks, microbatches"),
    ],
)
def test_an_assignment_that_means_nothing_is_refused(old, new, told, assignment, tmp_path):
    text = assignment.read_text()
    assert old in text
    assignment.write_text(text.replace(old, new, 1))
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    usage_error(told, main, [str(assignment), str(file)])
