"""Lines are printed on one rank, also of a reader that goes away; and what the header says of the
machine.
"""

import io
import re
import subprocess
import sys
from shlex import join

import pytest

from nnmpi import Group
from nnmpi.base.command import Console
from nnmpi.compose.stats import Totals
from nnmpi.metrics import Metric
from nnmpi.train.cli import main
from nnmpi.train.log import compare_hosts, describe_metrics
from tests.harness.commands import on_ranks
from tests.harness.job import mpirun, run


def test_a_quiet_console_prints_nothing():
    loud, quiet = io.StringIO(), io.StringIO()
    Console(False, loud).say("a", "b")
    Console(True, quiet).say("a")
    assert (loud.getvalue(), quiet.getvalue()) == ("a\nb\n", "")


def test_a_closed_stream_is_survived():
    class Closed(io.StringIO):
        calls = 0

        def write(self, text):
            Closed.calls += 1
            raise BrokenPipeError

    console = Console(False, Closed())
    console.say("a")
    console.say("b")
    assert Closed.calls == 1


def test_a_stream_without_all_letters_gets_the_others():
    """Where the system's language is not UTF-8."""
    bytes_ = io.BytesIO()
    console = Console(False, io.TextIOWrapper(bytes_, "latin-1"))
    console.say("é 😀")
    console.say("b")
    assert bytes_.getvalue() == b"\xe9 \\U0001f600\nb\n"


def test_metrics_are_written_with_their_labels():
    """Those of a user's own as they are called, by the Metric that says more, if it is known."""
    values = {"accuracy": 0.98056, "rmse": 0.42, "r2": 0.93124, "f1": float("nan"), "odd": 0.5}
    text = "accuracy 98.06 %, RMSE 0.42, R2 0.9312, F1 nan, odd 0.5"
    assert describe_metrics(values) == text
    odd = Metric("odd", len, len, is_share=True)
    assert describe_metrics(values, [odd]) == text.replace("odd 0.5", "odd 50.00 %")


def shell(command, end=""):
    program = (
        "from nnmpi.base.command import Console; c = Console(False); c.say('a');"
        " c.say('b' * 99999); c.say('c')"
    )
    program += f"; {end}" * bool(end)
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {command}', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", [">&-", "| head -n 1", "> /dev/full"])
def test_an_output_that_takes_nothing_is_survived_to_the_end_of_the_process(command):
    assert shell(command) == (0, "")


@pytest.mark.parametrize("command", ["> /dev/null", "| head -n 1", "> /dev/full"])
def test_what_could_not_be_written_is_an_error_for_those_who_ask(command):
    status, text = shell(command, "c.finish()")
    assert status == int("full" in command)
    assert ("could not be written: No space left on device" in text) == bool(status)


TIMES = {"steps": 2, "compute_s": 0.02}  # each computes for 10 ms


@pytest.mark.parametrize(
    "times, hosts, words",
    [
        ({"sync_s": 0.02}, 2, "2 hosts take as long as one: "),
        ({"sync_s": 0.08}, 2, "2 hosts take 2.5 times as long as one: .* 40 ms .as measured"),
        (
            {"sync_s": 0.02, "predicted_s": 0.01, "predicted_steps": 2},
            4,
            "are 2.7 times as fast .* 5 ms .by the",
        ),
        (
            {"hidden_s": 0.02, "predicted_s": 0.02, "predicted_steps": 2},
            4,
            "are 4 times as fast as one: ",
        ),
    ],
)
def test_hosts_are_compared_with_one(times, hosts, words):
    text = compare_hosts(Totals(**TIMES, **times), hosts)
    assert re.search(words, text), text


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_on_several_hosts_is_compared_once(nodes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Group, "nodes", lambda group: [rank % nodes for rank in range(group.size)])
    words = f"--dataset iris --model mlp --epochs 2 --log-every 1 --out {tmp_path / 'run'}"
    on_ranks(main, words, 2)
    assert capsys.readouterr().out.count("on these links 2 hosts") == nodes - 1


@pytest.mark.parametrize("start", [[], mpirun(1)])
def test_a_terminal_is_known_under_a_launcher_too(start, tmp_path):
    """Open MPI gives each rank a terminal, so its own output counts."""
    program = "from nnmpi.base.command import Console; print('seen', Console(False).is_terminal)"
    line = join([*start, sys.executable, "-c", program])
    words = ["sh", "-c", f"{line} && {line} > log; cat log"]
    job = [sys.executable, "-c", f"import pty; pty.spawn({words!r})"]
    ending = run(job, tmp_path / "output", 60.0, cwd=tmp_path)
    assert re.findall(r"seen (\w+)", ending.output) == ["True", "False"]


def test_the_lines_of_a_run_have_80_columns_and_the_header_names_what_is_done(tmp_path, capsys):
    """Longer ones have a long path."""
    words = "--epochs 2 --batch-size 64 --augment shift --class-weights balanced --clip 1.5"
    more = "--label-smoothing 0.1 --ema 0.9 --metric f1 recall:3 --keep-best --verbose"
    on_ranks(main, f"--dataset digits {words} {more} --out {tmp_path / 'run'}", 1)
    printed = capsys.readouterr().out
    path = str(tmp_path / "run")
    assert all(len(line.replace(path, "run")) <= 80 for line in printed.splitlines())
    text = re.sub(r"\s+", " ", printed)
    assert (
        "training: augmentation shift, class weights balanced, label smoothing 0.1, gradients"
        " clipped to a norm of 1.5 " in text
    )
    assert re.search(
        r"\nepoch 2/2: loss [\d.]+, accuracy [\d.]+ %; test [\d.]+, [\d.]+ %; \d+ ", printed
    )
    facts = (tmp_path / "run" / "console.txt").read_text()
    assert "training:    augmentation shift" in facts
