"""Whether what trainings rest on works here: tried on all ranks, in some seconds, with known answers."""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path

import numpy as np

from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.algorithms.registry import AUTO, NAMES, SHARED
from nnmpi.comm.group import Group
from nnmpi.compose.worker import Worker
from nnmpi.data.catalogue import load
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.errors import CommError, NnmpiError
from nnmpi.models.mlp import mlp
from nnmpi.optim.adam import Adam
from nnmpi.shard import split
from nnmpi.train.checkpoint import Saver, find, restore
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import MetricsRecorder
from nnmpi.train.run_state import RunState
from nnmpi.verify.__main__ import main as verify

LENGTHS = (1, 1000, 300_001)  # elements: fewer than ranks, short messages, long ones
OPERATIONS = ("reduce-scatter", "all-gather", "broadcast")
WAYS = {
    "reduce-scatter": ("native", "ring", "tree"),
    "all-gather": ("native", "ring", "tree"),
    "broadcast": ("native",),
}
STEPS = 6  # of the training that is cut in two


@dataclass(frozen=True)
class Check:
    """What was tried.

    Attributes:
        name: of it.
        seconds: that it took.
        problem: a sentence; empty if all is well.
    """

    name: str
    seconds: float
    problem: str


def try_all(group: Group) -> list[Check]:
    """Return what came of every check. Collective."""
    one_node = len(set(group.nodes())) == 1
    ways = [name for name in NAMES if name != AUTO and (name != SHARED or one_node)]
    checks: dict[str, Callable[[Group], None]] = {
        **{f"all-reduce by {name}": partial(_try_all_reduce, name) for name in ways},
        **{
            f"{operation} by {way}": partial(_try_other, operation, way)
            for operation in OPERATIONS
            for way in WAYS[operation]
        },
        "messages between neighbours": _try_messages,
        "a training on these ranks, against one rank": partial(_try_layout, ""),
    }
    if group.size % 2 == 0:
        checks["a pipeline of two stages, against one rank"] = partial(_try_layout, "--pp 2")
    checks["a checkpoint, resumed to the same bits"] = _try_checkpoint
    return [_try(group, name, check) for name, check in checks.items()]


def _try(group: Group, name: str, check: Callable[[Group], None]) -> Check:
    begin_s, problem = time.perf_counter(), ""
    try:
        check(group)
    except NnmpiError as error:  # of all ranks
        problem = str(error)
    return Check(name, time.perf_counter() - begin_s, problem)


def _require(group: Group, holds: bool, what: str) -> None:
    """Raise on all ranks if something does not hold on one."""
    with agreed(group):
        if not holds:
            raise CommError(what)


def _try_all_reduce(way: str, group: Group) -> None:
    for length in LENGTHS:
        array = np.empty(length, np.int64) if way != SHARED else group.memory().allocate(length, np.int64)
        array[...] = np.arange(length) + group.rank
        group.all_reduce(array, way)
        wanted = np.arange(length) * group.size + group.size * (group.size - 1) // 2
        _require(group, bool((array == wanted).all()), f"wrong sums of {length} elements")


def _try_other(operation: str, way: str, group: Group) -> None:
    for length in LENGTHS:
        array = np.arange(length, dtype=np.int64) * (group.rank + 1)
        group.bind(array, way, 0, operation).run()
        own = split(length, group.size)[group.rank]
        numbers, factor = np.arange(length), group.size * (group.size + 1) // 2
        if operation == "broadcast":
            right = array == numbers
        elif operation == "reduce-scatter":
            right = array[own.start : own.stop] == factor * numbers[own.start : own.stop]
        else:
            owners = np.repeat(np.arange(group.size) + 1, [len(part) for part in split(length, group.size)])
            right = array == numbers * owners
        _require(group, bool(np.all(right)), f"wrong values among {length} elements")


def _try_messages(group: Group) -> None:
    """Send to the right and receive from the left, at once."""
    for length in LENGTHS:
        own, came = np.full(length, group.rank, np.int64), np.empty(length, np.int64)
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        requests = [group.comm.irecv(came, left, 0), group.comm.isend(own, right, 0)]
        group.comm.wait_all(requests)
        _require(group, bool((came == left).all()), f"a message of {length} elements came changed")


def _try_layout(words: str, group: Group) -> None:
    said = StringIO()
    with redirect_stdout(said):
        equal = verify([*words.split(), "--backend", "numpy"], group)
    _require(group, equal, f"not equal to one rank; python -m nnmpi.verify {words} shows where".replace("  ", " "))


def _try_checkpoint(group: Group) -> None:
    """Train six steps at once, and with a checkpoint in the middle; on a disk where runs would lie."""
    place = Path(on_root(group, lambda: tempfile.mkdtemp(prefix=".nnmpi-doctor-", dir=Path.cwd())))
    folder, half, samples = RunFolder(place), STEPS // 2, load("iris")[0]
    try:
        whole, first, second = (_worker(group) for _ in range(3))
        _train(whole, samples, 0, STEPS)
        _train(first, samples, 0, half)
        with MetricsRecorder(None, 0) as recorder, Saver(folder, recorder, group, keep=1) as saver:
            saver.save(first, RunState(step=half))
            saver.wait()
        restore(second, find(folder, group), folder, RunState())
        _train(second, samples, half, STEPS)
        arrays = [{**each.model.state(), **each.state()[1].to_dict(everywhere=True)} for each in (whole, second)]
        same = all(np.array_equal(arrays[0][name], arrays[1][name]) for name in arrays[0])
        _require(group, same, "a training that was resumed ends with other weights")
        for each in (whole, first, second):
            each.release()
    finally:
        if group.is_root:
            shutil.rmtree(place, ignore_errors=True)


def _worker(group: Group) -> Worker:
    model = mlp((4,), 3, (16,)).initialize(seed=0)
    return Worker(model, Adam(model.storage), group)


def _train(worker: Worker, samples: Dataset, first: int, last: int) -> None:
    """Do the steps from one number to another, of one epoch."""
    loader = Loader(samples, len(samples) // STEPS, rank=worker.group.rank, world=worker.group.size)
    for batch in islice(loader.epoch(0), first, last):
        worker.step(batch)
