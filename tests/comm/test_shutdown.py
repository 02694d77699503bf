"""Noticing an uncaught `sys.exit`; what it does to a job of several ranks is in test_start."""

import pickle
import sys

import pytest

from nnmpi.comm.mpi.shutdown import WatchedExit, read_code, watch_exit


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, (0, "")),
        (0, (0, "")),
        (3, (3, "")),
        (True, (1, "")),
        (-1, (255, "")),
        (256, (0, "")),
        ("bye", (1, "bye")),
    ],
)
def test_the_status_is_what_the_interpreter_makes_of_it(code: object, expected: tuple[int, str]) -> None:
    assert read_code(code) == expected


def test_a_caught_exit_calls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, str]] = []
    monkeypatch.setattr(sys, "exit", sys.exit)
    watch_exit(lambda status, text: calls.append((status, text)))
    with pytest.raises(SystemExit) as caught:
        sys.exit(3)
    assert caught.value.code == 3
    assert caught.value.args == (3,)
    assert calls == []


def test_an_exit_travels_as_a_plain_one() -> None:
    """A pool of processes sends a worker's exception home: with its code, without our hook."""
    error = pickle.loads(pickle.dumps(WatchedExit(3, lambda status, text: None)))
    assert type(error) is SystemExit
    assert error.code == 3
