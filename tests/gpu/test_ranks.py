"""Several ranks on one device, under each strategy: the numbers are the host's, whatever way they
travel.
"""

import gc
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest

from nnmpi import AsynchronousWorker, Layout, Tensor, Worker, arrange, models, optim
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.algorithms.registry import NAMES, SHARED
from nnmpi.compose.replayed import Replay
from nnmpi.data import Dataset, Loader
from nnmpi.schedule.schedules import TRAINING
from tests.asynchronous.runs import EVERY_MODE, name_of, skip_unless_fitting
from tests.compose.small_runs import BATCH, dataset
from tests.compose.small_runs import build as small
from tests.equivalence.cover import SETUPS, spread
from tests.equivalence.reference import batches, build, evaluate, release
from tests.gpu.conftest import is_stand_in
from tests.gpu.play import BF16, FLOAT32, FLOAT64, FP16, differences, precise
from tests.harness.slow import MORE_LAYOUTS

SIZE, MICROBATCHES = 31, 3
# Of losses and of weights, as a share of the largest: after three steps of Adam with a large eps.
LIMITS = {FLOAT64: 1e-9, FLOAT32: 1e-3, FP16: 3e-2, BF16: 1e-1}
MIXES = {
    # name: dp, pp, tp for two ranks (a 0 stands for all the ranks that are left), options of the
    # layout
    **{f"pp {name}": ((1, 0, 1), {"schedule": name}) for name in TRAINING},
    "pp 1f1b": ((1, 0, 1), {"schedule": "1f1b", "activation_memory": "least"}),
    "tp": ((1, 1, 0), {}),
    "dp fixed": ((0, 1, 1), {"reduction": "fixed"}),
    "dp x pp": ((0, 2, 1), {"schedule": "1f1b"}),
    "dp x tp": ((0, 1, 2), {}),
    "pp x tp": ((1, 2, 0), {"schedule": "zero-bubble", "activation_memory": "least"}),
}
ALGORITHMS = [name for name in NAMES if name != SHARED]
WAITING = [sync for sync in EVERY_MODE if not sync.has_server]
RUNNING = [sync for sync in EVERY_MODE if sync not in WAITING]


def mesh_of(name, ranks):
    """Return (dp, pp, tp) of a mix for so many ranks, None where they cannot be divided so."""
    sizes = MIXES[name][0]
    given = int(np.prod([size for size in sizes if size]))
    if ranks % given or (ranks == given and 0 in sizes and given > 1):
        return None
    return tuple(size or ranks // given for size in sizes)


def train(group, backend, setup, mode, layout=None, epochs=1, **options):
    """Return losses, evaluation and weights after epochs of three batches, the last one short."""
    given = replace(
        SETUPS[setup],
        optimizer_options={"lr": 1e-3, "eps": 1e-3},
        dtype=FLOAT64 if mode == FLOAT64 else FLOAT32,
        microbatches=MICROBATCHES,
        batch_size=SIZE,
    )
    with precise(mode):
        worker = build(given, group, layout, backend=backend, **options)
        losses = [
            worker.step(batch).loss
            for _ in range(epochs)
            for batch in islice(batches(given, worker), 3)
        ]
        # a shape's third batch; a fixed order of sums leaves the device
        if epochs > 1 and backend.is_device:
            assert worker.passes.replay.replays >= epochs - 2, worker.explain_replay()
        evaluation = evaluate(given, worker)
        state = worker.state()[0].to_dict(everywhere=True)
    release(worker)
    return {
        "losses": np.array(losses),
        "evaluation": np.array(evaluation.loss),
        **{name: np.asarray(value, np.float64) for name, value in state.items()},
    }


@cache
def hosts(group, setup, layout, epochs):
    """Return the run on the host, which several of the device's are compared with."""
    return train(group, numpy_backend(), setup, FLOAT64, layout, epochs)


def assert_equal(group, device, setup, mode, layout, **options):
    """Fail on all ranks if a run on the device differs from the host's in float64 on any."""
    right = hosts(group, setup, layout, options.get("epochs", 1))
    result = train(group, device, setup, mode, layout, **options)
    words = group.gather(differences(result, {name: right[name] for name in result}, LIMITS[mode]))
    assert not any(words), words


def grown(group, device, options):
    """Return how many bytes of memory a few steps of a GPT take, and how often it was replayed."""
    draw = np.random.default_rng(0)
    x, y = (draw.integers(0, 30, (16 * group.size, 24)) for _ in range(2))
    text = Dataset("text", x.astype(np.uint16), y, 30)
    where = arrange(models.gpt(30, 24, 32, 4, 1), group, Layout(**options), x[:2], backend=device)
    model = where.model.initialize(seed=0, backend=device, storage=where.storage)
    gc.collect()
    pool = device.xp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    worker = Worker(model, optim.AdamW(model.storage), group, backend=device, arrangement=where)
    place = {"rank": where.data_rank, "world": where.data_ranks}
    microbatches = 4 if "pp" in options else 1
    loader = Loader(text, 8 * group.size, microbatches=microbatches, workers=0, **place)
    for epoch in range(3):
        for batch in loader.epoch(epoch, backend=device):
            worker.step(batch)
    bytes_, replays = pool.total_bytes() - before, worker.passes.replay.replays
    worker.release()
    return bytes_, replays


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options",
    [
        {"tp": 0, "dp": 1},
        {"zero": 3},
        pytest.param({"pp": 0, "dp": 1, "pipeline": "gpipe"}, marks=pytest.mark.slow(MORE_LAYOUTS)),
        pytest.param({"zero": 1}, marks=pytest.mark.slow(MORE_LAYOUTS)),
    ],
    ids=lambda options: " ".join(map(str, options.items())),
)
def test_memory_of_graphs(group, device, options, monkeypatch):
    """Recorded steps take what the eager ones do, on all ranks together: stages are cut by times.

    The double's pool does not cut its blocks.
    """
    given = {name: value or group.size for name, value in options.items()}
    Tensor(device.xp.ones((2, 2))) @ Tensor(device.xp.ones((2, 2)))  # takes cuBLAS's workspace
    bytes_, replays = grown(group, device, given)
    with monkeypatch.context() as patch:
        patch.setattr(Replay, "takes", lambda *_: False)
        eager, _ = grown(group, device, given)
    sums = [sum(group.gather(item)) for item in (bytes_, eager)]
    assert sums[0] < (1.3 if is_stand_in(device) else 1.1) * sums[1]
    assert replays > 1


@pytest.mark.mpi
@pytest.mark.parametrize(
    "setup, algorithm, overlap",
    [
        *(("mlp", item, True) for item in ALGORITHMS),
        ("mlp", "ring", False),
        ("resnet", "ring", True),
    ],
)
def test_data_parallel(group, device, setup, algorithm, overlap):
    """Every all-reduce, in buckets small enough that several are under way."""
    assert_equal(
        group,
        device,
        setup,
        FLOAT64,
        None,
        allreduce=algorithm,
        bucket_bytes=20_000,
        overlap=overlap,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("mode", [FLOAT32, BF16, FP16])
@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_data_parallel_in_lower_precision(group, device, algorithm, mode):
    """Gradients travel in float32 whatever the layers compute in."""
    assert_equal(group, device, "mlp", mode, None, allreduce=algorithm)


def row(setup, mode, name):
    """Return a layout's parameters; on how many ranks it can be, and whether it is like others."""
    few, more = pytest.mark.needs_ranks(4, 8), pytest.mark.slow(MORE_LAYOUTS)
    return pytest.param(
        setup,
        mode,
        name,
        marks=[few] * (2 in MIXES[name][0]) + [more] * (mode == FLOAT64 and setup != "cnn"),
    )


LAYOUTS = [
    *((setup, FLOAT64, name) for setup in ("cnn", "mlp", "resnet") for name in MIXES),
    *(("mlp", mode, name) for mode in (FLOAT32, BF16) for name in ("pp 1f1b", "tp", "dp x pp")),
]


@pytest.mark.mpi
@pytest.mark.parametrize("setup, mode, name", [row(*item) for item in LAYOUTS])
def test_layout(group, device, setup, mode, name):
    """Pipelines, layers shared out, mixes of them, sums in a fixed order; in bfloat16 activations
    travel so, too.
    """
    mesh = mesh_of(name, group.size)
    if mesh is None:
        pytest.skip(f"{name} on {group.size} ranks")
    assert_equal(
        group,
        device,
        setup,
        mode,
        spread(SETUPS[setup], mesh, **{"schedule": "1f1b", **MIXES[name][1]}),
    )


@pytest.mark.mpi
@pytest.mark.needs_ranks(2, 3)
@pytest.mark.parametrize("name", ["pp zero-bubble", "pp 1f1b"])
def test_stages_are_graphs(group, device, name):
    """In the third epoch what a stage computes between its messages is launched, halves, too."""
    layout = spread(SETUPS["mlp"], (1, group.size, 1), **MIXES[name][1])
    assert_equal(group, device, "mlp", FLOAT64, layout, epochs=4)


def asynchronous(group, backend, sync, epochs=2):
    """Return the last epoch's loss and the weights after some epochs out of step."""
    model = small(backend=backend)
    worker = AsynchronousWorker(
        model, optim.SGD(model.storage, lr=0.1), group, sync, seed=3, backend=backend
    )
    loader = Loader(dataset(), BATCH, group, dtype="float64", workers=0)
    count = loader.batches_per_epoch
    for epoch in range(epochs):
        report = worker.run(loader, epoch, 0, count, epoch * count, lr=lambda step: 0.1)
    state = worker.state()[0].to_dict(everywhere=True)
    worker.release()
    return {"loss": np.array(report.totals.loss), **state}


@pytest.mark.mpi
@pytest.mark.parametrize("sync", WAITING, ids=name_of)
def test_asynchronous_modes_that_wait(group, device, sync):
    """Servers in step, local steps, gossip: what they do does not depend on who is faster."""
    skip_unless_fitting(group, sync)
    right, result = (asynchronous(group, backend, sync) for backend in (numpy_backend(), device))
    words = group.gather(differences(result, right, LIMITS[FLOAT64]))
    assert not any(words), words


@pytest.mark.mpi
@pytest.mark.parametrize("sync", RUNNING, ids=name_of)
def test_asynchronous_modes_that_run_free(group, device, sync):
    """Nobody waits, so no two runs are alike: the loss is that of a model that learns, and all
    ranks agree.
    """
    skip_unless_fitting(group, sync)
    result = asynchronous(group, device, sync, epochs=12)
    everyones = group.gather([float(value.sum()) for value in result.values()])
    assert all(everyone == everyones[0] for everyone in everyones)
    assert float(result["loss"]) < 0.95  # three classes by chance: 1.1
