"""In half precision, too, a run under every layout is that of one rank in the same precision, up to
rounding.

Sums over ranks are taken in float32, so that a layout rounds where one rank does, but for products
that are cut into parts of other sizes: what is left is a difference of some roundings, and is
bounded by a multiple of one of them.

On the host bf16 rounds nothing but operands, each by itself. What is left is a difference of
float32's sums, and the few elements that it moves over the middle between two bfloat16. From layer
to layer these become more: behind an error d, a share d / r of the elements is rounded the other
way, by r, which is an error of sqrt(d r).
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from nnmpi import Layout
from nnmpi.models import cnn
from tests.equivalence import own
from tests.equivalence.cover import kinds
from tests.equivalence.reference import Setup, run, serial_run
from tests.equivalence.rows import (
    EXPERTS,
    GPT,
    LSTM,
    NOISY,
    ZERO_MLP,
    experts,
    recomputed,
    replicas,
    stages_of_zero,
)

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# How many roundings a gradient or five updates may differ by: twice what was seen. Where rounding
# moves a value over a ReLU's kink, or another pixel is its window's largest, a gradient goes
# another way, and those differences are larger.
GROWTH = {"cnn": 40, "tied": 3, "words": 3, "noisy": 4}
# The same of the host in bf16, where each sample's forward pass has the serial run's bits. Seen
# were float32's errors, 1e-7 to 1e-6, and 5e-5 with a rounding that went the other way.
FEW = 2.0**-4

SGD = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "dtype": "float32"}
# Adam would divide small roundings by their own size
CNN = Setup(cnn, {"hidden": (11, 9)}, microbatches=3, **SGD)
# A setup, how it is spread, and what workers are told beside that.
ROWS = {
    "cnn": (CNN, kinds, {}),
    "tied": (Setup(own.tied, microbatches=3, **SGD), kinds, {}),
    "words": (Setup(own.words, microbatches=2, prepare=own.integers, **SGD), kinds, {}),
    "noisy": (replace(NOISY, **SGD), kinds, {}),
    "fused update": (CNN, replicas, {"fused_update": True}),
    "ring, overlapped": (
        CNN,
        replicas,
        {"allreduce": "ring", "overlap": True, "bucket_bytes": 2000},
    ),
    "clipped": (replace(CNN, worker={"clip": 0.5}), replicas, {}),
}
SINGLE = {"dtype": "float32", "optimizer": "sgd", "optimizer_options": {"lr": 0.05}}


def sequences(ranks, _):
    """Return replicas of which two or three ranks share the sequences, in both ways."""
    sp = next(n for n in (3, 2, 1) if ranks % n == 0)
    return [Layout(dp=ranks // sp, sp=sp, sp_attention=way) for way in ("ulysses", "ring")]


# and how many roundings they may differ by
ON_HOST = {
    "tied": (FEW, *ROWS["tied"]),
    "words": (FEW, *ROWS["words"]),
    "convolutions": (FEW, *ROWS["cnn"]),
    "recomputed": (FEW, CNN, recomputed, {}),
    "lstm": (FEW, replace(LSTM, **SINGLE), replicas, {}),
    "zero": (FEW, replace(ZERO_MLP, **SINGLE), stages_of_zero, {}),
    "experts": (FEW, replace(EXPERTS, **SINGLE), experts, {}),
    "sequences": (1, replace(GPT, **SINGLE), sequences, {}),
    "shared gpt": (1, replace(GPT, **SINGLE), kinds, {}),
}
HOST = pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")


def distance(ours, theirs, length):
    """Return how far arrays are from others, relative to a length."""
    return (
        float(
            np.sqrt(sum(((ours[name] - theirs[name]).astype(float) ** 2).sum() for name in theirs))
        )
        / length
    )


def length(arrays):
    """Return the length of all arrays together."""
    return float(np.sqrt(sum((array.astype(float) ** 2).sum() for array in arrays.values())))


def errors(parallel, alone, start):
    """Return relative errors of losses, the first gradient, and how far the weights moved."""
    moved = length({name: alone.weights[name] - start[name] for name in start})
    result = {
        "losses": float(np.abs(np.subtract(parallel.losses, alone.losses) / alone.losses).max()),
        "weights": distance(parallel.weights, alone.weights, moved),
    }
    if parallel.gradient:  # a fused update uses it up
        result["gradient"] = distance(parallel.gradient, alone.gradient, length(alone.gradient))
    return result


def start(setup):
    """Return the parameters and buffers before the first step."""
    return setup.model((8, 8, 1), 10, **setup.model_options).initialize(seed=5).state()


@pytest.mark.simulated
@pytest.mark.parametrize(
    "name, precision",
    [
        pytest.param(name, precision, marks=[HOST] * (name == "fused update"))
        for name, precision in product(ROWS, ROUNDING)
    ],
)
def test_it_is_the_run_of_one_rank(group, alone, name, precision):
    """Replicas, pipelines, shared layers, and what combines them, in the schedules in turn; all
    ways of gradients.
    """
    compare(group, alone, ROWS[name], precision, GROWTH.get(name, GROWTH["cnn"]))


@pytest.mark.simulated(max_size=4)  # roundings do not depend on how many more there are
@pytest.mark.parametrize("name", ON_HOST)
@pytest.mark.host_only("a device's activations are bfloat16")
def test_bf16_of_the_host_is_nearer(group, alone, name):
    """Nearly as near as float32: under replicas, stages, shared layers, sequences and experts, ZeRO
    and recomputation.
    """
    roundings, *row = ON_HOST[name]
    compare(group, alone, row, "bf16", roundings)


def compare(group, alone, row, precision, roundings):
    """Fail if a run under one of a row's layouts is further from the serial one than roundings."""
    setup, layouts, options = row
    setup = replace(setup, worker={**setup.worker, "precision": precision})
    reference = serial_run(setup, alone) if group.is_root else None
    limit = roundings * ROUNDING[precision]
    for number, layout in enumerate(layouts(group.size, setup)):
        more = {"synchronous_sends": True, "replays": number == 0, **options}
        parallel = run(setup, group, layout, **more)
        result = {} if reference is None else errors(parallel, reference, start(setup))
        wrong = {what: error for what, error in result.items() if not error <= limit}
        everyone = group.gather([wrong, parallel.losses])
        assert not everyone[0][0], f"{layout}: {everyone[0][0]}, more than {limit:.2g}"
        assert all(theirs[1] == everyone[0][1] for theirs in everyone), (
            f"{layout}: ranks report different losses"
        )
