"""No documented way of training, eager or replayed, costs more than `costs.json` says."""

from collections import Counter

import pytest

from tests.costs import file
from tests.costs.count import Calls, cost_of
from tests.costs.ways import WAYS

pytestmark = pytest.mark.host_only("a device's step is counted in launches")
VERSIONS, STORED = file.read()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WAYS)
def test_no_way_of_training_costs_more(name):
    here = file.versions()
    if here["python"] != VERSIONS["python"]:
        pytest.skip(f"the numbers are those of Python {VERSIONS['python']}")
    way = WAYS[name]
    most = file.OF_A_RUN if way.is_run else 1
    if here["numpy"] != VERSIONS["numpy"]:
        most = file.OF_ANOTHER_NUMPY
    cost, functions = cost_of(way)
    if grown := file.growth(name, STORED[name], cost, functions, most):
        pytest.fail(grown, pytrace=False)


def test_the_file_has_each_way_once():
    assert [*STORED] == [*WAYS], f"{file.COMMAND} writes it anew"


def test_a_function_that_is_called_more_often_is_named():
    def halve(x):
        return x / 2

    def step(times):
        for _ in range(times):
            abs(halve(3))

    counts = [Calls(lambda times=times: step(times)) for times in (2, 5)]
    cost, dearer = ({"python": one.python.total(), "c": one.c} for one in counts)
    assert dearer["python"] - cost["python"] == dearer["c"] - cost["c"] == 3
    stored = file.entry(cost, counts[0].python)
    assert not file.growth("a loop", stored, cost, counts[0].python, 1)
    said = file.growth("a loop", stored, dearer, counts[1].python, 1)
    assert "halve 2 -> 5" in said
    assert "python -m tests.costs 'a loop'" in said
    assert not file.growth("a loop", stored, dearer, Counter(), 4)
