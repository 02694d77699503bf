"""A signal before a command has handlers of its own ends it with a sentence."""

import signal
import subprocess
import sys

import pytest

CODE = """
import os, runpy, signal, sys
module, number, *ignored = sys.argv[1:]
if ignored:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

class Signal:
    def find_spec(self, name, *_):
        if name == "nnmpi.train.cli":  # of the slow imports the first
            os.kill(os.getpid(), int(number))
            print("goes on", flush=True)
            os._exit(0)

sys.meta_path.insert(0, Signal())
sys.argv = [module, "train"]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["nnmpi", "nnmpi.train"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_says_what_ended_it_and_what_is_lost(number: signal.Signals, module: str) -> None:
    done = run(module, int(number))
    assert done.returncode == 128 + number and not done.stdout
    assert done.stderr == (
        f"nnmpi: ended by {number.name} outside of training's steps; no checkpoint is lost\n"
    )


@pytest.mark.parametrize("module", ["nnmpi", "nnmpi.train"])
def test_under_nohup_a_closed_terminal_ends_nothing(module: str) -> None:
    done = run(module, int(signal.SIGHUP), "ignored")
    assert (done.returncode, done.stdout) == (0, "goes on\n")
