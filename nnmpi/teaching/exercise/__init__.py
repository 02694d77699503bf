"""Exercises with a checker that says what is wrong: which chunk, which rank, after which step.

    exercise     an exercise: a statement, a starter file, a check of a solution
    exercises    tables of all exercises by kind; group_operations has those on group operations;
                 nnmpi.teaching.exercise.check, for a cell of a notebook
    solution     runs an untrusted file in processes of its own: child runs there, wire connects,
                 wall is what Linux lets it do
    __main__     nnmpi exercise

The checks are the package's own: `comm.prove`, `comm.duration.price`, `schedule.check`, the
simulated world. Read exercise first, then any other file.
"""

from nnmpi.teaching.exercise.exercises import check

__all__ = ["check"]
