"""--profile: its rows add up to the step, and the training is what it is without."""

import re

import pytest

from nnmpi.train.cli import main
from tests.harness.commands import on_ranks
from tests.harness.refusals import usage_error

WORDS = "--dataset digits --epochs 1"
USUAL = "--model mlp", "--batch-size 64"
FACTORS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def trained(capsys, words, ranks):
    usual = [option for option in USUAL if option.split()[0] not in words]
    on_ranks(main, " ".join([WORDS, *usual, words]), ranks)
    return capsys.readouterr().out


def rows_of(text):
    """Return the seconds of each row, forward and backward in all, by its name."""
    table = text[text.index("  layer ") :].partition("\nepoch")[0].splitlines()[1:]
    found = [re.fullmatch(r"  (.+?)  .*?(-?[\d.]+) (s|ms|us) +-?[\d.]+ %", line) for line in table]
    return {row[1].strip(): float(row[2]) * FACTORS[row[3]] for row in found}


@pytest.mark.parametrize(
    "words, ranks, layers",
    [
        ("", 1, 5),
        ("", 2, 5),
        ("--pp 2 --microbatches 2", 2, 2),
        ("--dp 2 --zero 3", 2, 5),
        ("--model cnn --batch-size 16 --max-steps 14 --activation-memory least", 1, 5),
    ],
)
def test_the_rows_add_up_to_the_step(words, ranks, layers, capsys):
    text = trained(capsys, f"{words} --profile", ranks)
    rows = rows_of(text)
    step_s = rows.pop("step")
    assert abs(sum(rows.values()) - step_s) < 0.03 * step_s
    assert sum(name[0].isdigit() for name in rows) >= layers and rows["the rest"] >= 0
    assert ("loss" in rows) == ("pp" not in words)  # which is on the last rank
    assert ("recomputed layers" in rows) == ("memory" in words)
    assert all(len(line) <= 80 for line in text.splitlines())
    plain = trained(capsys, words, ranks)
    for numbers in (r"epoch 1/1: (.*); \d+ samples", r"\ntest (.*)"):
        assert re.findall(numbers, text) == re.findall(numbers, plain)


def test_a_run_of_too_few_steps_says_so(capsys):
    assert "no profile: the first 3 steps" in trained(capsys, "--profile --max-steps 3", 1)
    assert "the mean of 1 step;" in trained(capsys, "--profile --max-steps 4", 1)


@pytest.mark.parametrize("words", ["--sync local --local-steps 16", "--sync gossip"])
def test_who_watches_ranks_that_meet_seldom_does_not_let_them_meet(words, capsys, tmp_path):
    """A trace of the first 20 steps ends no segment, and a profile of single steps is refused."""
    usage_error("--profile measures single steps", on_ranks, main, f"{WORDS} {words} --profile", 2)
    losses = [
        re.findall(r"\ntest (.*)", trained(capsys, f"--batch-size 32 {words} {more}", 2))
        for more in ("", f"--trace --out {tmp_path / 'run'}")
    ]
    assert losses[0] == losses[1] and losses[0]
