"""What a layout takes, seconds of a step and bytes by kind, and the layouts that take least.

    step = computing + bubble      of one replica measured; of a pipeline from its stages' layers
         + exposed messages        sums of gradients, exchanges of shared layers and sequences,
                                   ties, loss
         + update                  measured, of a rank's part

    bubble        of stages whose ranks compute a, b, c (b the longest) for a microbatch: a + c,
                  divided by the virtual stages of a rank; halves of backwards fill it but for the
                  forwards, with V-Half and V-Min half and two thirds of it; and the messages there
                  and back

Messages take the time of fitted links. A price that is 10 % off must not choose: see `auto_layout`.
Priced is every layout of this many ranks that may be looked at; what cannot be falls out, with the
reason:

    ranks = dp x pp x tp x sp      x  ZeRO 0..3  x  schedule, virtual stages, microbatches  x  least activations or all

Gradients are summed as `--allreduce auto` sums them. Left out, since another one is never slower:
the schedule naive, whose stages do one after the other what GPipe's do at once, and PipeDream,
which does not compute what one rank computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.backend import Backend
from nnmpi.comm.gradients import BUCKET_BYTES
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.errors import LayoutError, UsageError
from nnmpi.memory.ledger import ACTIVATIONS, BATCHES, COMMUNICATION, GRADIENTS, PARAMETERS, STATE
from nnmpi.memory.plan import LayerCost, saved_bytes
from nnmpi.mesh import AXES, Mesh
from nnmpi.nn.chain import ChainLayer, ModelPart, open_chain
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import STAGES
from nnmpi.parallel.zero.storage import StateBytes, predict_bytes
from nnmpi.schedule.partition import partition
from nnmpi.schedule.schedule import Home, around, peak_saved, stages_of
from nnmpi.schedule.schedules import TURNING, home_of, make
from nnmpi.shard import split
from nnmpi.train.planner.network import PlannedNetwork

NUMBERS_BYTES = 40  # loss, right answers, targets and hashes, which all ranks add up in a step
END_S = 25e-6  # of the processor, which a pipeline's message takes at each end
KEPT = 10
Memory = Mapping[str, int]
"""Bytes by the ledger's kinds."""
PIPELINES = (
    *(("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 4)),
    *((name, 2) for name in TURNING),
)
MICROBATCHES = (1, 2, 4, 8)  # for each rank of a pipeline
Refusals: TypeAlias = Counter[str]
"""How many layouts fall out for which reason."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One layout.

    Attributes:
        dp, pp, tp, sp: ranks on each axis.
        zero: what the replicas shard.
        schedule, virtual_stages, microbatches: of the pipeline.
        recompute: whether it keeps the least activations, and computes the others again.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sp: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    microbatches: int = 1
    recompute: bool = False

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """dp, pp, tp and sp."""
        return self.dp, self.pp, self.tp, self.sp

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.dp * self.pp * self.tp * self.sp

    @property
    def home(self) -> Home:
        """Which rank of the pipeline has which stage."""
        return home_of(self.schedule)

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters, and sum their gradients."""
        return self.dp * self.sp

    @property
    def kind(self) -> tuple[Any, ...]:
        """What prices of layouts that are alike have in common, and so their errors."""
        return tuple(size > 1 for size in self.axes), self.zero > 0

    def rows(self, batch_size: int) -> list[int]:
        """Return how many rows each microbatch of a batch has on the replica that has most."""
        return [-(-len(part) // self.dp) for part in split(batch_size, self.microbatches)]

    def options(self) -> dict[str, Any]:
        """Return the train command's options for this layout, without the split and defaults."""
        result: dict[str, Any] = dict(zip(AXES, self.axes, strict=True))
        if self.zero:
            result["zero"] = self.zero
        if self.pp > 1:
            result |= {"pipeline": self.schedule, "microbatches": self.microbatches}
            if self.virtual_stages > 1:
                result["virtual_stages"] = self.virtual_stages
        if self.recompute:
            result["activation_memory"] = "least"
        return result

    def __str__(self) -> str:
        """Return it in a few words."""
        words = [
            f"{name.replace('_', ' ')} {value}"
            for name, value in self.options().items()
            if value != 1 or name == "zero"
        ]
        axes = sum(size > 1 for size in self.axes)
        return ", ".join([" x ".join(words[:axes]) or "1 rank", *words[axes:]])


def candidates(
    ranks: int, batch_size: int, shares: Collection[tuple[int, int]], layers: int
) -> tuple[list[Candidate], Refusals]:
    """Return the layouts, and how many fall out for which reason before anything is priced.

    Args:
        ranks: how many.
        batch_size: rows of a global batch.
        shares: (tp, sp) that the model can have.
        layers: of the model's chain.
    """
    result: list[Candidate] = []
    refused = Refusals()
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, tp, sp in product(divisors, divisors, divisors):
        dp, left = divmod(ranks, pp * tp * sp)
        if left:
            continue
        if (tp, sp) not in shares:
            refused[
                "the model's layers or positions cannot be shared out so (tp, sp), or among so many"
            ] += 1
        elif dp * sp > 1 and dp > batch_size:
            refused["more replicas than rows of a batch"] += 1
        elif pp > layers:
            refused["more stages than the model has layers to cut between"] += 1
        else:
            for item in _pipelines(Candidate(dp, pp, tp, sp), batch_size, layers, refused):
                for zero, recompute in product(
                    (0, *STAGES) if item.replicas > 1 else (0,), (False, True)
                ):
                    result += _checked(replace(item, zero=zero, recompute=recompute), refused)
    return result, refused


def _pipelines(
    plain: Candidate, batch_size: int, layers: int, refused: Refusals
) -> Iterator[Candidate]:
    if plain.pp == 1:
        yield plain
        return
    for (schedule, virtual), times in product(PIPELINES, MICROBATCHES):
        microbatches = times * plain.pp
        if microbatches * plain.dp > batch_size:
            refused["more microbatches than the replicas have rows"] += 1
        elif plain.pp * virtual > layers:
            refused["more stages than the model has layers to cut between"] += 1
        else:
            yield replace(
                plain, schedule=schedule, virtual_stages=virtual, microbatches=microbatches
            )


def _checked(one: Candidate, refused: Refusals) -> Iterator[Candidate]:
    try:
        Layout(
            *(one.dp, one.pp, one.tp, one.schedule, one.virtual_stages),
            sp=one.sp,
            zero=one.zero,
            activation_memory="least" if one.recompute else None,
        )
    except UsageError as error:
        refused[str(error).partition(",")[0].partition(";")[0]] += 1
    else:
        yield one


# ---- what was measured ----


Share = tuple[int, int]
"""(tp, sp): how many ranks share the layers, and the positions."""


@dataclass(frozen=True)
class StepCost:
    """A replica's step for some rows: seconds, the update's seconds, activation bytes."""

    seconds: float
    update_s: float
    activations: float


@dataclass(frozen=True)
class ShareCost:
    """A step of a replica on its (tp, sp) ranks, beside one on one rank.

    Attributes:
        seconds, activations: by those of one rank, without messages.
        exchanges: (operation, bytes for each row, how many times) of the messages between the
            ranks.
    """

    seconds: float = 1.0
    activations: float = 1.0
    exchanges: tuple[tuple[str, float, int], ...] = ()


@dataclass(frozen=True)
class Profile:
    """What was measured of a workload.

    Attributes:
        steps: by rows.
        shares: by (tp, sp).
        layers: in the order of the chain, for `layer_rows` rows; their times are parts of a step's.
        raced: by the text of a layout, the seconds of a step as it ran, of those that have raced.
    """

    steps: Mapping[int, StepCost]
    shares: Mapping[Share, ShareCost]
    layers: tuple[LayerCost, ...]
    layer_rows: int
    raced: Mapping[str, float] = field(default_factory=dict)

    def step(self, rows: int, name: str) -> float:
        """Return a field of `StepCost` for any number of rows, interpolated linearly."""
        known = {item: float(getattr(cost, name)) for item, cost in sorted(self.steps.items())}
        if len(known) == 1:
            ((only, value),) = known.items()
            return value * rows / only
        places = list(known)
        right = min(max(int(np.searchsorted(places, rows)), 1), len(places) - 1)
        low, high = places[right - 1], places[right]
        return max(known[low] + (known[high] - known[low]) * (rows - low) / (high - low), 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values, of which `files.rebuilt` makes it again."""
        result = asdict(self)
        return result | {name: list(result[name].items()) for name in ("steps", "shares")}


# ---- prices ----


@dataclass(frozen=True)
class LayoutPrice:
    """What a step of a layout takes, in seconds.

    Attributes:
        computing_s: forward and backward of the rank that computes longest.
        bubble_s: for how long that rank waits in its pipeline.
        exposed_s: messages with nothing to hide them.
        update_s: of the weights.
    """

    computing_s: float
    bubble_s: float
    exposed_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.computing_s + self.bubble_s + self.exposed_s + self.update_s


class ModelShapes:
    """A model's shapes under a layout, without values: chain cuts, and each rank's holdings.

    Args:
        build: makes the model, uninitialized.
        dtype: of the model.
        state_arrays: how many of each parameter's size the optimizer keeps.
        sample: one row, as the model takes it.
        seconds: of its layers, by which the chain is cut.
        backend: for shapes alone; nothing is computed.
    """

    def __init__(
        self,
        build: Callable[[], Module],
        dtype: str,
        state_arrays: int,
        sample: Any,
        seconds: Sequence[float],
        backend: Backend,
    ) -> None:
        self._build, self._dtype, self._state_arrays, self._sample = (
            build,
            dtype,
            state_arrays,
            sample,
        )
        self._seconds, self._backend = seconds, backend
        self.cuts, self.states, self._model = (
            cache(self._cuts),
            cache(self._states),
            cache(self._spread),
        )

    def tied_bytes(self, tp: int, pp: int, virtual: int, home: Home = around) -> int:
        """Return the bytes of the parameters that stand on several ranks of a pipeline."""
        layers = self._model(tp)[1]
        sizes = [
            {id(p): p.size for _, module in layer.members for p in module.parameters()}
            for layer in layers
        ]
        local = self.layers_of(pp, virtual, home)
        held = [{key: size for i in mine for key, size in sizes[i].items()} for mine in local]
        count = Counter(key for item in held for key in item)
        tied = sum(
            size
            for key, size in {k: s for item in held for k, s in item.items()}.items()
            if count[key] > 1
        )
        return tied * np.dtype(self._dtype).itemsize

    def layers_of(self, pp: int, virtual: int, home: Home) -> list[list[int]]:
        """Return the layers of each of a pipeline's ranks."""
        cuts = self.cuts(pp, virtual)
        return [
            [i for s in stages_of(rank, pp, len(cuts), home) for i in cuts[s]] for rank in range(pp)
        ]

    def _states(
        self,
        tp: int,
        pp: int,
        virtual: int,
        zero: int,
        replicas: int,
        once: bool,
        home: Home = around,
    ) -> tuple[StateBytes, ...]:
        """Return what each of a pipeline's ranks holds."""
        itemsize, arrays = np.dtype(self._dtype).itemsize, self._state_arrays
        model, layers = self._model(tp)
        parts = [model]
        if pp > 1:
            parts = [
                ModelPart(model, [layers[i] for i in local])
                for local in self.layers_of(pp, virtual, home)
            ]
        return tuple(
            predict_bytes(part, zero, 0, replicas, itemsize, arrays, None, once) for part in parts
        )

    def _spread(self, tp: int) -> tuple[Module, tuple[ChainLayer, ...]]:
        """Return the model as the first of tp ranks has it, without values, and its chain."""
        model = self._build()
        if tp > 1:

            def spread(group: Group) -> Module:
                layout = Layout(1, 1, tp)
                return arrange(
                    self._build(), group, layout, self._sample, self._dtype, self._backend
                ).model

            model = simulate(spread, tp)[0]
        return model, open_chain(model)

    def _cuts(self, pp: int, virtual: int) -> tuple[range, ...]:
        return partition(self._seconds, pp * virtual)


class Pricer:
    """Prices layouts of one workload on one machine.

    Args:
        batch_size: rows of the global batch.
        row_bytes: of a sample and its labels.
        profile: what was measured of it.
        network: what messages cost.
        shapes: where the model is cut, and what ranks hold of it.
    """

    def __init__(
        self,
        batch_size: int,
        row_bytes: int,
        profile: Profile,
        network: PlannedNetwork,
        shapes: ModelShapes,
    ) -> None:
        self.batch_size, self.row_bytes, self.profile = batch_size, row_bytes, profile
        self.network, self.shapes = network, shapes
        self._mesh = cache(self._make_mesh)

    # ---- seconds ----

    def price(self, one: Candidate) -> LayoutPrice:
        """Return what a step takes."""
        busy_s, bubble_s = self._pipeline(one) if one.pp > 1 else (self._computing(one), 0.0)
        return LayoutPrice(busy_s, bubble_s, self._exposed(one, busy_s), self._update_s(one))

    def _rows(self, one: Candidate) -> int:
        return one.rows(self.batch_size)[0]

    def _computing(self, one: Candidate) -> float:
        """Return the seconds of forward and backward of a microbatch on the ranks of a replica that
        has all layers.
        """
        again = 1 + one.recompute * self._forward_part()
        return (
            again
            * self.profile.step(self._rows(one), "seconds")
            * self.profile.shares[one.tp, one.sp].seconds
        )

    def _forward_part(self) -> float:
        layers = self.profile.layers
        return sum(layer.keep_s for layer in layers) / max(
            sum(layer.seconds for layer in layers), 1e-12
        )

    def _pipeline(self, one: Candidate) -> tuple[float, float]:
        """Return for how long the longest rank computes in a pass, and for how long it waits."""
        cuts, layers, rows = (
            self.shapes.cuts(one.pp, one.virtual_stages),
            self.profile.layers,
            self._rows(one),
        )
        whole_s = sum(layer.seconds for layer in layers) or 1.0
        sent_s = self._sent(one) / len(cuts)
        work = []
        for stage, cut in enumerate(cuts):
            near = {
                one.home(other, one.pp)
                for other in (stage - 1, stage + 1)
                if 0 <= other < len(cuts)
            }
            ends = 2 * END_S * len(near - {one.home(stage, one.pp)})
            share = sum(layers[i].seconds for i in cut) / whole_s
            work.append(share * self._computing(one) + sent_s + ends)
        busy = [
            sum(work[s] for s in stages_of(rank, one.pp, len(cuts), one.home))
            for rank in range(one.pp)
        ]
        longest, links_s = max(busy), 0.0
        mesh = self._mesh(one.axes)
        for rank in range(one.pp - 1):
            nbytes = self._entering(cuts[rank + 1].start, rows) / one.sp
            sender, receiver = mesh.rank_at(0, rank, 0), mesh.rank_at(0, rank + 1, 0)
            links_s += 2 * self.network.message(sender, receiver, nbytes)
        fill_s = (sum(busy) - longest) / one.virtual_stages
        if one.schedule in ("zero-bubble", "zb-v"):
            fill_s *= self._forward_part()
        fill_s *= {"v-min": 4 / 3}.get(one.schedule, 1)  # of half of 1F1B's, as of two stages
        return one.microbatches * longest, fill_s + links_s

    def _update_s(self, one: Candidate) -> float:
        """Return the seconds of the update: in proportion to what a rank updates."""
        (full,) = self.shapes.states(1, 1, 1, 0, 1, False)
        states = self.shapes.states(one.tp, one.pp, one.virtual_stages, 0, 1, False, one.home)
        part = max(state.parameters for state in states) / max(full.parameters, 1)
        shared = one.replicas if one.zero or self._fused(one) else 1
        return min(cost.update_s for cost in self.profile.steps.values()) * part / shared

    def _through_memory(self, one: Candidate) -> bool:
        return self.network.has_shared and one.pp == one.tp == 1

    def _fused(self, one: Candidate) -> bool:
        return self._through_memory(one) and one.sp == 1 and not one.zero

    def _exposed(self, one: Candidate, busy_s: float) -> float:
        """Return the seconds of the messages that nothing hides; those of a pipeline's pass are in
        the pass.
        """
        network, result = self.network, 0.0 if one.pp > 1 else self._sent(one)
        if not self._fused(one):
            result += network.exchange("all-reduce", range(one.ranks), NUMBERS_BYTES)
        if one.pp > 1:
            mesh = self._mesh(one.axes)
            ends = mesh.rank_at(0, 0, 0), mesh.rank_at(0, one.pp - 1, 0)
            tied = self.shapes.tied_bytes(one.tp, one.pp, one.virtual_stages, one.home)
            result += network.exchange("all-reduce", ends, tied)
        return result + (self._sums(one, busy_s) if one.replicas > 1 else 0.0)

    def _sent(self, one: Candidate) -> float:
        """Return the seconds of the messages between the ranks of shared layers or positions, for a
        microbatch.
        """
        mesh, result = self._mesh(one.axes), 0.0
        ranks = [mesh.rank_at(0, 0, t, s) for s in range(one.sp) for t in range(one.tp)]
        for what, row_bytes, count in self.profile.shares[one.tp, one.sp].exchanges:
            nbytes = round(row_bytes * self._rows(one))
            for operation in ("all-reduce", "all-gather", "reduce-scatter"):
                if what.startswith(operation):
                    result += count * self.network.exchange(operation, ranks, nbytes)
                    break
            else:
                result += count * self.network.message(ranks[0], ranks[-1], nbytes)
        return result

    def _sums(self, one: Candidate, busy_s: float) -> float:
        """Return the seconds of the sums of gradients over the replicas, and of parameters that are
        gathered.
        """
        mesh, network, nodes = self._mesh(one.axes), self.network, self.network.nodes
        ranks = tuple(mesh.rank_at(d, 0, 0, s) for d in range(one.dp) for s in range(one.sp))
        sharing = 1  # groups of replicas that use a node's link at once
        if len({nodes[rank] for rank in ranks}) > 1:
            sharing = max(
                1, nodes.count(nodes[0]) // sum(nodes[rank] == nodes[0] for rank in ranks)
            )
        states = self.shapes.states(
            one.tp, one.pp, one.virtual_stages, one.zero, one.replicas, False, one.home
        )
        if one.zero:
            gathers, result = (2 if one.zero == 3 else 1), 0.0
            for nbytes in max(states, key=lambda item: item.total).lengths:
                if self._through_memory(one):  # parameters stand once, and are not gathered
                    result += network.shared(nbytes) / 2
                else:
                    result += network.exchange("reduce-scatter", ranks, nbytes, sharing)
                    result += gathers * network.exchange("all-gather", ranks, nbytes, sharing)
            return result
        nbytes = max(state.gradients for state in states)
        if self._through_memory(one):
            return network.shared(nbytes)
        whole_s = network.exchange("all-reduce", ranks, nbytes, sharing)
        if network.on_one_node or one.pp > 1:
            return whole_s
        # Between nodes buckets are summed while backward continues: all but the last may be hidden
        # under it.
        last_s = network.exchange("all-reduce", ranks, min(nbytes, BUCKET_BYTES), sharing)
        hidden = 1 - 1 / max(1, -(-nbytes // BUCKET_BYTES))
        return max(whole_s - (1 - self._forward_part()) * busy_s * hidden, last_s)

    # ---- bytes ----

    def memory(self, one: Candidate) -> Memory:
        """Return the bytes of the rank that has most, by kind."""
        return max(self.everyones_memory(one), key=lambda kinds: sum(kinds.values()))

    def everyones_memory(self, one: Candidate) -> list[Memory]:
        """Return the bytes of each of a pipeline's ranks, by kind."""
        once = one.zero > 0 and self._through_memory(one)
        states = self.shapes.states(
            one.tp, one.pp, one.virtual_stages, one.zero, one.replicas, once, one.home
        )
        return [self._held(one, *item) for item in zip(states, self._activations(one), strict=True)]

    def _held(self, one: Candidate, state: StateBytes, activations: int) -> Memory:
        shares = one.dp if self._fused(one) else 1  # how many times they stand once per node
        return {
            PARAMETERS: state.parameters // shares,
            GRADIENTS: state.gradients,
            STATE: state.optimizer // shares,
            ACTIVATIONS: activations,
            COMMUNICATION: state.units,
            BATCHES: sum(one.rows(self.batch_size)) * self.row_bytes // one.sp,
        }

    def _activations(self, one: Candidate) -> list[int]:
        """Return the activations of each of a pipeline's ranks: measured without one, else as
        layers keep them.
        """
        rows, layers, share = self._rows(one), self.profile.layers, one.tp * one.sp
        scale = rows / self.profile.layer_rows
        if one.pp == 1:
            if one.recompute:  # values between layers, and what one layer keeps
                values = sum(layer.value for layer in layers)
                most = max(saved_bytes(layers, range(i, i + 1)) for i in range(len(layers)))
                return [round(scale * (values + 2 * most) / share)]
            full = (
                self.profile.step(rows, "activations")
                * self.profile.shares[one.tp, one.sp].activations
            )
            return [round(full)]
        schedule = make(one.schedule, one.pp, one.microbatches, one.virtual_stages)
        cuts = self.shapes.cuts(one.pp, one.virtual_stages)
        result = []
        for rank in range(one.pp):
            stages = {s: cuts[s] for s in schedule.stages_of(rank)}
            entering = {s: self._entering(cut.start, rows) for s, cut in stages.items()}
            inside = {s: scale * saved_bytes(layers, cut) for s, cut in stages.items()}
            leaving = sum(
                self._entering(cut.stop, rows)
                for cut in stages.values()
                if cut.stop < cuts[-1].stop
            )
            peak = sum(entering.values()) + leaving  # a receive of each kind is posted ahead
            waiting = inside  # layers save what comes to them, too
            if one.recompute:
                waiting, peak = entering, peak + max(inside.values())
            result.append(round((peak_saved(schedule, rank, waiting) + peak) / share))
        return result

    def _entering(self, layer: int, rows: int) -> float:
        if not layer:
            return rows * self.row_bytes
        return self.profile.layers[layer - 1].value * rows / self.profile.layer_rows

    def _make_mesh(self, axes: tuple[int, int, int, int]) -> Mesh:
        dp, pp, tp, sp = axes
        return Mesh(dp, pp, tp, None if self.network.on_one_node else self.network.nodes, sp)


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its cost, the largest rank's bytes, and each pipeline stage's layers."""

    candidate: Candidate
    price: LayoutPrice
    memory: Memory
    split: Sequence[int]

    @property
    def bytes(self) -> int:
        """Of all kinds together."""
        return sum(self.memory.values())

    def options(self) -> dict[str, object]:
        """Return the train command's options that mean it."""
        return self.candidate.options() | ({"split": tuple(self.split)} if self.split else {})


@dataclass(frozen=True)
class LayoutSearch:
    """The fastest layouts in order, counts of rejections by reason, and the total."""

    best: tuple[PlannedLayout, ...]
    refused: Refusals
    looked_at: int


def plan(
    pricer: Pricer,
    limit_bytes: int | None = None,
    kept: int = KEPT,
    kind: Callable[[Candidate], Hashable] = lambda one: one,
) -> LayoutSearch:
    """Return the best layouts of a workload on the ranks of a machine.

    Args:
        pricer: of the workload there.
        limit_bytes: what a rank may have of everything; None for any.
        kept: how many are wanted.
        kind: of those of one kind only the best counts.

    Raises:
        LayoutError: when there is no layout, or none fits the memory; it says what comes nearest.
    """
    ranks = pricer.network.ranks
    result, refused = candidates(
        ranks, pricer.batch_size, pricer.profile.shares, len(pricer.profile.layers)
    )
    if not result:
        reasons = "; ".join(
            f"{count} fall out: {reason}" for reason, count in refused.most_common()
        )
        raise LayoutError(
            f"{ranks} ranks can have no layout of this model ({reasons}); give other ranks"
        )
    best: dict[Hashable, PlannedLayout] = {}
    too_large: list[PlannedLayout] = []
    prices = {element: pricer.price(element) for element in result}
    for one in sorted(result, key=lambda item: (prices[item].seconds, item)):
        if kind(one) in best:
            continue
        split = (
            tuple(map(len, pricer.shapes.cuts(one.pp, one.virtual_stages))) if one.pp > 1 else ()
        )
        planned = PlannedLayout(one, prices[one], pricer.memory(one), split)
        if limit_bytes is not None and planned.bytes > limit_bytes:
            too_large.append(planned)
            continue
        best[kind(one)] = planned
        if len(best) == kept:
            break
    if not best:
        nearest = min(too_large, key=lambda item: item.bytes)
        raise LayoutError(
            f"no layout of {ranks} rank{'s'[: ranks > 1]} fits {limit_bytes} bytes on each;"
            f" {nearest.candidate} would with {nearest.bytes}: give that much, more ranks or a"
            " smaller batch"
        )
    if too_large:
        refused[f"more than {limit_bytes} bytes on a rank, of those that might be as quick"] = len(
            too_large
        )
    return LayoutSearch(tuple(best.values()), refused, len(result))
