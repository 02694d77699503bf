"""What is left out where: nothing that is not run elsewhere."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import left_out
from tests.harness.left_out import options, reason
from tests.harness.records import PASSED
from tests.harness.simulated import most_ranks
from tests.harness.slow import HARNESS
from tests.harness.suite import run_suite

ROOT = Path(__file__).parents[2]


def item(name: str, **marks: tuple[Any, ...]) -> Any:
    """Return a stand-in for a test with these marks."""
    made = {mark: SimpleNamespace(args=args) for mark, args in marks.items()}
    return SimpleNamespace(nodeid=f"tests/{name}", get_closest_marker=made.get)


@pytest.mark.parametrize("among", [[2, 3, 4], [2, 3, 4, 6, 8], [2]], ids=str)
def test_what_is_dealt_out_runs_once(among: list[int]) -> None:
    names = [f"equivalence/test_a.py::test_b[{number}]" for number in range(300)]
    runs = [[size for size in among if not reason(item(name), size, True, among)] for name in names]
    assert all(len(each) == 1 for each in runs)
    counts = [runs.count([size]) for size in among]
    assert min(counts) > 0.7 * len(names) / len(among)


def test_what_needs_some_number_of_ranks_is_dealt_to_it() -> None:
    for number in range(20):
        pair = item(f"equivalence/test_a.py::test_b[{number}]", needs_ranks=(2,))
        assert [size for size in (2, 3, 4) if not reason(pair, size, True, [2, 3, 4])] == [2]
        assert [size for size in (6, 8) if not reason(pair, size, True, [6, 8])] == [6, 8]  # it checks nothing there
        slow = item(f"equivalence/test_a.py::test_b[{number}]", slow=("why",))
        assert len([size for size in (2, 3, 4) if not reason(slow, size, False, [2, 3, 4, 6, 8])]) == 1


def test_what_is_about_messages_runs_on_every_number_of_ranks() -> None:
    assert not any(reason(item("comm/test_group.py::test_a"), size, True, [2, 3, 4]) for size in (2, 3, 4))


def test_the_contract_runs_on_many_ranks_too() -> None:
    assert not any(reason(item("equivalence/test_layouts.py::test_a"), size, True, [6, 8]) for size in (6, 8))


@pytest.mark.parametrize(
    ("name", "on_host", "on_double"),
    [
        ("equivalence/test_layouts.py", 12, 4),
        ("equivalence/test_modes.py", 8, 4),
        ("parallel/test_data.py", 12, 4),
        ("comm/test_group.py", 33, 33),
    ],
)
def test_simulated_trainings_are_dealt_to_few_ranks(name: str, on_host: int, on_double: int) -> None:
    assert (most_ranks(item(name), True), most_ranks(item(name), False)) == (on_host, on_double)


def test_with_all_slow_tests_run_on_few_ranks() -> None:
    everything = [1, 2, 3, 4, 6, 8]
    assert options(0, everything, everything=True) == ["--sizes", "1"]
    assert all(options(ranks, everything, everything=True) == ["--deal", "2,3,4,6,8"] for ranks in (1, 2, 3, 4))
    assert all(options(ranks, everything, everything=True) == ["--quick", "--deal", "2,3,4,6,8"] for ranks in (6, 8))
    slow = item("train/test_a.py::test_b", slow=("why",))
    assert reason(slow, 6, True, [6, 8]) == "slow: why" and reason(slow, 2, False, []) == ""


def test_a_plain_run_leaves_out_what_is_slow() -> None:
    assert options(0, [2, 3, 4], everything=False) == ["--quick"]
    assert options(3, [2, 3, 4], everything=False) == ["--quick", "--deal", "2,3,4"]


PLANTED = """
import pytest
@pytest.mark.parametrize("number", range(6))
def test_serial(number): pass
@pytest.mark.slow("why")
def test_slow(): pass
@pytest.mark.simulated
def test_simulated(group): pass
@pytest.mark.simulated
@pytest.mark.slow("why")
def test_slow_simulated(group): pass
@pytest.mark.both_worlds
@pytest.mark.parametrize("number", range(6))
def test_both(group, number): pass
@pytest.mark.mpi
@pytest.mark.slow("why")
@pytest.mark.parametrize("number", range(6))
def test_slow_on_ranks(group, number): pass
"""


@pytest.mark.slow(HARNESS)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [0, 2])
def test_plain_and_rest_are_all(ranks: int, tmp_path: Path) -> None:
    for place in ("comm", "equivalence"):
        (tmp_path / "tests" / place).mkdir(parents=True)
        (tmp_path / "tests" / place / f"test_planted_{place}.py").write_text(PLANTED)

    def passed(among: list[int], everything: bool, rest: bool) -> set[str]:
        words = left_out.options(ranks, among, everything, rest)
        words += [
            "-p",
            "tests.harness.simulated",
            "-c",
            str(ROOT / "setup.cfg"),
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ]
        result = run_suite(ranks, words, 100, 30, lambda words: None)
        assert not result.failures
        return {name for name, outcome in result.outcomes.items() if outcome == PASSED}

    plain = passed(left_out.QUICK_RANKS, everything=False, rest=False)
    rest = passed(left_out.ALL_RANKS, everything=True, rest=True)
    assert plain and rest and not plain & rest
    # Dealt to fewer numbers of ranks, tests of a plain run may be among these ranks' that --all gives to others.
    whole = passed(left_out.ALL_RANKS, everything=True, rest=False)
    assert rest < whole <= plain | rest and (ranks or whole == plain | rest)
