"""The same numbers as torch.optim, torch's clipping and torch's schedules: 50 updates in float64."""

import itertools

import numpy as np
import pytest

from nnmpi.optim import adam, clip, schedule, sgd
from nnmpi.optim.storage import Arrays

torch = pytest.importorskip("torch")

SHAPES = [(50,), (7, 11), (2, 3, 4)]
STEPS = 50

SGD_OPTIONS = [
    {"lr": 0.05, "momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    for momentum, nesterov, decay in itertools.product((0.0, 0.5, 0.9), (False, True), (0.0, 0.01))
    if momentum > 0 or not nesterov
]
ADAM_OPTIONS = [
    {"lr": 0.01, "betas": betas, "eps": eps, "weight_decay": decay}
    for betas, eps, decay in itertools.product(((0.9, 0.999), (0.0, 0.5), (0.8, 0.9)), (1e-8, 1e-3), (0.0, 0.1))
]
CASES = [
    *((sgd.SGD, torch.optim.SGD, options) for options in SGD_OPTIONS),
    *((adam.Adam, torch.optim.Adam, options) for options in ADAM_OPTIONS),
    *((adam.AdamW, torch.optim.AdamW, options) for options in ADAM_OPTIONS),
    (adam.Adam, torch.optim.Adam, {}),
    (adam.AdamW, torch.optim.AdamW, {}),
]


def train_both(ours, theirs, options, dtype):
    """Train with both, the gradient a function of the weights, and the learning rate changed on the way."""
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]
    parameters = [torch.tensor(array, requires_grad=True) for array in data]
    grads = [np.zeros_like(array) for array in data]
    optimizer, reference = ours(Arrays(data, grads), **options), theirs(parameters, **options)
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.lr *= 0.3
            reference.param_groups[0]["lr"] *= 0.3
        for array, grad, parameter in zip(data, grads, parameters, strict=True):
            noise = rng.standard_normal(array.shape).astype(dtype)
            grad[...] = np.sin(array) + 0.3 * noise
            parameter.grad = torch.sin(parameter.detach()) + 0.3 * torch.from_numpy(noise)
        optimizer.step()
        reference.step()
    return optimizer, reference, parameters


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_float64(ours, theirs, options):
    """Weights and state agree to 1e-12 after 50 updates."""
    optimizer, reference, parameters = train_both(ours, theirs, options, "float64")
    names = {"m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buffer"}
    for i, parameter in enumerate(parameters):
        expected = parameter.detach().numpy()
        np.testing.assert_allclose(optimizer.storage.data[i], expected, rtol=1e-12, atol=1e-13)
        for name, slot in optimizer.slots().items():
            state = reference.state[parameter][names[name]].numpy()
            np.testing.assert_allclose(slot[i], state, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_float32(ours, theirs, options):
    """In float32 the rounding differs, no more."""
    optimizer, _, parameters = train_both(ours, theirs, options, "float32")
    for data, parameter in zip(optimizer.storage.data, parameters, strict=True):
        np.testing.assert_allclose(data, parameter.detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 1000.0])
def test_clipping(max_norm):
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(shape) for shape in SHAPES]
    parameters = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(grad)
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert clip.clip_by_global_norm(grads, max_norm) == pytest.approx(float(expected), rel=1e-14)
    for parameter, grad in zip(parameters, grads, strict=True):
        np.testing.assert_allclose(grad, parameter.grad.numpy(), rtol=1e-14)


def rates(make, steps):
    """Return the learning rates that a torch schedule gives to the first updates of a rate 0.1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules():
    torch_schedules = torch.optim.lr_scheduler
    cosine = rates(lambda o: torch_schedules.CosineAnnealingLR(o, T_max=30, eta_min=0.02), 31)
    np.testing.assert_allclose([schedule.Cosine(0.1, 30, final=0.2)(s) for s in range(31)], cosine, rtol=1e-12)
    steps = rates(lambda o: torch_schedules.StepLR(o, step_size=7, gamma=0.5), 30)
    np.testing.assert_allclose([schedule.StepDecay(0.1, 7, 0.5)(s) for s in range(30)], steps, rtol=1e-12)
    line = rates(lambda o: torch_schedules.LinearLR(o, start_factor=1 / 9, total_iters=8), 12)
    np.testing.assert_allclose([schedule.Warmup(8, schedule.ConstantRate(0.1))(s) for s in range(12)], line, rtol=1e-12)
