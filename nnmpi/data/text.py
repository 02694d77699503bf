"""Texts as training data: tokens to read, and for each of them the one that comes next.

Blocks, for GPT: the documents one behind the other, cut every T tokens; what is left makes a last block with padding.

    tokens    t h e _ c a t # a _ d o g #         # ends a document
    x         t h e _ c | a t # a _ | d o g p p
    y         h e _ c a | t # a _ d | o g # . .   . is IGNORED, p the padding: #

Sentences, for an LSTM: each document is a sample, one of more than T tokens goes on in the next sample; a batch is as
long as its longest, and has sentences of about that length (see `sampler.by_length`).

    x         t h e _ c a t         y     h e _ c a t #
              a _ d o g p p               _ d o g # . .

In x the end of a document stands for padding alone, so that the lengths can be told from it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array
from nnmpi.backend.random import stream
from nnmpi.data.dataset import IGNORED
from nnmpi.data.token_file import TextSource, TokenFile, open_tokens
from nnmpi.data.tokenizer import Tokenizer
from nnmpi.errors import DataError

DEFAULT_CONTEXT = 64
Spans = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Text(ABC):
    """A part of a text: `TextBlocks` or `TextSentences`.

    Attributes:
        name: for messages and headers.
        file: the tokens of the whole text.
        spans: (documents, 2), where each document of this part begins and ends in it.
        context: T, the most tokens of a sample.
    """

    name: str
    file: TokenFile
    spans: Spans
    context: int

    is_tokens = True

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens."""
        return self.file.tokenizer

    @property
    def classes(self) -> int:
        """The size of the vocabulary."""
        return self.tokenizer.vocabulary_size

    @property
    def identity(self) -> str:
        """What names the text's tokens."""
        return self.file.key

    @property
    def vocabulary(self) -> int:
        """How many tokens a model must know: the size of the vocabulary."""
        return self.classes

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a sample of the most tokens."""
        return (self.context,)

    def stored(self, indices: NDArray[np.int64], length: int | None = None) -> Array:
        """Return the tokens at these indices; see `dataset.Samples`."""
        return self.rows(indices, length=length)

    def rows(self, indices: NDArray[np.int64], dtype: DTypeLike = "int64", length: int | None = None) -> Array:
        """Return the tokens that are read; see `dataset.Samples`."""
        return self._filled(indices, length, self.tokenizer.end, 0)

    def labels(self, indices: NDArray[np.int64], length: int | None = None) -> NDArray[np.int64]:
        """Return the tokens that come next; see `dataset.Samples`."""
        return self._filled(indices, length, IGNORED, 1)

    def _filled(self, indices: NDArray[np.int64], length: int | None, padding: int, shift: int) -> NDArray[np.int64]:
        """Return each sample's targets, or what is before them, in rows of one length."""
        places, counts = self._places(indices, length, shift)
        result = self.file.tokens[places].astype(np.int64)
        result[np.arange(places.shape[1]) >= counts[:, None]] = padding
        return result

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    @abstractmethod
    def targets(self) -> NDArray[np.int64]:
        """How many tokens of each sample are to be predicted, (n,)."""

    @property
    @abstractmethod
    def lengths(self) -> NDArray[np.int64] | None:
        """How many tokens each sample has, (n,); None where all have `context`."""

    @abstractmethod
    def _places(
        self, indices: NDArray[np.int64], length: int | None, shift: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each sample's tokens lie in the file, (rows, length), and how many of them are no padding.

        Args:
            indices, length: see `dataset.Samples`.
            shift: by how many places what is wanted lies behind what is read.
        """


class TextBlocks(Text):
    """Blocks of `context` tokens; see the module."""

    def __len__(self) -> int:
        return -(-(int(self._stops[-1]) - 1) // self.context)

    @cached_property
    def _stops(self) -> NDArray[np.int64]:
        """Where each document ends in the part."""
        return np.cumsum(self.spans[:, 1] - self.spans[:, 0])

    @property
    def lengths(self) -> None:
        """All blocks have the same length."""

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """How many tokens of each block are to be predicted, (n,)."""
        left = int(self._stops[-1]) - 1 - np.arange(len(self)) * self.context
        return np.asarray(np.minimum(left, self.context), np.int64)

    def _places(
        self, indices: NDArray[np.int64], length: int | None, shift: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        places = indices[:, None] * self.context + np.arange(shift, self.context + shift)  # in the part
        places = np.minimum(places, self._stops[-1] - 1)
        document = np.searchsorted(self._stops, places, side="right")
        return places + (self.spans[:, 1] - self._stops)[document], self.targets[indices]


class TextSentences(Text):
    """A document for each sample; see the module."""

    def __len__(self) -> int:
        return len(self._samples)

    @cached_property
    def _samples(self) -> Spans:
        """Where each sample begins, and how many targets it has: (n, 2)."""
        parts = -(-(self.spans[:, 1] - self.spans[:, 0] - 1) // self.context)  # of each document
        document = np.repeat(np.arange(len(parts)), parts)
        within = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        first = self.spans[document, 0] + within * self.context
        return np.stack([first, np.minimum(self.spans[document, 1] - 1 - first, self.context)], axis=1)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many tokens each sample has, (n,)."""
        return self._samples[:, 1]

    @property
    def targets(self) -> NDArray[np.int64]:
        """How many of them are to be predicted, (n,): all."""
        return self.lengths

    def _places(
        self, indices: NDArray[np.int64], length: int | None, shift: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first, counts = self._samples[indices].T
        width = int(counts.max(initial=0)) if length is None else length
        places = first[:, None] + np.arange(shift, width + shift)
        return np.minimum(places, len(self.file.tokens) - 1), counts


def load_text(
    source: TextSource, context: int = DEFAULT_CONTEXT, seed: int = 0, test_fraction: float = 0.2
) -> tuple[Text, Text]:
    """Return the training and the test part of a text whose tokens are there: see `token_file.prepare_tokens`.

    The documents are dealt to the two parts by chance; of a single one the end is the test part.

    Args:
        source: the text.
        context: the most tokens of a sample.
        seed: of the split.
        test_fraction: the share of the test part, between 0 and 1.

    Raises:
        UsageError, DataError: see `token_file.open_tokens`; and for a part that is shorter than a block.
    """
    file, name = open_tokens(source), source.path.name.split(".")[0]
    starts = np.concatenate([[0], file.ends[:-1]])
    spans = np.stack([starts, file.ends], axis=1)
    if len(spans) == 1:
        cut = int(file.ends[0]) - max(1, round(int(file.ends[0]) * test_fraction))
        parts = [np.array([[0, cut]]), np.array([[cut, file.ends[0]]])]
    else:
        tests = min(max(round(len(spans) * test_fraction), 1), len(spans) - 1)
        order = stream(seed, "split").permutation(len(spans))
        parts = [spans[np.sort(order[tests:])], spans[np.sort(order[:tests])]]
    kind: type[Text] = TextSentences if source.sentences else TextBlocks
    for part, what in zip(parts, ("training", "test"), strict=True):
        length = int((part[:, 1] - part[:, 0]).sum())
        least = 2 if source.sentences else context + 1
        if length < least:
            raise DataError(
                f"{source.path}: the {what} part has {length} tokens, but a block of {context} and the one to be "
                f"predicted last are {least}; give a smaller context, or a longer text"
            )
    train, test = (kind(name, file, part, context) for part in parts)
    return train, test
