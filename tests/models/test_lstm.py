"""The recurrent language model: tied and untied, padded and alone, and every layout equal to the serial run."""

import numpy as np
import pytest

from nnmpi import models, nn
from nnmpi.compose.layout import Layout
from nnmpi.errors import UsageError
from tests.models.sequence_runs import TOKENS, differences

LAYOUTS = {
    3: (Layout(dp=3), Layout(pp=3, dp=1, schedule="gpipe"), Layout(tp=3, dp=1)),
    4: (Layout(pp=2, dp=2), Layout(pp=2, tp=2, dp=1)),
    6: (Layout(pp=3, dp=2, recompute="always"),),
}


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


@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_is_the_serial_run(ranks: int, tied: bool) -> None:
    """With dropout, in float64, with batches and sizes that do not divide."""
    for layout in LAYOUTS[ranks]:
        relative, absolute = differences(lambda: small(tied), ranks, layout)
        assert relative < 1e-12, layout
        assert absolute < 1e-11, layout
