"""The command as a user starts it: what is printed once, and with which status it ends."""

import json
import signal
import subprocess
import sys
from os import EX_DATAERR

import pytest

from nnmpi.train.checkpoint import read_checkpoint
from tests.train.jobs import lines, once, send, train


def test_help_is_printed_once(tmp_path):
    ending = train(tmp_path, "--help", ranks=2)
    assert ending.status == 0
    assert ending.output.count("usage: nnmpi train") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "output"]


def test_a_start_imports_what_each_run_needs_and_looks_for_no_cycles_meanwhile():
    """Each restart costs as much again: the planner, simulated ranks and readers of metadata are a
    tenth of it.
    """
    program = (
        "import gc, runpy, sys\n"
        "class Look:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'nnmpi.train.cli': print('collects:', gc.isenabled())\n"
        "sys.argv[1:] = ['--help']\n"
        "sys.meta_path.insert(0, Look)\n"
        "runpy.run_module('nnmpi.train', run_name='__main__')\n"
        "print('collects:', gc.isenabled())\n"
        "left_out = 'email', 'nnmpi.lab.planner', 'nnmpi.comm.simulated.simulated_world'\n"
        "print('too many:', [name for name in left_out if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    result = [
        line for line in done.stdout.splitlines() if line.startswith(("collects:", "too many:"))
    ]
    assert result == ["collects: False", "collects: True", "too many: []"]


def test_the_command_starts_its_ranks_as_the_launcher_does(tmp_path):
    words = "--ranks 2 --model mlp --dataset iris --epochs 1 --out run"
    ending = train(tmp_path, words)
    assert ending.status == 0 and "dp 2, 2 ranks on 1 node" in ending.output
    assert json.loads((tmp_path / "run/finished.json").read_text())["ranks"] == 2


def test_wrong_use_is_one_sentence_and_status_2(tmp_path):
    """Which sentence to which words is in test_ranks and test_parse."""
    ending = train(tmp_path, "--lr -1", ranks=2)
    assert ending.status == 2
    assert ending.output.count("--lr is -1.0; give a finite number above 0") == 1
    assert "Traceback" not in ending.output
    assert list(tmp_path.iterdir()) == [tmp_path / "output"]


def test_a_loss_that_is_not_finite_is_one_sentence_and_its_own_status(tmp_path):
    words = "--model mlp --dataset iris --optimizer sgd --lr 1e12 --save-every 1steps --out run"
    ending = train(tmp_path, words, ranks=2)
    assert ending.status == EX_DATAERR  # the supervisor's sign that this comes again
    assert ending.output.count("values that are not finite were first found in ") == 1
    assert "Traceback" not in ending.output
    assert "Warning" not in ending.output
    assert "on rank " in ending.output
    saved = sorted(item.name for item in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved[0] == "latest"
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() in saved


@pytest.mark.parametrize(
    "ranks, leave, told, when",
    [
        ("", "raise SystemExit(0)", "SystemExit(0)", "while it is made"),
        ("--simulate 2 --pp 2", "raise SystemExit(0)", "SystemExit(0)", "in a step"),
    ],
)
def test_a_model_that_ends_the_program_is_no_success(tmp_path, ranks, leave, told, when):
    """Its status would be 0, and other ranks would wait for this one."""
    (tmp_path / "leaving.py").write_text(
        "import os\n\nfrom nnmpi import nn\n\n\n"
        f"class Leaves(nn.Linear):\n    def forward(self, x):\n        {leave}\n\n\n"
        f"def leaves(*_):\n    {leave if when == 'while it is made' else 'pass'}\n"
        "    return nn.Sequential(nn.Linear(4, 4), Leaves(4, 3))\n"
    )
    ending = train(tmp_path, f"--model leaving.py:leaves --dataset iris --out run {ranks}")
    assert ending.status == 1
    assert f"{told} before the end of the command" in ending.output


def test_one_process_trains_without_mpirun_and_prints_its_epochs(tmp_path):
    ending = train(tmp_path, "--model mlp --dataset iris --epochs 2")
    assert ending.status == 0
    assert "1 rank on 1 node" in ending.output
    assert [f"epoch {n}/2: " in ending.output for n in (1, 2, 3)] == [True, True, False]
    (run,) = (item for item in (tmp_path / "runs").iterdir() if not item.is_symlink())
    assert run.name.startswith("iris-mlp-")
    assert json.loads((run / "config.json").read_text())["out"] == f"runs/{run.name}"


def test_every_line_is_printed_once_on_several_ranks(tmp_path):
    ending = train(tmp_path, "--model mlp --dataset iris --epochs 2 --out run", ranks=2)
    assert ending.status == 0
    printed = [line for line in ending.output.splitlines() if line]
    assert len(printed) == len(set(printed))
    assert "2 ranks on 1 node" in ending.output
    assert "\x1b" not in ending.output
    assert ending.output.count("; test ") == 2 and ending.output.count("test accuracy") == 1


def test_a_rank_that_fails_alone_ends_the_job_with_its_traceback(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '1':\n"
        "    import itertools\n"
        "    import nnmpi.data.dataset as module\n"
        "    calls, labels = itertools.count(), module.Dataset.labels\n"
        "    def fail(*given):\n"
        "        if next(calls) < 4: return labels(*given)\n"
        "        raise ZeroDivisionError('a fault in a batch')\n"
        "    module.Dataset.labels = fail\n"
    )
    ending = train(tmp_path, "--model mlp --dataset iris --no-normalize --out run", ranks=2)
    assert ending.status not in (0, None)
    assert ending.output.count("ZeroDivisionError: a fault in a batch") == 1
    assert "rank 1 of 2" in ending.output
    assert ending.seconds < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_keeps_what_was_done(tmp_path, number):
    """Half a second is what Open MPI's leaves its ranks: on a busy machine once more."""
    tries = (interrupted(tmp_path / f"run-{number}-{attempt}", number) for attempt in range(3))
    latest = next(item for item in tries if item.exists())
    assert read_checkpoint(latest.parent / latest.read_text().strip()).values["step"] > 1


def interrupted(run, number):
    """Train until the launcher gets the signal, and return where the name of the last checkpoint is
    to be.
    """
    callback = once(
        lambda: lines(run / "metrics.jsonl") > 2,
        lambda: send(number, str(run), to="launcher"),
        ends=False,
    )
    words = (
        "--model mlp --dataset iris --epochs 100000 --no-jit --eval-every 0 --save-every 0"
        f" --log-every 1 --out {run}"
    )
    assert train(run.parent, words, 2, callback).status not in (0, None)
    return run / "checkpoints" / "latest"


@pytest.mark.parametrize(
    "ranks, number, to",
    [
        (2, signal.SIGTERM, "ranks"),
        (2, signal.SIGTERM, "launcher"),
        (1, signal.SIGTERM, "ranks"),
        (1, signal.SIGINT, "ranks"),
    ],
)
def test_a_signal_saves_the_last_whole_step(tmp_path, ranks, number, to, monkeypatch):
    """To the launcher, too, where Open MPI's is told to hand SIGTERM on, as the scripts do."""
    monkeypatch.setenv("PRTE_MCA_ess_base_forward_signals", "15")
    run = tmp_path / f"run-{ranks}-{number}"
    metrics = run / "metrics.jsonl"
    callback = once(lambda: lines(metrics) > 2, lambda: send(number, str(run), to=to), ends=False)
    words = (
        "--model mlp --dataset iris --epochs 100000 --no-jit --eval-every 0 --save-every 0"
        f" --log-every 1 --out {run}"
    )
    ending = train(tmp_path, words, ranks, callback)
    assert ending.status == 128 + number
    assert ending.output.count(f"stopped by {number.name} after step ") == 1
    assert f"continue with: nnmpi train --resume {run}" in ending.output
    step = int(ending.output.split("after step ")[1].split(";")[0])
    assert sorted(item.name for item in (run / "checkpoints").iterdir()) == [
        "latest",
        f"step-{step:08d}",
    ]
    assert lines(metrics) == step


def test_a_batch_that_all_ranks_refuse_is_one_sentence(tmp_path):
    """Open MPI's launcher kills those who are not yet through when the first one ends, and may
    complain of them.
    """
    (tmp_path / "net.py").write_text(
        "import atexit, os, pathlib, time\nfrom nnmpi import nn\ndef end_late():\n   "
        " time.sleep(1.5)\n    pathlib.Path('through').touch()\nif"
        " os.environ['OMPI_COMM_WORLD_RANK' if 'OMPI_COMM_WORLD_RANK' in os.environ else"
        " 'PMI_RANK'] == '1':\n    atexit.register(end_late)\nclass Net(nn.Module):\n    def"
        " __init__(self): self.out = nn.Linear(64, 10)\n    def forward(self, x): return"
        " self.out(x.reshape(-1, 63))\ndef build(shape, classes): return Net()\n"
    )
    ending = train(tmp_path, "--dataset digits --model net.py:build --out run --quiet", 2)
    assert ending.status == 1
    assert ending.output.count("does not fit") == 1
    assert "Traceback" not in ending.output and "ERROR" not in ending.output
    assert (tmp_path / "through").exists()  # the other rank waited for it
