"""In half precision, too, a run under every layout is that of one rank in the same precision, up to rounding.

Sums over ranks are taken in float32, so that a layout rounds where one rank does, but for products that are cut into
parts of other sizes: what is left is a difference of some roundings, and is bounded by a multiple of one of them.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.compose.layout import Layout
from nnmpi.models import cnn
from tests.equivalence import own
from tests.equivalence.cover import kinds
from tests.equivalence.reference import Run, Setup, run, serial_run
from tests.harness.slow import cases

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# How many roundings a gradient or five updates may differ by: twice what was seen. Where rounding moves a value over a
# ReLU's kink, or another pixel is its window's largest, a gradient goes another way, and those differences are larger.
GROWTH = {"cnn": 40, "tied": 3, "words": 3, "noisy": 4}

SETUPS = {
    "cnn": Setup(cnn, {"hidden": (11, 9)}, microbatches=3),
    "tied": Setup(own.tied, microbatches=3),
    "words": Setup(own.words, microbatches=2, prepare=own.integers),
    "noisy": Setup(own.noisy, microbatches=2),
}


def half(name: str) -> Setup:
    """Return a setup of float32 parameters; SGD, as Adam would divide small gradients' roundings by their own size."""
    return replace(SETUPS[name], optimizer="sgd", optimizer_options={"momentum": 0.9}, dtype="float32")


def distance(ours: dict[str, Array], theirs: dict[str, Array], length: float) -> float:
    """Return how far arrays are from others, relative to a length."""
    return float(np.sqrt(sum(((ours[name] - theirs[name]).astype(float) ** 2).sum() for name in theirs))) / length


def length(arrays: dict[str, Array]) -> float:
    """Return the length of all arrays together."""
    return float(np.sqrt(sum((array.astype(float) ** 2).sum() for array in arrays.values())))


def errors(parallel: Run, alone: Run, start: dict[str, Array]) -> dict[str, float]:
    """Return relative errors of losses, the first gradient, and how far the weights moved."""
    moved = length({name: alone.weights[name] - start[name] for name in start})
    found = {
        "losses": float(np.abs(np.subtract(parallel.losses, alone.losses) / alone.losses).max()),
        "weights": distance(parallel.weights, alone.weights, moved),
    }
    if parallel.gradient:  # a fused update uses it up
        found["gradient"] = distance(parallel.gradient, alone.gradient, length(alone.gradient))
    return found


def start(setup: Setup) -> dict[str, Array]:
    """Return the parameters and buffers before the first step."""
    model = setup.model((8, 8, 1), 10, **setup.model_options).initialize(seed=5)
    return model.state()


def check(group: Group, parallel: Run, alone: Run | None, name: str, precision: str, what: str) -> None:
    """Fail on all ranks if a run is too far from that of one rank, which rank 0 has."""
    limit = GROWTH[name] * ROUNDING[precision]
    found = {} if alone is None else errors(parallel, alone, start(half(name)))
    wrong = {name: error for name, error in found.items() if not error <= limit}
    everyone = group.gather([wrong, parallel.losses])
    assert not everyone[0][0], f"{what} in {precision}: {everyone[0][0]}, more than {limit:.2g}"
    assert all(theirs[1] == everyone[0][1] for theirs in everyone), f"{what}: ranks report different losses"


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("name", "precision"),
    cases(product(SETUPS, ROUNDING), lambda name, precision: (name in ("cnn", "words")) == (precision == "bf16")),
)
def test_every_kind_of_layout_gives_the_run_of_one_rank(group: Group, alone: Group, name: str, precision: str) -> None:
    """Replicas, pipelines, shared layers, and what combines them, in the schedules in turn."""
    setup = half(name)
    reference = serial_run(setup, alone, precision=precision) if group.is_root else None
    for layout in kinds(group.size, setup):
        found = run(setup, group, layout, synchronous_sends=True, precision=precision)
        check(group, found, reference, name, precision, str(layout))


HOST = pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")
WAYS: dict[str, dict[str, Any]] = {
    "fused update": {"fused_update": True},
    "ring, overlapped": {"allreduce": "ring", "overlap": True, "bucket_bytes": 2000},
    "clipped": {"clip": 0.5},
}


@pytest.mark.simulated
@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=HOST) if "fused_update" in options else way for way, options in WAYS.items()]
)
def test_replicas_give_the_run_of_one_rank(group: Group, alone: Group, way: str, precision: str) -> None:
    setup, options = half("cnn"), WAYS[way]
    kept = {"clip": options["clip"]} if "clip" in options else {}
    reference = serial_run(setup, alone, precision=precision, **kept) if group.is_root else None
    check(group, run(setup, group, precision=precision, **options), reference, "cnn", precision, way)


@pytest.mark.simulated
@pytest.mark.parametrize("precision", ROUNDING)
def test_a_fixed_order_of_sums_gives_the_same_bits(group: Group, alone: Group, precision: str) -> None:
    """Over replicas: each microbatch is computed whole, in the same shapes."""
    setup = replace(half("cnn"), batch_size=32, microbatches=4)
    serial = serial_run(setup, alone, Layout(reduction="fixed"), precision=precision)
    layouts = [Layout(dp=group.size, reduction="fixed")]
    for layout in layouts:
        found = run(setup, group, layout, precision=precision)
        same = found.losses == serial.losses and found.norms == serial.norms
        assert all(group.gather(same)), str(layout)
        if group.is_root:
            assert all((found.weights[name] == value).all() for name, value in serial.weights.items()), str(layout)
