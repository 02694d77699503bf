"""A signal before a command has handlers of its own ends it with a sentence."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Python imports it before anything else; the signal comes at an import.
SITE = """
import os, signal, sys
at, number, *ignored = os.environ["SIGNAL_AT"].split()
if ignored:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

class Signal:
    def find_spec(self, name, *_):
        if name == at:
            os.kill(os.getpid(), int(number))
            print("goes on", flush=True)
            os._exit(0)

sys.meta_path.insert(0, Signal())
"""
# what nnmpi imports first, and the first of a command's slow imports
MOMENTS = ("nnmpi.base.errors", "nnmpi.train.cli")


def run(words, place, *signal_at):
    (place / "sitecustomize.py").write_text(SITE)
    (place / "nnmpi").write_text("from nnmpi.__main__ import main; main()")  # as pip writes it
    environ = os.environ | {
        "PYTHONPATH": f"{place}{os.pathsep}{ROOT}",
        "SIGNAL_AT": " ".join(map(str, signal_at)),
    }
    command = [sys.executable, *words.replace("PLACE", str(place)).split()]
    # whoever runs the tests may ignore hangups, as nohup does
    return subprocess.run(
        command,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("words", ["-m nnmpi train", "-m nnmpi.train", "PLACE/nnmpi train -m x"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_says_what_ended_it_and_what_is_lost(number, words, moment, tmp_path):
    done = run(words, tmp_path, moment, int(number))
    assert done.returncode == 128 + number and not done.stdout
    assert done.stderr == (
        f"nnmpi: ended by {number.name} outside of training's steps; no checkpoint is lost\n"
    )


@pytest.mark.parametrize("words", ["-m nnmpi train", "-m nnmpi.train"])
def test_under_nohup_a_closed_terminal_ends_nothing(words, tmp_path):
    done = run(words, tmp_path, MOMENTS[1], int(signal.SIGHUP), "ignored")
    assert (done.returncode, done.stdout) == (0, "goes on\n")


def test_other_programs_keep_their_signals(tmp_path):
    program = tmp_path / "own.py"
    program.write_text("import nnmpi")
    for words in (f"{program} train", "-m nnmpi evaluate train"):
        assert run(words, tmp_path, MOMENTS[0], int(signal.SIGTERM)).returncode == -signal.SIGTERM


@pytest.mark.parametrize("words", ["-m nnmpi report x", "PLACE/nnmpi report x", "-m nnmpi comm"])
def test_ctrl_c_ends_a_command_without_a_traceback(words, tmp_path):
    done = run(words, tmp_path, "nnmpi.base.units", int(signal.SIGINT))
    assert (done.returncode, done.stdout + done.stderr) == (-signal.SIGINT, "")
    (tmp_path / "own.py").write_text("import nnmpi, nnmpi.base.units")
    done = run(f"{tmp_path}/own.py", tmp_path, "nnmpi.base.units", int(signal.SIGINT))
    assert "KeyboardInterrupt" in done.stderr
