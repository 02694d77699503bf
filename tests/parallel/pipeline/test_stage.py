"""A pipeline stage by itself: forward, backward, halves and recomputation give what the plain model gives."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from nnmpi import models, nn
from nnmpi.backend.array import Array
from nnmpi.errors import UsageError
from nnmpi.nn.chain import cut_chain, kept_at, open_chain
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.parallel.pipeline.boundary import BoundaryArrays, Signature, pack, unpack
from nnmpi.parallel.pipeline.stage import Stage
from nnmpi.tensor.tensor import Tensor
from tests.device.here import here

ROWS, MICROBATCHES = 6, 3
Result = tuple[list[float], dict[str, Array], dict[str, Array]]


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((MICROBATCHES, ROWS, 8, 8, 1)), rng.integers(10, size=(MICROBATCHES, ROWS))


@contextmanager
def scope(microbatch: int, again: bool) -> Iterator[None]:
    with nn.training(seed=0, first_row=microbatch * ROWS, again=again):
        yield


def build(name: str) -> Module:
    options = {"dropout": 0.3} if name != "resnet" else {}
    model: Module = getattr(models, name)((8, 8, 1), 10, **options).initialize(seed=1, dtype="float64")
    return model


def serial(name: str) -> Result:
    x, y = data()
    model, losses = build(name), []
    for m in range(MICROBATCHES):
        with scope(m, again=False):
            loss = cross_entropy(model(x[m]), y[m], reduction="sum")
        loss.backward()
        losses.append(loss.item())
    return losses, {n: np.array(p.grad) for n, p in model.named_parameters()}, model.state()


def staged(name: str, cuts: list[int], halves: bool, recompute: bool) -> tuple[Result, list[int]]:
    """Go through the stages with all forwards first, as GPipe does; return also what was live in each after them."""
    x, y = data()
    model = build(name)
    layers = open_chain(model)
    edges = [0, *cuts, len(layers)]
    ranges = [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]

    def head(result: Tensor, m: int) -> Tensor:
        return cross_entropy(result, y[m], reduction="sum")

    stages = [
        Stage(i, each, kept_at(layers, ranges[i].start), scope, head if i == len(cuts) else None, recompute)
        for i, each in enumerate(cut_chain(layers, ranges))
    ]
    losses = []
    for m in range(MICROBATCHES):
        values = BoundaryArrays((here(x[m]),), (False,))
        for stage in stages:
            values = stage.forward(m, values)
        losses.append(float(values.arrays[0]))
    live = [stage.live for stage in stages]
    for m in range(MICROBATCHES):
        grads = [here(np.ones(()))]
        for stage in reversed(stages):
            grads = stage.backward(m, grads, halves)
        assert not grads  # the data need none
    for m in range(MICROBATCHES if halves else 0):
        for stage in stages:
            stage.finish(m)
    assert not any(stage.live for stage in stages)
    return (losses, {n: np.array(p.grad) for n, p in model.named_parameters()}, model.state()), live


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("name", "cuts"), [("mlp", [2, 4]), ("cnn", [1, 5]), ("resnet", [5, 12, 24]), ("cnn", [])])
def test_stages_give_the_serial_model(name: str, cuts: list[int], halves: bool, recompute: bool) -> None:
    """Losses, gradients and running statistics, which a repeated forward leaves alone."""
    expected = serial(name)
    found, live = staged(name, cuts, halves, recompute)
    assert found[0] == expected[0]
    for which in (1, 2):
        for key, value in expected[which].items():  # type: ignore[union-attr]
            np.testing.assert_allclose(found[which][key], value, rtol=1e-12, atol=1e-14, err_msg=key)  # type: ignore[call-overload]
    assert live == [MICROBATCHES] * (len(cuts) + 1)


def test_pack_and_unpack_are_inverse() -> None:
    a, b, c = (Tensor(np.full(2, i)) for i in range(3))
    for x, single in ((a, True), ((a, b), False)):
        tensors, found = pack(x, {"later": c, "early": b}, 0)
        assert found is single
        again, kept = unpack(tensors, found, ["early", "later"])
        assert (again is a) if single else (again[0] is a and again[1] is b)
        assert kept == {"early": b, "later": c}


def test_what_is_no_tensor_cannot_cross() -> None:
    with pytest.raises(UsageError, match="stage 3 ends with a dict"):
        pack({"x": 1}, {}, 3)


def test_signatures_come_back_from_the_wire() -> None:
    values = BoundaryArrays((np.ones((2, 0, 3), np.float32), np.ones((), np.int64)), (True, False), single=False)
    signature = Signature.of(values)
    key = ((4, 3), True)
    assert Signature.decode(signature.encode(key), key) == signature
    with pytest.raises(UsageError, match=r"of shape \(4, 3\) and \(5, 3\); give all of them the same part"):
        Signature.decode(signature.encode(key), ((5, 3), True))
    with pytest.raises(UsageError, match="too many to announce"):
        Signature.of(BoundaryArrays((np.ones(1),) * 2000, (True,) * 2000)).encode(())
