"""Arranging a model on ranks, in fixed order: mesh, tensor (shard), pipeline (cut), limits.

model (no values yet)
  1 mesh        world = dp x pp x tp x sp, this rank's coordinates in it
  2 tensor      layers are replaced by their shards            parallel.tensor
    experts     each rank keeps some of a mixture's            parallel.experts
  3 pipeline    the chain is cut, this rank keeps its stages   nn.chain, schedule.partition
  4 limits      a layout over a limit is refused, with one that fits
then the caller initializes `arrangement.model` in `arrangement.storage` and makes an optimizer, and
a Worker attaches the rest:
  5 data        gradients summed over dp x sp                  parallel.data, zero, fixed_reduction
  6 schedule    the pipeline's program                         parallel.pipeline
  7 sequence    each batch's positions are sharded             parallel.sequence
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, starmap
from math import inf
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.base.command import as_given
from nnmpi.base.errors import DeviceError, LayoutError, UsageError, expect
from nnmpi.base.units import format_bytes
from nnmpi.comm.agreement import agreed, require_equal
from nnmpi.comm.algorithms.registry import AUTO
from nnmpi.comm.group import Group
from nnmpi.comm.mesh import PP, TP, BoundMesh, Mesh
from nnmpi.compose.layout import Layout, check_layout
from nnmpi.data.loader import Batch
from nnmpi.memory.layers import measure, of_chain
from nnmpi.memory.plan import LayerCost
from nnmpi.memory.store import Store
from nnmpi.nn.chain import ChainLayer, KnownLayers, ModelPart, open_chain, parameters_of
from nnmpi.nn.mode import training
from nnmpi.nn.module import Buffer, Module, dtype_of_values
from nnmpi.nn.sharding import ALL, OPTIMIZER, STAGES, ULYSSES
from nnmpi.nn.transformer import CausalSelfAttention
from nnmpi.parallel.experts import share_experts
from nnmpi.parallel.replication import BUILD_ALIKE, DIFFERENT_MODELS
from nnmpi.parallel.sequence.attention import check_heads
from nnmpi.parallel.sequence.group import SequenceGroup
from nnmpi.parallel.tensor import refuse_values, shard
from nnmpi.parallel.zero.storage import (
    UNIT_BYTES,
    UnitCut,
    as_units,
    cut_runs,
    predict_bytes,
    sharded,
)
from nnmpi.schedule.partition import partition
from nnmpi.schedule.schedule import stages_of
from nnmpi.tensor.parameter import FlatStorage, Parameter
from nnmpi.tensor.placement import REPLICATED
from nnmpi.tensor.tensor import Tensor

SWEEPS = 6  # the most over the layers, to measure them
STEADY = 0.05  # a gain of the last sweep that ends them, as a share of all time
_seconds = attrgetter("seconds")


@dataclass(frozen=True, eq=False)
class Tie:
    """A parameter shared by stages on several ranks: each has a copy, gradients are summed.

    Attributes:
        parameter: this rank's copy.
        group: the ranks with a copy.
    """

    parameter: Parameter
    group: Group


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A model's distribution over the ranks, made by `arrange`.

    Attributes:
        layout: as given.
        mesh: the groups of this rank.
        model: this rank's part, to be initialized; the model itself without a pipeline.
        parameters: the full model's parameters in order: name -> number of elements.
        buffers: the names of its buffers.
        backend: of this rank.
        layers: the full model's chain; empty if it is not cut.
        cuts: the layers of each stage of the pipeline; one stage has all of them under ZeRO 2 and
            3 alone.
        segments: for each stage, the layers of its segments: the units of ZeRO 2 and 3, or what
            is recomputed to fit a limit of activations; otherwise all of them.
        costs: measured for the cuts; empty if nothing was measured.
        ties: this rank's parameters that other ranks of its pipeline have, too.
        classes: the number of classes if the logits are sharded over tp (a last layer with
            `Sharding.VOCAB`); otherwise 0.
        known: the layers and values of which the ranks have parts; None for full replicas, whose
            model may get other layers.
    """

    layout: Layout
    mesh: BoundMesh
    model: Module
    parameters: Mapping[str, int]
    buffers: Sequence[str]
    backend: Backend = field(default_factory=numpy_backend)
    layers: tuple[ChainLayer, ...] = ()
    cuts: tuple[range, ...] = ()
    segments: tuple[tuple[range, ...], ...] = ()
    costs: tuple[LayerCost, ...] = ()
    ties: tuple[Tie, ...] = ()
    classes: int = 0
    known: KnownLayers | None = None

    def follow(self) -> None:
        """Refuse a model that is not as it was arranged; see `nn.module.TreeCheck`.

        Raises:
            UsageError: naming the first difference.
        """
        if self.known is not None:
            self.known.check("arrange and initialize it again, and make a new Worker")

    @property
    def elements(self) -> int:
        """The number of elements of the full model's parameters."""
        return sum(self.parameters.values())

    def names_of_parameters(self) -> list[str]:
        """Return the names of the full model's parameters; of a full replica those of now."""
        model = self.model
        return (
            [name for name, _ in model.named_parameters()] if self.is_plain else [*self.parameters]
        )

    def names_of_buffers(self) -> list[str]:
        """Return the names of the full model's buffers; of a full replica those of now."""
        model = self.model
        return [name for name, _ in model.named_buffers()] if self.is_plain else [*self.buffers]

    @cached_property
    def stages(self) -> dict[int, tuple[ChainLayer, ...]]:
        """This rank's stages, by number; empty if a pass runs the full model as it is."""
        numbers = stages_of(self.mesh.pp.rank, self.mesh.pp.size, len(self.cuts), self.layout.home)
        return {
            number: self.layers[self.cuts[number].start : self.cuts[number].stop]
            for number in numbers
        }

    def free(self) -> None:
        """Free the groups, after the worker's `release`. Collective.

        Needed only in programs that make many arrangements: MPI's communicators are limited.
        """
        for group in dict.fromkeys(tie.group for tie in self.ties):
            group.free()
        self.mesh.free()

    def storage(self, *args: Any) -> FlatStorage:
        """Make the model's storage, for `Module.initialize`."""
        layout, store = self.layout, None
        if layout.offload_state is not None:
            assert layout.offload is not None
            contents = (
                "optimizer states"
                if layout.offload_state == OPTIMIZER
                else "weights and optimizer states"
            )
            store = Store(layout.offload, self.backend, contents)
        weights = store if layout.offload_state == ALL else None
        make = (
            sharded(
                self.model, self.mesh.replicas, layout.zero, layout.unit_bytes, weights, self.units
            )
            if layout.zero
            else FlatStorage
        )
        storage = make(*args)
        storage.state_store = store
        return storage

    @cached_property
    def units(self) -> UnitCut | None:
        """ZeRO's units of this rank's segments; None if they are cut from the full model."""
        if not self.segments or self.layout.zero < 2:
            return None
        runs = list(self.own_segments.values())
        return as_units(self.model, runs, {tie.parameter for tie in self.ties})

    @cached_property
    def own_segments(self) -> dict[int, tuple[ChainLayer, ...]]:
        """This rank's segments, by number; empty if a pass runs the full model as it is."""
        numbers = enumerate((s, cut) for s, cuts in enumerate(self.segments) for cut in cuts)
        return {
            number: self.layers[cut.start : cut.stop]
            for number, (stage, cut) in numbers
            if stage in self.stages
        }

    @cached_property
    def numbers(self) -> dict[int, list[int]]:
        """The storage numbers of each segment's parameters, for this rank's segments."""
        number_of = {span.parameter: i for i, span in enumerate(self.model.storage.spans)}
        return {
            number: sorted(number_of[parameter] for parameter in parameters_of(layers))
            for number, layers in self.own_segments.items()
        }

    @cached_property
    def is_plain(self) -> bool:
        """Whether every rank has the full model, and gradients are summed in any order."""
        return self.mesh.model.size == 1 and not (
            self.layout.fixed_order or self.layout.zero or self.layout.expert_parallel
        )

    @property
    def meets_in_forward(self) -> bool:
        """Whether replicas exchange data in a forward pass, so that each has as many of them."""
        return self.layout.expert_parallel or self.layout.zero == STAGES[-1]

    @property
    def is_pipeline(self) -> bool:
        """Whether several ranks have the stages of a replica."""
        return self.mesh.pp.size > 1

    @property
    def data_rank(self) -> int:
        """The number of this rank's part of each batch, for `data.Loader`."""
        return self.mesh.coordinates.d

    @cached_property
    def same_rows(self) -> tuple[Group, ...]:
        """The groups of this rank whose ranks compute the same rows of every batch."""
        return tuple(group for group in (self.mesh.model, self.mesh.sp) if group.size > 1)

    @cached_property
    def sequence(self) -> SequenceGroup | None:
        """The ranks that hold shards of the same sequences; None without sequence parallelism."""
        return (
            SequenceGroup(self.mesh.sp, self.layout.sp_attention) if self.mesh.sp.size > 1 else None
        )

    def local(self, batch: Batch) -> tuple[Batch, list[int]]:
        """Return this rank's part of its replica's batch, and a checksum of the full one.

        The checksum is there if several ranks are given the same rows, which they then compare.
        """
        rows = [batch.checksum()] if self.same_rows else []
        return (batch if self.sequence is None else self.sequence.part(batch)), rows

    @property
    def data_ranks(self) -> int:
        """The number of parts of each batch, for `data.Loader`."""
        return self.mesh.dp.size

    def counts_here(self, entry: Parameter | Buffer) -> bool:
        """True if this rank includes an array's (or shard's) gradient in the gradient norm.

        Several ranks of a replica may hold the array; one of them counts it. For a parameter that
        several stages share, that is the first of their ranks.
        """
        first = all(tie.group.rank == 0 for tie in self.ties if tie.parameter is entry)
        # the ranks of a tensor group have the same experts
        is_shard = entry.region is not None and not getattr(entry, "rank_local", False)
        return first and (is_shard or self.mesh.coordinates.t == 0)

    def writes_here(self, entry: Parameter | Buffer) -> bool:
        """True if this rank writes an array (or shard) to checkpoints; exactly one holder does."""
        is_first = self.mesh.replicas.rank == 0 or getattr(entry, "rank_local", False)
        return is_first and self.counts_here(entry)


def require_same_options(group: Group, options: Sequence[str]) -> None:
    """Refuse options that differ between ranks. Collective."""
    texts = [re.sub(" at 0x[0-9a-f]+", "", text) for text in options]
    require_equal(group, texts, "the ranks' options differ", "give all the same", UsageError)


def replicate(model: Module, group: Group, backend: Backend) -> Arrangement:
    """Return the arrangement of a full model on every rank of a group. Collective."""
    return _unsharded(model, Layout(), Mesh(dp=group.size).bind(group), backend)


def arrange(
    model: Module,
    group: Group,
    layout: Layout,
    sample: Array | None = None,
    dtype: Any = None,
    backend: Backend | None = None,
) -> Arrangement:
    """Arrange a model on a group's ranks. Collective.

    The model is replaced: use `.model` from then on.

    Args:
        model: built, not initialized, the same on all ranks.
        sample: a microbatch's input, or an array like it, for split "auto" and sharding by image
            rows.
        dtype: of the parameters, "float32" or "float64", with which `initialize` then draws them.
            By default `initialize` decides, and bytes are counted as of float32.

    Raises:
        UsageError: on all ranks, for another dtype.
        LayoutError: on all ranks, when the layout does not fit the world or the model; it names one
            that does.
        DeviceError: on all ranks, when a rank's part is larger than the limit.
        UsageError: for a model that cannot be cut, invalid shards, and values that ranks' parts
            would draw anew.

    Example:
        >>> def program(group):
        ...     layout = nnmpi.Layout(pp=2, split=(3, 3))
        ...     arranged = nnmpi.arrange(models.mlp((6,), 3, hidden=[8, 8]), group, layout)
        ...     model = arranged.model.initialize(seed=0)
        ...     sgd = optim.SGD(model.storage, lr=0.1)
        ...     worker = nnmpi.Worker(model, sgd, group, arrangement=arranged)
        ...     x, y = np.ones((4, 6)), np.arange(4) % 3
        ...     return arranged.layout.pp, round(worker.step(x, y).loss, 3)
        >>> nnmpi.simulate(program, ranks=2)
        [(2, 1.059), (2, 1.059)]
    """
    call = "nnmpi.arrange(model, group, layout)"
    expect(call, (model, Module), (group, Group), (layout, Layout))
    backend = numpy_backend() if backend is None else backend
    local = "offload", "memory_limit"  # a rank's own folder and memory
    options = [f"{name} {value}" for name, value in vars(layout).items() if name not in local]
    options.append(f"dtype {dtype}")
    require_same_options(group, options)
    mesh = find_mesh(group, layout)
    bound = mesh.bind(group)
    with agreed(group):
        given, dtype = dtype, "float32" if dtype is None else dtype_of_values(dtype)
        if given is not None and "storage" in vars(model) and model.storage.dtype != dtype:
            raise UsageError(
                f"the model has values of {model.storage.dtype}, and arrange got dtype {dtype!r};"
                " leave that out, or build the model again"
            )
        if isinstance(model, ModelPart) or any(
            parameter.rank_local or parameter.region is not None
            for _, parameter in model.named_weights()
        ):
            raise UsageError(
                "the model is arranged already, and this rank has only part of it; build it again"
                " for another arrangement"
            )
        if mesh.tp > 1 or mesh.pp > 1 or (layout.expert_parallel and bound.replicas.size > 1):
            refuse_values(model)
    require_equal(group, model.settings(), DIFFERENT_MODELS, BUILD_ALIKE)
    arrangement = _unsharded(model, layout, bound, backend)
    with agreed(group):
        if mesh.sp > 1 and layout.sp_attention == ULYSSES:
            for _, module in model.named_modules():
                if isinstance(module, CausalSelfAttention):
                    check_heads(module.heads // mesh.tp, mesh.sp, mesh.tp)
        shape = None if sample is None else tuple(sample.shape[1:])
        logits = (
            shard(model, bound.tp, layout.table, shape, keep_classes_sharded=True)
            if mesh.tp > 1
            else REPLICATED
        )
        if layout.expert_parallel:
            share_experts(model, bound.replicas)
    # The logits can only be sharded by classes, so the units of their placement are classes; 0 if
    # they are replicated.
    arrangement = replace(arrangement, classes=logits.units)
    if mesh.pp > 1:
        arrangement = _cut(arrangement, sample, dtype)
    elif layout.zero > 1:  # its units are segments of a single stage
        layers = open_chain(model)
        cuts = (range(len(layers)),)
        segments = _segments(layers, cuts, arrangement, np.dtype(dtype).itemsize)
        arrangement = replace(arrangement, layers=layers, cuts=cuts, segments=segments)
    _check_memory(arrangement, dtype)
    vars(arrangement.model)["_arranged_dtype"] = None if given is None else dtype
    known = None if arrangement.is_plain else KnownLayers(model, arrangement.layers)
    return replace(arrangement, known=known)


def _unsharded(model: Module, layout: Layout, mesh: BoundMesh, backend: Backend) -> Arrangement:
    parameters = {name: parameter.size for name, parameter in model.named_parameters()}
    return Arrangement(
        layout, mesh, model, parameters, [name for name, _ in model.named_buffers()], backend
    )


def find_mesh(group: Group, layout: Layout) -> Mesh:
    """Return the mesh of a layout on a group. Collective.

    Raises:
        LayoutError: on all ranks, when the degrees do not multiply to the number of ranks; it names
            degrees that do.
        UsageError: on all ranks, when an option excludes a degree that follows from the number of
            ranks.
    """
    nodes = group.nodes()
    with agreed(group):
        on_several = nodes if len(set(nodes)) > 1 else None
        dp, pp, tp = (None if n == AUTO else n for n in (layout.dp, layout.pp, layout.tp))
        mesh = Mesh.of(group.size, dp, pp, tp, on_several, layout.sp)
    check_layout(layout, mesh)
    return mesh


def _cut(full_model: Arrangement, sample: Array | None, dtype: str) -> Arrangement:
    """Cut the model's chain into the pipeline's stages, and return this rank's."""
    model, mesh, layout = full_model.model, full_model.mesh, full_model.layout
    ranks, count = mesh.pp.size, mesh.pp.size * layout.stages_per_rank
    with agreed(mesh.world):
        layers = open_chain(model)
        if len(layers) < count:
            raise LayoutError(
                f"the model has {len(layers)} layers to cut between, fewer than {count} stages"
                f" ({ranks} ranks x {layout.stages_per_rank}); give at most {len(layers)} stages,"
                f" or a deeper model{_why_closed(layers)}"
            )
    costs, cuts = _choose(full_model, layers, count, sample, dtype)
    segments = _segments(layers, cuts, full_model, np.dtype(dtype).itemsize)
    arrangement = replace(full_model, layers=layers, cuts=cuts, segments=segments, costs=costs)
    part = (StagesPart if ranks > 1 else ModelPart)(
        model, list(chain.from_iterable(arrangement.stages.values()))
    )
    ties = _tie(full_model, part, _shared_parameters(arrangement))
    return replace(arrangement, model=part, ties=ties)


def _segments(
    layers: Sequence[ChainLayer], cuts: Sequence[range], arrangement: Arrangement, itemsize: int
) -> tuple[tuple[range, ...], ...]:
    """Return the layers of each stage's segments. Collective over the ranks that share layers.

    Their shards may have other lengths, but the first rank's segments are those of all: a
    recomputed segment has collectives, which must come in the same order on each of them.
    """
    layout, tp = arrangement.layout, arrangement.mesh.tp
    result, limit = [], 1
    if layout.zero > 1:
        limit = layout.unit_bytes or UNIT_BYTES[layout.zero]
    elif not layout.limits_activations:
        return tuple((cut,) for cut in cuts)
    for cut in cuts:
        lengths = [
            len(run) for run in cut_runs(layers[cut.start : cut.stop], limit, itemsize, layout.zero)
        ]
        result.append(_by_lengths(tp.share(lengths), cut.start))
    return tuple(result)


def _by_lengths(lengths: Iterable[int], start: int = 0) -> tuple[range, ...]:
    return tuple(starmap(range, pairwise(accumulate(lengths, initial=start))))


class StagesPart(ModelPart):
    """The layers of a rank of a pipeline, which alone compute nothing."""

    def forward(self, *_: Any) -> NoReturn:
        """Refuse."""
        raise UsageError(
            "this rank has only some of the model's layers; compute through the whole pipeline with"
            " worker.step, worker.evaluate or compose.Inference"
        )


def _choose(
    full_model: Arrangement,
    layers: Sequence[ChainLayer],
    count: int,
    sample: Array | None,
    dtype: str,
) -> tuple[tuple[LayerCost, ...], tuple[range, ...]]:
    """Return the layers' costs, if measured, and the layers of each stage; equal on all ranks."""
    mesh, layout, backend = full_model.mesh, full_model.layout, full_model.backend
    if layout.split != AUTO:
        with agreed(mesh.world):
            return (), _by_hand([int(length) for length in layout.split], len(layers), count)
    with agreed(mesh.world):
        if sample is None:
            raise LayoutError(
                "split auto measures the model's layers, for which it needs a sample; give one, or"
                f" say how many of the {len(layers)} layers each stage has"
            )
    x = Tensor(backend.asarray(sample))
    # Each layer's fastest sweep counts: what keeps the core busy for a moment hits other layers in
    # the next one. Sweeps follow until one finds no layer much faster than all before it.
    measured: list[LayerCost] = []
    total_s = inf
    for _ in range(SWEEPS):
        with training():
            sweep = measure(of_chain(full_model.model, layers, dtype, backend), x, backend)
        measured = [min(a, b, key=_seconds) for a, b in zip(measured or sweep, sweep, strict=True)]
        before_s, total_s = total_s, sum(map(_seconds, measured))
        (settled,) = mesh.world.share([before_s - total_s <= STEADY * total_s])
        if settled:
            break
    costs = [
        LayerCost(*item)
        for item in mesh.world.share([list(vars(cost).values()) for cost in measured])
    ]
    copies = (2 + layout.state_arrays) * np.dtype(dtype).itemsize
    with agreed(mesh.world):
        bytes_ = [cost.elements * copies for cost in costs]
        # with several stages per rank, each gets its share of the limit
        limit = (
            None if layout.memory_limit is None else layout.memory_limit // layout.stages_per_rank
        )
        return tuple(costs), partition([cost.seconds for cost in costs], count, bytes_, limit)


def _why_closed(layers: Sequence[ChainLayer]) -> str:
    """Return the hint for a model that cannot be cut at all."""
    kinds = [type(module).__name__ for layer in layers for _, module in layer.members]
    return (
        f"; only nn.Sequential and nn.Residual are cut open, not a {kinds[0]}"
        if len(layers) == 1 and kinds
        else ""
    )


def _by_hand(lengths: Sequence[int], layers: int, count: int) -> tuple[range, ...]:
    if len(lengths) != count or sum(lengths) != layers:
        raise LayoutError(
            f"split {','.join(map(str, lengths))} has {len(lengths)} stages and {sum(lengths)}"
            f" layers; this pipeline has {count} stages, and the model {layers} layers"
        )
    return _by_lengths(lengths)


def _shared_parameters(arrangement: Arrangement) -> dict[str, list[int]]:
    """Return the stages of each parameter that several stages use.

    Raises:
        LayoutError: for a shared parameter with pipedream, because its stages have different
            versions of the weights. For shared running statistics, because two stages would update
            them in another order than the serial run.
    """
    model, layout, layers = arrangement.model, arrangement.layout, arrangement.layers
    users: dict[object, set[int]] = defaultdict(set)  # stages, by parameter or buffer
    for number, cut in enumerate(arrangement.cuts):
        for _, module in chain.from_iterable(layers[i].members for i in cut):
            for leaf in module.entries().values():
                users[leaf].add(number)
    leaves = model.entries()
    shared = {name: sorted(users[leaf]) for name, leaf in leaves.items() if len(users[leaf]) > 1}
    for name in shared:
        if isinstance(leaves[name], Buffer):
            raise LayoutError(
                f"the layer of {name} is in stages {', '.join(map(str, shared[name]))}, which would"
                " update its running statistics in a different order from the serial run; make a"
                " layer for each use, or cut the model so that both uses share a stage"
            )
    if shared and layout.asynchronous:
        name, numbers = next(iter(shared.items()))
        asked = as_given(layout, "pipeline")
        raise LayoutError(
            f"{name} is in stages {', '.join(map(str, numbers))}, which cannot be combined with"
            f" {asked}; cut the model so that all layers that have it share a stage, or leave"
            f" {asked} out"
        )
    return shared


def _tie(
    full_model: Arrangement, part: ModelPart, shared: Mapping[str, Sequence[int]]
) -> tuple[Tie, ...]:
    """Return this rank's ties. Collective over the pipeline."""
    mesh, home = full_model.mesh, full_model.layout.home
    parameters = dict(part.named_parameters())
    ties: list[Tie] = []
    groups: dict[tuple[int, ...], Group] = {}
    for name, stages in shared.items():
        ranks = tuple(sorted({home(number, mesh.pp.size) for number in stages}))
        if len(ranks) < 2:
            continue
        if ranks not in groups:
            groups[ranks] = mesh.pp.split(int(mesh.pp.rank in ranks), mesh.pp.rank)
        if name in parameters:
            parameters[name].room = f"tied {name}"
            ties.append(Tie(parameters[name], groups[ranks]))
    return tuple(ties)


def _check_memory(arrangement: Arrangement, dtype: str) -> None:
    """Refuse a layout whose largest part is above the limit. Collective."""
    layout, mesh = arrangement.layout, arrangement.mesh
    limit = layout.memory_limit
    if not any(mesh.world.gather(limit is not None)):
        return
    itemsize = np.dtype(dtype).itemsize
    # pipedream keeps older versions of the weights
    stashed = mesh.pp.size - 1 - mesh.pp.rank if layout.asynchronous else 0

    def need(stage: int, offloaded: str | None) -> int:
        result = predict_bytes(
            arrangement.model,
            stage,
            mesh.replicas.rank,
            mesh.replicas.size,
            itemsize,
            layout.state_arrays,
            layout.unit_bytes,
            offloaded=offloaded,
            units=arrangement.units if stage == layout.zero else None,
        )
        return result.total + result.parameters * stashed

    stages = range(layout.zero, 1 + STAGES[-1])
    by_rank = mesh.world.gather(
        [*(need(stage, layout.offload_state) for stage in stages), need(layout.zero, OPTIMIZER)]
    )
    needs = [int(rank_needs[0]) for rank_needs in by_rank]
    *largest, out = map(max, zip(*by_rank, strict=True))
    if limit is None or largest[0] <= limit:
        return
    worst = needs.index(largest[0])
    full = sum(needs[rank] for rank in mesh.sizes.groups(PP, TP)[0])
    ways = max(-(-full // limit), mesh.pp.size * mesh.tp.size + 1)
    even = (
        ", or cut it more evenly, as split auto does"
        if arrangement.cuts and layout.split != AUTO
        else ""
    )
    advice = []
    fits = [(stage, size) for stage, size in zip(stages, largest, strict=True) if size <= limit]
    if fits and not (layout.fixed_order or layout.asynchronous):
        stage, size = fits[0]
        advice.append(f"share it out with zero {stage}, which needs {format_bytes(size)}")
    if layout.offload_state is None and not layout.asynchronous and out <= limit:
        advice.append(
            "offload the optimizer's state with offload-state optimizer, which then needs"
            f" {format_bytes(out)}"
        )
    layers = len(arrangement.layers or open_chain(arrangement.model))
    such = (
        f"pp {ways} or tp {ways}" if ways <= layers else f"tp {ways}, as pp can be {layers} at most"
    )
    advice.append(f"spread the model over at least {ways} ranks with pp x tp, such as {such}{even}")
    if layout.expert_parallel:
        advice.insert(0, "shard the experts over more replicas")
    raise DeviceError(
        f"rank {worst} needs {format_bytes(needs[worst])} for parameters, gradients and optimizer"
        f" state under {mesh.sizes}{f' with zero {layout.zero}' if layout.zero else ''}, more than"
        f" the limit of {format_bytes(limit)}; {', or '.join(advice)}"
    )


def describe_stages(arrangement: Arrangement) -> list[str]:
    """Return each stage's rank and layers, a line each."""
    lines = []
    total = sum(cost.seconds for cost in arrangement.costs)
    basis = (
        "the time"
        if all(cost.timed for cost in arrangement.costs)
        else "parameters and activations"
    )
    for number, cut in enumerate(arrangement.cuts):
        first, last = arrangement.layers[cut.start].name, arrangement.layers[cut.stop - 1].name
        layers = f"layer {first}" if len(cut) == 1 else f"layers {first} to {last} ({len(cut)})"
        share = sum(arrangement.costs[i].seconds for i in cut) / total if total else 0.0
        measured = f", {share:.0%} of {basis}" if arrangement.costs else ""
        rank = arrangement.layout.home(number, arrangement.mesh.pp.size)
        lines.append(f"stage {number}: pipeline rank {rank}, {layers}{measured}")
    return lines
