"""Exercises with a checker that says what is wrong: which chunk, which rank, after which step.

    exercise     what an exercise is: a statement, a file to begin with, a check of the function
                 that is written
    exercises    all of them, a table of each kind; those on what ranks share out are in shared
    solution     a file that anybody may have written, in processes of its own: child, which runs
                 there, and wire
    notebook     nnmpi.exercise.check, for a cell
    __main__     python -m nnmpi.exercise

The checks are the package's own: `comm.prove`, `comm.duration.price`, `schedule.check`, the
simulated world. Begin with exercise, then read any of them.
"""

from nnmpi.exercise.notebook import check

__all__ = ["check"]
