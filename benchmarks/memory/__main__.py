"""Activations by budget beside what was predicted: computed again, or swapped; a process beside its ledger."""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from functools import partial
from mmap import mmap
from pathlib import Path
from statistics import median

import numpy as np
from throttled import ThrottledStore  # beside this file

import nnmpi
from nnmpi import models, nn, ops, optim
from nnmpi.backend.allocations import counting
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.memory import host_memory, keep_freed_memory, reset_host_peak
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.data.loader import Batch, Cut
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.memory.state_offload import keep_state
from nnmpi.tensor.tensor import Tensor
from nnmpi.units import parse_bytes

BUDGET = 30_000  # bytes of activations, for `flat`
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


def swapped(name, model, x, y, rounds, bandwidth):
    """Print a line for each of five budgets: predicted and measured bytes and seconds, elapsed, with a slow file."""
    model.initialize(seed=0)
    with tempfile.TemporaryDirectory() as folder:
        forward = RecomputedModel(model, None, store=ThrottledStore(Path(folder), bandwidth))
        step(forward, model, Tensor(x), y)
        for budget in forward.plans.budgets(5):
            forward.plan, seconds = forward.find_plan(budget), []
            with counting(numpy_backend()) as count:
                step(forward, model, Tensor(x), y)
            for _ in range(rounds):
                begin = time.perf_counter()
                step(forward, model, Tensor(x), y)
                seconds.append(time.perf_counter() - begin)
            price, took = forward.price, median(seconds)
            words = f"{price.moved} | {price.again} | {1e3 * price.seconds:.0f} | {1e3 * took:.0f}"
            print(f"| {name} | {price.peak} | {count.peak} | {words} | {took / price.seconds - 1:+.1%} |", flush=True)
        forward.release()


def resident(number):
    """Print a process's resident memory above what it has after training a small network, beside the ledger's peak."""
    keep_freed_memory()
    group = nnmpi.start()
    # The memory that BLAS has for itself is in the base; what is multiplied for that is not malloc's, and goes.
    squares = [np.frombuffer(mmap(-1, 4 * 1536**2), "float32").reshape(1536, 1536) for _ in range(3)]
    np.matmul(squares[0], squares[1], out=squares[2])
    del squares

    def train(model, x, y, steps):
        model.initialize(seed=0)
        worker = nnmpi.Worker(model, optim.Adam(model.storage, lr=1e-3), group)
        batch = Batch(x, y, np.arange(len(x)), (Cut(0, len(x), 0),), len(x), 0, 0)
        for _ in range(steps):
            worker.step(batch)
        used = host_memory().used_bytes
        worker.release()
        return nnmpi.memory.report().peak, used

    names = ("MLP, 2048 features", "GPT, 8 blocks of 256", "CNN, 512 images")
    sizes = (((16,) * 3, (2048,) * 3), ((1, 16, 1), (8, 256, 8)), (2, 512))[number]
    for size in sizes:
        gc.collect()
        base = host_memory().used_bytes
        reset_host_peak()
        if number == 0:
            x, y, _ = *images(256, 28, 1), None
            model = models.mlp((28, 28, 1), 10, hidden=size)
        elif number == 1:
            layers, features, batch = size
            model = models.gpt(256, 128, features, layers, 4)
            x, y = DRAW.integers(0, 256, (2, batch, 128))
        else:
            model, (x, y) = models.cnn((28, 28, 1), 10), images(size, 28, 1)
        ledger, used = train(model, x, y, 6)
        after, above = used - base, host_memory().peak_bytes - base
    columns = (names[number], *(f"{each / 2**20:.1f}" for each in (base, ledger, above, after)))
    columns = (*columns, *(f"{each / ledger - 1:+.1%}" for each in (above, after)))
    print("|", " | ".join(columns), "|")


def stored_cases(reduced):
    """Yield a name, what makes a network, and a batch."""
    width, layers = (64, 2) if reduced else (2048, 8)
    mlp = partial(models.mlp, (28, 28, 1), 10, hidden=(width,) * 3), images(256, 28, 1)
    gpt = partial(models.gpt, 256, 128, 32 if reduced else 256, layers, 4), DRAW.integers(0, 256, (2, 4, 128))
    for name, (make, (x, y)) in {"MLP": mlp, "GPT": gpt}.items():
        yield name, make, Batch(x, y, np.arange(len(x)), (Cut(0, len(x), 0),), len(x), 0, 0)


def stored(reduced, rounds):
    """Print a line for each network and what of it lies out of memory: bytes that stay, and the time of a step."""
    keep_freed_memory()
    group = nnmpi.start()
    print("| network | out of memory | held, MiB | formula, MiB | ms a step | times |\n|" + "---|" * 6, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "nothing": Layout(memory_limit=2**60),
            "optimizer": Layout(offload=folder, offload_state="optimizer"),
            "all, zero 3": Layout(zero=3, offload=folder, offload_state="all"),
        }
        for name, make, batch in stored_cases(reduced):
            plain = None
            for way, layout in ways.items():
                where = arrange(make(), group, layout)
                where.model.initialize(seed=0, storage=where.storage)
                worker = nnmpi.Worker(where.model, optim.Adam(where.model.storage), group, arrangement=where)
                seconds = []
                for _ in range(2 + rounds):
                    begin = time.perf_counter()
                    worker.step(batch)
                    seconds.append(time.perf_counter() - begin)
                report, took = nnmpi.memory.report(), median(seconds[2:])
                plain = took if plain is None else plain
                held = sum(report.held[kind] for kind in report.predicted)
                megabytes = " | ".join(f"{each / 2**20:.1f}" for each in (held, sum(report.predicted.values())))
                print(f"| {name} | {way} | {megabytes} | {1e3 * took:.0f} | {took / plain:.2f} |", flush=True)
                worker.release()


def stored_slowly(reduced, rounds, bandwidth):
    """Print a line for each network whose optimizer's state lies in a slow file; return 1 where weights differ."""
    keep_freed_memory()
    group, differ = nnmpi.start(), False

    def train(make, batch, store=None):
        """Return the weights, a step's seconds, those of its update, and the bytes that are in memory of the state."""
        model = make().initialize(seed=0)
        optimizer = optim.Adam(model.storage if store is None else keep_state(model.storage, store))
        worker, seconds = nnmpi.Worker(model, optimizer, group), []
        for _ in range(2 + rounds):
            before, begin = 0 if store is None else store.moved, time.perf_counter()
            worker.step(batch)
            seconds.append(time.perf_counter() - begin)
        moved = 0 if store is None else store.moved - before
        weights, begin = [each.copy() for each in model.storage.data], time.perf_counter()
        optimizer.step()
        update_s = time.perf_counter() - begin
        worker.release()
        return weights, median(seconds[2:]), update_s, moved, optimizer.state_bytes

    print("| network | moved a step, MiB | in memory, ms | predicted, ms | elapsed, ms | off |\n|" + "---|" * 6)
    with tempfile.TemporaryDirectory() as folder:
        for name, make, batch in stored_cases(reduced):
            weights, plain_s, update_s, *_ = train(make, batch)
            found, took_s, _, moved, windows = train(make, batch, ThrottledStore(Path(folder), bandwidth))
            differ |= any(not np.array_equal(*each) for each in zip(weights, found, strict=True))
            # What the update computes is hidden behind what moves, and the last two windows behind the next pass.
            predicted_s = plain_s - update_s + (moved - windows) / bandwidth
            times = " | ".join(f"{1e3 * each:.0f}" for each in (plain_s, predicted_s, took_s))
            print(f"| {name} | {moved / 2**20:.1f} | {times} | {took_s / predicted_s - 1:+.1%} |", flush=True)
    return int(differ)


def flat(steps):
    """Print what a process has after 100 steps of each kind, and what has come to it after so many more."""
    group, (x, y) = nnmpi.start(), images(16, 28, 1)
    batch = Batch(x, y, np.arange(len(x)), (Cut(0, len(x), 0),), len(x), 0, 0)
    print(f"| way | MiB after 100 steps | more after {steps} more, MiB | objects more |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = {"offload": folder}
        for way in (
            {"memory_limit": 2**60},
            *({"zero": stage} for stage in (1, 2, 3)),
            {"activation_memory": BUDGET},
            {**out, "activation_memory": BUDGET},
            {"offload_state": "optimizer", **out},
            {"offload_state": "all", "zero": 3, **out, "activation_memory": BUDGET},
        ):
            where = arrange(models.mlp((28, 28, 1), 10, hidden=(64,) * 8), group, Layout(**way))
            where.model.initialize(seed=0, storage=where.storage)
            worker = nnmpi.Worker(where.model, optim.Adam(where.model.storage, lr=1e-4), group, arrangement=where)
            seen = []
            for count in (100, steps):
                for _ in range(count):
                    worker.step(batch)
                gc.collect()
                seen.append((host_memory().used_bytes, len(gc.get_objects())))
            worker.release()
            (before, objects), (after, more) = seen
            words = ", ".join(f"{key} {value}" for key, value in way.items() if key not in ("offload", "memory_limit"))
            words = (words or "plain") + (", offload" if "offload" in way else "")
            print(
                f"| {words} | {before / 2**20:.1f} | {(after - before) / 2**20:+.2f} | {more - objects:+d} |",
                flush=True,
            )


def main():
    """Print the table; end with status 1 where a peak is not as predicted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="small networks, one round")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each plan, in turn (5)")
    parser.add_argument("--only", default="", help="networks whose names begin so")
    parser.add_argument("--throttle", metavar="BYTES", help="instead: a file of so many bytes per second")
    parser.add_argument("--stored", action="store_true", help="instead: optimizer states and weights out of memory")
    parser.add_argument("--flat", type=int, metavar="STEPS", help="instead: what has grown after so many steps")
    parser.add_argument("--resident", nargs="?", const="", metavar="N", help="instead: processes beside their ledgers")
    given = parser.parse_args()
    if given.resident is not None:
        if given.resident:
            return resident(int(given.resident))
        titles = "base, MiB | ledger, MiB | peak, MiB | after 6 steps, MiB | peak off | after off"
        print(f"| network | {titles} |\n|" + "---|" * 7, flush=True)
        return max(subprocess.call([sys.executable, __file__, "--resident", str(i)]) for i in range(3))
    if given.stored:
        if given.throttle is not None:
            return stored_slowly(given.check, given.rounds, parse_bytes(given.throttle))
        return stored(given.check, given.rounds)
    if given.flat is not None:
        return flat(given.flat)
    keep_freed_memory()
    if given.throttle is not None:
        print("| network | peak, predicted | measured | moved | again | predicted, ms | elapsed, ms | off |")
        print("|" + "---|" * 8)
        for case in cases(given.check):
            if case[0].startswith(given.only):
                swapped(*case, given.rounds, parse_bytes(given.throttle))
        return 0
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
