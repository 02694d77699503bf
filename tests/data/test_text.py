"""Texts: what is read and what is to be predicted, in blocks and sentences, from files of every
kind.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nnmpi import NnmpiError
from nnmpi.base.errors import UsageError
from nnmpi.data import Loader, TextSource, load, load_text, load_tokenizer, prepare_tokens
from nnmpi.data import text as texts
from nnmpi.data.catalogue import find_text
from nnmpi.data.readers import read_documents
from nnmpi.data.sampler import POOL, by_length
from nnmpi.data.tokenizer import ByteTokenizer, CharacterTokenizer, LibraryTokenizer
from tests.data.locked import lock
from tests.harness.refusals import data_error, refuses, usage_error

LINES = [
    "to be",
    "or",
    "not to be that",
    "",
    "is the question whether it is",
    "nobler",
    "in the mind",
    "to suffer",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def txt(tmp_path):
    return write(tmp_path / "play.txt", "\n".join(LINES) + "\n")


def write(path, text):
    path.write_bytes(text.encode())
    return path


def loaded(path, context, **options):
    source = TextSource(str(path), **options)
    prepare_tokens(source)
    return load_text(source, context, seed=3, test_fraction=0.3)


def first_batch(text):
    return next(iter(Loader(text, 99, shuffle=False, workers=0).epoch(0)))


def predicted(text, batch):
    """Yield what is read and what is predicted, where something is."""
    end = text.tokenizer.end
    for x, y in zip(batch.x, batch.y, strict=True):
        saved = y >= 0
        assert not saved[saved.sum() :].any() and (x[~saved] == end).all()  # padding comes last
        yield (
            text.tokenizer.decode(x[saved]),
            "".join("#" if i == end else text.tokenizer.decode([i]) for i in y[saved]),
        )


@pytest.mark.parametrize("context", [3, 7, 40])
def test_blocks_predict_every_token_but_the_first_once(txt, context):
    full = "\n".join(LINES) + "\n"
    train, test = loaded(txt, context) if context < 40 else loaded(txt, 20)
    text = ""
    for part in (train, test):
        batch = first_batch(part)
        assert (batch.x.dtype, batch.x.shape) == (np.int64, (len(part), part.context))
        pairs = list(predicted(part, batch))
        read, expected = "".join(x for x, _ in pairs), "".join(y for _, y in pairs)
        assert read[1:] == expected[:-1]
        text += read[:1] + expected
        assert batch.own_targets == batch.global_targets == len(expected)
        assert {len(y) for _, y in pairs[:-1]} <= {part.context}
    assert text == full + "#"


def test_documents_are_dealt_to_training_and_test(tmp_path):
    rows = [
        {"problem": f"add {i} and {i}", "solution": f"it is\r\n{2 * i}", "other": 3}
        for i in range(11)
    ]
    path = write(tmp_path / "sums.jsonl", "\n\n".join(map(json.dumps, rows)))
    train, test = loaded(path, 5, columns=("problem", "solution"), tokenizer="bytes")
    documents = []
    for part in (train, test):
        batch = first_batch(part)
        first = part.tokenizer.decode(batch.x[0, :1])
        full = first + "".join(y for _, y in predicted(part, batch))
        assert full.endswith("#")
        documents.append(full[:-1].split("#"))
    assert [len(document) for document in documents] == [8, 3]
    assert sorted(sum(documents, [])) == sorted(
        f"add {i} and {i}\nit is\r\n{2 * i}" for i in range(11)
    )


def test_a_table_gives_the_columns_that_are_asked_for(tmp_path):
    path = write(tmp_path / "t.csv", 'a,b,c\n1,"x, ""y""\n\nz",é\n\n2,w,ü\n')
    assert list(read_documents(path, ("c", "b"))) == [('é\nx, "y"\n\nz', True), ("ü\nw", True)]
    for column in ("d", "b"):
        write(path, path.read_text().replace("c", "b"))
        with pytest.raises(
            UsageError,
            match=rf"t\.csv, line \d must have one column '{column}'; its columns are: a, b, b",
        ):
            list(read_documents(path, (column,)))


def test_sentences_are_as_long_as_the_longest_of_their_batch(txt):
    train, test = loaded(txt, 10, sentences=True)
    seen = []
    for part in (train, test):
        loader = Loader(part, 3, workers=0)
        for batch in loader.epoch(0):
            assert batch.x.shape[1] == train.lengths[batch.indices].max() if part is train else True
            pairs = list(predicted(part, batch))
            assert max(len(x) for x, _ in pairs) == batch.x.shape[1]
            seen += [(x, y) for x, y in pairs]
    result = sorted(x[0] + y for x, y in seen)
    expected = []
    for line in filter(None, LINES):
        pieces = [f"{line}#"[first : first + 11] for first in range(0, len(line), 10)]
        expected += pieces
    assert result == sorted(expected)


def test_every_rank_pads_alike_and_knows_all_tokens(txt):
    train, _ = loaded(txt, 30, sentences=True)
    parts = [
        list(Loader(train, 5, rank=rank, world=3, microbatches=2, workers=0).epoch(1))
        for rank in range(3)
    ]
    for batches in zip(*parts, strict=True):
        assert len({batch.x.shape[1] for batch in batches}) == 1
        assert {batch.targets for batch in batches} == {batches[0].targets}
        assert sum(batch.own_targets for batch in batches) == batches[0].global_targets


def test_batches_have_like_lengths_in_an_order_of_their_own(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 40, 203)
    path = write(tmp_path / "many.txt", "\n".join("a" * length for length in lengths))
    train, _ = loaded(path, 50, sentences=True, tokenizer="bytes")
    loader = Loader(train, 8, workers=0)
    orders = [loader.order(epoch) for epoch in (0, 0, 1)]
    assert np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[0], orders[2])
    for order in orders:
        assert sorted(order) == list(range(len(train)))
        spread = [
            np.ptp(train.lengths[order[first : first + 8]]) for first in range(0, len(train), 8)
        ]
        assert max(spread) <= 8 and np.ptp(train.lengths) > 30
        longest = [train.lengths[order[first]] for first in range(0, len(train), 8)]
        assert longest != sorted(longest)
    one_more = np.arange(POOL + 1)
    assert sorted(by_length(one_more, one_more, 1, 0, 0)) == list(one_more)


def test_tokens_are_made_once_for_a_text_and_its_tokenizer(txt, cache):
    folders = {
        prepare_tokens(TextSource(txt, kind, (), lines))
        for kind in ("bytes", "characters")
        for lines in (False, True)
    }
    assert len(folders) == 4 == len([item for item in cache.iterdir() if item.is_dir()])
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*.bin")}
    source = TextSource(txt, "bytes")
    assert prepare_tokens(source) in folders
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.bin")} == before
    write(txt, "another text")
    assert prepare_tokens(TextSource(txt, "bytes")) not in folders


def test_a_prepared_text_is_not_read_again(txt, tmp_path, monkeypatch):
    """Each rank had hashed all of it at each start. A copy elsewhere is the same text."""
    before, _ = loaded(txt, 3, tokenizer="bytes")
    moved = write(tmp_path / "elsewhere.txt", txt.read_text())
    assert loaded(moved, 3, tokenizer="bytes")[0].identity == before.identity
    monkeypatch.setattr("nnmpi.data.text.sha256", None)
    again, _ = loaded(txt, 3, tokenizer="bytes")
    assert again.identity == before.identity
    monkeypatch.undo()
    write(txt, txt.read_text().swapcase())
    assert loaded(txt, 3, tokenizer="bytes")[0].identity != before.identity


def test_a_corpus_is_read_in_pieces_that_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("nnmpi.data.documents.PIECE", 7)
    text = "é line\r\n  two\n\nthree ünd\nfour\n" * 5 + "the last"
    path = write(tmp_path / "a.txt", "\ufeff" + text)
    pieces = list(read_documents(path))
    assert len(pieces) > 5 and [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece for piece, _ in pieces) == text.replace("\r\n", "\n")
    assert all(not piece[0].isspace() for piece, _ in pieces)
    # at an end GPT-2 has one token for the two
    assert not any(piece.endswith("\n\n") for piece, _ in pieces)
    lines = [line for line, _ in read_documents(path, lines=True)]
    assert lines == [line for line in text.replace("\r", "").split("\n") if line]


def test_nothing_is_left_of_tokens_that_could_not_be_made(txt, cache):
    path = write(txt.parent / "rows.jsonl", '{"text": "good"}\n{"text": " "}\n')
    data_error(
        r"rows\.jsonl, line 2: the document is empty; remove the row",
        lambda: prepare_tokens(TextSource(path, "bytes")),
    )
    assert [item.name for item in cache.iterdir()] == []


def test_damaged_tokens_are_named(txt):
    source = TextSource(txt)
    for name, content in ((texts.TOKENS, b"ab"), (texts.ENDS, b"")):
        (prepare_tokens(source) / name).write_bytes(content)
        data_error("damaged .*; remove it, and prepare_tokens makes it again", load_text, source)


@pytest.mark.parametrize(
    "name, content, columns, sentence",
    [
        ("a.txt", b"", (), "a.txt: the document is empty"),
        ("a.txt", b" \n\n", (), "a.txt: the document is empty"),
        ("a.txt", b"abc \xff def", (), "not UTF-8 text"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), ("b",), "is UTF-16 text; save it as UTF-8"),
        ("a.txt", b"abc", ("b",), "has no columns"),
        ("a.csv", b"a,b\n1\n", ("b",), "line 2: 1 cell, but the first line has 2"),
        ("a.csv", b"a,b\n1,\n", ("b",), "line 2: the document is empty"),
        ("a.csv", b"a,b\n", ("b",), "is empty"),
        ("a.csv", b'a,b\n1,"x', ("b",), "not CSV"),
        ("a.jsonl", b"{}\n", (), "line 1 must have one column 'text'"),
        ("a.jsonl", b"[1]\n", (), "line 1: not a JSON object"),
        ("a.jsonl", b"{\n", (), "line 1: not JSON"),
        ("a.jsonl", b'{"text": 3}', (), "line 1: a column is not Unicode text"),
        ("a.jsonl", rb'{"text": "a \ud800 b"}', (), "line 1: a column is not Unicode text"),
        ("a.txt.gz", b"not gz", (), "not a complete gz file"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(tmp_path, name, content, columns, sentence):
    (tmp_path / name).write_bytes(content)
    refuses(
        NnmpiError, sentence, lambda: prepare_tokens(TextSource(tmp_path / name, "bytes", columns))
    )


def test_a_text_that_is_shorter_than_a_block_is_refused(txt):
    data_error(
        "the test part has 26 tokens, but a context of 27 and .* need 28; give a smaller",
        loaded,
        txt,
        27,
    )


def test_a_text_that_may_not_be_read_is_not_called_damaged(txt, monkeypatch):
    lock(txt.parent, monkeypatch)
    data_error(r"play\.txt: cannot be read", lambda: prepare_tokens(TextSource(txt)))


def test_texts_are_told_from_tables_of_numbers(tmp_path):
    assert find_text("iris") is None and find_text(str(tmp_path / "a.csv")) is None
    bundled = find_text("paradise-lost")
    assert bundled is not None and bundled.read_text().startswith("PARADISE LOST\nBOOK I.\n")
    usage_error("no such file", find_text, str(tmp_path / "missing.txt"))
    usage_error("has no columns of text", find_text, "digits", ("a",))
    usage_error("is a text", load, "paradise-lost")


@pytest.mark.parametrize("size, kind", [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_tokens_are_numbers_of_few_bytes(txt, monkeypatch, size, kind):
    monkeypatch.setattr("nnmpi.data.tokenizer.ByteTokenizer.vocabulary_size", size)
    tokens = np.fromfile(prepare_tokens(TextSource(txt, "bytes")) / texts.TOKENS, kind)
    assert bytes(tokens[:-1].astype(np.uint8)) == txt.read_bytes() and tokens[-1] == 256


def test_of_many_that_want_the_same_tokens_one_makes_them(txt, monkeypatch):
    made = []
    write_once = texts._fill

    def slow(source, folder):
        made.append(folder)
        time.sleep(0.05)
        write_once(source, folder)

    monkeypatch.setattr(texts, "_fill", slow)
    with ThreadPoolExecutor(5) as pool:
        folders = list(pool.map(prepare_tokens, [TextSource(txt)] * 5))
    assert len(made) == 1 and len(set(folders)) == 1


# Tokenizers: there and back, saved and read again.


TEXT = "Grüße, 世界! 🙂\n\ttabs  and  spaces"


@pytest.fixture
def pairs(tmp_path):
    """A folder with a tokenizer as GPT-2's, with all bytes and three merges."""
    library = pytest.importorskip("tokenizers")
    letters = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    for word in ("an", "and", "Ġand", "<|endoftext|>"):
        vocabulary[word] = len(vocabulary)
    made = library.Tokenizer(
        library.models.BPE(vocabulary, [("a", "n"), ("an", "d"), ("Ġ", "and")])
    )
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    folder = tmp_path / "gpt2"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def tokenizers(pairs):
    return [ByteTokenizer(), CharacterTokenizer(TEXT), load_tokenizer(pairs)]


def test_a_text_comes_back(pairs, tmp_path):
    """And the library reads what is saved."""
    library = pytest.importorskip("tokenizers")
    for number, entry in enumerate(tokenizers(pairs)):
        ids = entry.encode(TEXT)
        assert all(0 <= token < entry.vocabulary_size for token in ids) and entry.end not in ids
        assert (
            entry.decode([*ids, entry.end]) == TEXT
            and entry.decode([]) == ""
            and entry.encode("") == []
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        entry.save(folder)
        again = load_tokenizer(folder)
        assert (again.encode(TEXT), again.identity) == (ids, entry.identity)
        assert (again.end, again.vocabulary_size) == (entry.end, entry.vocabulary_size)
        assert type(again) is type(entry)
        theirs = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert theirs.encode(TEXT).ids == ids and theirs.decode([*ids, entry.end]) == TEXT
        assert theirs.get_vocab_size() == entry.vocabulary_size
        usage_error(
            f"token {entry.vocabulary_size} is outside the vocabulary of",
            entry.decode,
            [entry.vocabulary_size],
        )
    assert len({item.identity for item in tokenizers(pairs)}) == 3


def test_added_tokens_are_those_of_the_tokenizers_own_file(pairs):
    (pairs / "added_tokens.json").write_text(json.dumps({"<|endoftext|>": 259}))
    assert load_tokenizer(pairs).end == 259
    (pairs / "added_tokens.json").write_text(json.dumps({"<|endoftext|>": 259, "<|user|>": 260}))
    data_error("'<|user|>' was added as token 260, but its own file", load_tokenizer, pairs)


def test_gpt2s_merges_are_applied(pairs):
    made = load_tokenizer(pairs / "tokenizer.json")
    assert made.vocabulary_size == 260 and made.end == 259
    assert made.encode("an and") == [256, 258]
    assert made.encode("sand and") == [*made.encode("s"), 257, 258]


def test_a_number_beyond_all_vocabularies_is_refused(pairs):
    """The embedding has a row for each number."""
    file = pairs / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["vocab"]["huge"] = 2**31 - 1
    file.write_text(json.dumps(values))
    data_error("not a tokenizer .a token has the number 2147483647", load_tokenizer, file)


def test_half_a_character_is_no_text(pairs):
    """A command line that is not UTF-8 has such."""
    for item in tokenizers(pairs):
        usage_error(r"\\udcff|no tokens for the text", item.encode, "a\udcff")


def test_a_tokenizer_without_an_end_gets_one():
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    result = LibraryTokenizer(made)
    assert result.end == result.vocabulary_size - 1 == 3 and result.name == "WordLevel"


@pytest.mark.parametrize(
    "files, end",
    [
        ({}, 1),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, 2),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}}, 3),
        ({"config.json": {"eos_token_id": 2}}, 2),
        ({"tokenizer_config.json": {"eos_token": ""}}, 1),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": [3]}}, 3),
        ({"tokenizer_config.json": {"eos_token": "</s>"}, "config.json": {"eos_token_id": 3}}, 2),
        ({"special_tokens_map.json": {"eos_token": "<new>"}}, 4),
    ],
)
def test_the_end_is_what_the_files_name(tmp_path, files, end):
    """It was the first usual name of the vocabulary's, so documents ended by another token."""
    library = pytest.importorskip("tokenizers")
    names = ["a", "<|endoftext|>", "</s>", "<|im_end|>"]
    numbers = {name: number for number, name in enumerate(names)}
    made = library.Tokenizer(library.models.WordLevel(numbers, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    result = load_tokenizer(tmp_path)
    assert (result.end, result.end_text) == (end, [*names, "<new>"][end])
    assert load_tokenizer(tmp_path / "tokenizer.json").end == end
    for name in files:
        (tmp_path / name).unlink()
    # a config.json has GPT-2's number beside any vocabulary
    for content in ("50256", "-1", "[]", "[77, 2]", "{", "1.5"):
        (tmp_path / "config.json").write_text(f'{{"eos_token_id": {content}}}')
        assert load_tokenizer(tmp_path).end == (2 if "2]" in content else 1)


def test_characters_that_were_not_in_the_text_are_named():
    made = CharacterTokenizer("cab")
    assert made.encode("abc") == [0, 1, 2] and (made.end, made.vocabulary_size) == (3, 4)
    usage_error("the tokenizer has no 'é': its 3 characters come from its", made.encode, "aé")


def test_what_is_no_tokenizer_is_refused(tmp_path):
    usage_error("no such file or folder", load_tokenizer, tmp_path / "nothing")
    usage_error("has no tokenizer.json; let transformers write", load_tokenizer, tmp_path)
    pytest.importorskip("tokenizers")
    # panics in Rust
    merge = '{"model": {"type": "BPE", "vocab": {"a": 0, "t": 1, "h": 2}, "merges": ["t h"]}}'
    file = tmp_path / "tokenizer.json"
    for content in ("{}", merge, "{"):
        file.write_text(content)
        data_error("not a tokenizer", load_tokenizer, file)


def test_without_the_library_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    usage_error(
        r"not installed; pip install tokenizers, or use bytes or characters",
        load_tokenizer,
        tmp_path,
    )


def test_a_tokenizer_that_makes_texts_long_is_refused_before_it_does():
    """The library fills the memory first. A pattern that tries too long panics in Rust."""
    library = pytest.importorskip("tokenizers")
    replace, regex = library.normalizers.Replace, library.Regex
    doubling = replace("a", "aa")

    def with_parts(**parts):
        model = library.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
        result = library.Tokenizer(model)
        for name, part in parts.items():
            setattr(result, name, part)
        return result

    sequence = library.normalizers.Sequence
    for parts in (
        {"normalizer": sequence([doubling] * 40)},
        {"normalizer": sequence([sequence([doubling] * 5), sequence([doubling] * 5)])},
        {"normalizer": replace(regex(""), "x" * 200)},
        {"normalizer": library.normalizers.Prepend("x" * 200)},
        {"decoder": library.decoders.Sequence([library.decoders.Replace("a", "aa")] * 9)},
    ):
        with pytest.raises(ValueError, match="makes a text up to .* times as long"):
            LibraryTokenizer(with_parts(**parts))
    usual = sequence([library.normalizers.NFKC(), replace(" ", "_")])
    assert LibraryTokenizer(with_parts(normalizer=usual)).encode("a") == [1]
    slow = library.pre_tokenizers.Split(regex("(a+)+b"), "isolated")
    usage_error(
        "WordLevel has no tokens for the text",
        lambda: LibraryTokenizer(with_parts(pre_tokenizer=slow)).encode("a" * 40),
    )
