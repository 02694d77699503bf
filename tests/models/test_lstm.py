"""The recurrent language model: tied and untied, padded and alone."""

import numpy as np
import pytest

from nnmpi import models, nn
from nnmpi.errors import UsageError
from tests.models.sequence_runs import TOKENS


def small(tied: bool = True) -> nn.Sequential:
    return models.lstm(TOKENS, features=10, layers=2, dropout=0.1, tied=tied)


def test_sizes() -> None:
    """The tied output has no weights of its own."""
    sizes = {tied: sum(p.size for p in models.lstm(50, 8, 3, tied=tied).parameters()) for tied in (True, False)}
    assert sizes[True] == 50 * 8 + 3 * (2 * 8 * 32 + 32)
    assert sizes[False] == sizes[True] + 50 * 8 + 50
    with pytest.raises(UsageError, match="0 layers, 8 features and 50 tokens"):
        models.lstm(50, 8, 0)


def test_padding_changes_nothing() -> None:
    """Whatever tokens stand behind a sequence."""
    model = small().initialize(0, "float64")
    tokens = np.random.default_rng(0).integers(0, TOKENS, (2, 9))
    assert np.allclose(model(tokens).data[:, :4], model(tokens[:, :4]).data, rtol=0, atol=1e-15)
