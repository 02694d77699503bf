"""Tokenizers: there and back, saved and read again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nnmpi.data.tokenizer import ByteTokenizer, CharacterTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer
from nnmpi.errors import DataError, UsageError

TEXT = "Grüße, 世界! 🙂\n\ttabs  and  spaces"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """GPT-2's files, with all bytes and three merges."""
    library = pytest.importorskip("tokenizers")
    letters = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    for word in ("an", "and", "Ġand", "<|endoftext|>"):
        vocabulary[word] = len(vocabulary)
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na n\nan d\nĠ and\n")
    return folder


def tokenizers(pairs: Path) -> list[Tokenizer]:
    return [ByteTokenizer(), CharacterTokenizer(TEXT), load_tokenizer(pairs)]


def test_a_text_comes_back(pairs: Path, tmp_path: Path) -> None:
    """And the library reads what is saved."""
    library = pytest.importorskip("tokenizers")
    for number, each in enumerate(tokenizers(pairs)):
        ids = each.encode(TEXT)
        assert all(0 <= token < each.vocabulary_size for token in ids) and each.end not in ids
        assert each.decode([*ids, each.end]) == TEXT and each.decode([]) == "" and each.encode("") == []
        folder = tmp_path / str(number)
        folder.mkdir()
        each.save(folder)
        again = load_tokenizer(folder)
        assert (again.encode(TEXT), again.identity) == (ids, each.identity)
        assert (again.end, again.vocabulary_size) == (each.end, each.vocabulary_size)
        assert type(again) is type(each)
        theirs = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert theirs.encode(TEXT).ids == ids and theirs.decode([*ids, each.end]) == TEXT
        assert theirs.get_vocab_size() == each.vocabulary_size
        with pytest.raises(UsageError, match=f"token {each.vocabulary_size} is outside the vocabulary of"):
            each.decode([each.vocabulary_size])
    assert len({each.identity for each in tokenizers(pairs)}) == 3


def test_gpt2s_merges_are_applied(pairs: Path) -> None:
    made = load_tokenizer(pairs / "merges.txt")
    assert made.vocabulary_size == 260 and made.end == 259
    assert made.encode("an and") == [256, 258]
    assert made.encode("sand and") == [*made.encode("s"), 257, 258]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda vocabulary: vocabulary.pop("H"), "1 of the 256 bytes have no token"),
        (lambda vocabulary: vocabulary.update(e=vocabulary["t"]), "two tokens have one number"),
    ],
)
def test_a_vocabulary_that_would_lose_letters_is_refused(
    pairs: Path, change: Callable[[dict[str, int]], object], words: str
) -> None:
    """The library leaves them out, or takes others for them, and says nothing."""
    vocabulary = json.loads((pairs / "vocab.json").read_text())
    change(vocabulary)
    (pairs / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(DataError, match=rf"vocab\.json: not the vocabulary of a GPT-2 \({words}"):
        load_tokenizer(pairs)


def test_half_a_character_is_no_text(pairs: Path) -> None:
    """A command line that is not UTF-8 has such."""
    for each in tokenizers(pairs):
        with pytest.raises(UsageError, match=r"\\udcff|no tokens for the text"):
            each.encode("a\udcff")


def test_a_tokenizer_without_an_end_gets_one() -> None:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    found = LibraryTokenizer(made)
    assert found.end == found.vocabulary_size - 1 == 3 and found.name == "WordLevel"


def test_characters_that_were_not_in_the_text_are_named() -> None:
    made = CharacterTokenizer("cab")
    assert made.encode("abc") == [0, 1, 2] and (made.end, made.vocabulary_size) == (3, 4)
    with pytest.raises(UsageError, match="the character 'é' is not among the 3 of the tokenizer"):
        made.encode("aé")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder; give bytes, characters, or where one|no such"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(UsageError, match="the folder has neither tokenizer.json nor vocab.json and merges.txt; "):
        load_tokenizer(tmp_path)
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(DataError, match="not a vocabulary and its merges"):
        load_tokenizer(tmp_path / "vocab.json")


def test_without_the_library_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"not installed; pip install 'nnmpi\[text\]', or take bytes or characters"):
        load_tokenizer(tmp_path)
