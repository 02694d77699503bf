"""The checker passes every right solution, finds every planted mistake, and says what is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nnmpi.base.errors import NnmpiError
from nnmpi.teaching.exercise.__main__ import main
from nnmpi.teaching.exercise.exercises import EXERCISES, KINDS
from nnmpi.teaching.exercise.solution import Solution, TimedOut
from nnmpi.teaching.exercise.wire import MADE, WrongAnswer
from tests.harness.refusals import refuses, usage_error
from tests.teaching.exercise import solutions
from tests.teaching.exercise.defects import DEFECTS
from tests.teaching.exercise.mistakes import all_mistakes

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.host_only("solutions are written in NumPy")


def test_there_are_thirty_and_all_are_listed():
    assert len(EXERCISES) >= 30
    listed = main([])
    assert all(f"{kind}:" in listed for kind in KINDS) and max(map(len, listed.splitlines())) <= 100
    assert all(
        " ".join(f"{name} {each.title}".split()) in " ".join(listed.split())
        for name, each in EXERCISES.items()
    )
    # what is to be returned
    assert all("Step(to=1, send=" in main([each.name]) for each in KINDS["collectives"])
    page = (ROOT / "docs" / "lessons" / "exercises.md").read_text()
    assert set(re.findall(r"`([a-z0-9-]+)`[,| ]", page.split("## How")[0])) >= set(EXERCISES)


@pytest.mark.parametrize("name", EXERCISES)
def test_a_right_solution_passes(name):
    assert re.match(
        "right (on|in|with)", EXERCISES[name].check(getattr(solutions, EXERCISES[name].function))
    )


def test_a_rule_may_return_numpys_values():
    """Which are no Python's: `numpy.min(steps) <= 3` is `numpy.True_`."""

    def by_numpy(steps, worker, bound):
        return steps[worker] - np.min(steps) <= bound

    assert EXERCISES["ssp-rule"].check(by_numpy).startswith("right in")
    with pytest.raises(WrongAnswer, match="it gives [01], but must give (True|False)"):
        EXERCISES["ssp-rule"].check(lambda *given: np.int64(by_numpy(*given)))


def test_defects_are_many_and_one_is_found_by_a_number_alone():
    """Of each exercise that courses have: three to nine, and a right one that is slow, or sends too
    much.
    """
    for name, planted in DEFECTS.items():
        assert name == "all-to-all" or 3 <= len(planted) <= 9, name
        slow = any("right, but" in told or "all is done" in told for *_, told in planted)
        assert slow or name in ("data-split", "gathered-gradient", "zero3-partition"), name


def test_planted_mistakes_are_found():
    """Every one, with a sentence that tells where it is."""
    missed = []
    planted = list(all_mistakes())
    assert len(planted) > 4 * len(EXERCISES)
    for name, (what, wrong, told) in planted:
        try:
            missed.append(f"{name}, {what}: passes, {EXERCISES[name].check(wrong)}")
        except WrongAnswer as error:
            if not re.search(told, str(error), re.DOTALL):
                missed.append(f"{name}, {what}: {error}")
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_file_to_begin_with_is_a_program_that_is_not_written_yet(name, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(main([name]))
    compile(file.read_text(), "mine.py", "exec")
    assert max(map(len, file.read_text().splitlines())) <= 120
    refuses(
        WrongAnswer,
        rf"{EXERCISES[name].function}\(.*NotImplementedError in line \d+",
        main,
        [name, str(file)],
    )


def test_a_file_is_checked_by_the_command(tmp_path):
    """What is right, what is wrong, and what is no solution at all."""
    file = tmp_path / "mine.py"
    text = main(["ring-cost"]).replace(
        'raise NotImplementedError("write it here")', "return 2 * (N - 1) * (alpha + {})"
    )
    file.write_text(text.format("M / N * beta"))
    assert main(["ring-cost", str(file)]).startswith("ring-cost: right")
    file.write_text(text.format("M * beta"))
    ran = subprocess.run(
        [sys.executable, "-m", "nnmpi", "exercise", "ring-cost", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    told = "nnmpi: with N = 2, M = 8000, alpha = 0, beta = 1 it gives 16000, but must give 8000\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", told)
    for wrong, told in (
        (
            "import nosuchthing",
            "raised ModuleNotFoundError in line 1 of mine.py: No module named 'nosuchthing'",
        ),
        ("\n", "has no function 'ring_cost'"),
        ("def ring_cost(N, M:\n", "mine.py, line 1"),
        ("\nraise SystemExit", "mine.py ends the program with SystemExit"),
        (
            "def ring_cost(*_):\n    raise SystemExit(0)",
            "raised SystemExit in line 2 of mine.py: 0",
        ),
    ):
        file.write_text(wrong)
        refuses(NnmpiError, told, main, ["ring-cost", str(file)])
    usage_error("no exercise 'ring-csot'; did you mean ring-cost", main, ["ring-csot"])


def test_a_loop_without_an_end_is_ended(tmp_path):
    """With its process, as no exception stops what catches all."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def ring_cost(*_):\n    while True:\n        try:\n            while True:\n              "
        "  pass\n        except BaseException:\n            pass\n"
    )
    with (
        Solution(file, "ring_cost", limit_s=1) as function,
        pytest.raises(TimedOut, match="not over after 1 s"),
    ):
        EXERCISES["ring-cost"].check(function)


def test_results_that_are_no_numbers_are_refused():
    for wrong in ([[1.0], [1.0, 2.0]], "abc", None, np.full((3, 5), "a")):
        with pytest.raises(
            WrongAnswer,
            match=r"(?s)the result of rank 0 is .*, but must be numbers of shape \(3, 5\)",
        ):
            EXERCISES["row-linear"].check(lambda *_, wrong=wrong: wrong)


def test_keys_of_one_hash_do_not_block_the_judge():
    """A dictionary of them takes the square of their number."""
    refuses(
        TypeError,
        "the same hash",
        lambda: MADE["dict"](*([number * (2**61 - 1), 0] for number in range(500_000))),
    )
    assert MADE["dict"](["a", 1], [2, 3]) == {"a": 1, 2: 3}
