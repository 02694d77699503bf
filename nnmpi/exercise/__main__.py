"""`python -m nnmpi.exercise`: exercises, and a checker that names the wrong chunk, rank and step.

python -m nnmpi.exercise                               lists the exercises
python -m nnmpi.exercise ring-all-reduce > my_ring.py  writes a starter file
python -m nnmpi.exercise ring-all-reduce my_ring.py    checks your solution
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from nnmpi.command import Parser, entry, folded, say
from nnmpi.exercise.exercises import KINDS
from nnmpi.exercise.notebook import find
from nnmpi.exercise.solution import Solution
from nnmpi.exercise.wire import WrongAnswer


def main(words: Sequence[str]) -> str:
    """Return the list of exercises, a starter file, or a sentence on a right solution.

    Raises:
        UsageError: for an unknown exercise or a missing file.
        WrongAnswer: naming the mistake in the solution.
    """
    parser = Parser("python -m nnmpi.exercise", description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the exercise")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.py", help="your solution")
    given = parser.parse_args(words)
    if given.name is None:
        lines = []
        for kind, exercises in KINDS.items():
            entries = (line for item in exercises for line in entry(item.name, item.title))
            lines += [f"{kind}:", *entries, ""]
        return "\n".join([*lines, folded(__doc__ or "")])
    exercise = find(given.name)
    if given.file is None:
        return exercise.starter().rstrip()
    try:
        with Solution(given.file, exercise.function) as function:
            return f"{exercise.name}: {exercise.check(function)}"
    except WrongAnswer as error:
        raise WrongAnswer(f"{error}\n\n{error.drawing}".strip()) from None


if __name__ == "__main__":
    sys.exit(say(main))
