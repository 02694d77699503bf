"""The doctor: what it says of runs that ended in every way, of machines."""

import json
import os
import re
import shutil
import sys
from time import time

import pytest

from nnmpi.base.errors import DivergenceError, UsageError
from nnmpi.base.files import locked
from nnmpi.lab.doctor import describe, describe_cache, diagnose, find_faults, inspect_machine
from nnmpi.train.cli import main
from tests.harness.commands import on_ranks
from tests.harness.job import mpirun, run

STALLED = (
    "the job is ended: it has waited for 9 s: rank 1 is at net.py:11 in f (step 8); rank 0 waits in"
    " a barrier"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a finished run of 9 steps, with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = (
        "--model mlp --hidden 4 --dataset iris --batch-size 50 --max-steps 9 --save-every 1"
        " --log-every 1 --quiet"
    )
    on_ranks(main, [*words.split(), "--backend", "numpy", "--out", str(folder)], 2)
    return folder


def write(file, text):
    file.parent.mkdir(exist_ok=True)
    file.write_text(text + "\n")


def lose_checkpoint(run):
    shutil.rmtree(run / "checkpoints" / "step-00000009")


def cut_weights(run):
    (run / "checkpoints" / "step-00000009" / "model.safetensors").write_bytes(b"")


def overflow(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    saved = [record for record in records if record["kind"] == "train"]
    saved[-1]["loss"] = None
    write(run / "metrics.jsonl", "\n".join(map(json.dumps, saved)))


def unfinished(*acts):
    def work(run):
        for act in (lambda run: (run / "finished.json").unlink(), *acts):
            act(run)

    return work


ENDS = {
    "finished": (
        lambda run: None,
        "The run is finished: 9 steps on 2 ranks, test accuracy",
        "nnmpi evaluate",
    ),
    "stopped on purpose": (
        lambda run: write(
            run / "finished.json",
            json.dumps(json.loads((run / "finished.json").read_text()) | {"of_steps": 135}),
        ),
        "The run is not finished: it stopped after 9 of 135 steps, the limit of --stop-after.",
        "continue with: nnmpi train --resume",
    ),
    "its end is lost": (
        lose_checkpoint,
        "its last complete checkpoint has different weights",
        "train its end again",
    ),
    "its weights are cut": (
        cut_weights,
        "its last complete checkpoint has different weights",
        "train its end again",
    ),
    "finished.json is damaged": (
        lambda run: write(run / "finished.json", "{"),
        "finished.json is damaged",
        "--resume",
    ),
    "saved by a signal": (
        unfinished(),
        "The run ended after step 9, which is saved",
        "-n 2 -- --resume",
    ),
    "killed": (
        unfinished(lose_checkpoint),
        "ended at about step 9; it gave no reason",
        "the 3 steps since the",
    ),
    "ended by an error": (
        unfinished(
            lose_checkpoint,
            lambda run: write(run / "console.txt", "epoch 2\nnnmpi: step 9: the loss is nan\n"),
        ),
        "ended at about step 9; its last words were: step 9: the loss is nan.",
        "mend that, and continue with: nnmpi run -n 2 -- --resume",
    ),
    "under a supervisor": (
        unfinished(
            lose_checkpoint,
            lambda run: write(run / "faults.jsonl", '{"start": 2, "fault": "SIGKILL came"}'),
        ),
        "ended at about step 9; its supervisor saw: SIGKILL came.",
        "continue with: nnmpi run -n 2 -- --resume",
    ),
    "stood still": (
        unfinished(
            lambda run: write(run / "flight" / "rank-0.txt", f"{STALLED}\n{{}}"),
            lambda run: write(run / "flight" / "rank-1.txt", "{}"),
        ),
        (
            "The run stood still and was ended: it has waited for 9 s: rank 1 is at net.py:11 in f"
            " (step 8)"
        ),
        "flight/rank-1.txt",
    ),
    "stood still in an earlier start": (
        unfinished(
            lambda run: write(run / "flight" / "rank-0.txt", STALLED),
            lambda run: os.utime(run / "flight" / "rank-0.txt", (0, 0)),
        ),
        "The run ended after step 9",
        "--resume",
    ),
    "not finite": (unfinished(overflow), "no longer a finite number at step 9", "a smaller --lr"),
    "no checkpoint is complete": (
        unfinished(lambda run: [file.write_bytes(b"") for file in run.rglob("*.safetensors")]),
        "ended at about step 9",
        "restore one from a copy",
    ),
    "never trained": (
        unfinished(
            lambda run: (run / "metrics.jsonl").unlink(),
            lambda run: shutil.rmtree(run / "checkpoints"),
        ),
        "came up and ended before a line of metrics",
        "--resume",
    ),
    "never came up": (
        unfinished(lambda run: (run / "starts.jsonl").unlink()),
        "ended while it was set up",
        "--resume",
    ),
}


@pytest.mark.parametrize(
    "file, text",
    [
        ("metrics.jsonl", b"[1]\n"),
        ("metrics.jsonl", b"{}\n"),
        ("starts.jsonl", b'{"ranks": "1; touch OWNED #"}\n'),
        ("flight/rank-0.txt", b"\xff"),
        ("flight/rank-\xb2.txt", b""),
    ],
)
def test_files_that_are_damaged_hide_nothing_else(file, text, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "a run")
    (run / "finished.json").unlink()
    (run / file).parent.mkdir(exist_ok=True)
    with (run / file).open("ab") as stream:
        stream.write(text)
    assert diagnose(run).happened.startswith("The run ended after step 9")
    assert re.search(rf"-n \d -- --resume '{run}'", diagnose(run).advice)  # as a shell takes it
    if file.endswith(".jsonl"):
        assert any(f"{file}: 1 damaged line" in fact for fact in diagnose(run).facts)


@pytest.mark.parametrize("name", ENDS)
def test_it_says_what_happened(name, finished, tmp_path):
    spoil, happened, advice = ENDS[name]
    shutil.copytree(finished, tmp_path / "run")  # with the times of the files
    spoil(tmp_path / "run")
    result = diagnose(tmp_path / "run")
    assert happened in result.happened
    assert advice in result.advice
    assert result.happened.count("\n") == 0 and str(result).startswith(result.happened)


def test_a_run_that_diverged_says_so_afterwards(tmp_path):
    """Before a line of metrics; a run that was only mistaken leaves no folder."""
    words = "--dataset iris --model mlp --hidden 4 --epochs 2 --quiet --out"
    out = tmp_path / "diverged"
    with pytest.raises(DivergenceError, match="the loss is") as error:
        on_ranks(main, [*words.split(), str(out), "--lr", "1e30"], 2)
    result = diagnose(out)
    assert f"its last words were: {str(error.value)[:40]}" in result.happened
    assert result.advice.startswith("mend that, and continue with: nnmpi run -n 2")


def test_a_run_that_goes_on_is_left_alone(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    with locked(tmp_path / "run"):
        assert (
            diagnose(tmp_path / "run").happened
            == "The run is still going; it is at step 9 or later."
        )
    with pytest.raises(UsageError, match="there is no run"):
        diagnose(tmp_path)


# ---- machines ----

NODE = {
    "host": "a",
    "processor": "P",
    "cores": [4, 4],
    "bound": [0, 1, 2, 3],
    "load": 0.5,
    "versions": "1",
    "mpi": "Open MPI 5",
    "launcher": "by mpirun",
    "blas": "openblas",
    "threads": 1,
    "older": None,
    "shm": 1 << 30,
}


@pytest.mark.parametrize(
    "ranks, text",
    [
        ([{}, {}], ""),
        ([{}, {"versions": "2"}], "ranks have different versions"),
        ([{}, {"mpi": "MPICH 4", "host": "b"}], "different MPI libraries"),
        ([{}] * 5, "a: 5 ranks share 4 cores"),
        ([{"bound": [2]}, {"bound": [2]}], "2 ranks are bound to the cores 2, others are idle"),
        ([{"bound": [2]}, {"bound": [3]}], ""),
        (
            [{"threads": 4}, {"threads": 4}],
            "2 ranks with 4 BLAS threads each need more than 4 cores",
        ),
        ([{"threads": 4}], ""),
        ([{"load": 7.0}], "its load is 7.0 on 4 cores"),
        ([{"older": "old code"}], "a: old code"),
        ([{"shm": 1 << 20}] * 2, "/dev/shm has 1 MiB free"),
        ([{"shm": None}] * 2, ""),
    ],
)
def test_what_is_slow_or_wrong_is_said(ranks, text):
    result = find_faults([NODE | changes for changes in ranks])
    assert [text in sentence for sentence in result] == [True] * bool(text), result


def test_the_cache_is_shown_with_what_empties_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    assert re.fullmatch(
        f"prepared data: 0 sets, 0 B, in {tmp_path}; .* free there", describe_cache()
    )
    for name, age in (("new", 0), ("old", 31 * 86400)):
        folder = tmp_path / "sets" / name / "data"
        folder.mkdir(parents=True)
        (folder / "0.npy").write_bytes(bytes(1024))
        os.utime(folder.parent, (time() - age, time() - age))
    shown = describe_cache()
    assert "2 sets, 2 KiB" in shown and "1 KiB not used for 30 days go when room" in shown
    assert shown.endswith(f"to empty it: rm -r {tmp_path / 'sets'}")
    monkeypatch.setenv("NNMPI_DATA", "~nobody-of-this-name")
    assert describe_cache().startswith("prepared data: none (")


@pytest.mark.simulated(max_size=3)
def test_each_rank_says_what_its_place_is(group):
    everyones = inspect_machine(group)
    assert len(everyones) == group.size and describe(everyones)[0].startswith(f"{group.size} rank")


def test_the_command_examines_the_ranks_that_mpi_has_started(tmp_path):
    ending = run([*mpirun(2), sys.executable, "-m", "nnmpi", "doctor"], tmp_path / "output", 60.0)
    assert ending.status == 0, ending.output
    assert ending.output.count("nnmpi verify") == 1
    assert (
        run(
            [sys.executable, "-m", "nnmpi", "doctor", str(tmp_path)], tmp_path / "output", 60.0
        ).status
        == 2
    )
