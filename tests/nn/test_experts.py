"""A mixture of experts: its formula written out, its gradients, and what ranks that share experts
send.
"""

import numpy as np
import pytest

from nnmpi import Tensor, nn
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.base.shard import split
from nnmpi.base.timeline import Timeline, tracing
from nnmpi.ops import gelu, softmax
from nnmpi.ops.experts import Experts, Gate
from nnmpi.parallel.experts import share_experts
from nnmpi.tensor import check_gradients
from tests.harness.refusals import told

FEATURES, EXPERTS, POSITIONS = 4, 5, 6


def layer_of(top_k, capacity, balance=0.0):
    return nn.MixtureOfExperts(FEATURES, EXPERTS, top_k, 3, capacity, balance)


def samples(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, POSITIONS, FEATURES))


def by_hand(layer, x, top_k, capacity):
    """Return the result, position by position."""
    w1, b1, w2, b2 = (item.data for item in (layer.w1, layer.b1, layer.w2, layer.b2))
    p, y = softmax(Tensor(x) @ layer.gate.weight).data, np.zeros_like(x)
    for s, sample in enumerate(x):
        taken = [0] * EXPERTS
        most = np.inf if capacity is None else np.ceil(capacity * top_k * POSITIONS / EXPERTS)
        for t, row in enumerate(sample):
            for e in np.argsort(-p[s, t], kind="stable")[:top_k]:
                taken[e] += 1
                if taken[e] <= most:
                    y[s, t] += p[s, t, e] * (
                        gelu(Tensor(row @ w1[e] + b1[e]), "tanh").data @ w2[e] + b2[e]
                    )
    return y


@pytest.mark.parametrize(
    "top_k, capacity", [(1, None), (2, None), (2, 0.6), (3, 1.0), (5, None), (2, 0.01)]
)
def test_the_formula_and_its_gradients(top_k, capacity):
    layer, x = layer_of(top_k, capacity).initialize(seed=1, dtype="float64"), samples(3)
    np.testing.assert_allclose(
        layer(x).data, by_hand(layer, x, top_k, capacity), rtol=1e-12, atol=1e-14
    )

    def function(x, p, *weights):
        return Experts(Gate(top_k, capacity, 0.0), None, None, lambda: None)(x, p, *weights)

    weights = [item.data.copy() for item in (layer.w1, layer.b1, layer.w2, layer.b2)]
    check_gradients(function, [x, softmax(Tensor(x) @ layer.gate.weight).data, *weights])


def test_a_graph_that_is_kept_has_another_backward_pass():
    layer, x = (
        layer_of(2, None, 0.1).initialize(seed=1, dtype="float64"),
        Tensor(samples(2), requires_grad=True),
    )
    loss, result = layer(x).sum(), []
    for keeps in (True, False):
        x.grad = None
        layer.zero_grad()
        loss.backward(retain_graph=keeps)
        result.append([item.grad.copy() for item in (x, *layer.parameters())])
    for first, second in zip(*result, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.filterwarnings("error")
def test_no_positions_have_no_result():
    with nn.training():
        layer_of(2, 1.0, 0.1).initialize(seed=1, dtype="float64")(
            samples(2)[:, :0]
        ).sum().backward()


def test_one_expert_is_the_multilayer_perceptron():
    mixture = nn.MixtureOfExperts(FEATURES, 1, 1, 3).initialize(seed=1, dtype="float64")
    w1, b1, w2, b2 = (item.data[0] for item in (mixture.w1, mixture.b1, mixture.w2, mixture.b2))
    x = samples(2)
    np.testing.assert_allclose(
        mixture(x).data, gelu(Tensor(x @ w1 + b1), "tanh").data @ w2 + b2, rtol=1e-12
    )


@pytest.mark.parametrize("weight", [None, 0.25])
def test_the_balance_is_the_gradient_of_its_formula(weight):
    """Shares of choices are constants of it. And outside of training there is none."""
    x = samples(3)

    def to_gate(balance, trains):
        layer = layer_of(2, None, balance).initialize(seed=1, dtype="float64")
        with nn.training(weight=weight) if trains else nn.evaluation():
            layer(x).sum().backward()
        return layer.gate.weight.grad

    layer = layer_of(2, None).initialize(seed=1, dtype="float64")
    p = softmax(Tensor(x) @ layer.gate.weight)
    chosen = np.argsort(-p.data, axis=2)[:, :, :2]
    shares = np.stack([(chosen == e).sum(axis=(1, 2)) / POSITIONS for e in range(EXPERTS)], axis=1)
    loss = (p.sum(axis=1) * shares * (0.3 * EXPERTS / 2)).sum() * (
        1 / 18 if weight is None else weight
    )
    loss.backward()
    np.testing.assert_allclose(
        to_gate(0.3, True) - to_gate(0.0, True), layer.gate.weight.grad, rtol=1e-9, atol=1e-14
    )
    np.testing.assert_array_equal(to_gate(0.3, False), to_gate(0.0, False))


@pytest.mark.host_only("NumPy says who takes what, beside the layer")
@pytest.mark.both_worlds(max_size=7)
@pytest.mark.parametrize("top_k, capacity", [(1, None), (2, 0.7)])
def test_shared_experts_are_the_serial_layer_and_send_what_the_formula_says(group, top_k, capacity):
    """Ranks have other numbers of samples, the last one none; seven ranks have five experts."""
    counts = [
        (2 * rank + 1) % 4 if rank < group.size - 1 or group.size == 1 else 0
        for rank in range(group.size)
    ]
    stops = np.cumsum(counts)
    everything, local = (
        samples(stops[-1], 3),
        slice(stops[group.rank] - counts[group.rank], stops[group.rank]),
    )
    serial = layer_of(top_k, capacity, 0.3).initialize(seed=2, dtype="float64")
    shared = layer_of(top_k, capacity, 0.3)
    share_experts(nn.Sequential(shared), group)
    shared.initialize(seed=2, dtype="float64")
    full, part = (
        Tensor(item, requires_grad=True) for item in (everything, everything[local].copy())
    )
    trace, weights = Timeline(), np.random.default_rng(5).normal(size=everything.shape)
    with nn.training(weight=0.25):
        y = serial(full)
        (y * weights).sum().backward()
        with tracing(trace):
            z = shared(part)
            (z * weights[local]).sum().backward()
    experts = split(EXPERTS, group.size)[group.rank]
    right = [
        np.allclose(z.data, y.data[local], rtol=1e-12, atol=1e-14),
        np.allclose(part.grad, full.grad[local], rtol=1e-11, atol=1e-13),
        *(
            np.allclose(
                mine.grad, theirs.grad[experts.start : experts.stop], rtol=1e-11, atol=1e-13
            )
            for mine, theirs in zip(
                (shared.w1, shared.b1, shared.w2, shared.b2),
                (serial.w1, serial.b1, serial.w2, serial.b2),
                strict=True,
            )
        ),
    ]
    assert group.gather(list(map(bool, right))) == [[True] * 6] * group.size
    (gate_sum,) = [shared.gate.weight.grad.copy()]
    group.all_reduce(gate_sum.reshape(-1))
    assert (
        group.gather(bool(np.allclose(gate_sum, serial.gate.weight.grad, rtol=1e-11)))
        == [True] * group.size
    )

    p = softmax(Tensor(everything) @ serial.gate.weight).data
    chosen, taken, _ = Gate(top_k, capacity, 0.3).choose(np, p)
    home = np.repeat(range(group.size), counts)[:, None, None]
    owner = np.array([r for r, item in enumerate(split(EXPERTS, group.size)) for _ in item])[chosen]
    away = taken & (owner != home)
    n, m = int((away & (home == group.rank)).sum()), int((away & (owner == group.rank)).sum())
    numbers = (EXPERTS - len(experts)) * 8 if group.size > 1 else 0
    sent = sum(event.args["bytes"] for event in trace.events if event.args)
    assert group.gather(sent == 2 * (n + m) * FEATURES * 8 + numbers) == [True] * group.size


def test_what_does_not_work_is_refused():
    layer = layer_of(2, None, 0.1).initialize(seed=0)
    layer.all_reduce = sum

    def unsaid():
        with nn.training():
            layer(samples(2).astype("float32"))

    rows = [
        (UsageError, "top_k of at most the experts", lambda: nn.MixtureOfExperts(4, 2, 3)),
        *(
            (
                UsageError,
                "capacity above 0",
                lambda bad=bad: nn.MixtureOfExperts(4, 2, 1, None, bad),
            )
            for bad in (0, np.inf)
        ),
        (
            UsageError,
            "finite balance of at least 0",
            lambda: nn.MixtureOfExperts(4, 2, 1, balance=np.inf),
        ),
        (
            ShapeError,
            "needs (batch, positions, features)",
            lambda: layer(np.ones((2, 4), "float32")),
        ),
        (UsageError, "nn.training(weight=1 / batch.global_targets)", unsaid),
    ]
    for kind, words, call in rows:
        assert words in told(kind, call)
