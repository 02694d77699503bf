"""Training out of step by the command: wrong options in a sentence, one worker is the serial run,
odd sizes.
"""

import pytest

from nnmpi.base.errors import UsageError
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.train.jobs import arrays

BASE = "--model mlp --dataset iris --dtype float64 --batch-size 25"


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--sync ssp --staleness -1", "--staleness is -1"),
        ("--sync ssp --staleness x", "--staleness is x"),
        ("--sync local --local-steps 0", "--local-steps is 0"),
        ("--sync local --outer-momentum 1", "--outer-momentum is 1"),
        ("--sync asp --slow rank=2,factor=3", "slow: rank 2 does not exist"),
        ("--slow fast", "slow: 'fast' is unknown"),
        ("--sync gossip", "gossip on 1 rank has no neighbours"),
        ("--sync asp --staleness 3", "--staleness is for --sync ssp, not for asp"),
        (
            "--sync ssp --local-steps 3",
            "--local-steps is for --sync local or slowmo or FILE.py:NAME, not for ssp",
        ),
        ("--sync asp --pp 2", "--pp cannot be combined with --sync asp"),
        ("--sync local --tp 2", "--tp cannot be combined with --sync local"),
        ("--sync asp --reduction fixed", "--reduction cannot be combined with --sync asp"),
        ("--sync asp --allreduce ring", "--allreduce cannot be combined with --sync asp"),
        ("--sync asp --network gbit=10", "--network is for --simulate"),
        ("--sync never", "--sync "),
    ],
)
def test_wrong_use_is_one_sentence(group, tmp_path, words, sentence):
    with pytest.raises(UsageError) as caught:
        main(f"{BASE} {words} --out {tmp_path / 'run'}".split(), group)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    assert not list(tmp_path.iterdir())


def test_one_worker_out_of_step_is_the_serial_run(train):
    """And its steps are as many, with a short segment at the end of each epoch and one at the end
    of the run.
    """
    words = f"{BASE} --epochs 3 --max-steps 13 --lr-schedule constant --dropout 0.1 --clip 0.5"
    plain = train(words)
    for mode in ("--sync asp", "--sync ssp --staleness 3", "--sync local"):
        asynchronous = train(f"{words} {mode} --save-every 2steps")
        assert arrays(asynchronous) == arrays(plain), mode
        records = read_metrics(asynchronous / "metrics.jsonl")
        segments = [record["global_step"] for record in records if record["kind"] == "staleness"]
        assert segments == [2, 4, 5, 6, 8, 10, 12, 13]


@pytest.mark.parametrize(
    "words",
    [
        "--sync local --batch-size full --epochs 2 --save-every 1steps --log-every 1",
        "--sync asp --epochs 2 --batch-size 100",
        "--sync ssp --microbatches 3 --epochs 1 --clip 0.1",
    ],
)
def test_odd_sizes_train(train, words):
    records = read_metrics(train(f"--model mlp --dataset iris {words}") / "metrics.jsonl")
    assert [record["kind"] for record in records].count("test") == 1
    steps = [record["global_step"] for record in records]
    assert steps == sorted(steps)
    assert (
        sum(record["kind"] == "train" and record["global_step"] == steps[-1] for record in records)
        <= 1
    )
