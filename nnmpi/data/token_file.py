"""A text's tokens in a file of their own, which is mapped into memory: the corpus need not fit there.

    ~/.cache/nnmpi/tokens/KEY/tokens.bin       every document's tokens and the one that ends it: uint16, or uint32
                              ends.npy         where each document ends in it, int64
                              tokenizer.json

KEY is a hash of the text, the tokenizer, and what a document is.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.data.documents import read_documents
from nnmpi.data.tokenizer import CHARACTERS, CharacterTokenizer, Tokenizer, load_tokenizer
from nnmpi.errors import DataError
from nnmpi.files import cache_folder, folder_atomically, locked

FORMAT = 2  # of the files; a new one has other keys
TOKENS, ENDS = "tokens.bin", "ends.npy"


@dataclass(frozen=True)
class TextSource:
    """A text to be read.

    Attributes:
        path: see `documents.read_documents`.
        tokenizer: "bytes", "characters", or where one was saved: see `tokenizer.load_tokenizer`.
        columns: of a table.
        sentences: whether each line of a .txt is a document.
    """

    path: Path
    tokenizer: str = CHARACTERS
    columns: tuple[str, ...] = ()
    sentences: bool = False

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield its documents; see `documents.read_documents`."""
        return read_documents(self.path, self.columns, self.sentences)

    def load_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None for one that is made of the text."""
        return None if self.tokenizer == CHARACTERS else load_tokenizer(self.tokenizer)

    @cached_property
    def key(self) -> str:
        """What names its tokens: a hash of the text, the tokenizer, and what a document is.

        Raises:
            DataError: when the file cannot be read.
        """
        made = self.load_tokenizer()
        try:
            with self.path.open("rb") as stream:
                text = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        kind = "".join(self.path.suffixes)
        parts = [FORMAT, text, kind, self.columns, self.sentences, CHARACTERS if made is None else made.identity]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The tokens of a text.

    Attributes:
        tokens: all documents' tokens, each with the tokenizer's end behind it; mapped, not read.
        ends: where each document ends.
        tokenizer: that made them.
        key: what they are named by, see `TextSource.key`.
    """

    tokens: Array
    ends: NDArray[np.int64]
    tokenizer: Tokenizer
    key: str


def prepare_tokens(source: TextSource) -> Path:
    """Return the folder with the text's tokens, after writing it if it is not there.

    One rank per node calls this; several at once wait for one another.

    Raises:
        UsageError, DataError: for a text or a tokenizer that cannot be read, see `documents` and `tokenizer`; and for a
            folder that cannot be written.
    """
    parent = cache_folder() / "tokens"
    folder = parent / source.key
    if folder.is_dir():
        return folder
    with locked(parent):
        if not folder.is_dir():
            try:
                with folder_atomically(folder) as temporary:
                    _fill(source, temporary)
            except OSError as error:
                raise DataError(f"{folder} cannot be written ({error.strerror or error})") from error
    return folder


def open_tokens(source: TextSource) -> TokenFile:
    """Return the tokens that `prepare_tokens` has written.

    Raises:
        UsageError, DataError: as `prepare_tokens`; for files that are damaged.
    """
    folder = cache_folder() / "tokens" / source.key
    try:
        ends = np.load(folder / ENDS, allow_pickle=False)
        tokenizer = load_tokenizer(folder)
        kind = _kind(tokenizer)
        tokens = np.memmap(folder / TOKENS, kind, "r").view(np.ndarray)  # a part of it is made ten times faster
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{folder} cannot be read ({error}); remove it, and it is made again") from error
    if not len(ends) or len(tokens) != ends[-1]:
        raise DataError(f"{folder} is damaged: {len(tokens)} tokens; remove it, and it is made again")
    return TokenFile(tokens, ends, tokenizer, source.key)


def _kind(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if tokenizer.vocabulary_size <= 2**16 else np.uint32)


def _fill(source: TextSource, folder: Path) -> None:
    tokenizer = source.load_tokenizer()
    if tokenizer is None:
        tokenizer = CharacterTokenizer(_characters(source.pieces()))
    kind, end = _kind(tokenizer), tokenizer.end
    ends: list[int] = []
    done = begun = 0
    with (folder / TOKENS).open("wb") as stream:
        for text, is_whole in source.pieces():
            ids = tokenizer.encode(text)
            if is_whole:
                ids = [*ids, end]
            stream.write(np.asarray(ids, kind).tobytes())
            done += len(ids)
            if is_whole:
                if done == begun + 1:
                    raise DataError(f"{source.path}: document {len(ends) + 1} is empty: it has no tokens")
                ends.append(done)
                begun = done
    np.save(folder / ENDS, np.array(ends, np.int64))
    tokenizer.save(folder)


def _characters(pieces: Iterable[tuple[str, bool]]) -> set[str]:
    found: set[str] = set()
    for text, _ in pieces:
        found.update(text)
    return found
