"""A part of the corpus; `python -m tests.corpus 5000` runs more."""

import pytest

from nnmpi.base.errors import UsageError
from tests.corpus.bad import Bad, failures, run

CASES = 150
pytestmark = pytest.mark.host_only("files and words, not arrays")


def test_no_bad_input_has_a_traceback_takes_long_or_succeeds(tmp_path):
    """The number that fails is told; `python -m tests.corpus 1 --first NUMBER` repeats it."""
    assert not [*failures(0, CASES, 0, tmp_path)]


def refused():
    raise UsageError("give another")


def left():
    raise SystemExit(0)


def fails():
    raise KeyError("x")


def loops():
    while True:
        pass


@pytest.mark.parametrize(
    "act, must_fail, wrong",
    [
        (refused, True, ""),
        (int, False, ""),
        (int, True, "success"),
        (left, False, "leaves with 0"),
        (fails, False, "KeyError: 'x'"),
        (loops, False, "longer than 1 s"),
    ],
)
def test_the_corpus_sees_what_is_wrong(monkeypatch, act, must_fail, wrong):
    monkeypatch.setattr("tests.corpus.bad.SECONDS", 1)
    text = run(Bad("planted", act, must_fail))
    assert wrong in text and bool(wrong) == bool(text)
