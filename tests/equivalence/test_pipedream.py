"""PipeDream: each microbatch's backward uses the weights that its forward used, and every stage its
own version.

The reference here computes serially with the whole model, and keeps each stage's weights after
every update:

    stage s, microbatch m: the weights after max(0, m - (S - 1 - s)) of the batch's updates
    update m of stage s:   from the newest weights, by the gradient at the stashed ones
"""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from nnmpi import Layout, Tensor
from nnmpi.nn import training
from nnmpi.nn.chain import ModelPart, open_chain
from nnmpi.ops import cross_entropy
from tests.equivalence import own
from tests.equivalence.cover import meshes, uneven
from tests.equivalence.reference import Setup, batches, build, digits, parts, release
from tests.equivalence.rows import NOISY

pytestmark = pytest.mark.simulated(max_size=12)  # no longer than the models

LR, MOMENTUM, STEPS = 0.05, 0.9, 5
SGD = {"optimizer": "sgd", "optimizer_options": {"lr": LR, "momentum": MOMENTUM}}
SETUPS = {"skipping": Setup(own.skipping, microbatches=6, **SGD), "noisy": replace(NOISY, **SGD)}


class Delayed:
    """The serial reference, for so many stages."""

    def __init__(self, setup, split):
        self.model = setup.model(digits().sample_shape, digits().classes).initialize(
            seed=5, dtype="float64"
        )
        layers = open_chain(self.model)
        starts = [sum(split[:i]) for i in range(len(split))]
        cuts = [range(start, start + length) for start, length in zip(starts, split, strict=True)]
        self.stages = [
            [
                name
                for name, _ in ModelPart(
                    self.model, layers[cut.start : cut.stop]
                ).named_parameters()
            ]
            for cut in cuts
        ]
        self.parameters = dict(self.model.named_parameters())
        self.weights = {name: parameter.data.copy() for name, parameter in self.parameters.items()}
        self.momentum = {name: np.zeros_like(value) for name, value in self.weights.items()}
        self.updates = 0

    def step(self, batch):
        """Train on a batch; return the mean loss and each stage's staleness."""
        versions = [self.weights]
        delays = [len(self.stages) - 1 - stage for stage in range(len(self.stages))]
        total = 0.0
        for m, cut in enumerate(batch.cuts):
            for names, delay in zip(self.stages, delays, strict=True):
                for name in names:
                    self.parameters[name].data[...] = versions[max(0, m - delay)][name]
            rows = slice(cut.start, cut.stop)
            self.model.storage.zero_grad()
            with training(3, self.updates + m, cut.first_row):
                loss = cross_entropy(
                    self.model(Tensor(batch.x[rows])), batch.y[rows], reduction="sum"
                )
            loss.backward(np.asarray(1 / (cut.stop - cut.start)))
            self.model.storage.finish_gradients()
            total += loss.item()
            versions.append(self._update(versions[-1]))
        self.weights, self.updates = versions[-1], self.updates + len(batch.cuts)
        staleness = [[min(delay, m) for m in range(len(batch.cuts))] for delay in delays]
        return total / batch.global_rows, staleness

    def _update(self, newest):
        result = {}
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            self.momentum[name] = MOMENTUM * self.momentum[name] + parameter.grad
            result[name] = newest[name] - LR * self.momentum[name]
        return result


def trained(setup, group, layout):
    """Return the losses, every step's staleness on each rank, and the weights on every rank."""
    worker = build(setup, group, layout, synchronous_sends=True)
    reports = [worker.step(batch) for batch in islice(batches(setup, worker), STEPS)]
    weights = worker.state()[0].to_dict(everywhere=True)
    release(worker)
    return [r.loss for r in reports], [group.gather(list(r.staleness)) for r in reports], weights


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_it_is_the_serial_run_with_delayed_weights(group, name):
    """Bitwise where only the pipeline spreads the model; the last batch of an epoch has fewer
    microbatches.
    """
    setup = SETUPS[name]
    for dp, pp, tp in meshes(group.size):
        if pp == 1:
            continue
        layout = Layout(dp, pp, tp, pipeline="pipedream", split=uneven(setup, pp))
        losses, staleness, weights = trained(setup, group, layout)
        reference = Delayed(setup, uneven(setup, pp))
        for step, batch in enumerate(islice(parts(setup), STEPS)):
            loss, expected = reference.step(batch)
            stages = [rank // tp % pp for rank in range(group.size)]
            assert staleness[step] == [expected[stage] for stage in stages]
            assert losses[step] == pytest.approx(loss, rel=1e-12)
        exact = dp == tp == 1
        for key, value in reference.weights.items():
            assert (
                np.array_equal(weights[key], value)
                if exact
                else np.allclose(weights[key], value, rtol=1e-9)
            )
