"""What a plain `scripts/test` leaves out: jobs and cases that take long and are much like others
that it runs.

Each reason is written once, since the table at the end groups what was left out by reason.
"""

import pytest

ONCE_MORE = "a job of its own, like others that ran"
HARNESS = "the harness itself, with ranks that fail, hang or vanish"
COMPILER = "kernels for more dtypes and devices, through CUDA's compiler"
KERNELS = "compiles kernels from the beginning"
GROWTH = "hundreds of steps, to see memory grow"
PAGES_WRITTEN = "writes pages, as scripts/docs does"
MORE_PRECISIONS = "more precisions, like those that ran"
MORE_CASES = "more cases of a test of many, some of which ran"
MORE_FAULTS = "faults in more operations of the disk, like those that ran"
MORE_SEEDS = "more seeds, like those that ran"
MORE_LAYOUTS = "more models, layouts and numbers of ranks, like those that ran"


def cases(rows, quick, reason=MORE_LAYOUTS):
    """Return rows of parameters, those marked slow of which `quick`, which is given a row, is not
    true.
    """
    return [
        pytest.param(*row, marks=() if quick(*row) else pytest.mark.slow(reason)) for row in rows
    ]


def once_more(value, slow=True, reason=ONCE_MORE):
    """Return a parameter of a test, marked slow (or not)."""
    return pytest.param(value, marks=pytest.mark.slow(reason)) if slow else value
