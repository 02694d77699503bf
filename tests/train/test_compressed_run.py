"""The train command with compressed gradients, and with a sum of one's own."""

from pathlib import Path

import pytest

from nnmpi.base.errors import LayoutError, UsageError
from nnmpi.train.cli import main as train
from nnmpi.train.cli import parse
from nnmpi.train.metrics import read_metrics
from tests.harness.commands import on_ranks
from tests.harness.refusals import refuses, usage_error

OPTIONS = "--dataset iris --model mlp --hidden 8 --batch-size 16 --epochs 4 --log-every 1"
SMALL = OPTIONS.split()
SIGNS = """
import numpy
from nnmpi.parallel import GradientSum


class Signs(GradientSum):
    per_replica = ("rest",)

    def __init__(self, group, gradients):
        super().__init__(group, gradients)
        self.state["rest"] = {name: 0 * grad for name, grad in gradients.items()}

    def sum(self, gradients):
        for name, grad in gradients.items():
            rest = self.state["rest"][name]
            rest += grad
            size, signs = abs(rest).mean(keepdims=True), numpy.sign(rest).astype("int8")
            rest -= size * signs
            grad[...] = sum(a * b for a, b in zip(self.gather(size), self.gather(signs)))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("signs.py").write_text(SIGNS)


def losses(run):
    return [item["loss"] for item in read_metrics(Path(run) / "metrics.jsonl") if "loss" in item]


@pytest.mark.parametrize(
    "words", ["--compress topk:0.2", "--compress fp16", "--sum signs.py:Signs"]
)
def test_a_run_is_resumed_to_the_same_losses_and_on_other_ranks(words):
    words = [*SMALL, *words.split()]
    on_ranks(train, [*words, "--out", "whole"], 2)
    for ranks in (2, 3):
        out = f"stopped-{ranks}"
        on_ranks(train, [*words, "--out", out, "--stop-after", "9"], 2)
        on_ranks(train, ["--resume", out, "--stop-after", "99", "--trust"], ranks)
        assert len(losses(out)) == len(losses("whole"))
    assert losses("stopped-2") == losses("whole")
    assert losses("stopped-3")[:9] == losses("whole")[:9]
    assert losses("stopped-3")[-1] == pytest.approx(losses("whole")[-1], rel=0.2)


def test_the_header_says_that_digits_differ():
    on_ranks(train, [*SMALL, "--compress", "topk:0.2", "--out", "run"], 2)
    text = " ".join(Path("run/console.txt").read_text().split())
    assert "compressed (topk:0.2, error feedback), so digits differ from the serial run" in text
    on_ranks(train, [*SMALL, "--sum", "signs.py:Signs", "--out", "own"], 2)
    assert "by Signs, a way of your own" in Path("own/console.txt").read_text()


def test_what_it_cannot_mix_with_is_refused():
    for words in ("--zero 1", "--reduction fixed", "--allreduce ring", "--sum signs.py:Signs"):
        refuses(LayoutError, "cannot be combined with", parse, f"--compress fp16 {words}".split())
    usage_error(
        "--compress cannot be combined with --sync asp",
        parse,
        ["--compress", "fp16", "--sync", "asp"],
    )
    usage_error("--compress is fp8; give fp16", parse, ["--compress", "fp8"])
    usage_error(
        "--sum signs.py:Nothing: signs.py has no function 'Nothing'",
        on_ranks,
        train,
        [*SMALL, "--sum", "signs.py:Nothing", "--out", "none"],
        2,
    )
    on_ranks(train, [*SMALL, "--compress", "fp16", "--out", "run", "--stop-after", "3"], 2)
    with pytest.raises(UsageError, match="--compress"):
        on_ranks(train, ["--resume", "run", "--compress", "bf16"], 2)
