"""A step of `nnmpi train`, with its share of evaluations, logs and reports, beside a step
of a compiled loop.

    python benchmarks/training/steps.py iris 500
    mpirun -n 2 python benchmarks/training/steps.py digits 8

Both train the same model on the same samples. Times are CPU time of rank 0's thread, the least of
several blocks of whole epochs. The loop's batches are made beforehand; it computes no gradient
norm, evaluates nothing, and reports nothing.
"""

import sys
import tempfile
import time
from pathlib import Path

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402

import nnmpi  # noqa: E402
from nnmpi import Tensor, data, models, nn, ops, optim  # noqa: E402
from nnmpi.base.command import Console  # noqa: E402
from nnmpi.comm.agreement import on_root  # noqa: E402
from nnmpi.comm.group import Group  # noqa: E402
from nnmpi.data.loader import Loader  # noqa: E402
from nnmpi.train.cli import parse  # noqa: E402
from nnmpi.train.session import begin  # noqa: E402

BLOCKS = 5
CASES = {"iris": ("mlp", 64, (50,)), "digits": ("cnn", 32, ())}  # model, batch, hidden layers


class EpochClock(Console):
    """A console that prints nothing, and records the CPU time at the end of each epoch."""

    ends: list[float]

    def say(self, *lines: str) -> None:
        """Record the time of an epoch's line."""
        if lines and lines[0].startswith("epoch "):
            self.ends.append(time.thread_time())


def train(name: str, epochs: int, group: Group, folder: str) -> float:
    """Return the seconds of a step of the train command."""
    model, batch, hidden = CASES[name]
    words = [
        "--dataset",
        name,
        "--model",
        model,
        "--batch-size",
        str(batch),
        "--epochs",
        str(epochs),
    ]
    words += [*(("--hidden", *map(str, hidden)) if hidden else ()), "--out", f"{folder}/run"]
    console = EpochClock(quiet=True)
    console.ends = []
    with begin(parse(words), group, console, words) as trained:
        trained.run()
    length = max((epochs - 2) // BLOCKS, 1)
    blocks = zip(console.ends[1::length], console.ends[1 + length :: length], strict=False)
    steps = length * len(Loader(data.load(name)[0], batch))
    return min(end - begin for begin, end in blocks) / steps


def loop(name: str, group: Group) -> float:
    """Return the seconds of a step of a compiled loop."""
    _, batch, hidden = CASES[name]
    result = data.load(name)[0]
    shape, classes = result.sample_shape, result.classes
    model = (
        models.mlp(shape, classes, hidden) if hidden else models.cnn(shape, classes)
    ).initialize(seed=0)
    optimizer, parallel = optim.Adam(model.storage, lr=1e-5), nnmpi.DataParallel(model, group)
    batches = list(Loader(result, batch, group).epoch(0))

    def step(x: Tensor, y: Tensor, rows: int) -> Tensor:
        model.zero_grad()
        with nn.training():
            loss = ops.cross_entropy(model(x), y, reduction="sum")
        parallel.backward(loss, rows)
        optimizer.step()
        return loss

    compiled = nnmpi.compile(step)

    def epochs(count: int) -> float:
        begin = time.thread_time()
        for item in count * batches:
            compiled(item.x, item.y, item.global_rows).item()
        return (time.thread_time() - begin) / (count * len(batches))

    count = -(-200 // len(batches))
    return min(epochs(count) for _ in range(1 + BLOCKS))


def main() -> None:
    """Print a line."""
    name, epochs, group = sys.argv[1], int(sys.argv[2]), nnmpi.start()
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as local, np.errstate(all="ignore"):
        trained_s = train(name, epochs, group, on_root(group, lambda: local))
        looped_s = loop(name, group)
        group.barrier()
    if group.is_root:
        ratio = trained_s / looped_s
        print(
            f"{name}, {group.size} ranks: train {1e6 * trained_s:.0f} us, loop {1e6 * looped_s:.0f}"
            f" us, {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
