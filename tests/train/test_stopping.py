"""A training that ends before its last step, by its evaluations or by a function of its user."""

from pathlib import Path

import numpy as np
import pytest

import nnmpi
from nnmpi import StopTraining, data, models, simulate
from nnmpi.base.errors import CheckpointError, UsageError
from nnmpi.base.files import read_json
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.compose.trainer import STOPPED
from nnmpi.train.cli import main, parse
from nnmpi.train.metrics import read_metrics
from tests.harness.refusals import refuses, usage_error
from tests.worker_options import work

WORDS = "--model mlp --dataset iris --eval-every 3steps --quiet --out run"
CALLBACKS = """
import nnmpi
def within(record):
    return "stop" if record["kind"] == "train" and record["global_step"] == 20 else ""
def typo(record):
    return "Stop"
def after(record):
    if record["kind"] == "eval" and record["global_step"] == 9:
        raise nnmpi.StopTraining
"""


def start(words, ranks=1):
    simulate(lambda group: main(words.split(), group), ranks)
    return dict(read_json(Path("run/finished.json")))


def patient(patience, gain):
    """Return the step after which the evaluations of the finished run had to stop it."""
    best, best_step = -1.0, 0
    for record in read_metrics(Path("run/metrics.jsonl")):
        if record["kind"] == "eval":
            if record["accuracy"] - best > gain:
                best, best_step = record["accuracy"], record["global_step"]
            if record["global_step"] - best_step >= 3 * patience:
                return int(record["global_step"])
    return 0


@pytest.mark.parametrize(
    "ranks, words",
    [(1, ""), (3, "--least-gain 0.2"), (2, "--pp 2"), (2, "--sync local"), (2, "--sync asp")],
)
def test_patience_ends_with_the_evaluations(ranks, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = start(f"{WORDS} --early-stopping 2 {words}", ranks)
    gain = 0.2 * ("gain" in words)
    assert 0 < end["step"] < 80 and end["step"] == patient(2, gain)
    best = end["step"] - 6
    assert end["stopped"] == f"as no evaluation was better than that after step {best}"
    assert nnmpi.load("run", best=True).step == best
    assert start("--resume run --quiet", 2)["step"] == end["step"]
    assert start("--resume run --quiet --early-stopping 3", ranks)["step"] == patient(3, gain)


def test_a_resumed_run_knows_its_patience(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = start(f"{WORDS} --early-stopping 2")
    Path("run").rename("full")
    start(f"{WORDS} --early-stopping 2 --stop-after 2")
    # the full run does not evaluate there
    refuses(CheckpointError, "has no best weights", lambda: nnmpi.load("run", best=True))
    start(f"--resume run --quiet --stop-after {end['step'] - 2}", 2)
    again = start("--resume run --quiet")
    assert (again["step"], again["stopped"]) == (end["step"], end["stopped"])


@pytest.mark.parametrize("name, step", [("within", 20), ("after", 9)])
@pytest.mark.parametrize("words", ["", "--sync ssp"])
def test_a_callback_stops_all_ranks_and_is_not_asked_for_later(
    name, step, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(CALLBACKS)
    for ranks in (1, 3):
        end = start(f"{WORDS} --callback own.py:{name} {words}", ranks)
        assert step <= end["step"] <= step + 3 * (name == "within" and ranks > 1)
        assert end["stopped"] == "as --callback asked"
        Path("own.py").rename("gone.py")
        assert nnmpi.load("run").predict(np.zeros((1, 4))).shape == (1, 3)
        usage_error("give --trust", start, "--resume run")
        Path("gone.py").rename("own.py")
        Path("run").rename(f"run{ranks}")
        usage_error(
            "returned 'Stop'; only 'stop' has a meaning",
            start,
            f"{WORDS} --callback own.py:typo {words}",
            ranks,
        )


@pytest.mark.parametrize("left, raises", [(None, False), (None, True), (1, False)])
@pytest.mark.both_worlds(max_size=3)
def test_progress_stops_a_worker_on_all_ranks(group, left, raises):
    """The last rank alone asks, early or at the last batch; they look ten times a second."""
    train, _ = data.load("iris")
    model = models.mlp((4,), 3).initialize(seed=0)
    slow = Slow(minimum_s=0.01)
    worker = work(model, group, lr=0.01, slow=slow)
    loader = data.Loader(train, group.size, group)
    batches = loader.batches_per_epoch
    first = 3 if left is None else batches - left

    def progress(item):
        if group.rank == group.size - 1 and getattr(item, "batch", 0) >= first:
            if raises:
                raise StopTraining
            return "stop"
        return ""

    report = worker.run(loader, 0, 0, batches, 0, lambda _: 0.01, progress)
    assert report.signal == STOPPED
    assert group.gather(report.batches) == [report.batches] * group.size
    assert first < report.batches <= min(first + 10, batches)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--early-stopping 0", "--early-stopping is 0; give a whole number, 1 or more"),
        ("--early-stopping 2 --eval-every 0steps", "and --eval-every 0 has none"),
        ("--least-gain 0.1", "--least-gain is of --keep-best and --early-stopping"),
        ("--least-gain -1", "--least-gain is -1.0; give a finite number, 0 or more"),
    ],
)
def test_what_cannot_stop_is_refused(words, sentence):
    with pytest.raises(UsageError) as caught:
        parse(words.split())
    assert sentence in str(caught.value)
