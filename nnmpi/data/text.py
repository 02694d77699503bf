"""Texts as training data: tokens to read, and for each of them the one that comes next.

Blocks, for GPT: the documents one after another, cut every T tokens; what is left makes a last
block with padding.

    tokens    t h e _ c a t # a _ d o g #         # ends a document
    x         t h e _ c | a t # a _ | d o g p p
    y         h e _ c a | t # a _ d | o g # . .   . is IGNORED, p the padding: #

Sentences, for an LSTM: each document is a sample, one of more than T tokens continues in the next
sample; a batch is as long as its longest, and has sentences of about that length (see
`sampler.by_length`).

    x         t h e _ c a t         y     h e _ c a t #
              a _ d o g p p               _ d o g # . .

In x the end of a document stands for padding alone, so that the lengths can be told from it.

A text's tokens are in a file of their own, which is mapped into memory: the corpus need not fit
there.

    ~/.cache/nnmpi/tokens/KEY/tokens.bin       every document's tokens and the one that ends it:
                                               uint16, or uint32
                              ends.npy         where each document ends in it, int64
                              tokenizer.json

KEY is a hash of the text, the tokenizer, and what a document is.

Documents come from files, one by one, in UTF-8, plain or .gz:

    .txt          the whole file is one document; or, for sentences, each line that is not empty
    .csv          each row: the columns that are asked for, one under the other
    .jsonl        each line, an object: the same of its fields
"""

import csv
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256 as hashed
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import Array, Integers
from nnmpi.backend.random import stream
from nnmpi.data.dataset import IGNORED, Samples
from nnmpi.data.tables import read_cells, read_lines
from nnmpi.data.tokenizer import CHARACTERS, CharacterTokenizer, Tokenizer, load_tokenizer
from nnmpi.errors import DataError, UsageError, raised_as
from nnmpi.files import cache_folder, folder_atomically, locked, parse_json, sha256

DEFAULT_CONTEXT = 64
FORMAT = 3  # of the files; a new one has other keys
PIECE = 2**20  # characters
CELL_BYTES = 2**30  # the longest cell of a table
ENDINGS = (".txt", ".jsonl")
TOKENS, ENDS = "tokens.bin", "ends.npy"


# ---- documents ----


def is_text(path: Path, columns: Sequence[str]) -> bool:
    """True if a file holds text, by its suffix, or by requested text columns of a table."""
    name = path.name.removesuffix(".gz")
    return name.endswith(ENDINGS) or (bool(columns) and name.endswith(".csv"))


def read_documents(
    path: Path, columns: Sequence[str] = (), lines: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yield pieces of a file's documents, and whether the document ends with the piece.

    Args:
        path: ending in .txt, .csv or .jsonl, or these and .gz.
        columns: of a table; of .jsonl "text" by default.
        lines: whether each line of a .txt is a document.

    Raises:
        UsageError: for a column that is not there.
        DataError: for a file that cannot be read, is not UTF-8 or no table, and for an empty
            document.
    """
    name, empty = path.name.removesuffix(".gz"), True
    if name.endswith(".txt"):
        if columns:
            raise UsageError(
                f"{path} has no columns, as it is no table; leave {', '.join(columns)} out"
            )
        rows = (
            ((line.rstrip("\n"), True) for line in read_lines(path) if line.strip())
            if lines
            else _pieces(path)
        )
        for text, is_whole in rows:
            empty = empty and not text.strip()
            yield text, is_whole and not empty
    else:
        for line, cells in (
            _json_rows(path, columns or ("text",))
            if name.endswith(".jsonl")
            else _rows(path, columns)
        ):
            text, empty = "\n".join(cells), False
            if not text.strip():
                raise DataError(
                    f"{path}, line {line}: the document is empty; remove the row, or choose other"
                    " columns"
                )
            yield text, True
    if empty:
        raise DataError(f"{path}: the document is empty; give a text, in UTF-8")


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield one document in pieces, cut before a line that begins with no space: no tokenizer joins
    over that.

    Behind an empty line it is not cut: there GPT-2's pattern looks at what comes next.
    """
    held, size = [""], 0
    for line in read_lines(path):
        if size > PIECE and line[:1].strip() and held[-1][-2:-1].strip():
            yield "".join(held), False
            held, size = [], 0
        held.append(line)
        size += len(line)
    yield "".join(held), True


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of each row of a CSV table with a header."""
    csv.field_size_limit(CELL_BYTES)
    rows = read_cells(path)
    _, header = next(rows, (1, []))
    _check_columns(str(path), header, columns)
    places = [header.index(column) for column in columns]
    yield from ((line, [cells[place] for place in places]) for line, cells in rows)


def _check_columns(where: str, there: Collection[str], columns: Sequence[str]) -> None:
    """Refuse columns that are not there, or more than once."""
    for column in columns:
        if list(there).count(column) != 1:
            raise UsageError(
                f"{where} has no single column {column!r}; its columns are: {', '.join(there)}"
            )


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the fields of each object of a file of JSON lines."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: not a JSON object; give one with a field for each column")
        _check_columns(where, row, columns)
        cells = [row[column] for column in columns]
        if not all(isinstance(cell, str) and _is_unicode(cell) for cell in cells):
            raise DataError(f"{where}: a column is no Unicode text")
        yield number, cells


def _is_unicode(text: str) -> bool:
    try:
        return text.encode() is not None
    except UnicodeEncodeError:
        return False


# ---- their tokens ----


@dataclass(frozen=True)
class TextSource:
    """A text to be read.

    Attributes:
        path: see `read_documents`.
        tokenizer: "bytes", "characters", or where one was saved: see `tokenizer.load_tokenizer`.
        columns: of a table.
        sentences: whether each line of a .txt is a document, and each document a sample.
    """

    path: Path
    tokenizer: str = CHARACTERS
    columns: tuple[str, ...] = ()
    sentences: bool = False

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield its documents; see `read_documents`."""
        return read_documents(self.path, self.columns, self.sentences)

    def load_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None for one that is made of the text."""
        return None if self.tokenizer == CHARACTERS else load_tokenizer(self.tokenizer)

    @cached_property
    def key(self) -> str:
        """What names its tokens: a hash of the text, the tokenizer, and what a document is."""
        made = self.load_tokenizer()
        with raised_as(DataError, f"{self.path}: cannot be read"):
            text = sha256(self.path)
        kind = "".join(self.path.suffixes)
        parts = [
            FORMAT,
            text,
            kind,
            self.columns,
            self.sentences,
            CHARACTERS if made is None else made.identity,
        ]
        return hashed(json.dumps(parts).encode()).hexdigest()[:32]


def prepare_tokens(source: TextSource) -> Path:
    """Return the folder with the text's tokens, after writing it if it is not there.

    One rank per node calls this; several at once wait for one another.

    Raises:
        UsageError, DataError: for a text or a tokenizer that cannot be read, see `read_documents`
            and `tokenizer`; and for a folder that cannot be written.
    """
    parent = cache_folder() / "tokens"
    folder = parent / source.key
    if folder.is_dir():
        return folder
    with locked(parent):
        if not folder.is_dir():
            with (
                raised_as(DataError, f"{folder} cannot be written"),
                folder_atomically(folder) as temporary,
            ):
                _fill(source, temporary)
    return folder


def _kind(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if tokenizer.vocabulary_size <= 2**16 else np.uint32)


def _fill(source: TextSource, folder: Path) -> None:
    tokenizer = source.load_tokenizer() or CharacterTokenizer(
        letter for text, _ in source.pieces() for letter in text
    )
    ends: list[int] = []
    done = 0
    with (folder / TOKENS).open("wb") as file:
        for text, is_whole in source.pieces():
            ids = [*tokenizer.encode(text), *([tokenizer.end] if is_whole else [])]
            file.write(np.asarray(ids, _kind(tokenizer)).tobytes())
            done += len(ids)
            if is_whole:
                if done == 1 + (ends[-1] if ends else 0):
                    raise DataError(
                        f"{source.path}: document {len(ends) + 1} is empty: it has no tokens"
                    )
                ends.append(done)
    np.save(folder / ENDS, np.array(ends, np.int64))
    tokenizer.save(folder)


class Text(Samples):
    """A part of a text, in blocks or sentences; see the module.

    Args:
        source: the text.
        tokens: all documents' tokens, each with the tokenizer's end behind it; mapped, not read.
        tokenizer: what made them.
        spans: (documents, 2), where each document of this part begins and ends in them.
        context: T, the most tokens of a sample.
    """

    def __init__(
        self, source: TextSource, tokens: Array, tokenizer: Tokenizer, spans: Integers, context: int
    ) -> None:
        self.name, self._key, self.sentences = (
            source.path.name.split(".")[0],
            source.key,
            source.sentences,
        )
        self.tokenizer, self.classes, self.context = tokenizer, tokenizer.vocabulary_size, context
        self._tokens = tokens
        sizes = spans[:, 1] - spans[:, 0]
        self._stops = np.cumsum(sizes)  # where each document ends in the part
        self._offsets = spans[:, 1] - self._stops
        # Each sample's first token in the part, and how many of them have one that comes next.
        if source.sentences:
            parts = -(-(sizes - 1) // context)  # of each document
            document = np.repeat(np.arange(len(parts)), parts)
            within = (
                np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
            ) * context
            self._firsts = (self._stops - sizes)[document] + within
            left = sizes[document] - 1 - within
        else:
            self._firsts = np.arange(0, self._stops[-1] - 1, context)
            left = self._stops[-1] - 1 - self._firsts
        self._counts: Integers = np.minimum(left, context)

    def __len__(self) -> int:
        return len(self._firsts)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a sample of the most tokens."""
        return (self.context,)

    @property
    def identity(self) -> str:
        """What names the text's tokens."""
        return self._key

    @property
    def targets(self) -> Integers:
        """How many tokens of each sample are to be predicted, (n,)."""
        return self._counts

    @property
    def lengths(self) -> Integers | None:
        """How many tokens each sample has, (n,); None where all have `context`."""
        return self._counts if self.sentences else None

    def rows(
        self, indices: Integers, dtype: DTypeLike = "float32", length: int | None = None
    ) -> Array:
        """Return the tokens that are read."""
        return self._filled(indices, length, self.tokenizer.end, 0)

    def labels(self, indices: Integers, length: int | None = None) -> Integers:
        """Return the tokens that come next."""
        return self._filled(indices, length, IGNORED, 1)

    def _filled(self, indices: Integers, length: int | None, padding: int, shift: int) -> Integers:
        """Return each sample's tokens, `shift` places behind those that are read, in rows of one
        length.
        """
        counts = self._counts[indices]
        width = (
            self.context
            if not self.sentences
            else int(counts.max(initial=0))
            if length is None
            else length
        )
        places = self._firsts[indices, None] + np.arange(shift, width + shift)  # in the part
        places = np.minimum(places, self._stops[-1] - 1)
        places += self._offsets[np.searchsorted(self._stops, places, side="right")]
        result: Integers = self._tokens[places].astype(np.int64)
        result[np.arange(width) >= counts[:, None]] = padding
        return result


def load_text(
    source: TextSource, context: int = DEFAULT_CONTEXT, seed: int = 0, test_fraction: float = 0.2
) -> tuple[Text, Text]:
    """Return the training and the test part of a text whose tokens are there: see `prepare_tokens`.

    The documents are dealt to the two parts by chance; of a single one the end is the test part.

    Args:
        source: the text.
        context: the most tokens of a sample.
        seed: of the split.
        test_fraction: the share of the test part, between 0 and 1.

    Raises:
        UsageError, DataError: as `prepare_tokens`; for tokens that are damaged; and for a part that
            is shorter than a block.
    """
    folder = cache_folder() / "tokens" / source.key
    try:
        ends = np.load(folder / ENDS, allow_pickle=False)
        tokenizer = load_tokenizer(folder)
        # a part is made 10 times faster
        tokens = np.memmap(folder / TOKENS, _kind(tokenizer), "r").view(np.ndarray)
        if not len(ends) or len(tokens) != ends[-1]:
            raise ValueError(f"{len(tokens)} tokens")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{folder} is damaged ({error}); remove it, and it is made again"
        ) from error
    spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    if len(spans) == 1:
        cut = int(ends[0]) - max(1, round(int(ends[0]) * test_fraction))
        parts = [np.array([[0, cut]]), np.array([[cut, ends[0]]])]
    else:
        tests = min(max(round(len(spans) * test_fraction), 1), len(spans) - 1)
        order = stream(seed, "split").permutation(len(spans))
        parts = [spans[np.sort(order[tests:])], spans[np.sort(order[:tests])]]
    least = 2 if source.sentences else context + 1
    for part, what in zip(parts, ("training", "test"), strict=True):
        if (length := int((part[:, 1] - part[:, 0]).sum())) < least:
            raise DataError(
                f"{source.path}: the {what} part has {length} tokens, but a block of {context} and"
                f" the one to be predicted last are {least}; give a smaller context, or a longer"
                " text"
            )
    train, test = (Text(source, tokens, tokenizer, part, context) for part in parts)
    return train, test
