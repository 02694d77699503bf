"""Activations by budget beside what was predicted: computed again, or swapped to a slow file."""

import argparse
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from statistics import median

import numpy as np
from throttled import ThrottledStore  # beside this file

from nnmpi import models, nn, ops
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.tensor.tensor import Tensor
from nnmpi.units import parse_bytes

DRAW = np.random.default_rng(0)


def images(batch, size, channels):
    """Return random images and labels."""
    x = DRAW.normal(size=(batch, size, size, channels)).astype("float32")
    return x, DRAW.integers(0, 10, batch)


def cases(reduced):
    """Yield each network's name, the network, and a batch."""
    layers, batch = (3, 2) if reduced else (8, 4)
    gpt = models.gpt(256, 128, features=128, layers=layers, heads=4, dropout=0.1)
    yield (
        f"GPT, {layers} blocks",
        gpt,
        DRAW.integers(0, 256, (batch, 128)),
        DRAW.integers(0, 256, (batch, 128)),
    )
    yield "CNN", models.cnn((28, 28, 1), 10), *images(8 if reduced else 256, 28, 1)
    blocks, batch = (1, 4) if reduced else (3, 16)
    yield (
        f"residual, {6 * blocks + 2} layers",
        models.resnet((32, 32, 3), 10, blocks=blocks),
        *images(batch, 32, 3),
    )


def step(run, model, x, y):
    """Do one pass, forward and back; return the processor's seconds, which other programs disturb
    less.
    """
    begin = time.process_time()
    model.zero_grad()
    with nn.training():
        loss = run(x, lambda logits: ops.cross_entropy(logits, y))
    loss.backward()
    return time.process_time() - begin


def traced(run, model, x, y):
    """Return the most bytes of a pass, all arrays of its operations among them."""
    tracemalloc.start()
    try:
        step(run, model, x, y)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def rows(model, x, y, rounds, bandwidth, folder):
    """Yield what a table says of each of a network's plans."""
    x = Tensor(x)
    model.initialize(seed=0)
    store = None if bandwidth is None else ThrottledStore(Path(folder), bandwidth)
    forward = RecomputedModel(model, None, store=store)

    def ordinary(x, head):
        return head(model(x))

    step(forward, model, x, y)
    budgets = forward.plans.budgets(20 if store is None else 5)
    plans = list(dict.fromkeys(map(forward.find_plan, reversed(budgets))))
    times = {plan: [] for plan in (None, *plans)}
    for number in range(rounds + 1):
        for plan, result in times.items():
            forward.plan = forward.plan if plan is None else plan
            begin = time.perf_counter()
            seconds = step(ordinary if plan is None else forward, model, x, y)
            if number:
                result.append(seconds if store is None else time.perf_counter() - begin)
    plain = median(times.pop(None))
    for plan, result in times.items():
        forward.plan = plan
        price, took = forward.price, median(result)
        predicted_ms, took_ms = f"{1e3 * price.seconds:.1f}", f"{1e3 * took:.1f}"
        again, part = str(price.again), f"{100 * price.peak / forward.plans.all:.0f}%"
        peak = str(traced(forward, model, x, y))
        yield [
            part,
            str(price.peak),
            peak,
            again,
            str(price.moved),
            predicted_ms,
            took_ms,
            f"{took / plain:.2f}",
        ]
    forward.release()


def main():
    """Print the tables; end with status 1 where a plan passes what all would take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="small networks, one round")
    parser.add_argument("--only", default="", help="networks whose names begin so")
    parser.add_argument("--rounds", type=int, default=5, help="passes by each plan (5)")
    parser.add_argument(
        "--throttle", type=parse_bytes, metavar="BYTES", help="swap to a file of so many per second"
    )
    given = parser.parse_args()
    right = True
    for name, model, x, y in cases(given.check):
        if name.startswith(given.only):
            print(f"\n{name}\n\n| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
            with tempfile.TemporaryDirectory() as folder:
                for row in rows(
                    model, x, y, 1 if given.check else given.rounds, given.throttle, folder
                ):
                    right &= float(row[0][:-1]) <= 100
                    print(f"| {' | '.join(row)} |", flush=True)
    return 0 if right else 1


TITLES = (
    "of all",
    "peak, predicted",
    "traced",
    "again",
    "moved",
    "predicted, ms",
    "took, ms",
    "of an ordinary pass",
)

if __name__ == "__main__":
    sys.exit(main())
