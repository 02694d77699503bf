"""What a person reads has at most 80 columns; what is printed to be run, runs as printed."""

import io
import subprocess
import sys

import pytest

from nnmpi.base.command import HELP_WIDTH, broken, complain, folded
from nnmpi.commands.table import COMMANDS, list_commands

# Each command's help in a process of its own, forked from one that has imported the most.
PRINTED = """
import os, runpy, sys
import nnmpi.train.cli
from nnmpi.commands.table import find_command
for line in sys.argv[1:]:
    name, *words = line.split()
    print("HELP", line, flush=True)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    sys.argv = [f"nnmpi {name}", *words]
    try:
        runpy.run_module(find_command(name), run_name="__main__", alter_sys=True)
    except SystemExit:
        pass
    sys.stdout.flush()
    os._exit(0)
"""
HELP = [f"{name} --help" for name in COMMANDS] + [
    f"comm {word} --help" for word in ("list", "prove", "render", "simulate", "fit")
]


def test_the_help_of_every_command():
    command = [sys.executable, "-c", PRINTED, *HELP]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    texts = dict(part.split("\n", 1) for part in text.split("HELP ")[1:])
    for name in HELP:
        lines = texts[name].splitlines()
        assert any(line.startswith("usage: nnmpi ") for line in lines), texts[name]
        assert not [line for line in lines if len(line) > HELP_WIDTH]


def test_the_list_of_commands():
    assert all(len(line) <= HELP_WIDTH for line in list_commands([]).splitlines())


def test_a_long_example_is_one_command_for_a_shell():
    command = f"nnmpi schedule --pipeline 1f1b --stages 4 {'--html page.html ' * 4}--svg x-y.svg"
    text = folded(f"What it does.\n\n{command}")
    shown = text.partition("\n\n")[2]
    joined = subprocess.run(["sh", "-c", f"echo {shown}"], capture_output=True, text=True).stdout
    assert len(shown.splitlines()) > 1 and joined.strip() == command


@pytest.mark.parametrize(
    "line, shown",
    [
        ("short", "short"),
        ("a" * 90, "a" * 90),  # a path
        (f"{'word ' * 16}end", f"{('word ' * 16).strip()}\n    end"),
        (f"  below: {'w ' * 36}end", f"  below: {('w ' * 36).strip()}\n    end"),
        (
            f"continue with {'it ' * 9}: nnmpi train --resume {'r' * 60}",
            f"continue with {'it ' * 9}:\n    nnmpi train --resume {'r' * 60}",
        ),
    ],
)
def test_a_line_is_broken_between_words_and_a_command_is_not(line, shown):
    assert broken(line) == shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_an_error_is_broken_in_a_terminal_and_a_line_in_a_file(monkeypatch):
    sentence = "the model is too large " * 6 + "for this"
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        complain(sentence)
        lines = stream.getvalue().splitlines()
        assert " ".join(map(str.strip, lines)) == f"nnmpi: {sentence}"
        assert (max(map(len, lines)) <= HELP_WIDTH) == stream.isatty()
