"""What is left out where: nothing that is not run elsewhere."""

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness import left_out
from tests.harness.left_out import beyond, beyond_cover, options, reason
from tests.harness.records import PASSED
from tests.harness.simulated import most_ranks
from tests.harness.slow import HARNESS
from tests.harness.suite import Suite

ROOT = Path(__file__).parents[2]


def item(name, **marks):
    """Return a stand-in for a test with these marks."""
    made = {mark: SimpleNamespace(args=args) for mark, args in marks.items()}
    return SimpleNamespace(nodeid=f"tests/{name}", get_closest_marker=made.get)


def runs_on(test, among, quick=True):
    """Return on which numbers of ranks a test runs."""
    return [size for size in among if not reason(test, size, quick, among)]


@pytest.mark.parametrize("among", [[2, 3, 4], [2, 3, 4, 6, 8], [2]], ids=str)
def test_what_is_dealt_out_runs_once(among):
    names = [f"equivalence/test_a.py::test_b[{number}]" for number in range(300)]
    runs = [runs_on(item(name), among) for name in names]
    assert all(len(run) == 1 for run in runs)
    assert min(runs.count([size]) for size in among) > 0.7 * len(names) / len(among)


@pytest.mark.parametrize(
    "name, marks, among, wanted",
    [
        ("comm/test_group.py", {}, [2, 3, 4], [2, 3, 4]),  # messages
        ("equivalence/test_layouts.py", {}, [6, 8], [6, 8]),  # the contract
        ("comm/test_group.py", {}, [2, 3, 4, 8], [2, 3, 4, 8]),
        ("equivalence/test_a.py", {"needs_ranks": (2,)}, [2, 3, 4], [2]),
        ("equivalence/test_a.py", {"needs_ranks": (2,)}, [6, 8], [6, 8]),  # it checks nothing there
        ("comm/test_group.py", {"slow": ("why",)}, [6, 8], []),
    ],
)
def test_where_a_test_runs(name, marks, among, wanted):
    assert all(runs_on(item(f"{name}::test_b[{n}]", **marks), among) == wanted for n in range(20))


def test_messages_are_tried_on_one_of_many_ranks():
    names = [f"comm/test_group.py::test_b[{n}]" for n in range(100)]
    runs = [runs_on(item(name), left_out.ALL_RANKS[1:]) for name in names]
    assert [run[:3] for run in runs] == [[2, 3, 4]] * 100
    assert 30 < [run[3:] for run in runs].count([6]) < 70
    assert {len(run) for run in runs} == {4}


@pytest.mark.parametrize("place", ["equivalence", "comm"])
def test_what_is_slow_is_dealt_to_few_ranks(place):
    """Of messages, too."""
    slow = [item(f"{place}/test_a.py::test_b[{n}]", slow=("why",)) for n in range(20)]
    assert {tuple(runs_on(entry, left_out.ALL_RANKS[1:], quick=False)) for entry in slow} == {
        (2,),
        (3,),
        (4,),
    }


@pytest.mark.parametrize(
    "name, on_host, on_double",
    [
        ("equivalence/test_layouts.py", 6, 4),
        ("parallel/test_data.py", 12, 4),
        ("comm/test_group.py", 33, 33),
    ],
)
def test_simulated_trainings_are_dealt_to_few_ranks(name, on_host, on_double):
    assert (most_ranks(item(name), True), most_ranks(item(name), False)) == (on_host, on_double)


@pytest.mark.parametrize("place, all_of, quick", [("ops/a.py", 4, 4), ("train/a.py", 1, 3)])
def test_a_share_of_many_cases_runs(place, all_of, quick):
    """All of a few; a case is one on any number of simulated ranks."""
    few = [item(f"{place}::test_few[{n}]") for n in range(all_of)]
    many = [
        item(f"{place}::test_b[{size}-ranks-seed-0-{n}]") for n in range(30) for size in (2, 33)
    ]
    others = [test.nodeid for test in beyond([*few, *many])]
    assert len(others) == 2 * (30 - quick) and all("test_b" in name for name in others)
    assert len({name.rpartition("-")[2] for name in others}) == 30 - quick


def test_cases_for_many_ranks_are_left_to_runs_that_have_them():
    cases = [item(f"train/a.py::test_b[{n}]", needs_ranks=(n,)) for n in (3, 6, 8, 12)]
    assert [test.nodeid for test in cases if test not in beyond(cases)] == [
        "tests/train/a.py::test_b[3]"
    ]


def crossed(*values, quick=()):
    """Return cases that cross values on two numbers of simulated ranks; all but some are slow."""
    result = []
    for case in product(*values):
        for size in (2, 33):
            name = "-".join([f"{size}-ranks-seed-0", *case])
            entry = item(f"ops/a.py::test_b[{name}]", **({} if case in quick else {"slow": ("",)}))
            entry.callspec = SimpleNamespace(_idlist=[f"{size}-ranks-seed-0", *case])
            result.append(entry)
    return result


def kept(cases):
    """Return the values of the cases that --all runs."""
    others = {id(case) for case in beyond_cover(cases)}
    return [case.callspec._idlist[1:] for case in cases if id(case) not in others]


def test_all_pairs_of_three_parameters_meet():
    values = ["abcde", "fghi", "klm"]
    quick = [("a", "f", "k"), ("b", "f", "k")]
    few = kept(crossed(*values, quick=quick))
    pairs = {pair for case in few for pair in combinations(case, 2)}
    assert pairs == {pair for case in product(*values) for pair in combinations(case, 2)}
    assert len(few) < 2 * 40 and all([*case] in few for case in quick)


def test_of_two_parameters_each_value_meets_some():
    few = kept(crossed("abcdefgh", "kl-m"))
    names = [value for case in few[::2] for value in case]
    assert min(names.count(value) for value in "abcdefghkl-m") >= left_out.MEETINGS
    assert len(few) < 2 * 20
    one = crossed("abcdefgh")
    assert kept(one) == [case.callspec._idlist[1:] for case in one]


def test_options_of_a_run():
    """A plain one leaves out what is slow; with --all it runs on few ranks."""
    quick, deal = ["--quick"], ["--deal", "2,3,4,6,8"]
    expected = {
        0: ["--cover", "--sizes", "1"],
        **dict.fromkeys([1, 2, 3, 4], ["--cover", *deal]),
        **dict.fromkeys([6, 8], quick + deal),
    }
    assert {
        ranks: options(ranks, left_out.ALL_RANKS, everything=True) for ranks in expected
    } == expected
    expected = {0: quick, 3: [*quick, "--deal", "2,3,4"]}
    assert {
        ranks: options(ranks, left_out.QUICK_RANKS, everything=False) for ranks in expected
    } == expected


PLANTED = """
import pytest
@pytest.mark.parametrize("number", range(12))
def test_serial(number): pass
@pytest.mark.parametrize("letter", "abcdef")
@pytest.mark.parametrize("number", range(6))
def test_crossed(number, letter): pass
@pytest.mark.slow("why")
def test_slow(): pass
@pytest.mark.simulated
def test_simulated(group): pass
@pytest.mark.simulated
@pytest.mark.slow("why")
def test_slow_simulated(group): pass
@pytest.mark.both_worlds
@pytest.mark.parametrize("number", range(12))
def test_both(group, number): pass
@pytest.mark.mpi
@pytest.mark.slow("why")
@pytest.mark.parametrize("number", range(6))
def test_slow_on_ranks(group, number): pass
"""


@pytest.mark.slow(HARNESS)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [0, 2])
def test_plain_and_rest_are_all(ranks, tmp_path):
    for place in ("comm", "equivalence"):
        (tmp_path / "tests" / place).mkdir(parents=True)
        (tmp_path / "tests" / place / f"test_planted_{place}.py").write_text(PLANTED)

    def passed(among, everything, rest):
        words = left_out.options(ranks, among, everything, rest)
        more = f"-p tests.harness.simulated -c {ROOT}/setup.cfg --rootdir {tmp_path} {tmp_path}"
        suite = Suite(ranks, words + more.split(), 100, 30, lambda words: None)
        suite.run()
        assert not suite.failures
        return {name for name, outcome in suite.outcomes.items() if outcome == PASSED}

    plain = passed(left_out.QUICK_RANKS, everything=False, rest=False)
    rest = passed(left_out.ALL_RANKS, everything=True, rest=True)
    assert plain and rest and not plain & rest
    # Dealt to fewer numbers of ranks, tests of a plain run may be among these ranks' that --all
    # gives to others.
    full = passed(left_out.ALL_RANKS, everything=True, rest=False)
    assert rest < full <= plain | rest and (ranks or full == plain | rest)
