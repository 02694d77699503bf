"""A small training in each way that there is, for what one rank does differently from some update
on: a program with the settings that a difference changes.
"""

from functools import partial

import numpy as np

from nnmpi import (
    DataParallel,
    GradientExchange,
    Layout,
    ShardedDataParallel,
    Worker,
    arrange,
    data,
    nn,
    ops,
    optim,
)

DRAW = np.random.default_rng(5)
X, Y = DRAW.standard_normal((48, 4)).astype("float32"), DRAW.integers(0, 3, 48)
BATCH = 12

LOOPS = {
    "DataParallel": DataParallel,
    "overlapped": partial(DataParallel, overlap=True),
    **{f"sharded {n}": partial(ShardedDataParallel, stage=n) for n in (1, 2, 3)},
}
WORKERS = {
    "Worker": (Layout(), GradientExchange(fused_update=False)),
    "fused": (Layout(), GradientExchange(fused_update=True)),
    **{f"zero {n}": (Layout(zero=n), GradientExchange()) for n in (1, 2, 3)},
    "pp": (Layout(pp=2, split=(3, 3)), GradientExchange()),
    "tp": (Layout(tp=2), GradientExchange()),
}
WAYS = *LOOPS, *WORKERS


class Scaled:
    """A transform that is an object of the user's."""

    def __init__(self, factor, name=""):
        self.factor, self.name = factor, name

    def __call__(self, x, indices, epoch, seed):
        return x * np.float32(self.factor)


def layers():
    """Return a model's layers: with a frozen one, masks and statistics."""
    return [
        nn.Linear(4, 8),
        nn.LayerNorm(8),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(8, 6),
        nn.Linear(6, 3),
    ]


class Program:
    """A training on a rank. What is set before `start`, or between two updates, it follows.

    Args:
        group: the ranks.
        way: one of WAYS.
    """

    def __init__(self, group, way):
        self.group, self.way, self.is_loop = group, way, way in LOOPS
        self.done = 0  # updates
        # of the model and its optimizer
        self.layers, self.make, self.lr, self.decay = layers(), optim.SGD, 0.05, 0.0
        # of the data
        self.x, self.y, self.batch_size, self.loader_seed = X, Y, BATCH, 0
        self.shuffle, self.transform, self.part = True, None, None
        # of a pass
        self.function, self.options, self.factor = ops.cross_entropy, {}, 1.0
        self.trains, self.seed, self.step_of = True, 0, lambda step: step
        self.samples = lambda batch: batch.global_targets
        self.rows = slice(None)
        self.around = self.before = self.after = lambda: None
        self.skips = self.keeps = False

    def start(self):
        """Make the model, its strategy or Worker, and the loader."""
        group, model = self.group, nn.Sequential(*self.layers)
        model.sharding = {"4": nn.Sharding.COLUMN, "5": nn.Sharding.ROW}
        if self.is_loop:
            self.model = model.initialize(seed=0)
            self.parallel = LOOPS[self.way](self.model, group)
            self.share = group
        else:
            layout, exchange = WORKERS[self.way]
            where = arrange(model, group, layout)
            self.model = where.model.initialize(seed=0, storage=where.storage)
            self.share = where
        self.optimizer = self.make(self.model.storage, lr=self.lr, weight_decay=self.decay)
        if not self.is_loop:
            loss = partial(self._each_loss)
            self.worker = Worker(
                self.model, self.optimizer, group, loss, exchange=exchange, arrangement=where,
                seed=self.seed,
            )  # fmt: skip
        self.renew()
        return self

    def _each_loss(self, logits, labels):
        return self.function(logits, labels, reduction="none", **self.options) * self.factor

    def renew(self):
        """Make the loader again, as after a change of what it reads."""
        train = data.Dataset("train", self.x, self.y, classes=3)
        settings = {"seed": self.loader_seed, "shuffle": self.shuffle, "transform": self.transform}
        share = {"group": self.share} if self.part is None else self.part
        self.loader = data.Loader(train, self.batch_size, **share, **settings)
        self._batches = self._all()

    def _all(self):
        for epoch in range(1000):
            yield from self.loader.epoch(epoch)

    def run(self, updates, difference=None, at=1):
        """Do some updates; from one on, this rank does something differently.

        Args:
            difference: called with this program; None on all ranks but one.
            at: the number of that update.
        """
        for _ in range(updates):
            if difference is not None and self.done + 1 == at:
                difference(self)
            self.before()
            if self.is_loop:
                self.update(next(self._batches))
            else:
                self.worker.step(next(self._batches))
            self.after()
            self.done += 1

    def update(self, batch):
        """Do an update of a loop of one's own."""
        if not self.keeps:
            self.model.zero_grad()
        loss = self.loss(batch.x[self.rows], batch.y[self.rows], batch.first_row)
        self.around()
        self.parallel.backward(loss, self.samples(batch))
        if not self.skips:
            self.optimizer.step()
        self.skips = self.keeps = False

    def loss(self, x, y, first_row=0):
        """Return the sum of the losses of some rows."""
        if self.trains:
            step = self.step_of(self.optimizer.steps)
            with nn.training(seed=self.seed, step=step, first_row=first_row):
                logits = self.model(x)
        else:
            with nn.evaluation():
                logits = self.model(x)
        loss = self.function(logits, y, reduction="sum", **self.options)
        return loss if self.factor == 1 else loss * self.factor
