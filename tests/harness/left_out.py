"""What a plain `scripts/test` leaves out, `scripts/test --all` on many ranks, and --rest, which
runs what is left.

Slow tests are left out where a quicker one of the kind runs, and of a test with many cases all
but four or an eighth, of one of whole trainings all but one or an eighth; names tell which. Most
MPI tests are dealt out: each runs on one of 2, 3 and 4 ranks, told by its name, or with --all on
one of 2, 3, 4, 6 and 8. Those of messages themselves run on 2, 3 and 4, and with --all on 6 or 8,
too; but what a plain run leaves out of them is dealt out to 2, 3 and 4, as all slow tests are. For
simulated ranks, on which most of what they try is tried on other numbers, see `simulated`.

With --all, of a test that crosses parameters the cases run in which all pairs of values meet, and
where it crosses two, each value with some of the other; see `beyond_cover`. pytest by itself runs
all cases, and so does scripts/test that is given a file.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    pass

QUICK_RANKS, ALL_RANKS = [2, 3, 4], [1, 2, 3, 4, 6, 8]  # of a plain run, and of one with --all
FEW = 4  # with --all, on so many ranks slow tests run, too
ALONE = 1  # a number of ranks on which nothing is dealt
CASES = 4  # of a test that has no more, all run
CASES_OF_A_TRAINING = 1  # which take long
MEETINGS = 2  # with --all, of each value where a test crosses two parameters
WORLD = re.compile(r"\d+-ranks-seed-\d+")  # in the name of a simulated test
DEALT = ("parallel/", "compose/", "equivalence/", "memory/", "device/", "gpu/", "train/")
DEALT += ("lab/", "nn/", "optim/", "data/", "models/", "commands/", "tensor/")
DEALT += ("test_docs.py", "test_examples.py", "comm/test_fit.py")
TRAININGS = ("train/", "compose/", "parallel/", "asynchronous/", "equivalence/", "memory/")
TRAININGS += ("lab/", "commands/", "models/", "gpu/", "device/")
CHECKED = "layering/"  # by scripts/check, which every change passes
# with --all: the contract itself, promised on every number of ranks
EVERYWHERE = "equivalence/test_layouts.py"


def read_ranks(text):
    """Return numbers of ranks from text such as "2,3"."""
    return [int(word) for word in text.replace(",", " ").split()]


def options(ranks, among, everything, rest=False):
    """Return the options for pytest that leave out what a run is to leave out.

    Args:
        ranks: how many the run has; 0 for the serial tests.
        among: all numbers of ranks that there are runs on.
        everything: whether on few ranks slow tests are to run.
        rest: whether what a plain run does is to be left out of that.
    """
    but = ["--but-plain"] * rest
    if ranks == 0:
        return ["--cover", "--sizes", "1", *but] if everything else ["--quick"]
    shared = [item for item in among if item > ALONE or not everything]
    return [
        *(["--cover"] if everything and ranks <= FEW else ["--quick"]),
        "--deal",
        ",".join(map(str, shared)),
        *but,
    ]


def most_cases(test, count):
    """Return how many of a test's cases a plain run has: an eighth, but four at least; of whole
    trainings one at least, since other tests have more of the same layouts.
    """
    return max(CASES_OF_A_TRAINING if is_training(test) else CASES, count // 8)


def beyond(tests, most=most_cases):
    """Return the cases of each test beyond so many, which are told by their names; those that a
    plain run has no ranks for come last.

    Args:
        tests: all cases of all tests.
        most: of (a case, the number of its test's cases), how many of them are not returned.
    """
    result = []
    for named in _cases(tests):
        ((first, *_), *_) = named.values()
        order = {name: (_needs_more(named[name][0]), crc32(name.encode())) for name in named}
        for name in sorted(named, key=order.__getitem__)[most(first, len(named)) :]:
            result += named[name]
    return result


def beyond_cover(tests):
    """Return the cases of tests that cross parameters in which nothing meets anew.

    Of three parameters and more, every two values that meet in any case meet in one that stays. Of
    two that would be all cases; there each value stays in `MEETINGS` cases. What a plain run has
    stays and counts.
    """
    result = []
    for named in _cases(tests):
        met = Counter()
        order = {name: (_is_slow(named[name][0]), crc32(name.encode())) for name in named}
        for name in sorted(named, key=order.__getitem__):
            values = _crossed(named[name][0])
            shown, times = (values, MEETINGS) if len(values) < 3 else (combinations(values, 2), 1)
            shown = [*shown]
            is_new = len(values) < 2 or any(met[item] < times for item in shown)
            if is_new or not _is_slow(named[name][0]):
                met.update(shown)
            else:
                result += named[name]
    return result


def _cases(tests):
    """Return for each test its cases: the items of each, which differ in their numbers of ranks."""
    cases = {}
    for item in tests:
        name = WORLD.sub("", item.nodeid)
        cases.setdefault(name.partition("[")[0], {}).setdefault(name, []).append(item)
    return cases.values()


def _crossed(test):
    """Return a case's values, each with the number of its `parametrize`, without ranks."""
    call = getattr(test, "callspec", None)
    # pytest has no public name for them: its `indices` count whole cases, and ids have hyphens
    names = [] if call is None else call._idlist
    return [part for part in enumerate(names) if not WORLD.fullmatch(part[1])]


def _is_slow(test):
    """Return whether a plain run leaves a case out."""
    return test.get_closest_marker("slow") is not None


def _needs_more(test):
    """Return whether a test is for other numbers of ranks than a plain run has."""
    needed = test.get_closest_marker("needs_ranks")
    return needed is not None and not {*needed.args} & {*QUICK_RANKS}


def _place(test):
    """Return where a test stands, from the folder of all tests on."""
    return test.nodeid.removeprefix("tests/")


def is_training(test):
    """Return whether a test is of whole trainings, or of commands that use them."""
    return _place(test).startswith(TRAININGS)


def is_dealt(test):
    """Return whether a test is not of messages and collectives themselves."""
    return _place(test).startswith(DEALT)


def is_contract(test):
    """Return whether a test is of the contract of layouts itself."""
    return _place(test).startswith(EVERYWHERE)


def is_plain(test, ranks):
    """Return whether a plain `scripts/test` runs a test on so many ranks, 0 for the serial tests
    but simulated ones.
    """
    if ranks == 0:
        return not any(
            test.get_closest_marker(mark) for mark in ("slow", "simulated", "both_worlds")
        )
    return ranks in QUICK_RANKS and not reason(test, ranks, True, QUICK_RANKS)


def reason(test, ranks, quick, among):
    """Return why a test is left out, nothing if it is not.

    Args:
        test: it.
        ranks: how many there are.
        quick: whether slow tests are left out.
        among: the numbers of ranks over which tests are dealt out; none for the serial tests.
    """
    slow = test.get_closest_marker("slow")
    if quick and slow is not None:
        return f"slow: {slow.args[0]}"
    place = _place(test)
    if quick and place.startswith(CHECKED):
        return "scripts/check runs it"
    dealt = slow is not None or (is_dealt(test) and not (is_contract(test) and ranks > FEW))
    needed = test.get_closest_marker("needs_ranks")
    able = [item for item in among if needed is None or item in needed.args]
    if ranks > FEW and slow is None and not is_dealt(test):
        dealt, able = True, [item for item in able if item > FEW]
    if slow is not None:
        able = [item for item in able if item <= FEW]
    if not able or not dealt:
        return ""
    return (
        ""
        if able[crc32(place.encode()) % len(able)] == ranks
        else "dealt to another number of ranks"
    )
