"""Training on texts from the command line: equal where ranks share sequences, resumed to the same
bits, and what is refused.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from nnmpi import NnmpiError
from nnmpi.data import load_tokenizer
from nnmpi.train.cli import main
from tests.harness.commands import on_ranks
from tests.harness.refusals import data_error, refuses, usage_error
from tests.train.jobs import train

GPT = "--model gpt --layers 2 --features 12 --heads 2 --context 13"
LSTM = "--model lstm --layers 1 --features 11 --context 17 --text-samples sentences"
SHORT = (
    "--max-steps 4 --batch-size 5 --epochs 3 --log-every 1 --eval-every 3steps --warmup-epochs 0 "
    "--optimizer sgd --lr 0.1 --dtype float64 --backend numpy"
)
KINDS = ("train", "eval", "test")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(1)
    words = ["alpha", "be", "gamma", "o", "epsilon", "zeta"]
    lines = [" ".join(random.choice(words, random.integers(1, 5))) for _ in range(23)]
    (tmp_path / "words.txt").write_text("\n".join(lines))
    rows = "".join(f'"What is {i}\n and {i}?",{2 * i},x\n' for i in range(12))
    (tmp_path / "sums.csv").write_text(f"problem,solution,more\n{rows}")
    return tmp_path


def run(words, name, ranks=1):
    """Train on simulated ranks; return the run's folder."""
    on_ranks(main, [*words.split(), "--out", name], ranks)
    return Path(name)


def records(folder, *kinds):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [item for item in map(json.loads, lines) if item["kind"] in kinds]


def weights(folder):
    last = max((folder / "checkpoints").glob("step-*"))
    return {name: x for file in last.glob("*.safetensors") for name, x in load_file(file).items()}


def check_equal(found, expected):
    for first, other in zip(records(found, *KINDS), records(expected, *KINDS), strict=True):
        for key in ("loss", "accuracy", "grad_norm", "perplexity"):
            assert first.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-11), (key, first)
    theirs = weights(expected)
    for name, values in weights(found).items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-11, atol=1e-12, err_msg=name)


def test_ranks_that_share_sequences_under_mpirun_give_the_serial_run(place):
    """Keys and values go round in MPI's messages, and the run goes on with whole sequences."""
    words = f"{GPT} {SHORT} --dataset sums.csv --text-columns problem,solution --save-every 2steps"
    job = train(place, f"{words} --sp 2 --out job", 2)
    assert job.status == 0, job.output
    assert "dp 1 x pp 1 x tp 1 x sp 2 (ulysses)" in job.output
    printed = " ".join(job.output.split())
    assert "blocks of 13 tokens, of a vocabulary of" in printed and "tokens/s" in printed
    full = run(words, "whole")
    check_equal(Path("job"), full)
    shutil.rmtree(max(Path("job/checkpoints").glob("step-*")))
    on_ranks(main, "--resume job --sp 1 --pp 2", 2)
    check_equal(Path("job"), full)


@pytest.mark.parametrize("model", [GPT, LSTM], ids=["gpt", "lstm"])
def test_a_run_goes_on_to_the_same_bits(model):
    words = f"{model} {SHORT} --dataset words.txt --save-every 3steps --dropout 0.1"
    full = run(words, "whole", 2)
    shutil.copytree(full, "stopped")
    shutil.rmtree(max(Path("stopped/checkpoints").glob("step-*")))
    on_ranks(main, "--resume stopped", 2)
    text = [(item["kind"], item["global_step"], item["loss"]) for item in records(full, *KINDS)]
    assert [
        (item["kind"], item["global_step"], item["loss"])
        for item in records(Path("stopped"), *KINDS)
    ] == text
    assert [(kind, step) for kind, step, _ in text[:4]] == [
        ("train", 1),
        ("train", 2),
        ("train", 3),
        ("eval", 3),
    ]
    np.testing.assert_equal(weights(Path("stopped")), weights(full))


def test_the_tokenizer_is_kept_and_must_stay(place):
    folder = run(f"{GPT} {SHORT} --dataset words.txt --save-every 2steps", "run")
    assert json.loads((folder / "config.json").read_text())["tokenizer"] == "characters"
    saved = load_tokenizer(folder / "tokenizer")
    assert saved.decode(saved.encode("alpha be")) == "alpha be"
    (place / "words.txt").write_text((place / "words.txt").read_text().replace("z", "Z"))
    data_error(
        "a run on different data, but the samples, labels or weights have changed since",
        on_ranks,
        main,
        "--resume run",
    )


def test_fine_tuning_takes_the_tokenizer_of_what_it_begins_with(place):
    run(f"{GPT} {SHORT} --dataset words.txt --tokenizer bytes", "first")
    words = (
        f"--model gpt --pretrained first {SHORT} --dataset sums.csv --text-columns problem,solution"
    )
    second = run(words, "second")
    assert load_tokenizer(second / "model").name == "bytes"
    usage_error(
        "--tokenizer characters is not the tokenizer in --pretrained first/model",
        run,
        f"{words} --tokenizer characters",
        "third",
    )


def test_perplexities_and_tokens_are_reported():
    folder = run(f"{LSTM} {SHORT} --dataset words.txt", "run")
    for item in records(folder, "train", "eval", "test"):
        assert item["perplexity"] == pytest.approx(np.exp(item["loss"]))
        assert 0 <= item["accuracy"] <= 1
        assert item["tokens_per_second"] > item["samples_per_second"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--model gpt --dataset missing.txt", "no such file or folder"),
        (
            "--model gpt --dataset digits",
            "--model gpt cannot be trained on digits, whose samples are not text",
        ),
        (
            "--model cnn --dataset paradise-lost",
            "--model cnn cannot be trained on paradise-lost, whose samples are tokens",
        ),
        (f"{GPT} --dataset words.txt --text-columns a", "has no columns"),
        (
            f"{GPT} --dataset sums.csv --text-columns problem,answer",
            "must have one column .answer.",
        ),
        (
            f"{GPT} --dataset sums.csv",
            "--model gpt needs a text; name its columns with --text-columns",
        ),
        (
            f"{GPT} --dataset words.txt --tokenizer nothing",
            "tokenizer nothing: there is no such file or folder",
        ),
        ("--dataset digits --tokenizer bytes", "--tokenizer is for texts"),
        ("--dataset digits --text-samples sentences", "--text-samples is for texts"),
        (f"{GPT} --dataset paradise-lost --data-dir .", "leave --data-dir out"),
        (
            "--model gpt --pretrained . --dataset words.txt",
            r"--pretrained \. has no config\.json; give a finished run",
        ),
        ("--model gpt --dataset words.txt --context 300", "give a smaller context"),
        (
            "--model small.py:build --dataset paradise-lost --tokenizer bytes",
            "paradise-lost has 257 tokens, but .* 9 rows",
        ),
        (f"{GPT} --dataset words.txt --partition label", "has several labels; use iid"),
        ("--model gpt --dataset bad.txt", "not UTF-8 text"),
        (
            f"{LSTM} --dataset words.txt --sp 3",
            "--model lstm needs them one after another; leave --sp out, or use --model",
        ),
    ],
)
def test_what_does_not_fit_is_said_once(place, words, sentence):
    (place / "bad.txt").write_bytes(b"caf\xe9 au lait")
    (place / "small.py").write_text(
        "from nnmpi import nn\n\ndef build(shape, classes):\n    return nn.Embedding(9, 2)\n"
    )
    refuses(NnmpiError, sentence, run, f"{words} {SHORT}", "run", 3)
