"""`nnmpi exercise`: exercises, and a checker that names the wrong chunk, rank and step.

nnmpi exercise                               lists the exercises
nnmpi exercise ring-all-reduce > my_ring.py  writes a starter file
nnmpi exercise ring-all-reduce my_ring.py    checks your solution
"""

import sys
from collections.abc import Sequence

from nnmpi.base.command import entry, read_command, say
from nnmpi.teaching.exercise.exercises import KINDS, find
from nnmpi.teaching.exercise.solution import Solution
from nnmpi.teaching.exercise.wire import WrongAnswer

NEXT = """nnmpi exercise NAME > FILE.py  writes a starter file
nnmpi exercise NAME FILE.py    checks your solution"""


def main(words: Sequence[str]) -> str:
    """Return the list of exercises, a starter file, or a sentence on a right solution.

    Raises:
        UsageError: for an unknown exercise or a missing file.
        WrongAnswer: naming the mistake in the solution.
    """
    name, file = read_command("[NAME] [FILE.py]", "nnmpi exercise", __doc__ or "", (), words)
    if name is None:
        lines = []
        for kind, exercises in KINDS.items():
            entries = (line for item in exercises for line in entry(item.name, item.title))
            lines += [f"{kind}:", *entries, ""]
        return "\n".join([*lines, NEXT])
    exercise = find(str(name))
    if file is None:
        return exercise.starter().rstrip()
    try:
        with Solution(file, exercise.function) as function:
            return f"{exercise.name}: {exercise.check(function)}"
    except WrongAnswer as error:
        raise WrongAnswer(f"{error}\n\n{error.drawing}".strip()) from None


if __name__ == "__main__":
    sys.exit(say(main))
