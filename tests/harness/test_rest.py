"""`scripts/test --rest` runs what --all runs and a plain run does not: nothing twice, and nothing is lost."""

from pathlib import Path

import pytest

from tests.harness import left_out
from tests.harness.records import PASSED
from tests.harness.slow import HARNESS
from tests.harness.suite import run_suite

ROOT = Path(__file__).parents[2]
ALL_RANKS = [1, 2, 3, 4, 6, 8]

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
    rest = passed(ALL_RANKS, everything=True, rest=True)
    assert plain and rest and not plain & rest
    # Dealt to fewer numbers of ranks, tests of a plain run may be among these ranks' that --all gives to others.
    whole = passed(ALL_RANKS, everything=True, rest=False)
    assert rest < whole <= plain | rest and (ranks or whole == plain | rest)
