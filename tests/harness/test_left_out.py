"""What is left out where: nothing that is not run elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.left_out import options, reason
from tests.harness.simulated import most_ranks


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
