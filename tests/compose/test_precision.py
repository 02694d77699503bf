"""Workers in half precision: they learn as much, skip overflows together, and refuse what does not
go together.
"""

import numpy as np
import pytest

from nnmpi import Layout, Numerics, arrange, models, nn
from nnmpi.base.errors import UsageError
from nnmpi.nn import Module
from nnmpi.tensor import Function
from tests.equivalence.reference import Setup, batches, build
from tests.harness.refusals import told
from tests.worker_options import grouped, work

SAMPLE = np.zeros((4, 8, 8, 1), np.float32)


class Blow(Function):
    """x, and a gradient that is infinite where somebody says so, as float16's are beyond 65504."""

    def __init__(self, when):
        self.when = when

    def forward(self, x):
        return x.copy()

    def backward(self, grad):
        if not self.when[0]:
            return (grad,)
        worse = grad.copy()
        worse.reshape(-1)[:1] = np.inf
        return (worse,)


class Fuse(Module):
    """Passes x on; its gradient overflows while `lit` holds True."""

    def __init__(self):
        self._lit = [False]

    def light(self, lit):
        """Let the gradient overflow, or not."""
        self._lit[0] = lit

    def forward(self, x):
        """Return x."""
        return Blow(self._lit)(x)


def fused(group, layout, **options):
    """Return a worker of a model with a Fuse between two layers, that Fuse if it is on this rank,
    and the batches.
    """
    fuse = Fuse()

    def model(*_):
        first, last = nn.Linear(64, 20), nn.Linear(20, 10)
        result = nn.Sequential(nn.Flatten(), first, nn.Tanh(), fuse, last)
        result.sharding = {"1": nn.Sharding.COLUMN, "4": nn.Sharding.ROW}
        return result

    setup = Setup(model, dtype="float32", microbatches=4, batch_size=32)
    worker = build(setup, group, layout, precision="fp16", **options)
    here = any(module is fuse for _, module in worker.model.named_modules())
    return worker, fuse if here else None, batches(setup, worker)


WAYS = {
    "replicas": (None, {"fused_update": False}),
    "fused update": (None, {"fused_update": True}),
    "pipeline": ({"pp": 2, "dp": "auto", "split": (3, 2)}, {}),
    "zero bubble": ({"pp": 2, "dp": "auto", "split": (3, 2), "pipeline": "zero-bubble"}, {}),
    "shared layers": ({"tp": 2, "dp": "auto"}, {}),
    "fixed order": ({"reduction": "fixed"}, {}),
}


HOST = pytest.mark.host_only("a fused update is for host memory")


@pytest.mark.simulated
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=HOST) if way == "fused update" else way for way in WAYS]
)
@pytest.mark.needs_ranks(2, 4, 6, 8)
def test_an_overflow_on_one_rank_skips_the_update_on_all(group, way):
    """The weights and the optimizer stay, the scale is halved, and the next step is one as
    before.
    """
    layout, options = WAYS[way]
    layout = None if layout is None else Layout(**layout)
    worker, fuse, given = fused(group, layout, clip=1.0, **options)
    holders = group.gather(fuse is not None)
    first = worker.step(next(given))
    before = {name: entry.data.copy() for name, entry in worker.model.entries().items()}
    if fuse is not None:
        fuse.light(group.rank == holders.index(True))
    second = worker.step(next(given))
    if fuse is not None:
        fuse.light(False)
    now = worker.model.entries()
    unchanged = all((before[name] == now[name].data).all() for name in before)
    third = worker.step(next(given))
    assert first.grad_norm < 100 < first.loss_scale  # without the scale
    told = [
        (first.skipped, first.loss_scale),
        (
            second.skipped,
            second.loss_scale,
            np.isfinite(second.loss),
            np.isfinite(second.grad_norm),
        ),
        (third.skipped, third.loss_scale, np.isfinite(third.grad_norm)),
        (unchanged, worker.optimizer.steps, worker.scaling.value, worker.scaling.skipped),
    ]
    changed = any((before[name] != now[name].data).any() for name in before)
    expected = [
        (False, 2.0**16),
        (True, 2.0**16, True, False),
        (False, 2.0**15, True),
        (True, 2, 2.0**15, 1),
    ]
    everyone = group.gather([told == expected or repr(told), changed])
    worker.release()
    assert everyone == [[True, True]] * group.size, everyone


@pytest.mark.parametrize(
    "options, words",
    [
        ({"precision": "fp8"}, "precision is 'fp8'; it must be one of float32, tf32, bf16, fp16"),
        (
            {"precision": "tf32"},
            "tf32 needs a CUDA device, and backend numpy has none; use float32, bf16 or fp16",
        ),
        (
            {"precision": "bf16", "dtype": "float64"},
            "bf16 is for float32 models, but this one is float64",
        ),
    ],
)
@pytest.mark.host_only("tf32 is refused there")
def test_what_does_not_go_together(group, options, words):
    layout = Layout(pipeline=options.pop("pipeline", "1f1b"))
    dtype = options.pop("dtype", "float32")
    where = arrange(models.mlp((8, 8, 1), 10), group, layout, SAMPLE.astype(dtype), dtype=dtype)
    where.model.initialize(seed=0, dtype=dtype)
    with pytest.raises(UsageError, match=words):
        work(where.model, group, arrangement=where, **grouped(**options))


@pytest.mark.simulated
def test_ranks_of_different_precisions_are_refused(group):
    """On all of them, before anything else."""
    model = models.mlp((4,), 3).initialize(seed=0)
    last = group.rank == group.size - 1
    numerics = Numerics(precision="fp16" if last else "float32")
    message = told(UsageError, lambda: work(model, group, numerics=numerics).release())
    before = "rank 0 has" if group.size == 2 else f"ranks 0-{group.size - 2} have"
    text = f"{before} precision float32; rank {group.size - 1} has precision fp16"
    assert group.gather(text in message) == [group.size > 1] * group.size
