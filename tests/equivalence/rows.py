"""What is trained in the suite of equivalence: a row for each model, option and kind of data;
`test_rows.py` runs them.

A new layer, option or strategy that must not change a run becomes a row here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from tempfile import gettempdir
from typing import Any

import numpy as np

from nnmpi import Layout, models, nn
from nnmpi.compose.losses import ERRORS
from nnmpi.data import IGNORED, Dataset
from nnmpi.data.dataset import Samples
from nnmpi.optim.updates import OPTIMIZERS, is_elementwise
from tests.equivalence import own
from tests.equivalence.cover import (
    ALGORITHMS,
    MEMORIES,
    SCHEDULES,
    SETUPS,
    kinds,
    layers,
    meshes,
    spread,
)
from tests.equivalence.reference import Setup, digits

TOKENS, TIME, COUNT = 13, 7, 17  # nothing divides anything
Layouts = Callable[[int, Setup], list[Layout | None]]


class Sentences(Samples):
    """Sentences of tokens that end anywhere, one of them without a target; a batch is as long as
    its longest.
    """

    name, classes, identity, sample_shape = "sentences", TOKENS, "sentences", (TIME,)

    def __init__(self):
        draw = np.random.default_rng(5)
        self.x, self.y = draw.integers(0, TOKENS, (2, COUNT, TIME))
        self.ends = draw.integers(1, TIME + 1, COUNT)
        self.y[np.arange(TIME) >= self.ends[:, None]] = IGNORED
        self.y[3] = IGNORED

    @property
    def targets(self):
        """How many tokens of each are to be predicted."""
        return (self.y >= 0).sum(1)

    @property
    def lengths(self):
        """How many tokens each has."""
        return self.ends

    def __len__(self):
        return COUNT

    def rows(self, indices, dtype="float32", length=None):
        """Return tokens."""
        return self.x[indices, :length]

    def labels(self, indices, length=None):
        """Return those that come next."""
        return self.y[indices, :length]


sentences = cache(Sentences)


@cache
def tokens():
    """Return the sentences with their padding: all have the same length."""
    return Dataset("tokens", sentences().x.astype(np.uint16), sentences().y, TOKENS)


@cache
def numbers():
    """Return the digits with two quantities to predict: the brightness of each half."""
    y = digits().rows(np.arange(len(digits())))[..., 0].reshape(-1, 2, 32).mean(-1)
    return replace(digits(), y=y.astype(np.float32), classes=0)


def gpt(*_, heads=5, features=10, **more):
    """Return a small language model of attention."""
    return models.gpt(
        TOKENS, TIME + 2, features=features, layers=2, heads=heads, dropout=0.1, **more
    )


def llama(*_, tied=True):
    """Return a small Llama: groups of two heads, wider than features / heads."""
    return models.llama(
        TOKENS,
        TIME + 2,
        features=10,
        layers=2,
        heads=6,
        kv_heads=3,
        hidden=13,
        head_features=4,
        theta=50,
        tied=tied,
        bias=True,
        qk_norm=tied,
    )


def adapted(*_, targets="all-linear", base_dtype=None, **more):
    """Return a small GPT with adapters, which drop elements of their own."""
    settings = {"rank": 3, "alpha": 10, "dropout": 0.3, "base_dtype": base_dtype}
    return nn.adapt(gpt(**more), targets=targets, **settings)


def adapted_llama(*_, base_dtype=None):
    """Return a small Llama with adapters."""
    settings = {"rank": 3, "dropout": 0.3, "base_dtype": base_dtype}
    return nn.adapt(llama(tied=False), targets="all-linear", **settings)


def lstm(*_, tied=True):
    """Return one of long short-term memory."""
    return models.lstm(TOKENS, features=9 + tied, layers=2 + tied, dropout=0.1, tied=tied)


def few_tokens(*_):
    """Return one that multiplies its table: of fewer tokens than features."""
    return models.lstm(TOKENS, features=TOKENS + 1)


def replicas(ranks, _):
    """Return data parallelism, said and not said."""
    return [None, Layout(dp=ranks)]


def everything(ranks, setup):
    """Return a layout for each (dp, pp, tp), with the schedules in turn, and recomputation in every
    second one.
    """
    result = []
    for number, mesh in enumerate(meshes(ranks, layers(setup))):
        schedule = SCHEDULES[(number + ranks) % len(SCHEDULES)]
        memory = MEMORIES[(number + ranks) % 2] if mesh[1] > 1 else None
        result.append(spread(setup, mesh, schedule, activation_memory=memory))
    return result


def recomputed(ranks, setup):
    """Return pipelines that keep as little as possible."""
    return [layout for layout in kinds(ranks, setup, activation_memory="least") if layout.pp != 1]


def sharded_classes(ranks, _):
    """Return layers that all ranks, or those of a stage, share."""
    return [Layout(dp=1, pp=pp, tp=ranks // pp) for pp in (1, 2) if ranks % pp == 0]


def each_layer(ranks, setup):
    """Return pipelines whose cuts stand at every layer, so that all but one or two are cut
    before.
    """
    count = layers(setup)
    firsts = range(1, min(count - ranks + 1, 9), 2) if ranks > 1 else ()
    return [
        Layout(pp=ranks, split=(n, *[1] * (ranks - 2), count - n - (ranks - 2))) for n in firsts
    ]


def single_layers(ranks, setup):
    """Return pipelines of one layer a stage: the first flattens, another is an activation alone."""
    result = [mesh for mesh in meshes(ranks, layers(setup)) if mesh[1] > 1 and mesh[2] == 1]
    return [
        Layout(dp, pp, 1, split=(*[1] * (pp - 1), layers(setup) - pp + 1)) for dp, pp, _ in result
    ]


def parts_at_cuts(ranks, setup):
    """Return a stage that begins with a layer which marks what comes to it as the rank's part: a
    dropout.
    """
    return (
        [Layout(dp=1, pp=2, tp=ranks // 2, split=(4, layers(setup) - 4))] if ranks % 2 == 0 else []
    )


def experts(ranks, _):
    """Return replicas that have all experts, share out what they have, and share out the
    experts.
    """
    return [
        Layout(dp=ranks),
        Layout(dp=ranks, zero=3, unit_bytes=1),
        Layout(dp=ranks, expert_parallel=True),
    ]


def stages_of_zero(ranks, _):
    """Return each stage of ZeRO, in units as small as may be."""
    return [Layout(dp=ranks, zero=stage, unit_bytes=1) for stage in (1, 2, 3)]


def gpipes(ranks, setup):
    """Return GPipe for each (dp, pp, tp)."""
    return [spread(setup, mesh, "gpipe") for mesh in meshes(ranks, layers(setup))]


def fixed(ranks, _):
    """Return replicas whose sums have a fixed order."""
    return [Layout(dp=ranks, reduction="fixed")]


@dataclass(frozen=True)
class Row:
    """A setup, and how it is spread: the layouts for a number of ranks, and what workers are told
    beside them.

    Attributes:
        serial: the layout of the run of one rank; with one, the runs must have its bits.
        alone: the setup of the run of one rank where it is another.
    """

    setup: Setup
    layouts: Layouts = kinds
    options: dict[str, Any] = field(default_factory=dict)
    serial: Layout | None = None
    alone: Setup | None = None


SHARED = (
    Layout(sp=2),
    Layout(sp=3, sp_attention="ring"),
    Layout(sp=2, pp=2, split=(4, 4)),
    Layout(sp=2, tp=2, sp_attention="ring"),
    Layout(sp=8, sp_attention="ring"),  # a rank has no position
    Layout(sp=2, sp_attention="ring"),
    Layout(sp=3),
    Layout(sp=4),
    Layout(sp=2, dp=2, sp_attention="ring"),
    Layout(sp=2, tp=2),
    Layout(sp=2, dp=3),
    Layout(sp=3, pp=2, split=(2, 6), sp_attention="ring", activation_memory="least"),
    Layout(sp=2, tp=3, sp_attention="ring"),  # 5 heads over 3 ranks
    Layout(sp=2, pp=2, tp=2, split=(4, 4), pipeline="zero-bubble"),
    Layout(sp=2, pp=2, dp=2, split=(4, 4), sp_attention="ring"),
    Layout(sp=4, tp=2, sp_attention="ring"),
)
BUCKETS = {"bucket_bytes": 20_000}
FIXED = Layout(reduction="fixed")
DECAY = {"optimizer": "adamw", "optimizer_options": {"weight_decay": 0.1}}
MUON = {"optimizer": "muon", "optimizer_options": {"lr": 0.02}}
MOMENTUM = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}
TEXT = {"microbatches": 3, "batch_size": 6, "worker": {"clip": 0.5}, **MOMENTUM}
NOISY = Setup(own.noisy, microbatches=3, batch_size=28)  # no microbatch has a single row
HALVES = Setup(own.halves, microbatches=3)
FLAT = Setup(own.flat, microbatches=2)
CLIPPED = {"width": 2}, "sgd", {"weight_decay": 0.1, "momentum": 0.9}
MLP, CNN = Setup(models.mlp), Setup(models.cnn)
GPT, LLAMA, LSTM = (Setup(model, data=sentences, **TEXT) for model in (gpt, llama, lstm))
ZERO_MLP = Setup(
    models.mlp,
    {"hidden": (37, 7, 41), "dropout": 0.2},
    microbatches=2,
    worker={"clip": 0.5},
    **MOMENTUM,
)
ADAPTED = replace(GPT, model=adapted)
LOW_BASE = replace(LLAMA, model=adapted_llama, model_options={"base_dtype": "bf16"})
# of which 3 ranks and more have uneven ones, or none
EXPERTS = replace(GPT, model_options={"experts": 5, "top_k": 2})
LIMITED = replace(GPT, model_options=dict(EXPERTS.model_options, capacity=0.7))
SHARED_LLAMAS = (
    *(Layout(sp=3, sp_attention=way) for way in ("ulysses", "ring")),
    Layout(sp=2, tp=2, sp_attention="ring"),  # 3 groups of heads over 2 ranks
    Layout(sp=2, pp=2, tp=2, split=(3, 4), sp_attention="ring", activation_memory="least"),
    Layout(dp=2, sp=2, zero=3, unit_bytes=1),
    Layout(tp=4),  # a rank has no group
    Layout(dp=2, tp=2, zero=3, unit_bytes=1),
)
SHARED_EXPERTS = Layout(dp=2, expert_parallel=True)
BESIDE_EXPERTS = (
    # the first two take the longest: on 8 ranks, of which one has no position, and on 12
    {"dp": 1, "sp": 8, "sp_attention": "ring"},
    {"sp": 3, "sp_attention": "ring", "pp": 2, "split": (3, 5), "activation_memory": "least"},
    {"sp": 2, "tp": 2},
    {"tp": 2, "zero": 3, "unit_bytes": 1},
    {"pp": 2, "zero": 1, "split": (2, 2, 2, 2), "pipeline": "zb-v"},
    {"dp": 6},  # a rank has no expert
    {"dp": 3, "zero": 1},
    {"dp": 3, "zero": 2, "unit_bytes": 1, "activation_memory": "least"},
    {"dp": 3, "zero": 3, "unit_bytes": 1},
    {"dp": 3, "activation_memory": 48_000},
    {"sp": 2, "sp_attention": "ring"},
    {"tp": 2},
    {"pp": 2, "split": (4, 4), "pipeline": "zero-bubble"},
)
WITH_EXPERTS = [
    ((EXPERTS, LIMITED)[number % 2], replace(SHARED_EXPERTS, **options))
    for number, options in enumerate(BESIDE_EXPERTS)
]
# ZeRO 2 and 3 inside of stages, in units of a layer; the table of tokens stands in two stages
PIPELINES = (
    (ZERO_MLP, Layout(dp=3, pp=2, unit_bytes=1)),
    (GPT, Layout(dp=2, pp=2, split=(4, 4), unit_bytes=1, pipeline="zero-bubble")),
    (GPT, Layout(dp=2, pp=2, split=(2, 2, 2, 2), unit_bytes=1, pipeline="zb-v")),
    (GPT, Layout(dp=2, pp=2, split=(2, 2, 2, 2), pipeline="interleaved", unit_bytes=1)),
    (GPT, Layout(dp=2, pp=2, tp=2, split=(4, 4), unit_bytes=1, activation_memory="least")),
    (GPT, Layout(dp=1, pp=2, sp=2, split=(4, 4), unit_bytes=1000)),
    (LIMITED, Layout(dp=2, pp=2, split=(4, 4), unit_bytes=1, expert_parallel=True)),
    (NOISY, Layout(dp=3, pp=3, unit_bytes=500)),
)
# each with the two stages of ZeRO that share out gradients
SHARDED = [(setup, replace(layout, zero=stage)) for setup, layout in PIPELINES for stage in (2, 3)]
FITTED = (
    (GPT, Layout(pp=2, split=(4, 4), activation_memory=60_000)),
    (GPT, Layout(pp=2, split=(2, 2, 2, 2), pipeline="zb-v", activation_memory=160_000)),
    (GPT, Layout(pp=2, split=(4, 4), activation_memory=60_000, offload=gettempdir())),
    (
        GPT,
        Layout(
            dp=2,
            pp=2,
            split=(3, 5),
            zero=3,
            unit_bytes=1,
            activation_memory=33_000,
            offload=gettempdir(),
        ),
    ),
    (GPT, Layout(dp=2, pp=2, split=(3, 5), zero=3, unit_bytes=1, activation_memory=33_000)),
    (LIMITED, Layout(dp=2, pp=2, split=(4, 4), expert_parallel=True, activation_memory=85_000)),
    (NOISY, Layout(pp=3, tp=2, activation_memory=19_500)),
)
ZERO = {
    "mlp": ZERO_MLP,
    "nested": Setup(own.nested, microbatches=2, **MOMENTUM),
    "free": Setup(own.free, microbatches=2, **DECAY),
    "gpt": GPT,
    "lstm": LSTM,
}

ROWS = {
    # models whose layers are no plain chain, cut anywhere
    "skipping": Row(Setup(own.skipping, microbatches=4)),
    "nested": Row(Setup(own.nested, microbatches=4)),
    "nested, cut at each layer": Row(Setup(own.nested, microbatches=3), each_layer),
    "tied": Row(Setup(own.tied, microbatches=4)),
    "tied, clipped and decayed": Row(
        Setup(own.tied, microbatches=4, worker={"clip": 0.05}, **DECAY)
    ),
    "tuples": Row(Setup(own.tupled, microbatches=4)),
    "integers": Row(Setup(own.words, microbatches=4, prepare=own.integers)),
    "stages without parameters": Row(replace(NOISY, worker={"clip": 0.3}), single_layers),
    "parts at a cut": Row(NOISY, parts_at_cuts),
    "measured cuts": Row(SETUPS["resnet"], lambda ranks, _: [Layout(pp=ranks, split="auto")]),
    "decoding": Row(Setup(own.decoding, microbatches=3)),
    "reading": Row(Setup(own.reading, data=tokens, **TEXT)),
    # what layers do differently in training, and what the global batch decides
    "recomputed": Row(NOISY, recomputed),
    "clipped": Row(replace(NOISY, worker={"clip": 0.05})),
    "decayed": Row(replace(NOISY, **DECAY)),
    "clipped and decayed": Row(
        Setup(models.resnet, *CLIPPED, worker={"clip": 0.3}, microbatches=2)
    ),
    "batch statistics": Row(Setup(own.nested, microbatches=3), gpipes),
    "batch statistics in a fixed order": Row(
        Setup(own.nested, microbatches=3), fixed, serial=FIXED
    ),
    "full batch": Row(replace(CNN, batch_size=90), replicas),
    "fewer samples than ranks": Row(replace(MLP, batch_size=2, **MOMENTUM), replicas),
    "microbatches and none": Row(replace(CNN, microbatches=3), replicas, alone=CNN),
    "dropout": Row(Setup(models.mlp, {"dropout": 0.4}, microbatches=2), replicas),
    "float32": Row(replace(SETUPS["cnn"], dtype="float32", **MOMENTUM)),
    # losses, labels and texts
    **{
        f"quantities, {loss}": Row(
            Setup(own.numeric, data=numbers, microbatches=2, worker={"loss": loss})
        )
        for loss in ERRORS
    },
    "classes apart": Row(HALVES, sharded_classes),
    "smoothed classes apart": Row(replace(HALVES, smoothing=0.1), sharded_classes),
    "tokens": Row(Setup(own.perceiving, data=tokens, **TEXT), everything),
    "gpt": Row(GPT, everything),
    "llama": Row(LLAMA),
    "adapters": Row(ADAPTED, everything),
    "adapters, zero": Row(replace(ADAPTED, model_options={"targets": "v"}), stages_of_zero),
    "adapters in a fixed order": Row(replace(ADAPTED, microbatches=4), fixed, serial=FIXED),
    "lstm": Row(LSTM, everything),
    "lstm of few tokens": Row(
        Setup(few_tokens, data=sentences, microbatches=2, batch_size=16, **MOMENTUM), everything
    ),
    "lstm, untied": Row(replace(LSTM, model_options={"tied": False}), everything),
    # the ways of gradients
    **{
        f"{way}": Row((MLP, CNN)[i % 2], replicas, BUCKETS | {"allreduce": way})
        for i, way in enumerate(ALGORITHMS)
    },
    "experts": Row(EXPERTS, experts),
    "experts with capacity": Row(LIMITED, experts),
    "muon": Row(replace(GPT, **MUON), replicas),
    "muon in a fixed order": Row(
        Setup(models.mlp, dtype="float32", microbatches=5, **MUON), fixed, serial=FIXED
    ),
    "muon, zero": Row(replace(GPT, **MUON), stages_of_zero),
    "overlapped": Row(MLP, replicas, BUCKETS | {"allreduce": "ring", "overlap": True}),
    **{f"zero, {name}": Row(setup, stages_of_zero) for name, setup in ZERO.items()},
    # each with its defaults; matrices are above
    **{
        f"{name}, zero": Row(
            replace(ZERO_MLP, optimizer=name, optimizer_options={}), stages_of_zero
        )
        for name in OPTIMIZERS
        if is_elementwise(name)
    },
    # to the last bit
    **{
        f"{count} microbatches of a fixed order": Row(
            replace(SETUPS[model], microbatches=count, worker={"clip": 0.5}), fixed, serial=FIXED
        )
        for model, count in (("mlp", 2), ("cnn", 4), ("resnet", 11))
    },
    # Adam's divisions by small gradients bring the last bit of any sum to light
    **{
        f"float32 in a fixed order, {model}": Row(
            replace(SETUPS[model], dtype="float32", microbatches=5, optimizer_options={"lr": 0.1}),
            fixed,
            serial=FIXED,
        )
        for model in SETUPS
    },
    **{
        f"{precision} in a fixed order": Row(
            replace(
                CNN,
                dtype="float32",
                worker={"precision": precision},
                batch_size=32,
                microbatches=4,
                **MOMENTUM,
            ),
            fixed,
            serial=FIXED,
        )
        for precision in ("bf16", "fp16")
    },
    "lstm in a fixed order": Row(replace(LSTM, microbatches=4), fixed, serial=FIXED),
}

# Layouts of a number of ranks of their own: branches, shared sequences, ZeRO beside other axes.
TOWERS = Setup(own.branched, microbatches=3, worker={"clip": 0.05})
SINGLE = [
    *((TOWERS, Layout(dp, pp, 2)) for dp in (1, 2) for pp in (1, 2)),
    *((GPT, layout) for layout in SHARED),
    *((LLAMA, layout) for layout in SHARED_LLAMAS),
    (replace(LLAMA, model_options={"tied": False}), Layout(pp=2, split=(2, 5), tp=2)),
    (GPT, Layout(dp=2, tp=2, zero=3, unit_bytes=1)),
    (ADAPTED, Layout(dp=2, tp=2, zero=3, unit_bytes=1)),
    (ADAPTED, Layout(sp=2, tp=2, sp_attention="ring")),
    (replace(LLAMA, model=adapted_llama), Layout(sp=2, tp=2, sp_attention="ring")),
    (replace(LLAMA, model=adapted_llama), Layout(dp=2, tp=3, zero=3, unit_bytes=1)),
    (LOW_BASE, Layout(dp=2, tp=2, zero=3, unit_bytes=1)),
    (LOW_BASE, Layout(sp=2, pp=2, split=(3, 4), sp_attention="ring", activation_memory="least")),
    (ADAPTED, Layout(sp=2, pp=2, split=(4, 4), activation_memory="least")),
    (GPT, Layout(dp=2, sp=2, zero=3, unit_bytes=1)),
    (GPT, Layout(dp=3, pp=2, split=(4, 4), zero=1)),  # the embedding's table stands in both stages
    (ZERO["nested"], Layout(dp=2, pp=2, zero=1)),
    (GPT, Layout(dp=3, tp=2, zero=2)),
    *SHARDED,
    *FITTED,
    (FLAT, Layout(dp=2, pp=2, zero=1)),  # a stage has no parameters to share out
    *((FLAT, Layout(dp=2, zero=stage)) for stage in (2, 3)),
    (replace(GPT, **MUON), Layout(dp=2, pp=2, split=(4, 4), zero=1)),
    (replace(GPT, **MUON), Layout(dp=2, sp=2)),
    (replace(NOISY, **MUON), Layout(pp=3, split=(1, 1, layers(NOISY) - 2))),  # flattens, no weights
    # uneven shards: the ranks have different numbers of units, and so of buffers
    (SETUPS["mlp"], Layout(dp=2, tp=2, zero=2, unit_bytes=1000)),
    (EXPERTS, Layout(dp=2, pp=2, split=(4, 4))),
    (EXPERTS, Layout(dp=2, tp=2)),
    *WITH_EXPERTS,
]
