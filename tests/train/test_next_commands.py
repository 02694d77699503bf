"""The next command that a command prints runs as it is printed."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from nnmpi.base.files import read_json
from nnmpi.lab.doctor import diagnose
from nnmpi.lab.plan import main as plan
from tests.harness.commands import on_ranks
from tests.harness.job import run
from tests.harness.slow import ONCE_MORE, cases
from tests.lab.little import measure_little

pytestmark = pytest.mark.host_only("processes, whatever computes")

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
SCRIPT = f"#!{sys.executable}\nimport sys\nfrom nnmpi.__main__ import main\nsys.exit(main())\n"
# stops its own process once, in the middle
MINE = """
import os, signal
from nnmpi import nn
def build(shape, classes):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, classes))
def stop(record):
    if record["kind"] == "train" and not os.path.exists("stopped"):
        open("stopped", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
"""
OPTIONS = "--dataset iris --max-steps 30 --log-every 5 --eval-every 0 --save-every 5steps"
OWN = "--model mine.py:build --callback mine.py:stop"
NEXT = re.compile(r"continue with: (nnmpi .*?)(?: \(and (--trust).*?\))?$", re.MULTILINE)


@pytest.fixture
def call(tmp_path):
    """Return a function that runs a command line in a folder, and returns status and output."""
    (tmp_path / "mine.py").write_text(MINE)
    script = tmp_path / "bin" / "nnmpi"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    script.chmod(0o755)
    beside = str(Path(sys.executable).parent)  # mpirun
    path = os.pathsep.join([str(script.parent), beside, os.environ["PATH"]])

    def called(line):
        environ = {"PATH": path, "PYTHONPATH": str(ROOT)}
        return run(shlex.split(line), tmp_path / "output", LIMIT_S, environ, cwd=tmp_path)

    return called


@pytest.mark.parametrize(
    "start, ranks",
    cases(
        [
            ("nnmpi train --out 'my runs/a'", 1),
            ("nnmpi train --ranks 2 --zero 1 --out=-a", 2),
            ("nnmpi train --simulate 3 --network alpha_us=9,gbit=1 --dp 3 --out a", 3),
            ("nnmpi run -n 2 -- --dp 2 --out a", 2),
        ],
        lambda start, ranks: ranks != 2 or "=-a" in start,
        ONCE_MORE,
    ),
)
def test_a_stopped_run_goes_on_by_the_printed_command(call, tmp_path, start, ranks):
    stopped = call(f"{start} {OPTIONS} {OWN}")
    assert stopped.status not in (0, None), stopped.output
    *_, (command, more) = NEXT.findall(stopped.output)
    assert not more and "--trust" in command
    ended = call(command)
    assert ended.status == 0, (command, ended.output)
    (finished,) = tmp_path.glob("**/finished.json")
    found = read_json(finished)
    assert (found["step"], found["ranks"]) == (30, ranks)


def test_a_run_without_code_of_ones_own_needs_no_trust(call):
    stopped = call(f"nnmpi train {OPTIONS} --model mlp --callback mine.py:stop --out a")
    *_, (command, _) = NEXT.findall(stopped.output)
    assert command == "nnmpi train --resume a --trust"  # its callback is one
    assert call(command).status == 0


def test_what_doctor_advises_runs(call, tmp_path, monkeypatch):
    """It names --trust beside the command: whether code is executed is not its decision."""
    call(f"nnmpi train --ranks 2 --dp 2 {OPTIONS} {OWN} --out a")
    monkeypatch.chdir(tmp_path)
    ((command, trust),) = NEXT.findall(diagnose(Path("a")).advice)
    assert trust == "--trust"
    refused = call(command)
    assert refused.status == 2 and "give --trust" in refused.output
    assert call(f"{command} {trust}").status == 0
    advice = diagnose(Path("a")).advice
    assert advice.startswith("nothing; use it: nnmpi evaluate a (and --trust")
    assert call("nnmpi evaluate a --trust").status == 0
    (tmp_path / "a" / "finished.json").write_text("{}")
    assert "nnmpi train --resume a (and --trust" in diagnose(Path("a")).advice


def test_what_a_finished_run_names_next_runs(call):
    ended = call(f"nnmpi train {OPTIONS} --model mlp --out 'a run'")
    (command,) = re.findall(r"curves: (nnmpi .*)", ended.output)
    assert call(command).status == 0


def test_what_plan_prints_runs(call, capfd, monkeypatch):
    measure_little(monkeypatch)
    words = "--dataset iris --model mlp --hidden 8 --batch-size 32 --ranks 2 --jit off"
    on_ranks(plan, [*words.split(), "--network", "alpha_us=10,gbit=10"])
    *_, line = capfd.readouterr().out.strip().splitlines()
    assert line.startswith("mpirun -n 2 nnmpi train "), line
    assert call(f"{line} --max-steps 2 --quiet --out planned").status == 0
