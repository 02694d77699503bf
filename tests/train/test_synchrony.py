"""Training out of step by the command: wrong options in a sentence, one worker is the serial run, odd sizes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from nnmpi.comm.group import Group
from nnmpi.errors import UsageError
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.train.jobs import ROOT

Train: TypeAlias = Callable[[str], Path]

BASE = "--model mlp --dataset iris --dtype float64 --batch-size 25"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--sync asp --servers 2", "servers 2 on 1 rank: every server is a rank of its own; give at most 1"),
        ("--sync asp --servers 0", "--servers is 0; give a whole number, 1 or more"),
        ("--sync ssp --staleness -1", "staleness is -1; give a whole number of at least 0"),
        ("--sync ssp --staleness x", "--staleness is x; it must be a whole number"),
        ("--sync local --local-steps 0", "local_steps is 0; give a whole number of at least 1"),
        ("--sync asp --straggler rank=2,factor=3", "a straggler has the rank 2, which is none of the workers"),
        ("--straggler rank=2,factor=3", "a straggler has the rank 2, which is none of the workers"),
        ("--sync asp --straggler rank=0,factor=0.5", "a straggler has the factor 0.5; give a finite number of at"),
        ("--sync asp --straggler fast", "straggler 'fast' has 'fast', which means nothing; give "),
        ("--sync gossip", "gossip on one rank has no neighbours to average with; start at least 2 ranks"),
        ("--sync asp --dedicated-servers", "with 1 dedicated server on 1 rank there is nobody to compute"),
        ("--dedicated-servers", "dedicated servers with bsp: there are none; give servers 1 or more, too"),
        ("--backup 1", "backup 1 with 1 worker: at least one gradient of each batch must be waited for"),
        ("--backup 1 --servers 2", "backup 1 with servers 2: which gradients come too late is decided at one"),
        ("--sync asp --backup 1", "backup 1 is for bsp, not asp; leave it out"),
        ("--sync asp --staleness 3", "--staleness 3 is for --sync ssp, not asp"),
        ("--sync ssp --local-steps 3", "--local-steps 3 is for --sync local, not ssp"),
        ("--sync local --servers 1", "servers 1 is for bsp or asp or ssp, not local; leave it out"),
        ("--sync asp --neighbours random", "neighbours random is for gossip, not asp; leave it out"),
        ("--sync local --staleness-lr", "--staleness-lr is for --sync asp or ssp, not local; leave it out"),
        ("--sync asp --pp 2", "--pp does not go with --sync asp: every worker has the whole model; leave it out"),
        ("--sync local --tp 2", "--tp does not go with --sync local: every worker has the whole model"),
        ("--servers 1 --fused-update", "--fused-update does not go with --sync bsp with --servers 1: weights are not"),
        ("--sync asp --reduction fixed", "--reduction does not go with --sync asp: sums depend on who comes first"),
        ("--sync asp --check-weights", "--check-weights does not go with --sync asp: workers' weights differ between"),
        ("--sync asp --allreduce ring", "--allreduce does not go with --sync asp: no gradients are summed by"),
        ("--sync asp --loader-threads 2", "--loader-threads does not go with --sync asp: a worker learns which"),
        ("--servers 1 --loader-threads 1", "--loader-threads does not go with --sync bsp with --servers 1: a worker"),
        ("--sync-warmup-epochs 1", "--sync-warmup-epochs does nothing for --sync bsp; leave it out"),
        ("--sync asp --sync-warmup-epochs -1", "--sync-warmup-epochs is -1; "),
        ("--sync asp --pace-ms -1", "--pace-ms is -1.0; "),
        ("--sync asp --network gbit=10", "--network is for --simulate; messages between real ranks take their time"),
        ("--sync never", "--sync "),
    ],
)
def test_wrong_use_is_one_sentence(group: Group, tmp_path: Path, words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        main(f"{BASE} {words} --out {tmp_path / 'run'}".split(), group)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    assert not list(tmp_path.iterdir())


def test_wrong_use_is_told_on_stderr_with_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nnmpi.train", *f"{BASE} --sync gossip --out run".split()]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    sentence = "gossip on one rank has no neighbours to average with; start at least 2 ranks\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
    assert not list(tmp_path.iterdir())


@pytest.mark.mpi
def test_wrong_use_is_the_same_sentence_on_all_ranks(group: Group, tmp_path: Path) -> None:
    count, ranks = group.size, f"{group.size} rank{'s' * (group.size > 1)}"
    wrong = {
        f"--sync ssp --servers {count + 1}": f"servers {count + 1} on {ranks}: every server is a rank of its own",
        f"--sync asp --servers {count} --dedicated-servers": f"with {count} dedicated server",
        f"--sync asp --straggler rank={count},factor=2": f"a straggler has the rank {count}, which is none",
        f"--backup {count}": f"backup {count} with {count} worker",
        "--sync asp --dedicated-servers --straggler rank=0,factor=2": (
            "with 1 dedicated server on 1 rank" if count == 1 else "a straggler has the rank 0, which is none"
        ),
    }
    for words, sentence in wrong.items():
        with pytest.raises(UsageError) as caught:
            main(f"{BASE} {words} --out {tmp_path / 'run'}".split(), group)
        assert str(caught.value).startswith(sentence), words
        assert len(set(group.gather(str(caught.value)))) == 1
    assert not list(tmp_path.iterdir())


def files(run: Path) -> list[bytes]:
    """Return the last checkpoint's arrays."""
    last = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    return [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def test_one_worker_out_of_step_is_the_serial_run(train: Train) -> None:
    """And its steps are as many, with a short segment at the end of each epoch and one at the end of the run."""
    words = f"{BASE} --epochs 3 --max-steps 13 --schedule constant --dropout 0.1"
    plain = train(words)
    for mode in ("--sync asp", "--sync ssp --staleness 0", "--servers 1", "--sync local"):
        asynchronous = train(f"{words} {mode} --save-steps 2")
        assert files(asynchronous) == files(plain), mode
        records = read_metrics(asynchronous / "metrics.jsonl")
        segments = [record["global_step"] for record in records if record["kind"] == "staleness"]
        assert segments == [2, 4, 5, 6, 8, 10, 12, 13]


@pytest.mark.parametrize(
    "words",
    [
        "--sync local --batch-size full --epochs 2 --save-steps 1 --log-every 1",
        "--sync asp --sync-warmup-epochs 99 --epochs 2 --batch-size 100",
        "--sync ssp --grad-accum 3 --epochs 1 --clip 0.1",
    ],
)
def test_odd_sizes_train(train: Train, words: str) -> None:
    records = read_metrics(train(f"--model mlp --dataset iris {words}") / "metrics.jsonl")
    assert [record["kind"] for record in records].count("test") == 1
    steps = [record["global_step"] for record in records]
    assert steps == sorted(steps)
    assert sum(record["kind"] == "train" and record["global_step"] == steps[-1] for record in records) <= 1
