"""The LSTM against PyTorch's in float64: all options, padded and packed, results and all gradients."""

import itertools

import numpy as np
import pytest

from nnmpi import Tensor, nn

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # the arrays are small, and other tests want the cores
rnn = torch.nn.utils.rnn

BATCH, TIME, INPUTS, FEATURES = 5, 7, 3, 4
LENGTHS = np.array([3, 7, 1, 7, 5])


def reordered(values):
    """Return (..., 4 features) in PyTorch's order of the gates, transposed."""
    i, f, o, g = np.split(values, 4, axis=-1)
    return np.concatenate([i, f, g, o], -1).T.copy()


def twins(layers, bidirectional):
    """Return our LSTM, PyTorch's with the same weights, and the pairs of their parameters."""
    ours = nn.LSTM(INPUTS, FEATURES, layers, bidirectional=bidirectional).initialize(0, "float64")
    theirs = torch.nn.LSTM(INPUTS, FEATURES, layers, batch_first=True, bidirectional=bidirectional).double()
    pairs = []
    for number, part in enumerate(ours.layers):
        suffix = f"_l{number // ours.directions}" + "_reverse" * (number % ours.directions)
        named = (("weight_ih", part.weight), ("weight_hh", part.recurrent), ("bias_ih", part.bias))
        for name, parameter in named:
            twin = getattr(theirs, name + suffix)
            twin.data = torch.tensor(reordered(parameter.data))
            pairs.append((parameter, twin))
        getattr(theirs, "bias_hh" + suffix).data.zero_()  # the two are added up: ours is one
    return ours, theirs, pairs


@pytest.mark.parametrize(
    ("layers", "bidirectional", "packed", "stateful"),
    list(itertools.product((1, 3), (False, True), (False, True), (False, True))),
)
def test_results_and_gradients_are_pytorchs(layers, bidirectional, packed, stateful):
    """To 1e-13 of the largest of each; the padding is NaN, which nobody may read."""
    ours, theirs, pairs = twins(layers, bidirectional)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((BATCH, TIME, INPUTS))
    for row, length in enumerate(LENGTHS if packed else ()):
        x[row, length:] = np.nan
    first = [draw.standard_normal((len(ours.layers), BATCH, FEATURES)) for _ in range(2)]
    seeds = [draw.standard_normal((BATCH, TIME, ours.directions * FEATURES)), *(2 * each for each in first)]
    inputs = [Tensor(each, requires_grad=True) for each in (x, *first)]
    y, state = ours.with_state(inputs[0], (inputs[1], inputs[2]) if stateful else None, LENGTHS if packed else None)
    sum((each * seed).sum() for each, seed in zip((y, *state), seeds, strict=True)).backward()
    leaves = [torch.tensor(each, requires_grad=True) for each in (x, *first)]
    given = leaves[0]
    if packed:
        given = rnn.pack_padded_sequence(given, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    their_y, their_state = theirs(given, (leaves[1], leaves[2]) if stateful else None)
    if packed:
        their_y, _ = rnn.pad_packed_sequence(their_y, batch_first=True, total_length=TIME)
    results = (their_y, *their_state)
    sum((each * torch.tensor(seed)).sum() for each, seed in zip(results, seeds, strict=True)).backward()
    found = [(each.data, twin) for each, twin in zip((y, *state), results, strict=True)]
    found += [
        (mine.grad, twin.grad) for mine, twin in zip(inputs, leaves, strict=True) if stateful or mine is inputs[0]
    ]
    found += [(reordered(parameter.grad), twin.grad) for parameter, twin in pairs]
    for mine, twin in found:
        expected = twin.detach().numpy()
        assert np.abs(mine - expected).max() <= 1e-13 * np.abs(expected).max()
