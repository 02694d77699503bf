"""The contract: with the global batch fixed, a run on any number of ranks is the serial run."""

from itertools import product
from typing import Any

import pytest

from nnmpi import models
from nnmpi.comm.group import Group
from tests.equivalence.reference import Setup, differences, run, serial_run
from tests.harness.slow import cases

ALGORITHMS = ("native", "shared", "ring", "tree", "ps", "halving-doubling", "hierarchical")
MODELS = (models.mlp, models.cnn, models.resnet)


def assert_equal_to_serial(group: Group, alone: Group, setup: Setup, **worker_options: Any) -> None:
    """Run in parallel and, on every rank alone, in series; fail on all ranks if any finds a difference."""
    parallel = run(setup, group, **worker_options)
    serial = serial_run(setup, alone)
    found = group.gather(differences(parallel, serial, setup))
    assert not any(found), f"ranks' differences: {found}"
    assert len(set(group.gather(parallel.losses[-1]))) == 1


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("model", "algorithm"),
    cases(product(MODELS, ALGORITHMS), lambda model, name: MODELS[ALGORITHMS.index(name) % len(MODELS)] is model),
)
def test_float64_run_is_the_serial_run(group: Group, alone: Group, model: Any, algorithm: str) -> None:
    """Every model under every all-reduce, in buckets small enough that several are in flight."""
    assert_equal_to_serial(group, alone, Setup(model), allreduce=algorithm, bucket_bytes=20_000)


@pytest.mark.simulated
def test_gradient_accumulation_changes_nothing_without_batch_statistics(group: Group, alone: Group) -> None:
    """Three microbatches on P ranks against one batch on one rank."""
    parallel = run(Setup(models.cnn, microbatches=3), group)
    serial = serial_run(Setup(models.cnn), alone)
    found = group.gather(differences(parallel, serial, Setup(models.cnn)))
    assert not any(found), found


@pytest.mark.simulated
def test_dropout_drops_the_same_elements_under_every_layout(group: Group, alone: Group) -> None:
    """Also in microbatches."""
    setup = Setup(models.mlp, {"dropout": 0.4}, microbatches=2)
    assert_equal_to_serial(group, alone, setup)


@pytest.mark.simulated
@pytest.mark.parametrize(
    "setup",
    [
        Setup(models.mlp, worker={"clip": 0.05}),
        Setup(models.mlp, optimizer="adamw", optimizer_options={"weight_decay": 0.1}),
        Setup(models.cnn, batch_size=90),
        Setup(models.mlp, batch_size=2, optimizer="sgd", optimizer_options={"lr": 1e-3}),
    ],
    ids=["clipping", "adamw", "full batch", "fewer samples than ranks"],
)
def test_options_that_depend_on_the_global_batch(group: Group, alone: Group, setup: Setup) -> None:
    """Norms of the global gradient, decay counted once, one batch of everything, ranks without samples."""
    assert_equal_to_serial(group, alone, setup)
