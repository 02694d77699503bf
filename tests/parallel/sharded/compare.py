"""Runs a model whole and sharded, and compares every step: what all tests of sharded layers
share.
"""

import numpy as np

from nnmpi import Tensor, no_grad, optim
from nnmpi.nn import training
from nnmpi.ops import cross_entropy
from nnmpi.parallel.tensor import shard

STEPS = 2
TOLERANCES = {"float64": 1e-11, "float32": 2e-4}


def images(rows, shape, dtype, classes=3):
    """Return inputs and labels, the same on all ranks."""
    generator = np.random.default_rng(7)
    return generator.standard_normal((rows, *shape)).astype(dtype), generator.integers(
        0, classes, rows
    )


def train(model, x, y, loss=cross_entropy, lr=0.1):
    """Return losses and gradients of each step, the state after the last, and an evaluation's
    result.
    """
    optimizer = optim.SGD(model.storage, lr=lr, momentum=0.9)
    losses, gradients = [], []
    for step in range(STEPS):
        model.zero_grad()
        with training(seed=1, step=step, first_row=5):
            value = loss(model(Tensor(x)), y)
        value.backward()
        model.storage.finish_gradients()
        losses.append(value.item())
        gradients.append({name: np.array(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
    with no_grad():
        result = model(Tensor(x)).numpy()
    values = {name: entry.data.copy() for name, entry in model.entries().items()}
    return losses, gradients, values, result


def regions(model):
    """Return the region of every parameter and buffer."""
    return {
        name: entry.region for name, entry in [*model.named_parameters(), *model.named_buffers()]
    }


def check_equal(
    group, build, shape, dtype="float64", table=None, rows=5, sample=None, sharded_at_least=1
):
    """Fail on all ranks unless a sharded model computes what the whole one does; return the sharded
    one.

    Args:
        sharded_at_least: how many parameters must be cut when there are several ranks, lest nothing
            is tested.
    """
    x, y = images(rows, shape, dtype)
    full = build().initialize(seed=3, dtype=dtype)
    ours = build()
    shard(ours, group, table, sample)
    ours.initialize(seed=3, dtype=dtype)
    names = [name for name, _ in full.named_parameters()]
    problems = (
        [] if [name for name, _ in ours.named_parameters()] == names else ["the names differ"]
    )
    cut = [name for name, region in regions(ours).items() if region is not None]
    if group.size > 1 and len(cut) < sharded_at_least:
        problems.append(f"only {cut} are cut")
    problems += differences(
        train(full, x, y), train(ours, x, y), regions(ours), TOLERANCES[dtype], group.size == 1
    )
    everyone = group.gather(problems)
    assert not any(everyone), everyone
    check_same_bits(group, ours)
    return ours


def differences(whole, ours, where, tolerance, exact):
    """Return what is not as in the whole model's run."""
    result = []

    def compare(what, expected, actual):
        expected, actual = np.asarray(expected), np.asarray(actual)
        if expected.shape != actual.shape:
            result.append(f"{what} has shape {actual.shape}, not {expected.shape}")
        elif exact and not np.array_equal(expected, actual):
            result.append(f"{what} differs, if only by {np.abs(expected - actual).max():.1e}")
        elif expected.size and not np.abs(expected - actual).max() <= tolerance * max(
            1.0, np.abs(expected).max()
        ):
            result.append(f"{what} differs by {np.abs(expected - actual).max():.1e}")

    def part(name, array):
        return array if where[name] is None else where[name].take(array)

    compare("the losses", whole[0], ours[0])
    for step, (expected, actual) in enumerate(zip(whole[1], ours[1], strict=True)):
        for name, gradient in actual.items():
            compare(f"step {step}: the gradient of {name}", part(name, expected[name]), gradient)
    for name, values in ours[2].items():
        compare(f"{name} at the end", part(name, whole[2][name]), values)
    compare("the result", whole[3], ours[3])
    return result


def check_same_bits(group, model):
    """Fail on all ranks unless what is not cut has the same bits on all ranks."""
    where = regions(model)
    local = {
        name: entry.data.tobytes().hex()
        for name, entry in model.entries().items()
        if where[name] is None
    }
    local |= {
        f"gradient of {name}": np.array(p.grad).tobytes().hex()
        for name, p in model.named_parameters()
        if where[name] is None
    }
    everyone = group.gather(local)
    different = [
        name
        for name in local
        if any(theirs.get(name) != everyone[0].get(name) for theirs in everyone)
    ]
    assert not different, different
