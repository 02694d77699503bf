"""Memory, descriptors and threads over 20,000 steps, by way of computing. See README.md.

python -m benchmarks.faults flat --ranks 1 2
"""

import os
from itertools import chain, count, islice
from pathlib import Path

import numpy as np

from benchmarks.harness import tables
from benchmarks.harness.command import Parser
from benchmarks.harness.launch import run_job
from nnmpi import DataParallel, Worker, data, models, nn, ops, optim
from nnmpi.compose.inference import TokenGenerator

ROWS, BATCH = 250, 32  # the last batch of an epoch is a shorter one
# Of few steps the heap still fills: up to 1.5 MB. 0.3 KB a step would be 4.5 MB of 15,000.
GROWTH_KB, LOOKS = 4096, 4


def make():
    """Return a model, its optimizer, and a data set."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(ROWS, 8)).astype(np.float32)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).initialize(seed=0)
    samples = data.Dataset("draws", x, (x[:, 0] > 0).astype(np.int64), classes=2)
    return model, optim.Adam(model.storage, lr=1e-3), samples


def batches(samples, group):
    """Yield the batches of one epoch after another, without end."""
    loader = data.Loader(samples, BATCH, group)
    return chain.from_iterable(map(loader.epoch, count()))


def by_worker(group):
    """Yield after each step of a Worker."""
    model, optimizer, samples = make()
    yield from map(Worker(model, optimizer, group).step, batches(samples, group))


def by_loop(group):
    """Yield after each step of an own loop."""
    model, optimizer, samples = make()
    parallel = DataParallel(model, group)
    for batch in batches(samples, group):
        loss = ops.cross_entropy(model(batch.x), batch.y, reduction="sum")
        parallel.backward(loss, batch.global_rows)
        optimizer.step()
        yield model.zero_grad()


def by_evaluate(group):
    """Yield after each evaluation of a Worker."""
    model, optimizer, samples = make()
    worker = Worker(model, optimizer, group)
    loader = data.Loader(samples, ROWS // 2, group, shuffle=False)
    while True:
        yield worker.evaluate(loader)


def by_generate(group):
    """Yield after each token of a GPT whose context is full every 32 tokens."""
    model = models.gpt(31, 64, 16, layers=1, heads=2).initialize(seed=0)
    worker = Worker(model, optim.SGD(model.storage, lr=0.1), group)
    yield from TokenGenerator(worker.arrangement, worker.backend).write(
        [1], 64, lambda logits: int(np.argmax(logits))
    )


WAYS = {"worker": by_worker, "loop": by_loop, "evaluate": by_evaluate, "generate": by_generate}


def look():
    """Return the process's resident KB, descriptors and threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return [pages * 4, *(len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))]


def measure(group, settings):
    """Return what every rank has after each quarter of the steps."""
    steps, seen = iter(WAYS[settings["way"]](group)), []
    for _ in range(LOOKS):
        for _ in islice(steps, settings["steps"] // LOOKS):
            pass
        seen.append(look())
    return group.gather(seen)


def main(words):
    """Measure each way on each number of ranks, and print the table; 1 if something grows."""
    parser = Parser("python -m benchmarks.faults flat", description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=20_000)
    options, rows = parser.parse_args(words), []
    for way in WAYS:
        for ranks in options.ranks:
            settings = {"way": way, "steps": options.steps}
            seen = np.array(run_job("benchmarks.faults.flat", ranks, settings)["rows"])
            # from the first quarter on: before it arenas and caches fill
            growth = (seen[:, -1] - seen[:, 0]).max(axis=0)
            rows.append((way, ranks, *seen[0, -1], *growth))
    heads = "way", "ranks", "KB", "descriptors", "threads", "more KB", "descriptors", "threads"
    columns = [(head, lambda row, i=i: str(row[i])) for i, head in enumerate(heads)]
    print(tables.render(columns, rows))
    return int(any(row[5] > GROWTH_KB or row[6] > 0 or row[7] > 0 for row in rows))
