"""The models as numbers, and their data. Nothing here needs nnmpi or PyTorch.

| case            | model                                                 | loss               |
|-----------------|-------------------------------------------------------|--------------------|
| mlp, iris       | linear layers with ReLU between them                  | cross-entropy      |
| cnn             | `nnmpi.models.cnn`: two convolutions, ReLU, max-pool  | cross-entropy      |
| gpt-block       | pre-LN transformer block, causal, GELU (tanh)         | mean squared error |
| gpt-small, gpt2 | `nnmpi.models.gpt`: such blocks between tied tables   | cross-entropy      |
| lstm            | `nnmpi.models.lstm`: layers between untied tables     | cross-entropy      |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

MLP, CNN, BLOCK, GPT, LSTM = "mlp", "cnn", "block", "gpt", "lstm"
LANGUAGE = (GPT, LSTM)  # models that predict the next token
CROSS_ENTROPY, SQUARED = "cross-entropy", "mse"


@dataclass(frozen=True)
class Case:
    """A model, a global batch and a loss.

    Attributes:
        name: on the command line.
        model: MLP, CNN, BLOCK, GPT or LSTM.
        batch: rows of the global batch.
        sizes: MLP: of the layers; CNN: height, width, channels, classes; BLOCK: time, features,
            heads, hidden features; GPT: time, features, heads, layers, context, vocabulary; LSTM:
            time, features, layers, vocabulary.
        loss: CROSS_ENTROPY, or SQUARED (mean over all elements).
        seed: of data and first weights.
        large: only the ways that were fastest elsewhere take part: all of them would take many
            minutes, and more memory than the machine has.
    """

    name: str
    model: str
    batch: int
    sizes: tuple[int, ...]
    loss: str = CROSS_ENTROPY
    seed: int = 0
    large: bool = False

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one row of x in nnmpi's layout, channels last."""
        return self.sizes[: {CNN: 3, BLOCK: 2}.get(self.model, 1)]

    @property
    def classes(self) -> int:
        """Number of labels, or of a language model's tokens."""
        return self.sizes[-1]

    @property
    def elements(self) -> int:
        """Elements of one row of the target."""
        return self.sizes[0] * self.sizes[1] if self.loss == SQUARED else 1

    @property
    def targets(self) -> int:
        """The divisor of the global batch's summed loss: its tokens, or its rows."""
        return self.batch * (self.sizes[0] if self.model in LANGUAGE else 1)

    def data(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the global batch: x (batch, *sample), and labels (batch,) int64 or targets like x.

        A language model's x are tokens, int64, and its labels the next ones, (batch, time). Images
        have a background of zeros, like handwritten digits, so that max-pooling meets ties.
        """
        draw = np.random.default_rng(self.seed)
        if self.model in LANGUAGE:
            tokens = draw.integers(0, self.classes, (self.batch, self.sizes[0] + 1))
            return tokens[:, :-1], tokens[:, 1:]
        x = draw.standard_normal((self.batch, *self.sample)).astype(np.float32)
        if self.model == CNN:
            margin = self.sizes[0] // 7
            inside = np.zeros_like(x)
            inner = (slice(None), slice(margin, -margin), slice(margin, -margin))
            inside[inner] = abs(x[inner])
            x = inside
        if self.loss == SQUARED:
            return x, draw.standard_normal(x.shape).astype(np.float32)
        return x, draw.integers(0, self.classes, self.batch)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case("mlp-small", MLP, 128, (784, 128, 127, 126, 125, 124, 123, 10)),
            Case("mlp-large", MLP, 256, (784, 2048, 2048, 10)),
            Case("cnn", CNN, 64, (28, 28, 1, 10)),
            Case("gpt-block", BLOCK, 8, (128, 256, 4, 1024), SQUARED),
            Case("gpt-small", GPT, 4, (256, 384, 6, 6, 256, 65), large=True),
            Case("gpt2", GPT, 4, (64, 768, 12, 12, 1024, 50257), large=True),
            Case("lstm", LSTM, 32, (35, 512, 2, 10000), large=True),
            Case("iris", MLP, 64, (4, 50, 3)),
        )
    }
)
