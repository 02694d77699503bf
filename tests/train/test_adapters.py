"""Fine-tuning by adapters from the command line: what a run has, under every layout; resumed,
evaluated, merged; another base is refused.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nnmpi
from nnmpi.base.errors import CheckpointError
from nnmpi.commands.export import main as export
from nnmpi.train.cli import main
from tests.harness.commands import on_ranks
from tests.harness.refusals import data_error, refuses, usage_error

GPT = "--model gpt --dataset words.txt --dtype float64 --backend numpy --batch-size 5"
SIZE = "--layers 2 --features 12 --heads 2 --context 13"
LORA = f"{GPT} --pretrained base --lora 3 --lora-alpha 7 --lora-targets all-linear --dropout 0.1"
STEPS = "--lora-dropout 0.2 --epochs 9 --optimizer sgd --lr 0.5 --lr-schedule constant"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a base, which no test changes."""
    folder = tmp_path_factory.mktemp("base")
    words = np.random.default_rng(1).choice(["alpha", "be", "gamma", "o", "zeta"], 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("words.txt").write_text(" ".join(words))
        train("base", f"{GPT} {SIZE} --max-steps 2")
    return folder


@pytest.fixture(autouse=True)
def place(trained, tmp_path, monkeypatch):
    """Copy the base to where the test is."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def train(out, words, ranks=1):
    """Train on simulated ranks; return the lines of evaluations."""
    on_ranks(main, [*words.split(), "--out", out], ranks)
    lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    return [item["loss"] for item in lines if item["kind"] == "test"]


def arrays(run, file="model"):
    """Return those of a run's last checkpoint."""
    last = max((Path(run) / "checkpoints").glob("step-*"))
    return load_file(last / f"{file}.safetensors")


def spoil(folder):
    """Change one number of a model's files."""
    file = next(Path(folder).glob("*.safetensors"))
    values = load_file(file)
    name = min(values)
    values[name].flat[0] += 1e-3
    save_file(values, file, {"format": "pt"})


@pytest.mark.parametrize(
    "layout, ranks, low",
    [
        ("--zero 3", 3, ""),
        ("--tp 2 --pp 2 --split 4,4", 4, ""),
        ("--zero 3 --tp 2", 4, "--base-dtype bf16"),
        ("--pp 2 --split 4,4", 2, "--base-dtype bf16"),
    ],
)
def test_a_layout_has_the_serial_run_and_its_checkpoints(layout, ranks, low):
    """Which have adapters alone, and are resumed by another layout."""
    steps = f"{STEPS} --max-steps 6 {low}"
    expected = train("serial", f"{LORA} {steps}")
    assert train("run", f"{LORA} {steps} --stop-after 3 {layout}", ranks)
    on_ranks(main, "--resume run --stop-after 6 --tp 1 --pp 1")
    mine, serial = arrays("run"), arrays("serial")
    assert {name.rpartition(".")[2] for name in mine} == {"lora_a", "lora_b"}
    assert len(mine) == len(serial) == 16 and not Path("run/model").exists()
    for name, array in serial.items():
        np.testing.assert_allclose(mine[name], array, rtol=0, atol=1e-12, err_msg=name)
    assert expected and np.isclose(spread("run"), spread("serial"), rtol=1e-12)
    on_ranks(export, "run --merge")
    assert np.isclose(spread("run/merged"), spread("serial"), rtol=1e-12)


def spread(run):
    """Return the standard deviation of a model's logits, opened as a program does."""
    opened = nnmpi.load(run)
    return opened.outputs(np.arange(13)[None] % 5).std()


def test_merged_it_is_the_same_model_and_an_adapter_goes_on():
    train("run", f"{LORA} {STEPS} --max-steps 4")
    on_ranks(export, "run --merge")
    assert np.isclose(spread("run"), spread("run/merged"), rtol=1e-12)
    assert not np.isclose(spread("run"), spread("base"), rtol=1e-3)
    train("more", f"{GPT} --pretrained base --adapter run/adapter --max-steps 1 --lr 1e-30")
    assert spread("more") == spread("run")
    options = json.loads(Path("more/config.json").read_text())
    assert (options["lora"], options["lora_alpha"], options["lora_dropout"]) == (3, 7, 0.2)


def test_a_llama_has_adapters_by_its_layers_names():
    """Merged it is the same model, too."""
    llama = GPT.replace("--model gpt", "--model llama")
    train("llama", f"{llama} {SIZE} --kv-heads 1 --max-steps 1")
    tuned = f"{llama} --pretrained llama --lora 2 --lora-targets q,gate,down --lr 0.1"
    train("run", f"{tuned} --max-steps 3 --tp 2", 2)
    names = {name.rpartition(".")[0].partition(".")[2] for name in arrays("run")}
    assert names == {"attention.q", "mlp.gate", "mlp.down"}
    on_ranks(export, "run --merge")
    assert np.isclose(spread("run"), spread("run/merged"), rtol=1e-12)
    assert not np.isclose(spread("run"), spread("llama"), rtol=1e-3)


def test_a_base_in_bfloat16_stays_so():
    """In a run that goes on, and with its adapter."""
    low = "--base-dtype bf16"
    train("wide", f"{LORA} --max-steps 1")
    sentence = "the run has no --base-dtype, which cannot change to --base-dtype bf16"
    usage_error(sentence, on_ranks, main, f"--resume wide --max-steps 4 {low}")
    train("run", f"{LORA} {STEPS} --max-steps 2 {low}")
    words = f"{GPT} --pretrained base --adapter run/adapter --max-steps 1 --lr 1e-30"
    data_error("or on these in another --base-dtype", train, "x", words)
    train("more", f"{words} {low}")
    assert spread("more") == spread("run")
    usage_error("--base-dtype: give --lora RANK", train, "x", f"{GPT} --pretrained base {low}")


def test_another_base_is_refused():
    train("run", f"{LORA} {STEPS} --max-steps 2")
    shutil.copytree("base", "other")
    spoil("other/model")
    words = f"{GPT} --pretrained other --adapter run/adapter --max-steps 1"
    data_error("run/adapter was trained on other weights than .* other/model", train, "x", words)
    spoil("base/model")
    other = "adapters of another base"
    refuses(CheckpointError, other, nnmpi.load, "run")
    refuses(CheckpointError, other, on_ranks, main, "--resume run --max-steps 4")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (f"{GPT} --lora 2", "give --pretrained, too"),
        (f"{GPT} --pretrained base --lora-alpha 2", "--lora-alpha: give --lora RANK, too"),
        (f"{GPT} --pretrained base --lora 2 --lora-targets up", "no linear layer is called 'up'"),
        (f"{GPT} --pretrained base --lora 0", "--lora"),
        ("--model cnn --lora 2", "--lora is for --model gpt"),
    ],
)
def test_what_has_no_meaning_is_refused(words, sentence):
    usage_error(sentence, train, "x", words)


def test_a_run_of_adapters_is_no_base():
    train("run", f"{LORA} --max-steps 1")
    usage_error(
        "run has adapters alone; .* nnmpi export run --merge",
        train,
        "x",
        f"{GPT} --pretrained run --max-steps 1",
    )
    usage_error("run has adapters .* give --merge", on_ranks, export, "run")
    usage_error("no adapters to merge", on_ranks, export, "base --merge")
    on_ranks(export, "run --merge")
    usage_error("run/merged is there", on_ranks, export, "run --merge")
