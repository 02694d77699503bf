"""The programs of the examples, but for their notebooks."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SOURCE = '''
class Shape:
    def area(self, unit):
        """Return the area.

        In square metres."""
        side = self.side / unit
        return side * side

    def name(self):
        return "shape"

    def todo(self):
        """Do it."""
'''


def test_problems_are_functions_that_say_what_they_are_for() -> None:
    """Nothing is lost between problem and solution, and methods begin at the margin."""
    pytest.importorskip("tokenizers")
    find = runpy.run_path(str(FOLDER / "finetuning" / "make_texts.py"))["find_problems"]
    ((problem, solution),) = find(SOURCE)
    assert problem == 'def area(self, unit):\n    """Return the area.\n\n    In square metres."""'
    assert solution == "    side = self.side / unit\n    return side * side"
    assert not list(find("def f(:"))
