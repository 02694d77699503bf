"""Texts as training data: x holds tokens, y the next token of each.

Blocks, for GPT: documents are concatenated and cut every T tokens. The rest makes a last block
with padding.

    tokens    t h e _ c a t # a _ d o g #         # ends a document
    x         t h e _ c | a t # a _ | d o g p p
    y         h e _ c a | t # a _ d | o g # . .   . is IGNORED, p the padding: #

Sentences, for an LSTM: each document is a sample. A document of more than T tokens continues in the
next sample. A batch is padded to its longest sample and holds samples of similar length (see
`sampler.by_length`).

    x         t h e _ c a t         y     h e _ c a t #
              a _ d o g p p               _ d o g # . .

In x, the end token # occurs as padding only, so that the model can compute the lengths from x.

The tokens are written to a file once and mapped into memory, so that the corpus may be larger than
memory:

    ~/.cache/nnmpi/tokens/KEY/data/tokens.bin  the tokens of all documents, each with its end token:
                                               uint16, or uint32 for a large vocabulary
                                   ends.npy    the end of each document in tokens.bin, int64
                                   asked.bin   of conversations: 1 for each token of an assistant,
                                               whose losses count alone; uint8
                                   tokenizer.json, identity.json

KEY says where the text is, when it was written, the tokenizer, and the rule that makes documents.
The identity, which checkpoints compare, is a hash of the content and these rules; who makes the
tokens computes it, and nobody again. The column "messages" of a .jsonl has conversations, which the
tokenizer's chat template makes texts: see `chat`.

Documents are read one by one from a file in UTF-8, plain or .gz: see `documents`.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256 as hashed
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import Array, Integers, Shape
from nnmpi.base.errors import DataError, expect, raised_as
from nnmpi.base.files import json_text, read_json, sha256, write_json
from nnmpi.base.settled import Settled
from nnmpi.data.cache import DATA, TEXTS, entry_of, filled
from nnmpi.data.chat import MESSAGES, ChatTemplate, conversations, read_template
from nnmpi.data.dataset import IGNORED, Samples, split_indices
from nnmpi.data.documents import Pieces
from nnmpi.data.names import TOKENIZER, Names
from nnmpi.data.prepared import key_of
from nnmpi.data.readers import read_documents
from nnmpi.data.team import ALONE, Team
from nnmpi.data.tokenizer import CHARACTERS, CharacterTokenizer, Tokenizer, load_tokenizer

DEFAULT_CONTEXT = 64
FORMAT = 3  # of the token files; part of KEY, so that files of other formats are written again
TOKENS, ENDS, ASKED, IDENTITY = "tokens.bin", "ends.npy", "asked.bin", "identity.json"


@dataclass(frozen=True)
class TextSource:
    """A text file and the rules to make samples from it.

    Attributes:
        path: of the text; see `read_documents`.
        tokenizer: "bytes", "characters", or the path of one: see `tokenizer.load_tokenizer`.
        columns: of a table.
        sentences: whether each line of a .txt is a document, and each document a sample.
    """

    path: Path
    tokenizer: str = CHARACTERS
    columns: tuple[str, ...] = ()
    sentences: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def pieces(self) -> Pieces:
        """Yield the documents' pieces; see `read_documents`."""
        return read_documents(self.path, self.columns, self.sentences)

    def load_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None for "characters", which is made from the text."""
        return None if self.tokenizer == CHARACTERS else load_tokenizer(self.tokenizer)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template of conversations; None for other texts.

        Raises:
            UsageError: see `read_template`.
        """
        is_lines = self.path.name.lower().removesuffix(".gz").endswith(".jsonl")
        return read_template(self.tokenizer) if is_lines and self.columns == (MESSAGES,) else None

    @cached_property
    def rules(self) -> list[Any]:
        """What its tokens depend on besides the text, as JSON values."""
        tokenizer = self.load_tokenizer()
        identity = CHARACTERS if tokenizer is None else tokenizer.identity
        rules = ["".join(self.path.suffixes), self.columns, self.sentences, identity]
        if self.template is not None:
            rules += [self.template.text, self.template.tokens]
        return rules


def prepare_tokens(source: TextSource, team: Team = ALONE) -> Path:
    """Return the folder with the text's tokens; write it first if it is missing. Collective.

    Concurrent callers wait for a file lock.

    Args:
        source: the text.
        team: of the ranks of a node, of which one writes; by default this process alone.

    Raises:
        UsageError, DataError: for an unreadable text or tokenizer, see `read_documents` and
            `tokenizer`; and for a folder that cannot be written.
    """
    with team.agreed():
        entry = _entry(source)
    return filled(entry, lambda folder: team.first(partial(_fill, source, folder)), team)


def _entry(source: TextSource) -> Path:
    with raised_as(DataError, f"{source.path}: cannot be read"):
        return entry_of(TEXTS, [FORMAT, key_of([source.path]), source.rules])


def _kind(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if tokenizer.vocabulary_size <= 2**16 else np.uint32)


EncodedPieces: TypeAlias = Iterator[tuple[list[int], bool, bool]]
"""Tokens; whether they are to be predicted; and whether they end their document."""


def _fill(source: TextSource, folder: Path) -> None:
    """Write the tokens of a text, and of conversations which of them an assistant says."""
    tokenizer = source.load_tokenizer() or CharacterTokenizer(
        letter for text, _ in source.pieces() for letter in text
    )
    ends, done = list[int](), 0
    with ExitStack() as stack:
        tokens = stack.enter_context((folder / TOKENS).open("wb"))
        pieces, asked = _encoded(source, tokenizer), None
        if source.template is not None:
            pieces = _encoded_conversations(source.path, source.template, tokenizer)
            asked = stack.enter_context((folder / ASKED).open("wb"))
        for ids, is_asked, is_whole in pieces:
            tokens.write(np.asarray(ids, _kind(tokenizer)).tobytes())
            if asked is not None:
                asked.write(np.full(len(ids), is_asked, np.uint8).tobytes())
            done += len(ids)
            if is_whole:
                if done == 1 + (ends[-1] if ends else 0):
                    raise DataError(
                        f"{source.path}: document {len(ends) + 1} is empty: it has no tokens"
                    )
                ends.append(done)
    if not ends:
        raise DataError(f"{source.path}: the document is empty; give a text, in UTF-8")
    np.save(folder / ENDS, np.array(ends, np.int64))
    identity = json_text([FORMAT, sha256(source.path), *source.rules])
    write_json(folder / IDENTITY, hashed(identity.encode()).hexdigest()[:32])
    tokenizer.save(folder)


def _encoded(source: TextSource, tokenizer: Tokenizer) -> EncodedPieces:
    for text, is_whole in source.pieces():
        yield [*tokenizer.encode(text), *([tokenizer.end] if is_whole else [])], True, is_whole


def _encoded_conversations(
    path: Path, template: ChatTemplate, tokenizer: Tokenizer
) -> EncodedPieces:
    """Yield what others and what an assistant say, tokenized apart, as in a generated reply."""
    for messages in conversations(path):
        for text, says in template.segments(messages):
            yield tokenizer.encode(text), says, False
        yield [tokenizer.end], False, True


class Text(Settled, Samples, read_once="name sentences tokenizer classes context"):
    """A part of a text, in blocks or sentences; see the module.

    Args:
        source: the text.
        tokens: of all documents, each followed by the end token; mapped, not read.
        tokenizer: of the tokens.
        spans: (documents, 2), the begin and end in `tokens` of each document of this part.
        context: T, the most tokens per sample.
        identity: a hash of what the tokens depend on.
        asked: of each token, whether it is to be predicted; None if all are.
    """

    def __init__(
        self,
        source: TextSource,
        tokens: Array,
        tokenizer: Tokenizer,
        spans: Integers,
        context: int,
        identity: str,
        asked: Array | None = None,
    ) -> None:
        self.name = source.path.name.split(".")[0]
        self._identity = identity
        self.sentences = source.sentences
        self.tokenizer, self.classes, self.context = tokenizer, tokenizer.vocabulary_size, context
        self._tokens = tokens
        sizes = spans[:, 1] - spans[:, 0]
        # Positions count through the documents of this part. `_stops` are the documents' ends
        # in the part; adding `_offsets` turns a position into an index of `tokens`.
        self._stops = np.cumsum(sizes)
        self._offsets = spans[:, 1] - self._stops
        # `_firsts` are the samples' first positions; `_counts` their tokens with a next one.
        if source.sentences:
            parts = -(-(sizes - 1) // context)  # samples per document
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
        self._asked, self._targets = asked, self._counts
        if asked is not None:
            part = np.concatenate([asked[start:stop] for start, stop in spans])
            before = np.append(0, np.cumsum(part, dtype=np.int64))
            self._targets = before[self._firsts + 1 + self._counts] - before[self._firsts + 1]

    def __len__(self) -> int:
        return len(self._firsts)

    @property
    def names(self) -> Names:
        """The tokenizer, by a hash of its tokens."""
        return {TOKENIZER: [f"{self.tokenizer.name} {self.tokenizer.identity[:8]}"]}

    @property
    def sample_shape(self) -> Shape:
        """The shape of the longest possible sample."""
        return (self.context,)

    @property
    def identity(self) -> str:
        """A hash of the text, the tokenizer, and the rule that makes documents."""
        return self._identity

    @property
    def targets(self) -> Integers:
        """The number of tokens to predict in each sample, (n,)."""
        return self._targets

    @property
    def lengths(self) -> Integers | None:
        """The number of tokens in each sample, (n,); None for blocks, which are padded to T."""
        return self._counts if self.sentences else None

    def rows(
        self, indices: Integers, dtype: DTypeLike = "float32", length: int | None = None
    ) -> Array:
        """Return the samples' tokens (rows, length), padded with the end token."""
        return self._filled(indices, length, self.tokenizer.end, 0)

    def labels(self, indices: Integers, length: int | None = None) -> Integers:
        """Return the next token of each (rows, length), padded with `IGNORED`.

        Of a conversation, what the assistant does not say is ignored, too.
        """
        result = self._filled(indices, length, IGNORED, 1)
        if self._asked is not None:
            result[self._filled(indices, length, 0, 1, self._asked) == 0] = IGNORED
        return result

    def _filled(
        self,
        indices: Integers,
        length: int | None,
        padding: int,
        shift: int,
        values: Array | None = None,
    ) -> Integers:
        """Return each sample's tokens from `shift` positions after its first, in rows of equal
        length; or another value of each token.
        """
        counts = self._counts[indices]
        width = self.context
        if self.sentences:
            width = int(counts.max(initial=0)) if length is None else length
        positions = self._firsts[indices, None] + np.arange(shift, width + shift)  # in the part
        positions = np.minimum(positions, self._stops[-1] - 1)
        positions += self._offsets[np.searchsorted(self._stops, positions, side="right")]
        result = (self._tokens if values is None else values)[positions].astype(np.int64)
        result[np.arange(width) >= counts[:, None]] = padding
        return result


def load_text(
    source: TextSource, context: int = DEFAULT_CONTEXT, seed: int = 0, test_fraction: float = 0.2
) -> tuple[Text, Text]:
    """Return the training and the test part of a text, after `prepare_tokens` has run.

    Documents are assigned to the parts at random. A single document is cut: its end is the test
    part.

    Args:
        source: the text.
        context: the most tokens per sample.
        seed: of the split.
        test_fraction: the share of the test part, between 0 and 1.

    Raises:
        UsageError, DataError: as `prepare_tokens`; for damaged token files; and for a part shorter
            than a block.
    """
    expect("load_text(data.TextSource(path)), after prepare_tokens", (source, TextSource))
    folder = _entry(source) / DATA
    try:
        ends, identity = np.load(folder / ENDS, allow_pickle=False), read_json(folder / IDENTITY)
        tokenizer = load_tokenizer(folder)
        # as an ndarray: indexing a memmap takes 10 times as long
        tokens = np.memmap(folder / TOKENS, _kind(tokenizer), "r").view(np.ndarray)
        if not len(ends) or len(tokens) != ends[-1]:
            raise ValueError(f"{len(tokens)} tokens")
        asked = None
        if source.template is not None:
            asked = np.memmap(folder / ASKED, np.uint8, "r").view(np.ndarray)
            if len(asked) != len(tokens):
                raise ValueError(f"{len(asked)} of {len(tokens)} tokens in {ASKED}")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{folder} is missing or damaged ({error}); remove it, and prepare_tokens makes it"
            " again"
        ) from error
    spans = np.stack([np.append(0, ends[:-1]), ends], axis=1)
    parts = [spans[np.sort(part)] for part in split_indices(len(spans), test_fraction, seed)]
    if len(spans) == 1:
        cut = int(ends[0]) - max(1, round(int(ends[0]) * test_fraction))
        parts = [np.array([[0, cut]]), np.array([[cut, ends[0]]])]
    least = 2 if source.sentences else context + 1
    for part, what in zip(parts, ("training", "test"), strict=True):
        if (length := int((part[:, 1] - part[:, 0]).sum())) < least:
            raise DataError(
                f"{source.path}: the {what} part has {length} tokens, but a context of {context}"
                f" and the token after it need {least}; give a smaller context, or a longer text"
            )
    rest = context, identity, asked
    train, test = (Text(source, tokens, tokenizer, part, *rest) for part in parts)
    return train, test
