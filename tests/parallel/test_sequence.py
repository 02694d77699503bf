"""Sequences that ranks share: equal to the serial run in both ways of attention, the bytes, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnmpi import Tensor, models, nn, ops, optim
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import run_simulation, simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.options import GradientExchange, Numerics
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import IGNORED, Dataset
from nnmpi.data.loader import Loader
from nnmpi.errors import LayoutError
from nnmpi.nn.module import Module
from nnmpi.parallel.sequence.group import RING, ULYSSES, SequenceGroup
from nnmpi.shard import split, zigzag
from nnmpi.tensor.cut import whole
from nnmpi.timeline import Timeline, recording
from tests.equivalence.reference import gather_gradient
from tests.harness.slow import once_more

ON_HOST = "the device's double takes long, and runs the same kernels in the trainings of both ways"
TOKENS, TIME, ROWS, HEADS = 13, 7, 11, 5  # nothing divides anything


def samples() -> Dataset:
    """Return sentences of which most end before the last position, and one that has no target."""
    draw = np.random.default_rng(5)
    x, y = draw.integers(0, TOKENS, (ROWS, TIME)).astype(np.uint16), draw.integers(0, TOKENS, (ROWS, TIME))
    for row, length in enumerate(draw.integers(0, TIME + 1, ROWS)):
        y[row, length:] = IGNORED
    y[3] = IGNORED
    return Dataset("tokens", x, y, TOKENS)


def small() -> Module:
    return models.gpt(TOKENS, TIME + 2, features=10, layers=2, heads=HEADS, dropout=0.1)


def train(group: Group, layout: Layout, build: Callable[[], Module] = small, dtype: str = "float64") -> dict[str, Any]:
    """Return all that two steps and an evaluation gave: losses, the first gradient, weights."""
    where = arrange(build(), group, layout, samples().rows(np.arange(2)), dtype)
    where.model.initialize(seed=0, dtype=dtype)
    optimizer = optim.SGD(where.model.storage, lr=0.3, momentum=0.9)  # the keys' bias has a gradient of rounding alone
    fused = None if layout.sp_attention == ULYSSES else False
    options: dict[str, Any] = {"numerics": Numerics(clip=1.0), "exchange": GradientExchange(fused_update=fused)}
    worker = Worker(where.model, optimizer, group, arrangement=where, seed=3, **options)
    parts: dict[str, Any] = {"rank": where.data_rank, "world": where.data_ranks, "dtype": dtype, "workers": 0}
    batches = Loader(samples(), 6, microbatches=3, **parts).epoch(0)
    reports = [worker.step(next(batches))]
    found: dict[str, Any] = {f"gradient {name}": x for name, x in gather_gradient(worker).items()}
    reports += [worker.step(batch) for batch in batches]
    tested = worker.evaluate(Loader(samples(), 8, **parts).epoch(0))
    found |= worker.state()[0].to_dict(everywhere=True)
    worker.release()
    where.free()
    for name in ("loss", "accuracy", "samples", "targets", "grad_norm"):
        found[name] = [getattr(each, name) for each in reports]
    return found | {"tested": [tested.loss, tested.accuracy, tested.perplexity, tested.samples, tested.targets]}


@pytest.fixture(scope="module")
def serial() -> dict[str, Any]:
    return simulate(lambda group: train(group, Layout(pp=1, tp=1, memory_limit=2**40)), 1)[0]


def check_equal(found: dict[str, Any], serial: dict[str, Any]) -> None:
    for name, value in serial.items():
        if name in found or "gradient" not in name:  # the root has it, unless a fused update has used it up
            np.testing.assert_allclose(found[name], value, rtol=1e-11, atol=1e-13, err_msg=name)


BRIEF = (Layout(sp=2), Layout(sp=3, sp_attention=RING))
LAYOUTS = (
    Layout(sp=2, sp_attention=RING),
    Layout(sp=3),
    Layout(sp=4),
    Layout(sp=2, dp=2, sp_attention=RING),
    Layout(sp=2, pp=2, split=(4, 4)),
    Layout(sp=2, tp=2),
    Layout(sp=2, tp=2, sp_attention=RING),
    Layout(sp=2, dp=3),
    Layout(sp=3, pp=2, split=(2, 6), sp_attention=RING, activation_memory="least"),
    Layout(sp=2, tp=3, sp_attention=RING),  # 5 heads over 3 ranks
    Layout(sp=8, sp_attention=RING),  # a rank has no position
    Layout(sp=2, pp=2, tp=2, split=(4, 4), schedule="zero-bubble"),
    Layout(sp=2, pp=2, dp=2, split=(4, 4), sp_attention=RING),
    Layout(sp=4, tp=2, sp_attention=RING),
)
QUICK = (LAYOUTS[4], LAYOUTS[6], LAYOUTS[10])


def check_layout(serial: dict[str, Any], layout: Layout) -> None:
    ranks = (layout.dp or 1) * (layout.pp or 1) * (layout.tp or 1) * layout.sp
    runs = simulate(lambda group: train(group, layout), ranks)
    for found in runs:
        check_equal(found, serial)
    if layout.sp_attention == RING:  # else the update may be fused
        assert any("gradient" in name for name in runs[0])


@pytest.mark.parametrize("layout", BRIEF, ids=lambda layout: layout.sp_attention)
def test_both_ways_are_the_serial_run(serial: dict[str, Any], layout: Layout) -> None:
    check_layout(serial, layout)


@pytest.mark.host_only(ON_HOST)
@pytest.mark.parametrize(
    "layout",
    [once_more(layout, slow=layout not in QUICK) for layout in LAYOUTS],
    ids=lambda layout: f"{layout.dp, layout.pp, layout.tp, layout.sp} {layout.sp_attention}",
)
def test_every_layout_is_the_serial_run(serial: dict[str, Any], layout: Layout) -> None:
    check_layout(serial, layout)


class Own(nn.Module):
    """A user's module."""

    def __init__(self, compute: Callable[[Any, Tensor], Any]) -> None:
        self.wide, self.narrow, self.norm = nn.Linear(4, 30), nn.Linear(10, 4), nn.LayerNorm(4)
        self.places = nn.Embedding(TIME, 4)
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        """Return what `compute` makes of x: (batch, TIME, 4)."""
        return self.compute(self, x)


def own(compute: Callable[[Any, Tensor], Any]) -> Callable[[], Module]:
    return lambda: nn.Sequential(nn.Embedding(TOKENS, 4), Own(compute), nn.Linear(4, TOKENS))


def attend(causal: bool) -> Callable[[Any, Tensor], Tensor]:
    """Return attention of the module's own, with queries, keys and values apart."""

    def compute(m: Any, x: Tensor) -> Tensor:
        heads = m.wide(x).reshape(len(x), TIME, 3, HEADS, 2).transpose(2, 0, 3, 1, 4)
        y = ops.scaled_dot_product_attention(heads[0], heads[1], heads[2], causal=causal)
        result: Tensor = m.narrow(y.transpose(0, 2, 1, 3).reshape(len(x), TIME, 10))
        return result

    return compute


EQUAL: dict[str, Callable[[Any, Tensor], Any]] = {
    "causal": attend(True),
    "all to all": attend(False),
    "places": lambda m, x: m.norm(x + m.places.weight),
    "a mask": lambda m, x: x * np.linspace(0, 1, TIME)[:, None],
    "made whole": lambda m, x: x * m.norm(whole(x)).mean(1, keepdims=True) + whole(x)[:, ::-1],
}


@pytest.mark.host_only(ON_HOST)
@pytest.mark.parametrize("way", [ULYSSES, RING])
@pytest.mark.parametrize("name", EQUAL)
def test_what_a_module_may_do(name: str, way: str) -> None:
    build = own(EQUAL[name])
    expected = simulate(lambda group: train(group, Layout(), build), 1)[0]
    for found in simulate(lambda group: train(group, Layout(sp=3, sp_attention=way), build), 3):
        check_equal(found, expected)


REFUSED: dict[str, tuple[Callable[[], Module], str]] = {
    "a mean": (
        own(lambda m, x: x + x.mean(1, keepdims=True)),
        "Mean needs all elements .* each of 2 ranks has",
    ),
    "a shift": (own(lambda m, x: x[:, ::-1]), "GetItem picks slice"),
    "the first": (own(lambda m, x: x + x[:, :1]), "GetItem picks slice"),
    "a product": (own(lambda m, x: (x @ x.transpose(0, 2, 1)) @ x), "multiplies all parts with all parts"),
    "other positions": (own(lambda m, x: x.transpose(1, 0, 2)), "does not have the 7 positions of its input at axis 1"),
    "made whole": (own(lambda m, x: whole(x)), "does not have the 7 positions"),
    "lstm": (lambda: models.lstm(TOKENS, 10, 1), "works on whole tensors, but each of 2 ranks has a part of the 7 el"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_module_may_not_do(name: str) -> None:
    """One sentence says which operation, and what would work."""
    build, words = REFUSED[name]
    with pytest.raises(LayoutError, match=words) as caught:
        simulate(lambda group: train(group, Layout(sp=2), build), 2)
    assert "leave sp at 1" in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(sp=6), "ulysses shares out heads, .* for each rank of 5 heads; sp up to 5 fits, or sp attention r"),
        (Layout(sp=2, tp=3), "for each rank of 1 head on a rank of tp 3; sp 1 fits"),
        (Layout(sp=4, dp=2), "6 ranks are not dp 2 x pp 1 x tp 1 x sp 4 = 8; these fit: dp 2 x pp 1 x tp 1 x sp 3, "),
    ],
)
def test_layouts_that_do_not_fit(layout: Layout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        simulate(lambda group: train(group, layout), 6)


def sent(ranks: int, way: str, time: int, heads: int, backward: bool) -> tuple[list[int], int]:
    """Return the bytes that each rank said that it sent for a layer's attention, and those on all wires."""
    batch, features = 2, 3 * heads

    def main(group: Group) -> int:
        sequence, timeline = SequenceGroup(group, way), Timeline()
        x = np.random.default_rng(0).standard_normal((batch, time, 3 * features))
        region = sequence.placement(time).region(x.shape, 1, group.size, group.rank)
        with recording(timeline):
            x = sequence.enter(Tensor(region.take(x), requires_grad=True), time)
            y = sequence.leave(ops.attention(x, heads, causal=True), time)
            if backward:
                (y * y).sum().backward()
        return sum((event.args or {}).get("bytes", 0) for event in timeline.events)

    run = run_simulation(main, ranks)
    return run.results, run.bytes


@pytest.mark.parametrize(("ranks", "time", "heads"), [(2, 8, 4), (3, 7, 5), (4, 7, 6)])
def test_the_bytes_are_those_of_the_formulas(ranks: int, time: int, heads: int) -> None:
    """In elements of 8 bytes, by rank and altogether."""
    batch, features, others = 2, 3 * heads, range(ranks)
    t, f = [len(each) for each in split(time, ranks)], [3 * len(each) for each in split(heads, ranks)]
    one = [8 * batch * t[r] * (features - f[r]) for r in others]  # of one of q, k, v to heads, and of y to positions
    other = [8 * batch * f[r] * (time - t[r]) for r in others]
    each_way, total = [3 * a + b for a, b in zip(one, other, strict=True)], 4 * sum(one)
    assert total == 8 * 4 * batch * (time * features - sum(np.multiply(t, f)))
    assert sent(ranks, ULYSSES, time, heads, False) == (each_way, total)
    assert sent(ranks, ULYSSES, time, heads, True) == (
        [4 * (a + b) for a, b in zip(one, other, strict=True)],
        2 * total,
    )
    t = [sum(map(len, zigzag(time, ranks, r))) for r in others]
    forward = [8 * 2 * batch * features * (time - t[(r + 1) % ranks]) for r in others]
    gradients = [8 * 2 * batch * features * (time - t[r]) for r in others]
    total = 8 * 2 * batch * features * time * (ranks - 1)
    assert sent(ranks, RING, time, heads, False) == (forward, total)
    both = [2 * one + other for one, other in zip(forward, gradients, strict=True)]
    assert sent(ranks, RING, time, heads, True) == (both, 3 * total)
    if ranks == 2:  # where all have as much: what the papers say
        assert each_way == [8 * 4 * batch * time * features * (ranks - 1) // ranks**2] * 2
        assert forward == [8 * 2 * batch * time * features * (ranks - 1) // ranks] * 2
