"""Conversations: a chat template makes them texts, and losses count what the assistant says."""

import json

import numpy as np
import pytest

from nnmpi.commands.generate import main as generate
from nnmpi.data import IGNORED, TextSource
from nnmpi.data.chat import read_template
from nnmpi.data.text import load_text, prepare_tokens
from nnmpi.data.tokenizer import ByteTokenizer, load_tokenizer
from nnmpi.train.cli import main as train
from tests.harness.commands import on_ranks
from tests.harness.refusals import data_error, usage_error

pytest.importorskip("jinja2")

CHATML = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("no such role") }}
    {%- endif %}
    {{- "<|" + message["role"] + "|>\\n" + message["content"] | trim + "<|end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant|>\\n" }}
{%- endif %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi\nthere "},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Grüße."},
]
BOS = {"__type": "AddedToken", "content": "<s>", "special": True}
SAID = "Hello!<|end|>\nGrüße.<|end|>\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a tokenizer of bytes and a chat template."""
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path / "cache"))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    ByteTokenizer().save(folder)
    templated(folder, CHATML)
    return folder


def templated(folder, template):
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text()) | {"bos_token": BOS}
    file.write_text(json.dumps(values | {"chat_template": template}))


def talks(folder, *rows):
    file = folder.parent / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def source_of(folder, *rows, sentences=True):
    return TextSource(talks(folder, *rows), str(folder), ("messages",), sentences)


@pytest.mark.parametrize("where", ["config", "list", "file"])
def test_losses_count_what_the_assistant_says(folder, where):
    """In sentences and in blocks, of every document; the number of targets is that of labels."""
    if where == "list":
        templated(
            folder, [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]
        )
    elif where == "file":
        templated(folder, "another")
        (folder / "chat_template.jinja").write_text(CHATML)
    for sentences, context in ((True, 400), (True, 31), (False, 16)):
        source = source_of(folder, *[TALK] * 5, sentences=sentences)
        prepare_tokens(source)
        asked = 0
        for part in load_text(source, context):
            rows = np.arange(len(part))
            x, y = part.rows(rows), part.labels(rows)
            np.testing.assert_array_equal((y != IGNORED).sum(1), part.targets)
            said = y[y != IGNORED]
            text = bytes(said.tolist()).decode()
            if context == 400:
                assert text == SAID * len(part)
                whole = bytes(x[0][x[0] < 256].tolist()).decode()
                assert whole.startswith(
                    "<s><|system|>\nBe brief.<|end|>\n<|user|>\nHi\nthere<|end|>"
                )
            asked += len(text.encode())
        assert asked == 5 * len(SAID.encode())


def test_transformers_makes_the_same_texts(folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    segments = read_template(str(folder)).segments(TALK)
    assert "".join(text for text, _ in segments) == tokenizer.apply_chat_template(
        TALK, tokenize=False
    )


def test_a_model_is_trained_on_them(folder, tmp_path, capfd):
    words = (
        f"--model llama --features 16 --layers 1 --context 48 --text-columns messages --tokenizer"
        f" {folder} --dataset {talks(folder, *[TALK] * 6)} --text-samples sentences --batch-size 4"
        f" --epochs 1 --out {tmp_path / 'run'}"
    )
    on_ranks(train, words, 2)
    assert "test accuracy" in capfd.readouterr().out
    # its model speaks with the same template and tokens, here and in transformers
    for saved in ("model", "tokenizer"):
        config = json.loads((tmp_path / "run" / saved / "tokenizer_config.json").read_text())
        assert config["chat_template"] == CHATML and config["bos_token"] == BOS
    for run in ("run", "run/model"):
        on_ranks(generate, f"{tmp_path / run} --chat --prompt Hi --tokens 3 --temperature 0")
    first, second = capfd.readouterr().out.splitlines()[::2]
    assert first == second and "user" not in first
    other = tmp_path / "other"
    other.mkdir()
    load_tokenizer(tmp_path / "run" / "model").save(other)
    assert read_template(str(other)).render(TALK) == read_template(str(folder)).render(TALK)


def test_a_text_without_a_template_is_no_answer(tmp_path):
    words = "--model gpt --features 8 --heads 2 --layers 1 --dataset paradise-lost --max-steps 1"
    on_ranks(train, f"{words} --out {tmp_path / 'run'}")
    usage_error("has no chat template", on_ranks, generate, f"{tmp_path / 'run'} --chat")


@pytest.mark.parametrize(
    "template, words",
    [
        ("{% generation %}{{ x }}{% endgeneration %}", "needs more than Jinja .*unknown tag"),
        ("{{ strftime_now('%Y') }}", "needs more than Jinja .*strftime_now"),
        ("{{ messages[0].__class__.__mro__ }}", "needs more than Jinja .*unsafe"),
        ("{{ messages | length }}", "in another way once others follow"),
        (3, "has no chat template"),
    ],
)
def test_templates_that_are_refused(folder, template, words):
    templated(folder, template)
    usage_error(words, lambda: prepare_tokens(source_of(folder, TALK)))


@pytest.mark.parametrize(
    "messages, words",
    [
        ([{"role": "tool", "content": "x"}, TALK[2]], "its chat template says: no such role"),
        ([{"role": "user", "content": "x"}], "line 1: no message has the role assistant"),
        ([{"role": "user", "content": ["x"]}], "line 1: messages is .*; give a list of"),
        ([], r"line 1: messages is \[\]"),
    ],
)
def test_conversations_that_are_refused(folder, messages, words):
    data_error(words, lambda: prepare_tokens(source_of(folder, messages)))


def test_a_tokenizer_without_a_template(folder):
    source = TextSource(talks(folder, TALK), "bytes", ("messages",), True)
    usage_error("tokenizer bytes has no chat template", prepare_tokens, source)
