"""What a plain `scripts/test` leaves out: jobs and cases that take long and are much like others that it runs.

Each reason is written once, since the table at the end groups what was left out by reason.
"""

from typing import Any

import pytest

ONCE_MORE = "a job of its own, like others that ran"
BENCHMARK = "a reduced benchmark, like those of scripts/benchmark-check"
HARNESS = "the harness itself, with ranks that fail, hang or vanish"
COMPILER = "kernels for more dtypes and devices, through CUDA's compiler"
KERNELS = "compiles kernels from the beginning"
LARGE = "a graph or a machine of millions, like a smaller one that ran"
GROWTH = "hundreds of steps, to see memory grow"
MORE_SEEDS = "more seeds, like those that ran"


def once_more(value: Any, slow: bool = True, reason: str = ONCE_MORE) -> Any:
    """Return a parameter of a test, marked slow (or not)."""
    return pytest.param(value, marks=pytest.mark.slow(reason)) if slow else value
