"""The documented ways of training, each as a function of a rank's group that returns its step.

They are counted on simulated ranks. What a step costs beside its arithmetic does not depend on the
model, so that is small; but its arrays are larger than what Python allocates for itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

import nnmpi
from nnmpi import data, models, nn, ops, optim
from nnmpi.compose import passes
from nnmpi.train.cli import main
from tests.worker_options import arranged, replicas

ROWS, FEATURES, CLASSES, HIDDEN = 128, 20, 3, [64]  # of a rank
IRIS = "--model mlp --dataset iris --batch-size 32"


class Way(NamedTuple):
    """A way of training.

    Attributes:
        ranks: on which it is counted.
        make: (group) -> a function that does one step.
        calls: of that function before its cost is steady.
    """

    ranks: int
    make: Callable[[Any], Callable[[], Any]]
    calls: int = 20  # after the audits of a recorded step

    @property
    def is_run(self):
        """Whether it is a whole run, not a step: some of its calls depend on times."""
        return self.calls == 1


def samples():
    """Return a rank's rows and their labels."""
    rows = np.random.default_rng(0).standard_normal((ROWS, FEATURES)).astype("f")
    return rows, np.arange(ROWS) % CLASSES


def mlp():
    """Return a model with weights."""
    return models.mlp([FEATURES], CLASSES, HIDDEN).initialize(seed=0)


def loop(compiled=False, parallel=None):
    """A loop of one's own, as docs/library.md has it; `parallel` is ZeRO's stage, 0 for none."""

    def make(group):
        model, (x, y) = mlp(), samples()
        strategy = None if parallel is None else replicas(model, group, parallel)
        optimizer = optim.AdamW(model.storage, lr=1e-3)

        def step(x, y):
            model.zero_grad()
            if strategy is None:
                loss = ops.cross_entropy(model(x), y)
                loss.backward()
            else:
                loss = ops.cross_entropy(model(x), y, reduction="sum")
                strategy.backward(loss, samples=ROWS * group.size)
            optimizer.step()
            return loss

        run = nnmpi.compile(step) if compiled else step

        def once():
            with nn.training(step=optimizer.steps):
                run(x if compiled else nnmpi.Tensor(x), y)

        return once

    return make


def worker(eager=False, layout=None, evaluates=False):
    """A Worker's step, or its evaluation of one batch."""

    def make(group):
        x, y = samples()
        if layout is None:
            model = mlp()
            trainer = nnmpi.Worker(model, optim.AdamW(model.storage, lr=1e-3), group)
        else:
            model = models.mlp([FEATURES], CLASSES, HIDDEN)
            trainer = arranged(model, group, layout, x, make=optim.AdamW, lr=1e-3)
        return lambda: (trainer.evaluate if evaluates else trainer.step)(x, y)

    def made_eager(group):
        with patch.object(passes, "refusal_of", lambda *_: "the eager pass is counted"):
            return make(group)

    return made_eager if eager else make


def first_program(group):
    """README's first program: a Worker's step on a loader's next batch of digits."""
    train, _ = data.load("digits")
    model = models.cnn(train.sample_shape, train.classes).initialize(seed=0)
    trainer = nnmpi.Worker(model, optim.AdamW(model.storage, lr=3e-3), group)
    loader = data.Loader(train, 64, group)

    def batches():
        epoch = 0
        while True:
            yield from loader.epoch(epoch)
            epoch += 1

    following = batches()
    return lambda: trainer.step(next(following))


def command(words):
    """A whole run of the train command, in the current folder."""

    def make(group):
        numbers = iter(range(1000))

        def run():
            main(["--quiet", *words.split(), "--out", f"run-{next(numbers)}"], group)

        return run

    return make


WAYS = {
    "loop": Way(1, loop()),
    "loop, compiled": Way(1, loop(compiled=True)),
    "DataParallel, 2 ranks": Way(2, loop(parallel=0)),
    "DataParallel, compiled, 2 ranks": Way(2, loop(compiled=True, parallel=0)),
    "ShardedDataParallel, zero 1, 2 ranks": Way(2, loop(parallel=1)),
    "ShardedDataParallel, zero 3, 2 ranks": Way(2, loop(parallel=3)),
    "README's first program": Way(1, first_program),
    "README's first program, 2 ranks": Way(2, first_program),
    "Worker": Way(1, worker()),
    "Worker, eager": Way(1, worker(eager=True)),
    "Worker, evaluate": Way(1, worker(evaluates=True)),
    "Worker, dp 2": Way(2, worker()),
    "Worker, dp 2, eager": Way(2, worker(eager=True)),
    "Worker, dp 2, evaluate": Way(2, worker(evaluates=True)),
    "Worker, pp 2": Way(2, worker(layout=nnmpi.Layout(pp=2))),
    "Worker, pp 2, eager": Way(2, worker(eager=True, layout=nnmpi.Layout(pp=2))),
    "Worker, tp 2": Way(2, worker(layout=nnmpi.Layout(tp=2))),
    "Worker, tp 2, eager": Way(2, worker(eager=True, layout=nnmpi.Layout(tp=2))),
    "Worker, zero 1, 2 ranks": Way(2, worker(layout=nnmpi.Layout(zero=1))),
    "Worker, zero 3, 2 ranks": Way(2, worker(layout=nnmpi.Layout(zero=3))),
    "Worker, zero 3, 2 ranks, eager": Way(2, worker(eager=True, layout=nnmpi.Layout(zero=3))),
    "nnmpi train": Way(1, command("--max-steps 20"), 1),
    "nnmpi train, 2 ranks": Way(2, command("--max-steps 20"), 1),
    "nnmpi train on iris": Way(1, command(f"{IRIS} --epochs 4"), 1),
    "nnmpi train on iris, 2 ranks": Way(2, command(f"{IRIS} --epochs 4"), 1),
}
