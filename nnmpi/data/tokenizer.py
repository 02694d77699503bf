"""Tokenizers: text to tokens and back.

    bytes           one token per byte of UTF-8 (256)             built in
    characters      the characters of a training text, sorted     built in
    FOLDER or FILE  any tokenizer.json, such as GPT-2's           the library `tokenizers`

Every tokenizer has an end token, `end`. It separates documents and pads short ones. It is the one
that the files beside a tokenizer.json name, and without them the first of ENDS that it has.

All are saved as a tokenizer.json, which the library `tokenizers` reads, and a
tokenizer_config.json, which Hugging Face's transformers needs beside it. nnmpi reads its built-in
tokenizers back without either library.
"""

import hashlib
import importlib
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nnmpi.base.errors import DataError, UsageError
from nnmpi.base.files import (
    expand,
    foreign,
    json_text,
    parse_json,
    read_json,
    write_atomically,
    write_json,
)
from nnmpi.base.settled import Settled

LIBRARY_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE, TEMPLATE = "chat_template.jinja", "chat_template"
END_FILES = (CONFIG_FILE, "special_tokens_map.json", "config.json")  # these may name the end token
ADDED_FILE = "added_tokens.json"
SAVED_ANEW = (
    f"let transformers write a {LIBRARY_FILE} with all of it:"
    " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
MOST_TOKENS = 2**22  # fifteen times the largest vocabularies in use
MOST_GROWTH = 100.0  # of a text; SentencePiece's forms of compatibility have up to 33 bytes
BYTES, CHARACTERS = "bytes", "characters"


class Tokenizer(Settled, ABC, read_once="name end end_text vocabulary_size"):
    """Convert a text to tokens and back.

    Attributes:
        name: for headers.
        end: the end token.
        end_text: its spelling in tokenizer.json.
        vocabulary_size: the number of tokens, which are 0..vocabulary_size-1.
        beside: what its CONFIG_FILE says of special tokens and conversations, see `read_words`.
    """

    name: str
    end: int
    end_text = ENDS[0]
    vocabulary_size: int
    beside: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end token.

        Raises:
            UsageError: for a text with parts that have no token.
        """

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of tokens, none of which is an end token."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the text of the tokenizer.json."""

    @property
    def identity(self) -> str:
        """A hash of everything that its tokens depend on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; end tokens are left out.

        Raises:
            UsageError: for a number outside the vocabulary.
        """
        size = self.vocabulary_size
        if wrong := [item for item in ids if not 0 <= item < size]:
            raise UsageError(
                f"token {wrong[0]} is outside the vocabulary of {size}: give numbers in"
                f" 0..{size - 1}"
            )
        return self._decode([item for item in ids if item != self.end])

    def save(self, folder: Path) -> None:
        """Write LIBRARY_FILE and CONFIG_FILE into an existing folder, which must not be a link."""
        root = folder.parent
        write_atomically(folder / LIBRARY_FILE, self.to_json().encode(), root)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.end_text,
            **self.beside,
            "eos_token": self.end_text,
        }
        write_json(folder / CONFIG_FILE, config, root)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a folder or a file.

    Args:
        path: "bytes"; or a tokenizer.json, or a folder with one, such as `Tokenizer.save` wrote.

    Raises:
        UsageError: without such a file, or without the library to read it.
        DataError: for a damaged file.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    result = find_tokenizer(path)
    if result is None:
        if Path(path).is_dir():
            raise UsageError(f"tokenizer {path}: the folder has no {LIBRARY_FILE}; {SAVED_ANEW}")
        raise UsageError(
            f"tokenizer {path}: there is no such file or folder; give {BYTES}, {CHARACTERS}, or the"
            " path of a saved tokenizer"
        )
    tokenizer = _read_built_in(result) or _read_by_library(result)
    tokenizer.beside = read_words(result.parent)
    return tokenizer


def _read_by_library(file: Path) -> "LibraryTokenizer":
    """Read a tokenizer.json.

    Raises:
        UsageError, DataError: see `load_tokenizer`.
    """
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise UsageError(
            f"tokenizer {file} is read by the library tokenizers, which is not installed; pip"
            f" install tokenizers, or use {BYTES} or {CHARACTERS}"
        ) from None
    ends = [*_named_ends(file.parent)]
    with foreign(file, DataError, "not a tokenizer"):
        inner = library.Tokenizer.from_file(str(file))
        _check_added(file.parent, inner)
        return LibraryTokenizer(inner, ends)


def _read_beside(folder: Path, name: str) -> dict[str, Any]:
    """Return the dictionary of a file beside a tokenizer's; empty without the file.

    Raises:
        DataError: for a file that holds something else.
    """
    file = folder / name
    if not file.is_file():
        return {}
    with foreign(file, DataError, "no JSON"):
        values = read_json(file)
    if not isinstance(values, dict):
        raise DataError(f"{file}: it holds no JSON object")
    return values


def read_words(folder: Path) -> dict[str, Any]:
    """Return the special tokens by name, and the chat template, that stand beside a tokenizer.

    Raises:
        DataError: for an unreadable file.
    """
    values = _read_beside(folder, CONFIG_FILE)
    words = {key: value for key, value in values.items() if key.endswith("_token")}
    if (file := folder / TEMPLATE_FILE).is_file():
        with foreign(file, DataError, "no text"):
            return {**words, TEMPLATE: file.read_text("utf-8")}
    return words if values.get(TEMPLATE) is None else {**words, TEMPLATE: values[TEMPLATE]}


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return {text: number} of the tokens that files beside a tokenizer's say were added to it."""
    config = _read_beside(folder, CONFIG_FILE).get("added_tokens_decoder") or {}
    added = {token["content"]: int(number) for number, token in config.items()}
    return added | _read_beside(folder, ADDED_FILE)


def _check_added(folder: Path, inner: Any) -> None:
    """Refuse a tokenizer without the tokens that files beside it say were added.

    Raises:
        DataError: naming one: its text would be cut into pieces, or have another number.
    """
    for text, number in _added_tokens(folder).items():
        if inner.token_to_id(text) != number:
            raise DataError(
                f"{folder}: a file beside the tokenizer says that {text!r} was added as token"
                f" {number}, but its own file has no such token; {SAVED_ANEW}"
            )


def _named_ends(folder: Path) -> Iterator[str | int]:
    """Yield the end tokens that a folder's files name, texts or numbers; damaged files name none.

    A number may be of no token: a config.json has GPT-2's beside any vocabulary.
    """
    for file in (folder / name for name in END_FILES):
        try:
            values = read_json(file)
            # the text, or a dictionary of it and its flags; the number, or a list of several
            end = values.get("eos_token", values.get("eos_token_id"))
            for item in end if isinstance(end, list) else [end]:
                yield item["content"] if isinstance(item, dict) else item
        except (OSError, ValueError, KeyError, AttributeError, RecursionError):
            continue


def find_tokenizer(path: str | Path) -> Path | None:
    """Return the file that `load_tokenizer` reads, or None."""
    full = expand(Path(path), "tokenizer")
    file = full / LIBRARY_FILE if full.is_dir() else full
    return file if file.is_file() else None


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8; 256 is the end token."""

    name = BYTES
    vocabulary_size = 257
    end = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{text[error.start]!r} is half of a surrogate pair, which UTF-8 cannot encode"
            ) from None

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return the text of the tokenizer.json: GPT-2's letter for each byte, and no merges."""
        # GPT-2 writes printable bytes as themselves and shifts the others to 256..
        plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        vocabulary = {chr(byte if byte in plain else next(others)): byte for byte in range(256)}
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        return _library_form(vocabulary, {"type": "BPE", "merges": []}, level, level)


class CharacterTokenizer(Tokenizer, read_once="characters"):
    """One token per character, in sorted order; the next number is the end token.

    Args:
        characters: the vocabulary, in any order; duplicates are ignored.
    """

    name = CHARACTERS

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._codes = np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)
        self.end = len(self.characters)
        self.vocabulary_size = self.end + 1

    def encode(self, text: str) -> list[int]:
        """Return each character's index in the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        if not self.characters:
            raise UsageError("the tokenizer has no characters; make it from a text")
        indices = np.minimum(np.searchsorted(self._codes, codes), self.end - 1)
        unknown = np.flatnonzero(self._codes[indices] != codes)
        if unknown.size:
            raise UsageError(
                f"the tokenizer has no {text[unknown[0]]!r}: its {self.end} characters come from"
                " its training text; leave this one out, or use another tokenizer, such as bytes"
            )
        return indices.tolist()

    def _decode(self, ids: list[int]) -> str:
        return "".join(self.characters[item] for item in ids)

    def to_json(self) -> str:
        """Return the text of the tokenizer.json: words of one character."""
        vocabulary = {character: index for index, character in enumerate(self.characters)}
        split = {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        }
        return _library_form(
            vocabulary, {"type": "WordLevel", "unk_token": ENDS[0]}, split, {"type": "Fuse"}
        )


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`.

    Args:
        inner: a `tokenizers.Tokenizer`.
        ends: what may be its end token: the first text, which is added if it lacks it, or number of
            one of its tokens; else the first of ENDS that it has, or the first of all.

    Raises:
        ValueError: for a tokenizer that cannot be used.
    """

    def __init__(self, inner: Any, ends: Sequence[Any] = ()) -> None:
        self._inner, self.name = inner, type(inner.model).__name__
        inner.no_truncation()
        inner.no_padding()
        named = (
            inner.id_to_token(end) if type(end) is int and 0 <= end < MOST_TOKENS else end
            for end in ends
        )
        usual = (item for item in ENDS if inner.token_to_id(item) is not None)
        self.end_text = next(
            (item for item in chain(named, usual) if item and isinstance(item, str)), ENDS[0]
        )
        if inner.token_to_id(self.end_text) is None:
            inner.add_special_tokens([self.end_text])
        self.end = inner.token_to_id(self.end_text)
        # the largest number, not the count: a vocabulary may have gaps
        self.vocabulary_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocabulary_size > MOST_TOKENS:  # the embedding has a row for each number
            raise ValueError(
                f"a token has the number {self.vocabulary_size - 1}, beyond {MOST_TOKENS}"
            )
        # after the check above: the library writes a vocabulary in steps of one number
        form = parse_json(inner.to_str())
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (times := _growth(form[part])) > MOST_GROWTH:
                raise ValueError(f"its {part} makes a text up to {times:.3g} times as long")

    def encode(self, text: str) -> list[int]:
        """Return the library's tokens."""
        with self._explained("has no tokens for the text"):
            return list(self._inner.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: list[int]) -> str:
        with self._explained("has no text for the tokens"):
            return str(self._inner.decode(ids, skip_special_tokens=True))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        # the library raises plain Exceptions, and its panics are not even these
        except BaseException as error:
            raise UsageError(f"the tokenizer {self.name} {what} ({error})") from None

    def to_json(self) -> str:
        """Return the text of the tokenizer.json."""
        return self._inner.to_str()


def _growth(part: Any) -> float:
    """Return how many times as long a text becomes at most by a part of a tokenizer.json.

    The library would fill the memory with the longer text before it returns.
    """
    if isinstance(part, list):
        return prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Replace":
        replaced, content = part["pattern"].get("String"), part["content"]
        # a regular expression may match between any two characters
        return max(1.0, len(content) / len(replaced) if replaced else len(content) + 1.0)
    if part.get("type") == "Prepend":
        return max(1.0, float(len(part["prepend"])))
    if part.get("type") == "Precompiled":  # a trie with its length, and what it leads to
        table = b64decode(part["precompiled_charsmap"])
        return float(max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0"))))
    return prod(map(_growth, part.values()))


def _library_form(
    vocabulary: dict[str, int],
    model: dict[str, Any],
    pieces: dict[str, Any],
    decoder: dict[str, Any],
) -> str:
    """Return the text of a tokenizer.json; the end token follows the vocabulary.

    Args:
        vocabulary: {token: number}, from 0 on.
        model: the other fields of "model".
        pieces: the "pre_tokenizer", which splits a text before the model sees it.
        decoder: joins tokens to a text.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    form = {
        "version": "1.0",
        "added_tokens": [{"id": len(vocabulary), "content": ENDS[0], **flags, "special": True}],
        "pre_tokenizer": pieces,
        "decoder": decoder,
        "model": {**model, "vocab": vocabulary},
    }
    return json_text(form)


def _read_built_in(file: Path) -> Tokenizer | None:
    """Return the file's built-in tokenizer; None for another tokenizer."""
    try:
        values = read_json(file)
        candidates: list[Tokenizer] = [
            ByteTokenizer(),
            CharacterTokenizer("".join(values["model"]["vocab"])),
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((item for item in candidates if parse_json(item.to_json()) == values), None)
