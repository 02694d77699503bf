"""Muon: PyTorch's numbers, and on any ranks the serial update's bits."""

import numpy as np
import pytest

from nnmpi import (
    AsynchronousWorker,
    DataParallel,
    GradientExchange,
    Layout,
    ShardedDataParallel,
    Sync,
    Worker,
    arrange,
)
from nnmpi.base.errors import LayoutError, UsageError
from nnmpi.models import gpt, mlp
from nnmpi.nn import Linear
from nnmpi.ops import cross_entropy
from nnmpi.optim import Arrays, Muon
from nnmpi.optim.muon import deal, orthogonalize
from nnmpi.parallel.zero.storage import sharded
from nnmpi.tensor import FlatStorage
from tests.harness.refusals import told

STEPS = 4
SIZES = [(5, 5), (7, 3), (3, 11), (1, 4), (2, 1)]


def whole():
    """A model with matrices, vectors and tables: three blocks' worth of Muon's work and AdamW's."""
    return gpt(11, 6, features=6, layers=2, heads=2)


def mixed():
    """Experts are no matrices, nor are their biases, which lie one behind the other."""
    return gpt(11, 6, features=6, layers=1, heads=2, experts=3)


def gradient(name, shape, step):
    return np.random.default_rng([step, *name.encode()]).normal(size=shape).astype("float32")


def trained(group, stage):
    """Return the weights after some updates whose gradient is the last rank's alone: the sum is
    exact.
    """
    model, tokens = whole(), np.arange(12).reshape(2, 6)
    model.initialize(
        seed=3, storage=sharded(model, group, stage, unit_bytes=700) if stage else FlatStorage
    )
    parallel = ShardedDataParallel(model, group, stage) if stage else DataParallel(model, group)
    optimizer = Muon(model.storage, lr=0.02)
    for _ in range(STEPS):
        model.zero_grad()
        loss = cross_entropy(model(tokens % 11), (tokens + 3) % 11, reduction="sum")
        # two terms: a plain sum of 12 rows on every rank would have to be divided by all of them
        parallel.backward(loss * float(group.rank == group.size - 1) + loss * 0.0, 12)
        optimizer.step()
    if stage:
        parallel.gather_model()
    return model.state()


@pytest.mark.both_worlds(max_size=9)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_has_the_serial_update_to_the_bit(group, stage):
    serial, shared = trained(group.split(group.rank), 0), trained(group, stage)
    wrong = [name for name in serial if not np.array_equal(serial[name], shared[name])]
    assert group.gather(wrong) == [[]] * group.size


@pytest.mark.both_worlds(max_size=3)
@pytest.mark.parametrize("stage", [0, 1])
def test_after_a_release_a_rank_deals_only_what_is_sharded(group, stage):
    model = whole().initialize(seed=3)
    parallel = ShardedDataParallel(model, group, stage) if stage else DataParallel(model, group)
    dealt = model.storage.replicas
    parallel.release()
    right = [dealt is group, model.storage.replicas is (group if stage else None)]
    assert group.gather(right) == [[True, True]] * group.size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_work_is_dealt_out_evenly(size):
    shapes = [span.parameter.declared for span, *_ in Muon(whole().initialize().storage)._matrices]
    works, loads = [min(s) ** 2 * (2 * max(s) + min(s)) for s in shapes], [0] * size
    for work, rank in zip(works, deal(shapes, size), strict=True):
        loads[rank] += work
    assert len(works) == 8
    assert max(loads) - min(loads) <= max(works)


@pytest.mark.parametrize("shape", SIZES)
def test_singular_values_come_near_to_one(shape):
    result = orthogonalize(np.random.default_rng(0).normal(size=shape))
    values = np.linalg.svd(result, compute_uv=False)
    assert result.shape == shape
    assert ((values > 0.5) & (values < 1.3)).all()
    assert not orthogonalize(np.zeros(shape)).any()


@pytest.mark.host_only("gradients that are made on the host")
@pytest.mark.parametrize(
    "name, factors", [("match_rms_adamw", (0.8, 0.8)), ("original", (2.0, 1.0))]
)
def test_an_update_has_the_size_that_is_asked_for(name, factors):
    """Of a matrix with four times as many outputs as inputs, and of one with a quarter."""
    for shape, factor in zip(((4, 16), (16, 4)), factors, strict=True):
        layer = Linear(*shape, bias=False).initialize(seed=0)
        before, grad = layer.weight.data.copy(), gradient("w", shape, 0)
        layer.weight.grad = grad
        Muon(layer.storage, 0.01, weight_decay=0.0, adjust_lr_fn=name).step()
        expected = orthogonalize(grad) * (0.01 * factor)
        np.testing.assert_allclose(before - layer.weight.data, expected, atol=1e-6)
    with pytest.raises(UsageError, match="adjust_lr_fn is 'rms'; give 'match_rms_adamw' or 'orig"):
        Muon(layer.storage, adjust_lr_fn="rms")


@pytest.mark.host_only("PyTorch on the host, which reads NumPy's arrays")
@pytest.mark.parametrize("factor", ["match_rms_adamw", "original"])
def test_pytorch_has_the_same_numbers(monkeypatch, factor):
    """But for its bfloat16: there, too, all is in float32 here."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    model = mlp([5], 3, [9, 9, 4]).initialize(seed=0)
    ours = Muon(model.storage, lr=0.01, weight_decay=0.1, adjust_lr_fn=factor)
    parameters = {span.parameter.name: span.parameter for span in model.storage.spans}
    theirs = {
        name: torch.nn.Parameter(torch.tensor(p.data.T.copy())) for name, p in parameters.items()
    }
    matrices, rest = (
        [p for p in theirs.values() if (p.ndim == 2) == expected] for expected in (True, False)
    )
    muon = torch.optim.Muon(matrices, 0.01, 0.1, 0.95, adjust_lr_fn=factor)
    adamw = torch.optim.AdamW(rest, 0.01, weight_decay=0.1)
    for step in range(30):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, parameter.shape, step)
            theirs[name].grad = torch.tensor(parameter.grad.T.copy())
        ours.step(), muon.step(), adamw.step()
    for name, parameter in parameters.items():
        np.testing.assert_allclose(
            parameter.data, theirs[name].detach().numpy().T, rtol=0, atol=5e-7
        )


@pytest.mark.host_only("a server, which a device refuses in its own words")
@pytest.mark.simulated(min_size=2, max_size=3)
def test_parts_of_matrices_are_refused(group):
    def sharded_layers():
        where = arrange(mlp([4], 3, [8]), group, Layout(tp=group.size))
        Muon(where.model.initialize(seed=0).storage)

    def fused():
        model = mlp([4], 3, [8]).initialize(seed=0)
        worker = Worker(
            model, Muon(model.storage), group, exchange=GradientExchange(fused_update=True)
        )
        raise LayoutError(worker.notice)

    def served():
        model = mlp([4], 3, [8]).initialize(seed=0)
        AsynchronousWorker(model, Muon(model.storage), group, Sync("asp"))

    rows = [
        (
            LayoutError,
            "whole matrices, but this rank has only part of 1.weight; leave tp at 1",
            sharded_layers,
        ),
        (LayoutError, "not fused: Muon updates whole matrices", fused),
        (
            UsageError,
            "with asp a server updates flat arrays, but Muon takes whole matrices; give sync bsp",
            served,
        ),
        (
            UsageError,
            "give model.storage",
            lambda: Muon(Arrays([np.ones((2, 2))], [np.ones((2, 2))])) and None,
        ),
    ]
    for kind, words, call in rows:
        assert all(words in item for item in group.gather(told(kind, call)))


def test_experts_and_their_biases_are_no_matrices():
    names = [span.parameter.name for span, *_ in Muon(mixed().initialize().storage)._matrices]
    assert names == ["2.attention.qkv.weight", "2.attention.proj.weight", "2.mlp.gate.weight"]


def test_matrices_of_a_group_have_its_rate():
    """A matrix moves half as far at half of the rate, and no matrix moves twice."""
    moved = []
    for lr in ({"body": 0.01, "head": 0.01}, {"body": 0.01, "head": 0.005}):
        model = mlp((4,), 3, (5,)).initialize(
            seed=0, group=lambda name, _: "head" if name[0] == "3" else "body"
        )
        before, optimizer = model.state(), Muon(model.storage, lr, weight_decay=0.0)
        model(np.ones((2, 4), "float32")).sum().backward()
        optimizer.step()
        moved.append({name: value - before[name] for name, value in model.state().items()})
    for name, change in moved[0].items():
        np.testing.assert_allclose(
            moved[1][name], change * (0.5 if name[0] == "3" else 1), rtol=1e-3, atol=1e-9
        )
