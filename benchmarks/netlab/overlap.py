"""Training steps on the lab's hosts: summing gradients under the backward pass against summing them at its end.

    python benchmarks/netlab up --hosts 2 --rate 200mbit
    python benchmarks/netlab run mpirun --host h0,h1 -np 2 --map-by ppr:1:node python benchmarks/netlab/overlap.py

Each way has a Worker of its own on the same model; blocks of steps take turns. Rank 0 prints the median of a block's
time per step (the slowest rank's), and its quartiles.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import nnmpi  # noqa: E402  before NumPy, whose threads it sets

group = nnmpi.start()

import numpy as np  # noqa: E402

from benchmarks.harness.turns import quartiles  # noqa: E402
from benchmarks.netlab.waiting import go_first  # noqa: E402
from nnmpi import models, optim  # noqa: E402
from nnmpi.backend.memory import keep_freed_memory  # noqa: E402
from nnmpi.data.loader import Batch, Cut  # noqa: E402
from nnmpi.shard import part  # noqa: E402

WAYS: dict[str, dict[str, Any]] = {
    "at the end, one message": {"overlap": False},
    "at the end, 4 MiB": {"overlap": False, "bucket_bytes": 4 * 2**20},
    "overlap, 4 MiB": {"overlap": True},
    "overlap, 1 MiB": {"overlap": True, "bucket_bytes": 2**20},
}


def main() -> None:
    """Measure and print."""
    options = _options()
    keep_freed_memory()
    go_first()
    batch = _batch(options.inputs, options.batch)
    workers = {name: _worker(options, way) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    hidden: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(options.rounds + 1):  # the first one makes connections, and does not count
        for name in list(WAYS) if turn % 2 else list(WAYS)[::-1]:
            group.barrier()
            begin, under = time.perf_counter(), 0.0
            for _ in range(options.steps):
                under += workers[name].step(batch).hidden_s
            slowest = group.max_floats([time.perf_counter() - begin])[0]
            if turn:
                seconds[name].append(slowest / options.steps)
                hidden[name].append(under / options.steps)
    if group.is_root:
        size = sum(grad.nbytes for grad in workers["overlap, 4 MiB"].model.storage.grads)
        print(f"{group.size} ranks, {options.inputs}-{options.hidden}-10, batch {options.batch}, {size / 1e6:.1f} MB")
        for name, times in seconds.items():
            low, high = (1000 * each for each in quartiles(times))
            middle = 1000 * statistics.median(times)
            under_ms = 1000 * statistics.median(hidden[name])
            print(f"{name:25} {middle:8.1f} ms ({low:.1f} to {high:.1f}), {under_ms:.1f} ms under way while computing")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="training steps, gradients summed under backward or at its end")
    parser.add_argument("--inputs", type=int, default=784)
    parser.add_argument("--hidden", default="1024-1024-1024", help="widths of the hidden layers")
    parser.add_argument("--batch", type=int, default=512, help="rows of the global batch")
    parser.add_argument("--algorithm", default="ring", help="the all-reduce; MPI's own hosts that wait spin")
    parser.add_argument("--steps", type=int, default=2, help="in each block")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each way")
    return parser.parse_args()


def _worker(options: argparse.Namespace, way: dict[str, Any]) -> nnmpi.Worker:
    hidden = [int(width) for width in options.hidden.split("-")]
    model = models.mlp((options.inputs,), 10, hidden=hidden).initialize(seed=0)
    optimizer = optim.SGD(model.storage, lr=0.01)
    exchange = nnmpi.GradientExchange(allreduce=options.algorithm, fused_update=False, **way)
    return nnmpi.Worker(model, optimizer, group, exchange=exchange)


def _batch(inputs: int, rows: int) -> Batch:
    """Return this rank's part of a batch of noise."""
    draws, own = np.random.default_rng(0), part(rows, group.size, group.rank)
    x, y = draws.normal(size=(rows, inputs)).astype(np.float32), draws.integers(0, 10, rows)
    mine = slice(own.start, own.stop)
    return Batch(x[mine], y[mine], np.arange(rows)[mine], (Cut(0, len(own), own.start),), rows, epoch=0, number=0)


if __name__ == "__main__":
    main()
