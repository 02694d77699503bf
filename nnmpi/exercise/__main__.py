"""`python -m nnmpi.exercise`: exercises, and a checker that says which chunk, which rank, after which step is wrong.

python -m nnmpi.exercise                                       lists them
python -m nnmpi.exercise ring-all-reduce > my_ring.py          what is wanted, as a file to begin with
python -m nnmpi.exercise ring-all-reduce my_ring.py            checks what was written there
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nnmpi.command import Parser, say
from nnmpi.exercise.exercise import guarded
from nnmpi.exercise.table import KINDS, find_exercise
from nnmpi.own import load_own


def main(words: Sequence[str]) -> str:
    """Return the list, an exercise to begin with, or that a solution is right.

    Raises:
        UsageError: for an exercise or a file that there is not.
        WrongAnswer: what is wrong with the solution.
    """
    given = _parser().parse_args(words)
    if given.name is None:
        width = max(len(each.name) for kind in KINDS.values() for each in kind)
        rows = [(kind, [f"  {each.name:{width}}  {each.title}" for each in found]) for kind, found in KINDS.items()]
        return "\n".join(
            [*(line for kind, lines in rows for line in (f"{kind}:", *lines, "")), (__doc__ or "").strip()]
        )
    exercise = find_exercise(given.name)
    if given.file is None:
        return exercise.starter().rstrip()
    with guarded(given.file):
        function = load_own(f"{given.file}:{exercise.function}", exercise.name, f"({exercise.arguments})")
        return f"{exercise.name}: {exercise.check(function)}"


def _parser() -> Parser:
    parser = Parser(
        "python -m nnmpi.exercise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which exercise")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.py", help="your solution")
    return parser


if __name__ == "__main__":
    sys.exit(say(main))
