"""Random mutants: each is one change of a program that is still one."""

import pytest

from tests.planted.mutants import finders_of, mutants


@pytest.mark.parametrize(
    "text, found",
    [
        ("a < b <= (c)", ["a <= b <= (c)", "a < b < (c)"]),
        ("x = a and not b", ["x = a or not b", "x = a and b"]),
        ("f(n + 1, True)", ["f(n - 1, True)", "f(n + 2, True)", "f(n + 1, False)"]),
        ("\u00e9 = a not in b", ["\u00e9 = a in b"]),
    ],
)
def test_a_mutant_is_one_change(text, found):
    assert sorted(mutants(text)) == sorted((1, item) for item in found)


def test_the_finders_of_a_file_name_its_module():
    assert "tests/lab/test_planner.py" in finders_of("nnmpi/lab/planner/price.py").split()
    assert finders_of("nnmpi/ops/none.py") == "tests/ops"
