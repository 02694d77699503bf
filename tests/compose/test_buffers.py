"""Modules of one's own that change a Buffer in forward: the serial run's values, or a sentence."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from nnmpi import Layout, Tensor, nn, simulate
from nnmpi.base.errors import UsageError
from tests.equivalence.reference import Setup, batches, build, release
from tests.equivalence.rows import MOMENTUM


class Moving(nn.Module):
    """Subtracts a moving mean, which it keeps without a thought for other ranks and repeated
    passes.
    """

    def __init__(self, features):
        self.mean = nn.Buffer((features,), 0.0)

    def forward(self, x):
        """Return x less the mean so far."""
        shift = Tensor(self.mean.data.copy())
        if nn.current().training:
            self.move(x.data)
        return x - shift

    def move(self, x):
        """Move the mean towards that of these rows."""
        self.mean.data += 0.1 * (x.mean(0) - self.mean.data)


class Careful(Moving):
    """Thinks of them."""

    all_reduce: Any = None

    def move(self, x):
        """Move the mean towards that of all ranks' rows."""
        sums = np.array([*x.sum(0), len(x)])
        if not nn.current().recomputing:
            sums = sums if self.all_reduce is None else self.all_reduce(sums)
            self.mean.data += 0.1 * (sums[:-1] / sums[-1] - self.mean.data)


class Annealed(Moving):
    """Reads a buffer that others change between steps."""

    replayable = True

    def forward(self, x):
        """Return a function of x and the buffer whose derivative depends on both."""
        return (x * Tensor(self.mean.data)).tanh()


def train(group, kind, layout):
    """Return the losses and the mean of 6 steps of two microbatches each."""

    def model(shape, classes):
        hidden = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, classes)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), kind(8), *hidden)

    setup = Setup(model, microbatches=2, **MOMENTUM)
    worker, losses = build(setup, group, layout), []
    for batch in islice(batches(setup, worker), 6):
        if kind is Annealed:
            for _, buffer in worker.model.named_buffers():
                buffer.data += 0.5
        losses.append(worker.step(batch).loss)
    mean = worker.state()[0].to_dict().get("2.mean")  # on rank 0
    release(worker)
    return [losses, mean]


LAYOUTS = {
    "dp": (3, Layout(dp=3)),
    "zero": (2, Layout(dp=2, zero=3)),
    "budget": (1, Layout(activation_memory="least")),
    "recompute": (2, Layout(pp=2, split=(4, 2), activation_memory="least")),
}


@pytest.mark.parametrize("kind", [Careful, Annealed])
@pytest.mark.parametrize("name", [*LAYOUTS, "pp"])
def test_a_module_that_thinks_of_others_is_the_serial_one(kind, name):
    ranks, layout = LAYOUTS.get(name, (2, Layout(pp=2, dp=1)))
    right = simulate(lambda group: train(group, kind, Layout(dp=1)), 1)[0]
    for result, expected in zip(
        simulate(lambda group: train(group, kind, layout), ranks)[0], right, strict=True
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-9)


@pytest.mark.parametrize("name", [*LAYOUTS, "fixed"])
def test_one_that_does_not_is_refused(name):
    """With a fixed order of sums each microbatch is one rank's, and nothing can help."""
    ranks, layout = LAYOUTS.get(name, (2, Layout(dp=2, reduction="fixed")))
    kind = Careful if name == "fixed" else Moving
    with pytest.raises(
        UsageError, match="changed its Buffer '2.mean', by this rank's rows or more than once"
    ):
        simulate(lambda group: train(group, kind, layout), ranks)
