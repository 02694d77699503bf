"""What DataParallel and Worker do beside the contract: checks, errors, and what they report."""

import numpy as np
import pytest

from nnmpi import (
    DataParallel,
    GradientExchange,
    Layout,
    Worker,
    arrange,
    models,
    nn,
    ops,
    optim,
    simulate,
)
from nnmpi.base.errors import DivergenceError, UsageError
from nnmpi.base.shard import part
from nnmpi.data import Batch
from nnmpi.data.sampler import Cut
from nnmpi.parallel.fixed_reduction import FixedReduction
from nnmpi.tensor import concatenate
from tests.harness.refusals import caught
from tests.worker_options import grouped


def batch_of(group, rows=13, features=5):
    """Return this rank's part of a batch that is the same under every layout."""
    generator = np.random.default_rng(0)
    x, y = (
        generator.standard_normal((rows, features)).astype(np.float32),
        generator.integers(0, 3, rows),
    )
    mine = part(rows, group.size, group.rank)
    taken = np.arange(mine.start, mine.stop)
    return Batch(x[taken], y[taken], taken, (Cut(0, len(taken), mine.start),), rows, 0, 0)


def worker_for(group, **options):
    """Return a worker on a small network."""
    model = models.mlp((5,), 3, hidden=(7,)).initialize(seed=0)
    return Worker(model, optim.SGD(model.storage, lr=0.1), group, **grouped(**options))


def outcomes(group, error):
    """Return every rank's kind of error and its text."""
    return group.gather([type(error).__name__, str(error)])


@pytest.mark.simulated
def test_ranks_get_the_weights_of_rank_0(group):
    """Models that were initialized differently become equal."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm(3)).initialize(seed=group.rank)
    buffer = dict(model.named_buffers())["1.running_mean"]
    buffer.data += group.rank
    parallel = DataParallel(model, group)
    parallel.check_equal()
    sums = group.gather([float(model.storage.data[0].sum()), float(buffer.data.sum())])
    assert all(pair == sums[0] for pair in sums), sums


@pytest.mark.simulated(min_size=2, max_size=4)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_weights_that_went_apart_are_named(group, axis):
    """By every rank, after the step in which one differs."""
    model = models.mlp((5,), 3, hidden=(7,))
    where = arrange(model, group, Layout(**{axis: group.size}), np.zeros((1, 5), np.float32))
    model = where.model.initialize(seed=0)
    exchange = GradientExchange(check=True, fused_update=False)
    optimizer = optim.SGD(model.storage, lr=0.1)
    worker = Worker(model, optimizer, group, arrangement=where, exchange=exchange)
    batch = batch_of(where.mesh.dp)
    report = worker.step(batch)
    gradients = sum(parameter.data.nbytes for parameter in model.parameters())
    assert axis == "tp" or report.comm_bytes > gradients
    if group.rank == group.size - 1:
        dict(model.named_parameters())["3.bias"].data[0] += 1
    result = outcomes(group, caught(lambda: worker.step(batch)))
    assert all("3.bias" in text and "differ" in text for _, text in result), result


@pytest.mark.simulated
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_input_that_is_not_finite_is_named_on_all_ranks(group, bad):
    """The rank, the step and the place; the weights stay as they were."""
    worker = worker_for(group)
    worker.step(batch_of(group))
    before = worker.model.state()
    batch = batch_of(group)
    if group.rank == 0:
        batch.x[0, 0] = bad
    with np.errstate(invalid="ignore", over="ignore"):
        result = outcomes(group, caught(lambda: worker.step(batch)))
    unchanged = all((value == before[name]).all() for name, value in worker.model.state().items())
    assert all(group.gather(unchanged))
    assert all(kind == DivergenceError.__name__ for kind, _ in result), result
    assert all("step 2" in text and "the input on rank 0" in text for _, text in result), result


@pytest.mark.simulated
def test_gradient_that_overflows_is_named(group):
    """A finite loss whose gradient is not: found by a backward pass on each rank."""

    def steep(logits, labels):
        return (logits * 1e-30).sum(axis=1) * 0.0 + ((logits - logits.detach()) * 1e30 * 1e30).sum(
            axis=1
        )

    worker = worker_for(group, loss=steep)
    with np.errstate(invalid="ignore", over="ignore"):
        result = outcomes(group, caught(lambda: worker.step(batch_of(group))))
    assert all(kind == DivergenceError.__name__ for kind, _ in result), result
    assert all("gradient of '3.bias'" in text for _, text in result), result


@pytest.mark.simulated
def test_parameter_that_no_rank_uses_does_not_block(group):
    """Its gradient is zero; the buckets before and after it are summed as ever."""

    class Partly(nn.Module):
        def __init__(self):
            self.first, self.unused, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.first(x))

    model = Partly().initialize(seed=0)
    worker = Worker(
        model,
        optim.SGD(model.storage, lr=0.1),
        group,
        exchange=GradientExchange(check=True, bucket_bytes=1),
    )
    before = model.state()
    worker.step(batch_of(group))
    after = model.state()
    moved = {name for name in after if not (after[name] == before[name]).all()}
    assert all(group.gather(moved == {"first.weight", "first.bias", "last.weight", "last.bias"})), (
        moved
    )


@pytest.mark.simulated
def test_parameter_that_one_rank_alone_uses(group):
    """The others report no gradient for it; the sum is that rank's."""

    class Sometimes(nn.Module):
        def __init__(self):
            self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.first(x) + self.second(x) if group.rank == 0 else self.first(x)

    model = Sometimes().initialize(seed=0)
    parallel = DataParallel(model, group, bucket_bytes=1)
    batch = batch_of(group)
    with nn.training():
        loss = ops.cross_entropy(model(batch.x), batch.y, reduction="sum")
    parallel.backward(loss, batch.global_rows)
    norms = group.gather(
        [float(np.abs(p.grad).sum()) for p in model.parameters() if p.grad is not None]
    )
    assert all(norm == norms[0] for norm in norms) and all(n > 0 for n in norms[0]), norms


@pytest.mark.simulated
def test_release_gives_the_model_back(group):
    """After it a backward pass is local again."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm(3)).initialize(seed=0)
    DataParallel(model, group).release()
    if group.rank == 0:  # the others take no part: a collective here would hang
        with nn.training():
            ops.cross_entropy(model(np.ones((4, 5), np.float32)), np.zeros(4, np.int64)).backward()
    assert all(p.hook is None for p in model.parameters())


def test_a_batch_norm_in_two_places_is_refused(group):
    """Only one of its two statistics would be taken in."""
    norm = nn.BatchNorm(2)
    model = nn.Sequential(nn.Linear(2, 2), norm, nn.Linear(2, 2), norm).initialize()
    fixed = FixedReduction(model, group)
    fixed.begin(1)
    with nn.training(), pytest.raises(UsageError, match="runs twice in one microbatch"):
        model(np.ones((3, 2), np.float32))
    fixed.release()


class Towers(nn.Module):
    """Two towers, of which a rank uses the one that its rows choose; the first works row by row."""

    def __init__(self):
        self.a, self.b, self.o = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)
        self.norms = [nn.BatchNorm(4), nn.BatchNorm(4)]

    def forward(self, x):
        rows = [ops.tanh(self.a(x[i : i + 1])) for i in range(len(x))]
        a, b = self.norms[0](concatenate(rows)), self.norms[1](self.b(x))
        chosen = np.asarray(x.data)[:, 0] > 0
        if chosen.all():
            return self.o(a)
        if not chosen.any():
            return self.o(b)
        weights = chosen[:, None].astype("float64")
        return self.o(a * weights + b * (1 - weights))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["worker", "loop", "overlap"])
def test_batch_normalization_of_which_a_rank_uses_no_result(ranks, kind):
    """Its share of the others' gradient is zeros, also in a step that is replayed."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 6)), rng.integers(0, 3, 7)
    x[:, 0] = (1, 1, 1, 1, -1, -1, -1)

    def program(group):
        model = Towers().initialize(seed=0, dtype="float64")
        sgd = optim.SGD(model.storage, lr=0.5)
        cuts = {1: [0, 7], 2: [0, 4, 7], 3: [0, 4, 6, 7]}[group.size]
        rows = slice(*cuts[group.rank : group.rank + 2])
        if kind == "worker":
            worker = Worker(model, sgd, group)
            return [worker.step(x[rows], y[rows]).grad_norm for _ in range(5)]
        parallel, norms = DataParallel(model, group, "ring", overlap=kind == "overlap"), []
        for step in range(5):
            with nn.training(step=step):
                loss = ops.cross_entropy(model(x[rows]), y[rows], reduction="sum")
            model.zero_grad()
            parallel.backward(loss, 7)
            norms.append(optim.global_norm(model.storage.grads))
            sgd.step()
        return norms

    (right,) = simulate(program, 1)
    np.testing.assert_allclose(simulate(program, ranks), [right] * ranks, rtol=1e-9)
