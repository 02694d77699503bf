"""The assignments: right solutions earn all, an untouched starter nothing, slow ones lose the
numbers alone.
"""

import re
from pathlib import Path

import pytest

from nnmpi.teaching.exercise.exercises import EXERCISES
from nnmpi.teaching.exercise.wire import WrongAnswer
from nnmpi.teaching.grade import grade, main, read_assignment
from tests.harness.slow import ONCE_MORE, cases
from tests.teaching.exercise.defects import DEFECTS
from tests.teaching.exercise.sealed import unseal
from tests.teaching.test_grade import RIGHT

FOLDER = Path(__file__).parents[1] / "examples" / "assignments"
TRAINING, REDUCE = (
    FOLDER / name / "assignment.toml" for name in ("parallel-training", "my-all-reduce")
)
pytestmark = pytest.mark.host_only("solutions are written in NumPy")
SERVER = """from nnmpi.comm.collective import Step
def my_all_reduce(rank, size):
    others, buffer = range(1, size), range(size)
    if rank:
        return [Step(to=0, send=buffer), Step(from_=0, recv=buffer)]
    added = [Step(from_=other, recv=buffer, reduce=True) for other in others]
    return added + [Step(to=other, send=buffer) for other in others]
"""


def points(assignment, work):
    """Return the total, and why criteria have failed, by name."""
    found = grade(read_assignment(assignment), work)
    return found.total, {each.name: each.text for each in found.outcomes if each.points < each.of}


@pytest.mark.parametrize(
    "assignment, of", [(TRAINING, 150), (REDUCE, 100)], ids=["training", "reduce"]
)
def test_an_untouched_starter_earns_nothing(assignment, of, tmp_path):
    written = main([str(assignment), str(tmp_path), "--starter"]).splitlines()
    assert len(written) == len({one.file for one in read_assignment(assignment).criteria})
    assert all(f" {file}\n" in Path(file).read_text() for file in written)  # how to check it
    total, failed = points(assignment, tmp_path)
    assert total == f"0 of {of}"
    assert all(
        "NotImplementedError" in told or "has not passed" in told for told in failed.values()
    )
    (tmp_path / Path(written[0]).name).write_text("mine")
    assert (
        main([str(assignment), str(tmp_path), "--starter"]) == f"nothing is missing in {tmp_path}"
    )


@pytest.mark.parametrize(
    "assignment, of",
    cases([(TRAINING, 150), (REDUCE, 100)], lambda assignment, of: of == 100, ONCE_MORE),
    ids=["training", "reduce"],
)
def test_right_solutions_earn_all(assignment, of, tmp_path):
    (tmp_path / "all.py").write_text(unseal())
    found = grade(read_assignment(assignment), tmp_path / "all.py")
    assert found.total == f"{of} of {of}"
    assert not [each for each in found.outcomes if each.text.rstrip().endswith(": it")]


def test_a_ring_is_right_on_all_machines_and_too_slow_on_two(tmp_path):
    for name in ("cluster", "laptops", "nodes"):
        (tmp_path / f"{name}.py").write_text(RIGHT.replace("ring_all_reduce", "my_all_reduce"))
    total, failed = points(REDUCE, tmp_path)
    assert failed.keys() == {"seconds on the laptops", "seconds on the nodes"}
    assert failed["seconds on the nodes"].startswith("0.00311658 seconds on nodes, 1 times ring's")
    assert 75 < float(total.split()[0]) < 80


def test_a_parameter_server_is_right_and_too_slow_everywhere(tmp_path):
    """Its messages overlap if they are short: the laptops' were."""
    for name in ("cluster", "laptops", "nodes"):
        (tmp_path / f"{name}.py").write_text(SERVER)
    assert points(REDUCE, tmp_path)[0] == "50 of 100"


def test_the_handout_says_what_the_checker_says(monkeypatch):
    """Of each common wrong answer, but for numbers: of inputs in which no rank's gradient is 0."""
    monkeypatch.setattr("secrets.randbits", int)
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| (.*?) \| (.*?) \|$",
        (TRAINING.parent / "README.md").read_text(),
        re.M,
    )
    assert len(rows) > 15
    for name, what, told in (row for row in rows if not row[1].isdigit()):
        (wrong,) = (function for each, function, _ in DEFECTS[name] if each == what)
        pattern = ".*".join(map(re.escape, told.split("…")))
        with pytest.raises(WrongAnswer, match=f"^{pattern}$"):
            EXERCISES[name].check(wrong)
