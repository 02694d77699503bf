"""The command that writes: from a run's folder, under every layout the same; and what it cannot do,
in a sentence.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nnmpi import NnmpiError
from nnmpi.base.errors import CheckpointError
from nnmpi.commands.generate import main, parse
from nnmpi.models.pretrained import GPTSize, read_size
from nnmpi.train.cli import main as train
from tests.harness.commands import on_ranks
from tests.harness.refusals import refuses, usage_error
from tests.harness.slow import MORE_LAYOUTS, once_more

TOKENS, CONTEXT = 17, 12


def text(folder):
    """Return a data set of tokens that count on."""
    steps = np.random.default_rng(0).integers(1, 3, (60, CONTEXT + 1))
    tokens = np.cumsum(steps, 1) % TOKENS
    np.savez(folder / "tokens.npz", x=tokens[:, :-1].astype(np.uint16), y=tokens[:, 1:])
    return folder / "tokens.npz"


def run(folder, model, *more):
    """Return the folder of a short run."""
    out = folder / f"run-{model}-{len(more)}"
    words = (
        f"--model {model} --dataset {text(folder)} --epochs 1 --features 16 --dtype float64 --out"
        f" {out}".split()
    )
    on_ranks(train, [*words, *more])
    return out


def written(words, ranks, capfd, *prompt):
    """Return the first line that the command prints."""
    capfd.readouterr()
    more = ["--prompt", *prompt] if prompt else []
    on_ranks(main, [*words.split(), *more], ranks)
    return capfd.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    "model", [once_more(name, name != "gpt", MORE_LAYOUTS) for name in ("gpt", "llama", "lstm")]
)
def test_every_layout_writes_the_same(tmp_path, capfd, model):
    """Past the context, too."""
    folder = run(tmp_path, model)
    words = f"{folder} --tokens 20 --seed 3 --top-k 9 --backend numpy"
    result = [
        written(words + layout, ranks, capfd, "3 4")
        for ranks, layout in (
            (1, ""),
            (2, " --pp 2"),
            (2, " --tp 2"),
            (4, " --pp 2 --tp 2"),
            (2, ""),
        )
    ]
    assert len(result[0].split()) == 22
    assert result[0].startswith("3 4 ")
    assert result == result[:1] * 5


def test_a_run_of_gpt_leaves_and_takes_hugging_faces_files(tmp_path, capfd):
    """What one run wrote is where another begins; then the first is gone."""
    folder, out = run(tmp_path, "gpt", "--context", "12"), tmp_path / "next"
    assert read_size(folder / "model") == GPTSize(TOKENS, CONTEXT, 16, 2, 4)
    assert written(f"{folder / 'model'} --tokens 9", 2, capfd, "3 4") == written(
        f"{folder} --tokens 9", 1, capfd, "3 4"
    )
    words = (
        f"--model gpt --pretrained {folder} --dataset {text(tmp_path)} --epochs 1 --dtype float64"
        f" --out {out}"
    )
    on_ranks(train, words)

    def first(run_folder):
        lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
        return float(next(line["loss"] for line in lines if "loss" in line))

    assert first(out) < first(folder)
    shutil.rmtree(folder / "model")
    usage_error(
        f"--pretrained {folder} is a run without a model",
        lambda: on_ranks(train, [*words.split()[:-1], str(tmp_path / "other")]),
    )
    usage_error(
        "a model in Hugging Face's files has no best weights; leave --best out",
        written,
        f"{out / 'model'} --prompt 3 --best",
        1,
        capfd,
    )
    shutil.rmtree(folder)
    assert len(written(f"{out} --tokens 9", 1, capfd, "3 4").split()) == 11


def test_a_folder_says_which_model_it_has_and_where_a_text_ends(tmp_path, capfd):
    """A Llama is trained on, under another layout, without --model; a run of it begins there."""
    folder, out = run(tmp_path, "llama", "--kv-heads", "2", "--tied"), tmp_path / "next"
    size = read_size(folder / "model")
    assert (size.heads, size.kv_heads, size.hidden, size.tied) == (4, 2, 48, True)
    text_of = f"{folder / 'model'} --tokens 9 --temperature 0"
    whole = written(text_of, 2, capfd, "3 4").split()
    words = f"--pretrained {folder} --dataset {text(tmp_path)} --epochs 1 --dtype float64"
    on_ranks(train, f"{words} --tp 2 --max-steps 1 --out {out}", 2)
    on_ranks(train, f"--resume {out} --max-steps 2 --tp 1 --sp 2", 2)
    assert read_size(out / "model") == size
    usage_error(
        "is a llama, not a gpt; leave --model out",
        lambda: on_ranks(train, f"{words} --model gpt --out {tmp_path / 'other'}"),
    )
    usage_error(
        "--kv-heads 4 differs from the 2 of --pretrained",
        lambda: on_ranks(train, f"{words} --kv-heads 4 --out {tmp_path / 'other'}"),
    )
    (folder / "model" / "generation_config.json").write_text(f'{{"eos_token_id": [{whole[4]}]}}')
    assert written(text_of, 1, capfd, "3 4").split() == whole[: whole.index(whole[4], 2)]


def test_what_cannot_be_written(tmp_path, capfd, monkeypatch):
    """A sentence each."""
    folder = run(tmp_path, "gpt")
    for words, sentence in (
        (f"{folder}", "the prompt is empty"),
        (f"{folder} --prompt one", "but the run has no tokenizer; give token numbers"),
        (f"{folder} --prompt 17", r"token 17 is not in the model's vocabulary, 0\.\.16"),
        (f"{folder} --top-p 0", "--top-p is 0.0; give a number above 0, up to 1"),
        (f"{folder} --tokens 0", "--tokens is 0"),
        (f"{tmp_path} --prompt 1", f"^{tmp_path}: there is no run"),
        ("--prompt 1", "give RUN first and then the options"),
        (f"{folder} --prompt 1 --sp 2", "is generated one position at a time; leave --sp out"),
    ):
        usage_error(sentence, written, words, 1, capfd)
    counted = run(tmp_path, "gpt", *["--experts", "3", "--experts-capacity", "2.5"])
    for ranks, layout in ((1, ""), (2, " --pp 2")):
        usage_error(
            "to generate, train without a capacity",
            written,
            f"{counted}{layout}",
            ranks,
            capfd,
            "3",
        )
    usage_error(
        "the prompt has 13 tokens, but the model sees at most 12; shorten it",
        lambda: written(str(folder), 1, capfd, " ".join(["1"] * 13)),
    )
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        refuses(
            NnmpiError,
            "could not be written: No space left",
            on_ranks,
            main,
            [str(folder), "--prompt", "1"],
        )
    (folder / "checkpoints").rename(folder / "gone")
    refuses(CheckpointError, "has no checkpoint yet", written, f"{folder} --prompt 1", 1, capfd)
    words = f"--model mlp --dataset iris --max-steps 1 --out {tmp_path / 'classes'}"
    on_ranks(train, words)
    usage_error(
        "is a run of model mlp; only lstm, gpt or llama can generate",
        written,
        f"{tmp_path / 'classes'} --prompt 1",
        1,
        capfd,
    )


def test_options():
    folder, options, place = parse(["runs/x", "--prompt", "Once upon", "--top-k", "5", "--tp", "2"])
    assert (folder, options.prompt, options.top_k, place.tp) == (Path("runs/x"), "Once upon", 5, 2)


def test_a_text_in_and_a_text_out(tmp_path, capfd):
    """By the tokenizer that the run keeps; of a folder of another run it would be another."""
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 60)
    out = tmp_path / "run"
    words = (
        f"--model gpt --dataset {tmp_path / 'text.txt'} --context 8 --features 12 --epochs 3 --lr"
        f" 0.01 --out {out}"
    )
    on_ranks(train, words)
    line = written(f"{out} --tokens 9 --temperature 0", 2, capfd, "to be")
    assert line.startswith("to be")
    assert set(line) <= set("to be or not to be")
    usage_error("--prompt: the tokenizer has no 'Z'", written, str(out), 1, capfd, "Zebra")
