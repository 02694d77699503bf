"""A signal before a command has handlers of its own ends it with a sentence."""

import signal
import subprocess
import sys

import pytest

CODE = """
import os, signal, sys
if len(sys.argv) > 2:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.argv[1:] = ["train", *sys.argv[1:]]
import nnmpi.__main__
os.kill(os.getpid(), int(sys.argv[2]))
print("goes on")
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_says_what_ended_it_and_what_is_lost(number: signal.Signals) -> None:
    done = run(int(number))
    assert done.returncode == 128 + number and not done.stdout
    assert done.stderr == (
        f"nnmpi: ended by {number.name} outside of training's steps; no checkpoint is lost\n"
    )


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    done = run(int(signal.SIGHUP), "ignored")
    assert (done.returncode, done.stdout) == (0, "goes on\n")
