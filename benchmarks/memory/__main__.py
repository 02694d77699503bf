"""Activations within a budget, beside the prediction: recomputed, or swapped to a slow file."""

import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from statistics import median

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402

from benchmarks.harness.command import Parser, add_options, positive_count, run, say  # noqa: E402
from benchmarks.harness.tables import render  # noqa: E402
from benchmarks.memory.throttled import ThrottledStore  # noqa: E402
from nnmpi import models, nn, ops  # noqa: E402
from nnmpi.base.units import parse_bytes  # noqa: E402
from nnmpi.memory.recompute import RecomputedModel  # noqa: E402
from nnmpi.tensor.tensor import Tensor  # noqa: E402

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
    """Do a forward and a backward pass; return the CPU time, which other programs disturb less."""
    begin = time.process_time()
    model.zero_grad()
    with nn.training():
        loss = run(x, lambda logits: ops.cross_entropy(logits, y))
    loss.backward()
    return time.process_time() - begin


def traced(run, model, x, y):
    """Return the peak of a pass in bytes, including temporary arrays of its operations."""
    tracemalloc.start()
    try:
        step(run, model, x, y)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def rows(model, x, y, rounds, bandwidth, folder, count):
    """Yield a row for each of a network's plans of up to `count` budgets, by title."""
    x = Tensor(x)
    model.initialize(seed=0)
    store = None if bandwidth is None else ThrottledStore(Path(folder), bandwidth)
    forward = RecomputedModel(model, None, store=store)

    def ordinary(x, head):
        return head(model(x))

    step(forward, model, x, y)
    budgets = forward.plans.budgets(count)
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
        yield {
            "of all": f"{100 * price.peak / forward.plans.all:.0f}%",
            "peak, predicted": price.peak,
            "traced": traced(forward, model, x, y),
            "recomputed": price.recomputed,
            "moved": price.moved,
            "predicted, ms": f"{1e3 * price.seconds:.1f}",
            "took, ms": f"{1e3 * took:.1f}",
            "of an ordinary pass": f"{took / plain:.2f}",
        }
    forward.release()


def main():
    """Print the tables; return 1 if a plan needs more than the activations of all layers."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="small networks, five budgets, one round"
    )
    add_options(
        parser,
        ("--only", str, "", "networks whose names begin so"),
        ("--rounds", positive_count, "5", "passes by each plan"),
        ("--throttle", parse_bytes, None, "bytes per second of a file to swap to"),
    )
    given = parser.parse_args()
    right = True
    for name, model, x, y in cases(given.check):
        if name.startswith(given.only):
            rounds = 1 if given.check else given.rounds
            count = 20 if given.throttle is None and not given.check else 5
            with tempfile.TemporaryDirectory() as folder:
                plans = list(rows(model, x, y, rounds, given.throttle, folder, count))
            say(f"{name}\n\n{render([(title, title) for title in plans[0]], plans)}")
            right &= all(float(row["of all"][:-1]) <= 100 for row in plans)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(run("python benchmarks/memory", main))
