"""`python -m nnmpi.exercise`: exercises, and a checker that says which chunk, which rank, after which step is wrong.

python -m nnmpi.exercise                               lists them
python -m nnmpi.exercise ring-all-reduce > my_ring.py  what is wanted, as a file to begin with
python -m nnmpi.exercise ring-all-reduce my_ring.py    checks what was written there
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from nnmpi.command import Parser, entry, folded, say, suggest
from nnmpi.errors import UsageError
from nnmpi.exercise.exercise import WrongAnswer
from nnmpi.exercise.exercises import EXERCISES, KINDS
from nnmpi.exercise.solution import Solution


def main(words: Sequence[str]) -> str:
    """Return the list, an exercise to begin with, or that a solution is right.

    Raises:
        UsageError: for an exercise or a file that there is not.
        WrongAnswer: what is wrong with the solution.
    """
    given = _parser().parse_args(words)
    if given.name is None:
        lists = [
            [f"{kind}:", *(line for one in found for line in entry(one.name, one.title)), ""]
            for kind, found in KINDS.items()
        ]
        return "\n".join([*(line for lines in lists for line in lines), folded(__doc__ or "")])
    if given.name not in EXERCISES:
        near = suggest(given.name, EXERCISES)
        raise UsageError(f"there is no exercise {given.name!r}{near}; python -m nnmpi.exercise lists them")
    exercise = EXERCISES[given.name]
    if given.file is None:
        return exercise.starter().rstrip()
    try:
        with Solution(given.file, exercise.function) as function:
            return f"{exercise.name}: {exercise.check(function)}"
    except WrongAnswer as error:
        raise WrongAnswer(f"{error}\n\n{error.drawing}".strip()) from None


def _parser() -> Parser:
    parser = Parser("python -m nnmpi.exercise", description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="which exercise")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.py", help="your solution")
    return parser


if __name__ == "__main__":
    sys.exit(say(main))
