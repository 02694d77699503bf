"""A run that was killed and resumed ends with the same weights, bit for bit, as one that never
stopped.
"""

import json
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from nnmpi.train import checkpoint
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.harness.commands import on_ranks
from tests.harness.slow import ONCE_MORE
from tests.train.jobs import arrays, last_checkpoint, lines, once, send, train

# Several jobs one after the other, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(300)

TIMES = (
    "samples_per_second",
    "steps_per_second",
    "runtime",
    "compute_s",
    "sync_s",
    "input_s",
    "hidden_s",
    "step_s",
    "elapsed_s",
)
OF_THE_PROCESS = (*TIMES, "time")  # not of what was computed


def without_times(run):
    records = read_metrics(run / "metrics.jsonl")
    return [
        {
            key: value
            for key, value in record.items()
            if key not in OF_THE_PROCESS and not key.startswith("memory_")
        }
        for record in records
    ]


def assert_same_end(one, other):
    assert arrays(one) == arrays(other)
    assert without_times(one) == without_times(other)


def simulated(words, ranks):
    """Run the command on simulated ranks, in this process: what a checkpoint holds is the same."""
    on_ranks(main, f"--backend numpy {words}", ranks)


def assert_near(one, other, *names):
    """Compare the last checkpoints' files, whose sums were taken in other orders."""
    for name in names:
        ours, theirs = (
            load_file(last_checkpoint(run) / f"{name}.safetensors") for run in (one, other)
        )
        assert ours.keys() == theirs.keys()
        for key, array in ours.items():
            np.testing.assert_allclose(theirs[key], array, rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.slow(ONCE_MORE)
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path):
    full, broken = tmp_path / "whole", tmp_path / "broken"
    words = (
        "--model mlp --hidden 32 --dropout 0.2 --augment shift --optimizer sgd --momentum 0.9 --lr"
        " 0.05 --epochs 8 --batch-size 50 --eval-every 7steps --save-every 3steps --log-every 1"
    )
    assert train(tmp_path, f"{words} --out {full}", ranks=2).status == 0
    moments = random.Random(7)
    for attempt in range(3):
        begin = f"{words} --out {broken}" if attempt == 0 else f"--resume {broken}"
        wanted_lines = lines(broken / "metrics.jsonl") + moments.randrange(1, 30)

        pause = moments.random() / 50

        def kill(pause_s=pause):
            time.sleep(pause_s)
            send(signal.SIGKILL, str(broken))

        ready = once(
            lambda least=wanted_lines: lines(broken / "metrics.jsonl") >= least, kill, ends=True
        )
        assert train(tmp_path, begin, ranks=2, is_lost=ready).status != 0, (
            "the run ended before it was killed"
        )
    assert train(tmp_path, f"--resume {broken}", ranks=2).status == 0
    assert_same_end(full, broken)


def test_killed_before_its_first_checkpoint_it_starts_again(tmp_path):
    full, broken = tmp_path / "whole", tmp_path / "broken"
    words = (
        "--model mlp --dataset iris --lr-schedule constant --eval-every 0 --save-every 0"
        " --log-every 1"
    )
    words += " --epochs 3000 --max-steps"
    callback = once(
        lambda: lines(broken / "metrics.jsonl") > 3,
        lambda: send(signal.SIGKILL, str(broken)),
        ends=True,
    )
    assert train(tmp_path, f"{words} 6000 --out {broken}", is_lost=callback).status != 0
    ending = train(tmp_path, f"--resume {broken} --max-steps 30")
    assert ending.status == 0
    assert "has no checkpoint yet: starting at the beginning" in ending.output
    assert train(tmp_path, f"{words} 30 --out {full}").status == 0
    assert_same_end(full, broken)


@pytest.mark.slow(ONCE_MORE)
def test_running_statistics_and_the_place_in_an_epoch_are_restored(tmp_path):
    words = "--model resnet --batch-size 20 --optimizer adamw --lr-schedule constant"
    assert train(tmp_path, f"{words} --max-steps 6 --out whole", ranks=2).status == 0
    assert train(tmp_path, f"{words} --max-steps 4 --log-every 2 --out broken", ranks=2).status == 0
    assert train(tmp_path, "--resume broken --max-steps 6", ranks=2).status == 0
    assert arrays(tmp_path / "whole") == arrays(tmp_path / "broken")
    state = json.loads((last_checkpoint(tmp_path / "broken") / "state.json").read_text())
    assert (state["step"], state["epoch"], state["batch"], state["seed"]) == (6, 0, 6, 0)


def test_sums_in_a_fixed_order_name_the_kernels_that_differ(tmp_path, capsys, monkeypatch):
    """Of nodes, and of restarts: another processor's products have other bits."""
    words = "--model mlp --dataset iris --reduction fixed --max-steps"
    simulated(f"{words} 2 --stop-after 1 --out {tmp_path}/run", 1)
    assert "of products by" not in capsys.readouterr().out
    own = checkpoint.name_products()
    # "rank 0" and "rank 1"
    monkeypatch.setattr(checkpoint, "name_products", lambda: threading.current_thread().name)
    simulated(f"--resume {tmp_path}/run", 2)
    assert re.sub(r"\s+", " ", capsys.readouterr().out).count("products by rank 0 and rank 1") == 1
    moved = f"products by {own} and continues with rank 0 and rank 1: equal up to rounding"
    assert moved in (tmp_path / "run" / "console.txt").read_text()


@pytest.mark.parametrize("reduction, equal", [("fast", "up to rounding"), ("fixed", "bit for bit")])
def test_a_checkpoint_resumes_on_another_number_of_ranks(reduction, equal, tmp_path, capsys):
    words = (
        "--model mlp --dataset iris --dtype float64 --batch-size 25 --dropout 0.1 --max-steps 12"
        f" --reduction {reduction} --microbatches 5"
    )
    full, moved = tmp_path / "whole", tmp_path / "moved"
    simulated(f"{words} --out {full}", 1)
    # in the middle of the schedule, with which it goes on
    simulated(f"{words} --stop-after 7 --out {moved}", 2)
    stopped = (moved / "console.txt").read_text()
    assert "the run stops after 7 of 12 steps, the limit of --stop-after" in stopped
    assert "with the present weights" in stopped and "with the final weights" not in stopped
    simulated(f"--resume {moved}", 3)
    assert f"the run had 2 ranks and continues with 3: equal {equal}" in capsys.readouterr().out
    assert "with the final weights" in (moved / "console.txt").read_text()
    if reduction == "fixed":
        assert arrays(full) == arrays(moved)
    else:
        assert_near(full, moved, "model")


@pytest.mark.parametrize("order", ["", " --shuffle-block 4"])
def test_a_checkpoint_resumes_under_another_layout(order, tmp_path, capsys):
    """In the middle of an epoch."""
    words = (
        "--model mlp --dataset iris --dtype float64 --batch-size 25 --optimizer adamw --lr-schedule"
        f" constant{order}"
    )
    full, moved = tmp_path / "whole", tmp_path / "moved"
    simulated(f"{words} --max-steps 9 --out {full}", 1)
    pipeline = (
        # which stay among its options, and do nothing without
        "--pp 2 --pipeline interleaved --virtual-stages 2"
    )
    simulated(f"{words} --max-steps 3 {pipeline} --out {moved}", 2)
    simulated(f"--resume {moved} --max-steps 6 --pp 1 --tp 2", 2)
    text = (
        "the run had dp 1 x pp 2 x tp 1 and continues with dp 1 x pp 1 x tp 2: equal up to rounding"
    )
    assert text in capsys.readouterr().out
    simulated(f"--resume {moved} --max-steps 9 --tp 1", 1)
    assert_near(full, moved, "model", "optimizer")


def test_a_pipeline_that_was_what_is_missing_stays_one(tmp_path):
    """As a supervisor goes on, which says --dp auto."""
    simulated(
        "--model mlp --dataset iris --dp 2 --tp 1 --max-steps 4 --stop-after 2 --out"
        f" {tmp_path / 'run'}",
        4,
    )
    simulated(f"--resume {tmp_path / 'run'} --dp auto", 4)
    layout = json.loads((last_checkpoint(tmp_path / "run") / "state.json").read_text())["layout"]
    assert (layout["dp"], layout["pp"]) == (2, 2)


def test_a_damaged_checkpoint_is_passed_over_with_a_notice(tmp_path):
    words = "--model mlp --dataset iris --batch-size 64 --epochs 4 --save-every 1"
    assert train(tmp_path, f"{words} --out run").status == 0
    newest = last_checkpoint(tmp_path / "run")
    weights = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(weights[:-8])
    ending = train(tmp_path, "--resume run")
    assert ending.status == 0
    assert "an older checkpoint is used instead" in ending.output
    assert "resuming from run/checkpoints/step-00000006" in ending.output
    assert (newest / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    "words, text",
    [
        ("--resume run --model cnn", "the run has --model mlp, which cannot change to --model cnn"),
        (
            "--resume run --shuffle-block 8",
            "the run has no --shuffle-block, which cannot change to --shuffle-block 8",
        ),
        (
            "--resume run --sync bsp",
            "the run is trained by DiLoCo, and cannot change; leave --sync, --outer-lr and",
        ),
        (
            "--resume run --outer-lr 1 --outer-momentum 0",
            "the run is trained by DiLoCo, and cannot change; leave --sync",
        ),
        (
            "--resume plain --sync local --outer-lr 0.7",
            "the run is not trained by DiLoCo, and cannot change; leave --sync",
        ),
        ("--out run", "--out run already holds a run (config.json); continue it with --resume run"),
    ],
)
def test_runs_are_not_mixed_up(tmp_path, words, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "plain").mkdir()
    outer = ', "sync": "local", "outer_lr": 0.7, "outer_momentum": 0.9'
    for name, more in (("run", outer), ("plain", ', "outer_lr": 1.0')):
        (tmp_path / name / "config.json").write_text(f'{{"model": "mlp"{more}}}')
    ending = train(tmp_path, words)
    assert (ending.status, ending.output.count(text)) == (2, 1)
