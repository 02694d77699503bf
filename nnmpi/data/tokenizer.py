"""Tokenizers: a text to numbers and back.

    bytes           256 tokens, one for each byte of UTF-8                            built in
    characters      the characters of a training text, sorted                         built in
    FOLDER or FILE  GPT-2's byte pairs (vocab.json and merges.txt: Radford et al.,
                    2019), or any tokenizer.json                                      the library `tokenizers`

Every tokenizer has a token that ends a text, `end`. It stands between two documents, and where a
short one is padded.

All are saved as a tokenizer.json, which that library reads, and a tokenizer_config.json, with which
Hugging Face's transformers does. Reading those of the two that are built in needs neither.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nnmpi.errors import DataError, UsageError
from nnmpi.files import expand, foreign, read_json

LIBRARY_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
PAIRS_FILES = ("vocab.json", "merges.txt")
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
MOST_TOKENS = 2**22  # fifteen times what the largest vocabularies have
BYTES, CHARACTERS = "bytes", "characters"


class Tokenizer(ABC):
    """Turns a text into tokens and back.

    Attributes:
        name: for headers.
        end: the token that ends a text.
        end_text: what the library calls it.
        vocabulary_size: how many tokens there are: the numbers 0..vocabulary_size-1.
    """

    name: str
    end: int
    end_text = ENDS[0]
    vocabulary_size: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end.

        Raises:
            UsageError: for a text that has no tokens for all of it.
        """

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of tokens without an end."""

    @abstractmethod
    def to_json(self) -> str:
        """Return it as the library has it."""

    @property
    def identity(self) -> str:
        """A hash of all that its results depend on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; an end is nothing.

        Raises:
            UsageError: for a number that is no token.
        """
        size = self.vocabulary_size
        if wrong := [item for item in ids if not 0 <= item < size]:
            raise UsageError(
                f"token {wrong[0]} is outside the vocabulary of {size}: give numbers in"
                f" 0..{size - 1}"
            )
        return self._decode([item for item in ids if item != self.end])

    def save(self, folder: Path) -> None:
        """Write LIBRARY_FILE and CONFIG_FILE into a folder, which exists."""
        (folder / LIBRARY_FILE).write_text(self.to_json(), encoding="utf-8")
        words = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.end_text,
            "bos_token": self.end_text,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer that a folder or a file holds.

    Args:
        path: "bytes"; a folder with what `Tokenizer.save` wrote, a tokenizer.json, or vocab.json
            and merges.txt; or one of these files.

    Raises:
        UsageError: when there is none, or the library that reads it is not installed.
        DataError: for a file that is damaged.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    result = find_tokenizer(path)
    if result is None:
        expected = f"neither {LIBRARY_FILE} nor {' and '.join(PAIRS_FILES)}"
        state = (
            f"the folder has {expected}"
            if Path(path).is_dir()
            else "there is no such file or folder"
        )
        raise UsageError(
            f"tokenizer {path}: {state}; give {BYTES}, {CHARACTERS}, or where a tokenizer was saved"
        )
    if built_in := _read_built_in(result):
        return built_in
    try:
        library: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise UsageError(
            f"tokenizer {result} is read by the library tokenizers, which is not installed; pip"
            f" install tokenizers, or take {BYTES} or {CHARACTERS}"
        ) from None
    with foreign(result, DataError, "not a tokenizer"):
        if result.name in PAIRS_FILES:
            return LibraryTokenizer(
                _of_pairs(library, *(str(result.parent / name) for name in PAIRS_FILES))
            )
        return LibraryTokenizer(library.Tokenizer.from_file(str(result)))


def find_tokenizer(path: str | Path) -> Path | None:
    """Return the file that `load_tokenizer` reads first; None where there is none."""
    full = expand(Path(path), "tokenizer")
    names = (LIBRARY_FILE, *PAIRS_FILES) if full.is_dir() else (full.name,)
    folder = full if full.is_dir() else full.parent
    return next((folder / name for name in names if (folder / name).is_file()), None)


class ByteTokenizer(Tokenizer):
    """A token for each byte of a text in UTF-8, and 256 for the end."""

    name = BYTES
    vocabulary_size = 257
    end = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{text[error.start]!r} is half of a character, and no text in UTF-8 has it"
            ) from None

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Return it as the library has it: GPT-2's letter for each byte, and no pairs."""
        # these stand for themselves, others move up
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


class CharacterTokenizer(Tokenizer):
    """A token for each of some characters, in their order; the next one is the end.

    Args:
        characters: of the vocabulary, in any order.
    """

    name = CHARACTERS

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._codes = np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)
        self.end = len(self.characters)
        self.vocabulary_size = self.end + 1

    def encode(self, text: str) -> list[int]:
        """Return each character's place in the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        if not self.characters:
            raise UsageError("the tokenizer has no characters; make it of a text")
        places = np.minimum(np.searchsorted(self._codes, codes), self.end - 1)
        unknown = np.flatnonzero(self._codes[places] != codes)
        if unknown.size:
            raise UsageError(
                f"the character {text[unknown[0]]!r} is not among the {self.end} of the tokenizer,"
                " which are those of its training text; leave it out, or take another tokenizer,"
                " such as bytes"
            )
        return places.tolist()

    def _decode(self, ids: list[int]) -> str:
        return "".join(self.characters[item] for item in ids)

    def to_json(self) -> str:
        """Return it as the library has it: words of one character."""
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
        made: a `tokenizers.Tokenizer`. If it has none of the tokens in ENDS, the first of these is
            added.
    """

    def __init__(self, made: Any) -> None:
        self._made, self.name = made, type(made.model).__name__
        made.no_truncation()
        made.no_padding()
        self.end_text = next((item for item in ENDS if made.token_to_id(item) is not None), ENDS[0])
        if made.token_to_id(self.end_text) is None:
            made.add_special_tokens([self.end_text])
        self.end = made.token_to_id(self.end_text)
        # some may be no text's
        self.vocabulary_size = max(made.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocabulary_size > MOST_TOKENS:  # an embedding would have a row for each number
            raise ValueError(
                f"a token has the number {self.vocabulary_size - 1}, beyond {MOST_TOKENS}"
            )

    def encode(self, text: str) -> list[int]:
        """Return the tokens that the library finds."""
        try:
            tokens: list[int] = self._made.encode(text, add_special_tokens=False).ids
        except Exception as error:  # see `load_tokenizer`
            raise UsageError(
                f"the tokenizer {self.name} has no tokens for the text ({error})"
            ) from None
        return tokens

    def _decode(self, ids: list[int]) -> str:
        return self._made.decode(ids, skip_special_tokens=True)

    def to_json(self) -> str:
        """Return what the library keeps of it."""
        return self._made.to_str()


def _of_pairs(library: Any, vocabulary: str, merges: str) -> Any:
    """Return GPT-2's tokenizer: pairs of bytes, merged in order."""
    made = library.Tokenizer(library.models.BPE.from_file(vocabulary, merges))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    numbers = made.get_vocab()
    lost = len(set(library.pre_tokenizers.ByteLevel.alphabet()) - numbers.keys())
    if lost or len(set(numbers.values())) < len(numbers):
        # the library would leave out what it does not find
        raise ValueError(
            f"{lost} of the 256 bytes have no token" if lost else "two tokens have one number"
        )
    if made.token_to_id(ENDS[0]) is not None:
        made.add_special_tokens([ENDS[0]])
    return made


def _library_form(
    vocabulary: dict[str, int],
    model: dict[str, Any],
    pieces: dict[str, Any],
    decoder: dict[str, Any],
) -> str:
    """Return what the library keeps of a tokenizer; the end comes after the vocabulary.

    Args:
        vocabulary: each token's number, from 0 on.
        model: what else there is of it.
        pieces: what cuts a text before the model sees it.
        decoder: what puts tokens together.
    """
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    form = {
        "version": "1.0",
        "added_tokens": [{"id": len(vocabulary), "content": ENDS[0], **flags}],
        "pre_tokenizer": pieces,
        "decoder": decoder,
        "model": {**model, "vocab": vocabulary},
    }
    return json.dumps(form)


def _read_built_in(file: Path) -> Tokenizer | None:
    """Return the tokenizer of bytes or of characters that the file holds; None for any other."""
    try:
        values = read_json(file)
        known: list[Tokenizer] = [
            ByteTokenizer(),
            CharacterTokenizer("".join(values["model"]["vocab"])),
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((item for item in known if json.loads(item.to_json()) == values), None)
