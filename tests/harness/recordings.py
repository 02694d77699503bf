"""In which tests a Worker records its passes: in all of a file that speaks of replays, and in one
of three others, told by its name.

A recording takes several times as long as the pass, and most trainings of tests end where replays
would begin. That replays are the passes as they stand is what `compose/test_replayed.py`,
`nn/test_compiled.py` and the suite of equivalence are about. The double of a device has all.
"""

import sys
from contextlib import nullcontext
from unittest.mock import patch
from zlib import crc32

import pytest

ONE_OF = 3
REFUSAL = "this test is not dealt a recording"
COMPILED = "nnmpi.nn.compiled"
PASSES = "nnmpi.compose.passes"


def records(item):
    """Return whether passes are recorded in a test."""
    return (
        crc32(item.nodeid.encode()) % ONE_OF == 0
        or "replay" in item.path.read_text()
        or item.config.getoption("--backend", default="numpy") != "numpy"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test with recordings or without."""
    passes, compiled = sys.modules.get(PASSES), sys.modules.get(COMPILED)
    eager = passes is not None and not records(item)
    with (
        patch.object(passes, "refusal_of", lambda *_: REFUSAL) if eager else nullcontext(),
        # what is found when a step is dropped would end this process, not fail the test
        patch.object(compiled, "fail_at_end", raised) if compiled else nullcontext(),
    ):
        return (yield)


def raised(error):
    """Raise an error; pytest fails the test in which `__del__` does."""
    raise error
