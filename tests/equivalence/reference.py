"""A run as values: what the contract compares, for any group of ranks and any model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nnmpi import models, optim
from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.compose import Worker
from nnmpi.data.catalogue import load
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.nn.module import Module

# 90 samples in batches of 29 leave a last batch of 3: nothing divides, and with more than 3 ranks some have no rows.
SAMPLES, BATCH_SIZE = 90, 29


@dataclass(frozen=True)
class Setup:
    """One training run, whatever the number of ranks."""

    model: Callable[..., Module] = models.mlp
    model_options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    microbatches: int = 1
    batch_size: int = BATCH_SIZE
    worker: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What a run did: the losses of its steps, the first gradient, the last weights, and an evaluation."""

    losses: list[float]
    gradient: Array
    norms: list[float]
    weights: dict[str, Array]
    evaluation: tuple[float, float]


def digits() -> Dataset:
    """Return the first samples of the bundled digits' training part."""
    train, _ = load("digits")
    return train.take(np.arange(SAMPLES))


def run(setup: Setup, group: Group, **worker_options: Any) -> Run:
    """Train one epoch on the group; the worker options say how, and must not change what."""
    dataset = digits()
    model = setup.model(dataset.sample_shape, dataset.classes, **setup.model_options)
    model.initialize(seed=5, dtype=setup.dtype)
    optimizer = optim.build(setup.optimizer, model.storage, **{"lr": 1e-2, **setup.optimizer_options})
    worker = Worker(model, optimizer, group, check=True, seed=3, **{**setup.worker, **worker_options})
    loader = Loader(
        dataset,
        setup.batch_size,
        seed=1,
        rank=group.rank,
        world=group.size,
        microbatches=setup.microbatches,
        dtype=setup.dtype,
    )
    losses, norms, gradient = [], [], None
    for batch in loader.epoch(0):
        report = worker.step(batch)
        losses.append(report.loss)
        norms.append(report.grad_norm)
        if gradient is None:
            gradient = model.storage.grads[0].copy()
    test = Loader(dataset, 17, rank=group.rank, world=group.size, shuffle=False, dtype=setup.dtype)
    report = worker.evaluate(test.epoch(0))
    assert gradient is not None
    return Run(losses, gradient, norms, model.state(), (report.loss, report.accuracy))


# What a rounding error grows by from one step to the next: a gradient divides by batch statistics, and Adam's update
# divides by the gradient's own size, so small gradients' errors become large. Twice what was seen in 20 runs.
GROWTH = {"sgd": 2.0, "adam": 4.0, "adamw": 4.0}


def tolerance(dtype: str, steps: int, optimizer: str) -> float:
    """Return how far apart two orders of summation may be after some steps, relative to the largest value.

    Independent rounding errors of a sum grow with the square root of its length; the factor 30 is for the layers.
    """
    return 30 * float(np.sqrt(SAMPLES)) * float(np.finfo(dtype).eps) * GROWTH[optimizer] ** steps


def differences(parallel: Run, serial: Run, setup: Setup) -> list[str]:
    """Return in words what differs by more than the tolerance; an empty list for equal runs."""
    steps = len(serial.losses)
    pairs: list[tuple[str, int, Any, Any]] = [
        ("loss of step 1", 0, parallel.losses[:1], serial.losses[:1]),
        ("gradient of step 1", 0, parallel.gradient, serial.gradient),
        ("losses", steps, parallel.losses, serial.losses),
        ("gradient norms", steps, parallel.norms, serial.norms),
        ("evaluation", steps, parallel.evaluation, serial.evaluation),
        *((name, steps, parallel.weights[name], value) for name, value in serial.weights.items()),
    ]
    found = []
    for name, step, ours, theirs in pairs:
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        error = float(np.abs(ours - theirs).max(initial=0)) / max(1.0, float(np.abs(theirs).max(initial=0)))
        limit = tolerance(setup.dtype, step, setup.optimizer)
        if not error <= limit:
            found.append(f"{name} differs by {error:.3g}, more than {limit:.3g}")
    return found
