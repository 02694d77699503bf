"""Recomputation by budget: peaks and times of 20 budgets beside what was predicted. See README.md."""

import argparse
import sys
import time
from statistics import median

import numpy as np

from nnmpi import models, nn, ops
from nnmpi.backend.allocations import counting
from nnmpi.backend.memory import keep_freed_memory
from nnmpi.backend.record import numpy_backend
from nnmpi.memory.run import RecomputedModel
from nnmpi.tensor.tensor import Tensor

DRAW = np.random.default_rng(0)


def images(batch, size, channels):
    """Return random images and labels."""
    x = DRAW.normal(size=(batch, size, size, channels)).astype("float32")
    return x, DRAW.integers(0, 10, batch)


def cases(reduced):
    """Yield each network's name, the network, and a batch."""
    layers, batch = (3, 2) if reduced else (8, 4)
    gpt = models.gpt(256, 128, features=128, layers=layers, heads=4, dropout=0.1)
    yield f"GPT, {layers} blocks", gpt, DRAW.integers(0, 256, (batch, 128)), DRAW.integers(0, 256, (batch, 128))
    yield "CNN", models.cnn((28, 28, 1), 10), *images(8 if reduced else 256, 28, 1)
    blocks, batch = (1, 4) if reduced else (3, 16)
    yield f"residual, {6 * blocks + 2} layers", models.resnet((32, 32, 3), 10, blocks=blocks), *images(batch, 32, 3)


def step(run, model, x, y):
    """Do one pass, forward and back; return the processor's seconds, which other programs disturb less."""
    begin = time.process_time()
    model.zero_grad()
    with nn.training():
        loss = run(x, lambda logits: ops.cross_entropy(logits, y))
    loss.backward()
    return time.process_time() - begin


def levels(model, x, y, rounds):
    """Yield what a table says of each of a network's plans."""
    x = Tensor(x)
    model.initialize(seed=0)
    forward = RecomputedModel(model, None)

    def ordinary(x, head):
        return head(model(x))

    step(forward, model, x, y)
    plans = forward.plans
    budgets = {plans.plan(each): each for each in [*reversed(plans.budgets(20)), max(plans.all // 2, plans.least)]}
    times = {plan: [] for plan in (None, *budgets)}
    for number in range(rounds + 1):
        for plan, found in times.items():
            forward.plan = plan
            seconds = step(ordinary if plan is None else forward, model, x, y)
            if number:
                found.append(seconds)
    plain = median(times.pop(None))
    for plan, budget in budgets.items():
        forward.plan = plan
        with counting(numpy_backend()) as count:
            step(forward, model, x, y)
        price, took = forward.price, median(times[plan])
        yield budget, price.peak, count.peak, price.peak / plans.all, price.again, price.seconds, took, took / plain


def main():
    """Print the table; end with status 1 where a peak is not as predicted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="small networks, one round")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each plan, in turn (5)")
    parser.add_argument("--only", default="", help="networks whose names begin so")
    given = parser.parse_args()
    keep_freed_memory()
    titles = (
        "network",
        "budget",
        "peak, predicted",
        "measured",
        "of all",
        "again",
        "predicted, ms",
        "CPU, ms",
        "times",
    )
    print("|", " | ".join(titles), "|")
    print("|" + "---|" * len(titles))
    wrong, rounds = 0, 1 if given.check else given.rounds
    for name, model, x, y in cases(given.check):
        if not name.startswith(given.only):
            continue
        for budget, peak, found, part, again, predicted_s, took_s, ratio in levels(model, x, y, rounds):
            wrong += peak != found or found > budget
            words = f"{part:.0%} | {again} | {1e3 * predicted_s:.0f} | {1e3 * took_s:.0f} | {ratio:.2f}"
            print(f"| {name} | {budget} | {peak} | {found} | {words} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
