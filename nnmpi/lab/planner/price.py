"""Predict the step time and the memory of layouts, and find the fastest layouts.

    step = computing + bubble      measured for one replica; for a pipeline from its stages' layers
         + exposed messages        sums of gradients, exchanges of sharded layers and sequences,
                                   tied parameters, loss
         + update                  measured, in proportion to a rank's parameters

The bubble of a pipeline is what its schedule takes in a simulation beyond the computing of the
busiest rank, with the seconds of each stage and each message. On slow links most of it is waiting
for messages, in every microbatch.

The time of a message follows from the fitted or given links. A price may be off by 10 %, so
`auto_layout` races layouts with close prices. All possible layouts of the ranks are priced, at
first without a pipeline's bubble: only those that may still be among the best are simulated. The
impossible ones are counted by reason:

    ranks = dp x pp x tp x sp
        x  ZeRO 0..3
        x  pipeline, virtual stages, microbatches
        x  all activations, or as few as possible

Gradients are summed as by `--allreduce auto`. Which schedules are tried, with how many stages per
rank, is said by their rows in `schedule.schedules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import chain, product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Shape
from nnmpi.backend.backend import Backend
from nnmpi.base.errors import LayoutError, UsageError
from nnmpi.base.shard import split
from nnmpi.comm.algorithms.registry import SHARED
from nnmpi.comm.gradients import BUCKET_BYTES
from nnmpi.comm.group import Group
from nnmpi.comm.mesh import AXES, DP, PP, SP, TP, Mesh
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.executor import SERIAL, executable
from nnmpi.compose.layout import GradientExchange, Layout, check_layout
from nnmpi.lab.planner.network import PlannedNetwork
from nnmpi.memory.fitting import StageCost, peak_of_stages
from nnmpi.memory.ledger import ACTIVATIONS, BATCHES, COMMUNICATION, GRADIENTS, PARAMETERS, STATE
from nnmpi.memory.plan import LayerCost
from nnmpi.nn.chain import ChainLayer, ModelPart, open_chain, parameters_of
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import STAGES
from nnmpi.parallel.compressed import held_bytes, messages_of
from nnmpi.parallel.zero.storage import (
    UNIT_BYTES,
    StateBytes,
    UnitCut,
    as_units,
    cut_runs,
    predict_bytes,
)
from nnmpi.schedule.lower import lower
from nnmpi.schedule.partition import partition
from nnmpi.schedule.schedule import Home, Instruction, Kind, Schedule, stages_of
from nnmpi.schedule.schedules import SCHEDULES, PipelineName, example_of, make
from nnmpi.schedule.simulate import Costs, Lengths, simulate_schedule
from nnmpi.tensor.parameter import Parameter

NUMBERS_BYTES = 40  # loss, score, targets and hashes, which all ranks exchange in each step
END_S = 25e-6  # processor time of a pipeline's message at each end, unless measured
# Pipelines that are measured, with their stages per rank: without W, with it, and with 4 messages
# more for each rank.
WHOLE, HALVED, SENDING = MEASURED = ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)
BEST = 10  # layouts that `plan` returns by default
Memory = Mapping[str, int]
"""Bytes by the ledger's kinds."""
PlannedExchange: TypeAlias = tuple[str, Sequence[Sequence[int]], int, float]
"""A collective in some groups at once: operation, groups, bytes, and how often."""
PIPELINES = tuple((name, stages) for name, row in SCHEDULES.items() for stages in row.tried)
MICROBATCHES = (1, 2, 4, 8)  # per rank of a pipeline
Refusals: TypeAlias = Counter[str]
"""{reason: number of impossible layouts}."""


Division: TypeAlias = tuple[int, int, int, Home]
"""tp, pp, stages per rank, their home."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One layout.

    Attributes:
        dp, pp, tp, sp: ranks on each axis.
        zero: ZeRO stage of the replicas.
        pipeline, virtual_stages, microbatches: its schedule, stages per rank, parts of a batch.
        recompute: True saves as few activations as possible and recomputes the others.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sp: int = 1
    zero: int = 0
    pipeline: PipelineName = "1f1b"
    virtual_stages: int = 1
    microbatches: int = 1
    recompute: bool = False

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """dp, pp, tp and sp."""
        return self.dp, self.pp, self.tp, self.sp

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(self.axes)

    @property
    def replicas(self) -> int:
        """The number of ranks with equal parameters, which sum their gradients."""
        return self.dp * self.sp

    @property
    def division(self) -> Division:
        """How the ranks of a replica divide the model."""
        return self.tp, self.pp, self.virtual_stages, example_of(self.pipeline).home

    @property
    def kind(self) -> tuple[Any, ...]:
        """The axes in use, and whether ZeRO is in use. Prices of one kind have similar errors."""
        return tuple(size > 1 for size in self.axes), self.zero > 0

    def rows(self, batch_size: int) -> list[int]:
        """Return the rows of each microbatch on the replica with the most."""
        return [-(-len(part) // self.dp) for part in split(batch_size, self.microbatches)]

    def options(self) -> dict[str, Any]:
        """Return the train command's options for this layout, without the split and defaults."""
        result: dict[str, Any] = dict(zip(AXES, self.axes, strict=True))
        if self.zero:
            result["zero"] = self.zero
        if self.pp > 1:
            result |= {"pipeline": self.pipeline, "microbatches": self.microbatches}
            if self.virtual_stages > 1:
                result["virtual_stages"] = self.virtual_stages
        if self.recompute:
            result["activation_memory"] = "least"
        return result

    def __str__(self) -> str:
        words = [
            f"{name.replace('_', ' ')} {value}"
            for name, value in self.options().items()
            if value != 1 or name == "zero"
        ]
        axes = sum(size > 1 for size in self.axes)
        return ", ".join([" x ".join(words[:axes]) or "1 rank", *words[axes:]])


def candidates(
    ranks: int,
    batch_size: int,
    shares: Collection[tuple[int, int]],
    layers: int,
    compress: str | None = None,
) -> tuple[list[Candidate], Refusals]:
    """Return the possible layouts, and the number of impossible ones by reason.

    Args:
        ranks: the number of ranks.
        batch_size: rows of a global batch.
        shares: the possible (tp, sp) of the model.
        layers: the length of the model's chain.
        compress: see `GradientExchange`.
    """
    result: list[Candidate] = []
    exchange = GradientExchange(compress=compress)
    refused = Refusals()
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, tp, sp in product(divisors, divisors, divisors):
        dp, left = divmod(ranks, pp * tp * sp)
        if left:
            continue
        if (tp, sp) not in shares:
            refused[
                "the model's layers (tp) or positions (sp) cannot be sharded over so many ranks"
            ] += 1
        elif dp > batch_size:
            refused["more replicas than rows of a batch"] += 1
        else:
            for item in _pipelines(Candidate(dp, pp, tp, sp), batch_size, layers, refused):
                for zero, recompute in product(
                    (0, *STAGES) if item.replicas > 1 else (0,), (False, True)
                ):
                    one = replace(item, zero=zero, recompute=recompute)
                    result += _checked(one, exchange, refused)
    return result, refused


def _pipelines(
    plain: Candidate, batch_size: int, layers: int, refused: Refusals
) -> Iterator[Candidate]:
    if plain.pp == 1:
        yield plain
        return
    for (pipeline, virtual), times in product(PIPELINES, MICROBATCHES):
        microbatches = times * plain.pp
        if microbatches * plain.dp > batch_size:
            refused["more microbatches than the replicas have rows"] += 1
        elif plain.pp * virtual > layers:
            refused["more stages than the model has layers to cut between"] += 1
        else:
            yield replace(
                plain, pipeline=pipeline, virtual_stages=virtual, microbatches=microbatches
            )


def _checked(
    candidate: Candidate, exchange: GradientExchange, refused: Refusals
) -> Iterator[Candidate]:
    options = candidate.options()
    options.pop("microbatches", None)
    try:
        check_layout(Layout(**options), exchange=exchange)
    except UsageError as error:
        refused[str(error).partition(",")[0].partition(";")[0]] += 1
    else:
        yield candidate


# ---- measurements ----


Share = tuple[int, int]
"""(tp, sp): the ranks over which layers, and positions, are sharded."""


@dataclass(frozen=True)
class StepCost:
    """A step of one replica on one rank.

    Attributes:
        seconds: of all but the update.
        update_s: seconds of the optimizer's update.
        least_s: seconds of all but the update, with as few activations as possible.
    """

    seconds: float
    update_s: float
    least_s: float


@dataclass(frozen=True)
class ShareCost:
    """A step of a replica on its (tp, sp) ranks, relative to one rank.

    Attributes:
        seconds: the ratio of a rank's to one rank's; messages are not included.
        exchanges: (operation, axis, bytes per row, count) of the messages between the ranks.
        least_s: the ratio with the least activations, whose repeated messages are included.
    """

    seconds: float = 1.0
    exchanges: tuple[tuple[str, str, float, int], ...] = ()
    least_s: float = 1.0


def at_rows(known: Mapping[int, float], rows: int) -> float:
    """Return what is known for some numbers of rows for any, on a line through two of them."""
    measured = sorted(known)
    if len(measured) == 1:
        return known[measured[0]] * rows / measured[0]
    right = min(max(int(np.searchsorted(measured, rows)), 1), len(measured) - 1)
    low, high = measured[right - 1], measured[right]
    return max(known[low] + (known[high] - known[low]) * (rows - low) / (high - low), 0.0)


@dataclass(frozen=True)
class Profile:
    """The measurements of a workload.

    Attributes:
        steps: {rows: cost}.
        shares: {(tp, sp): cost}.
        layers: in the order of the chain, for `layer_rows` rows. Only ratios of their times are
            used.
        few: the same for the fewest rows in `steps`, of which calls take the most.
        raced: {layout as text: seconds of a step in a race}.
        once_s: the seconds of a step that it takes once, however many microbatches it has.
        piped_s: {(schedule, stages per rank, rows): the seconds of one more microbatch of so many
            rows in a pipeline of two ranks}; without those that are impossible.
        zero_s: {ZeRO stage: the seconds of its step beside computing, sums and update}, such as its
            meetings, on the ranks that measured.
        date: when it was measured.
        busy: the share of the processor time that other programs took meanwhile.
    """

    steps: Mapping[int, StepCost]
    shares: Mapping[Share, ShareCost]
    layers: tuple[LayerCost, ...]
    layer_rows: int
    few: tuple[LayerCost, ...] = ()
    raced: Mapping[str, float] = field(default_factory=dict)
    once_s: float = 0.0
    piped_s: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    zero_s: Mapping[int, float] = field(default_factory=dict)
    date: str = ""
    busy: float = 0.0

    def step(self, rows: int, name: str) -> float:
        """Return a field of `StepCost` for any number of rows, interpolated linearly."""
        return at_rows({item: getattr(cost, name) for item, cost in self.steps.items()}, rows)

    def layer_s(self, rows: int, name: str) -> list[float]:
        """Return a time of each layer for any number of rows, interpolated linearly."""
        fewest = min(self.steps)
        part = min(max(rows - fewest, 0) / max(self.layer_rows - fewest, 1), 1.0)
        return [
            (1 - part) * getattr(few, name) + part * getattr(most, name)
            for few, most in zip(self.few or self.layers, self.layers, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, the inverse of `files.rebuilt`."""
        result = asdict(self)
        names = "steps", "shares", "zero_s", "piped_s"
        return result | {name: list(result[name].items()) for name in names}


# ---- prices ----


@dataclass(frozen=True)
class LayoutPrice:
    """The predicted seconds of a layout's step.

    Attributes:
        computing_s: forward and backward of the busiest rank.
        bubble_s: that rank's waiting time in its pipeline.
        exposed_s: messages that no computation hides.
        update_s: of the weights.
    """

    computing_s: float
    bubble_s: float
    exposed_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        """The sum: seconds of a step."""
        return self.computing_s + self.bubble_s + self.exposed_s + self.update_s


class ModelShapes:
    """A model's shapes under a layout: the pipeline's stages, and each rank's bytes.

    Args:
        build: returns the model, uninitialized.
        dtype: of the model.
        state_arrays: arrays of each parameter's size in the optimizer's state.
        sample: one row of model input.
        seconds: of the layers, to balance stages.
        backend: needed for shapes; nothing is computed.
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
        self._build, self._dtype, self._state_arrays = build, dtype, state_arrays
        self._sample, self._seconds, self.backend = sample, seconds, backend
        self.cuts, self.states = cache(self._cuts), cache(self._states)
        self.tied_bytes, self.gradients = cache(self._tied_bytes), cache(self._gradients)
        self._model = cache(self._spread)

    def _tied_bytes(self, division: Division) -> int:
        """Return the bytes of tied parameters with copies on several ranks of a pipeline."""
        tied = sum(parameter.size for parameter in self._tied(division))
        return tied * np.dtype(self._dtype).itemsize

    def _tied(self, division: Division) -> set[Parameter]:
        """Return the parameters that several ranks of a pipeline have."""
        ranks = Counter(
            parameter
            for stages in self._stages_of(division)
            for parameter in parameters_of(list(chain.from_iterable(stages)))
        )
        return {parameter for parameter, count in ranks.items() if count > 1}

    def _gradients(self, division: Division) -> tuple[tuple[Shape, ...], ...]:
        """Return the shapes of the gradients on each pipeline rank."""
        if division[1] == 1:
            model, _ = self._model(division[0])
            ranks = [[*model.parameters()]]
        else:
            ranks = [
                [*parameters_of(list(chain.from_iterable(stages)))]
                for stages in self._stages_of(division)
            ]
        return tuple(
            tuple(item.declared for item in parameters if item.requires_grad)
            for parameters in ranks
        )

    @property
    def itemsize(self) -> int:
        """The bytes of a number."""
        return np.dtype(self._dtype).itemsize

    def _stages_of(self, division: Division) -> list[list[Sequence[ChainLayer]]]:
        """Return the layers of each stage of each rank of a pipeline."""
        tp, pp, virtual, home = division
        _, layers = self._model(tp)
        cuts = self.cuts(pp, virtual)
        return [
            [layers[cuts[s].start : cuts[s].stop] for s in stages_of(rank, pp, len(cuts), home)]
            for rank in range(pp)
        ]

    def _states(
        self, division: Division, zero: int, replicas: int, once: bool = False
    ) -> tuple[StateBytes, ...]:
        """Return the bytes of weights, gradients and optimizer state on each pipeline rank.

        Args:
            once: the replicas read one copy of the weights in their node's shared memory.
        """
        itemsize, arrays = np.dtype(self._dtype).itemsize, self._state_arrays
        model, _ = self._model(division[0])
        parts: list[tuple[Module, UnitCut | None]] = [(model, None)]
        if division[1] > 1:
            tied, parts = self._tied(division), []
            for stages in self._stages_of(division):
                part, units = ModelPart(model, list(chain.from_iterable(stages))), None
                if zero > 1:
                    limit = UNIT_BYTES[zero]
                    cut = [cut_runs(layers, limit, itemsize, zero) for layers in stages]
                    units = as_units(part, list(chain.from_iterable(cut)), tied)
                parts.append((part, units))
        return tuple(
            predict_bytes(part, zero, 0, replicas, itemsize, arrays, None, once, units=units)
            for part, units in parts
        )

    def _spread(self, tp: int) -> tuple[Module, tuple[ChainLayer, ...]]:
        """Return the model as tp rank 0 has it, uninitialized, and its chain."""
        model = self._build()
        if tp > 1:

            def spread(group: Group) -> Module:
                layout = Layout(1, 1, tp)
                return arrange(
                    self._build(), group, layout, self._sample, self._dtype, self.backend
                ).model

            model = simulate(spread, tp)[0]
        return model, open_chain(model)

    def _cuts(self, pp: int, virtual: int) -> tuple[range, ...]:
        return partition(self._seconds, pp * virtual)


SegmentCosts: TypeAlias = tuple[tuple[int, ...], dict[int, StageCost]]
"""The segments of each stage, and what a microbatch costs each segment."""


class Pricer:
    """Price layouts of one workload on one machine.

    Args:
        batch_size: rows of the global batch.
        row_bytes: of a sample and its labels.
        profile: measurements of the workload.
        network: costs of messages.
        shapes: of the model under layouts.
        count: (ranks, options of a layout) -> its segments and their bytes.
        compress: how gradients are compressed, see `GradientExchange`.
    """

    def __init__(
        self,
        batch_size: int,
        row_bytes: int,
        profile: Profile,
        network: PlannedNetwork,
        shapes: ModelShapes,
        count: Callable[[int, Mapping[str, Any]], SegmentCosts],
        compress: str | None = None,
    ) -> None:
        self.compress = compress
        self.batch_size, self.row_bytes, self.profile = batch_size, row_bytes, profile
        self.network, self.shapes = network, shapes
        self._mesh = cache(lambda dp, pp, tp, sp: Mesh(dp, pp, tp, network.nodes, sp))
        self._piped, self._measure, self._counted = cache(self._bubble), count, cache(self._count)
        self._layer_s, self._own_s = cache(profile.layer_s), cache(self._part_s)
        self._lowered = cache(lambda *schedule: lower(make(*schedule)))

    # ---- seconds ----

    def price(self, candidate: Candidate, simulated: bool = True) -> LayoutPrice:
        """Return the price of a step; of a pipeline that is not simulated, the least possible."""
        busy_s, bubble_s = self._computing(candidate), 0.0
        if candidate.pp > 1:
            busy_s, _ = self._work(candidate)
            bubble_s = self._piped(replace(candidate, zero=0)) if simulated else 0.0
        return LayoutPrice(
            busy_s, bubble_s, self._exposed(candidate, busy_s, bubble_s), self._update_s(candidate)
        )

    def _rows(self, candidate: Candidate) -> int:
        return candidate.rows(self.batch_size)[0]

    def _computing(self, candidate: Candidate) -> float:
        """Return a microbatch's seconds of forward and backward through all layers of a replica."""
        one, name, factor = candidate, "seconds", 1.0
        if one.recompute and one.pp == 1 and one.zero < 2:
            name = "least_s"  # of a plan, which computes some layers again
        elif one.recompute:  # whole segments
            factor += self._forward_part(self._rows(one))
        step_s = self.profile.step(self._rows(one), name)
        once_s = min(step_s, self.profile.once_s) if one.pp > 1 else 0.0
        return factor * (step_s - once_s) * getattr(self.profile.shares[one.tp, one.sp], name)

    def _forward_part(self, rows: int) -> float:
        return sum(self._layer_s(rows, "keep_s")) / max(sum(self._layer_s(rows, "seconds")), 1e-12)

    def _work(self, candidate: Candidate) -> tuple[float, list[float]]:
        """Return the busiest rank's seconds of computing, and those of each stage's microbatch."""
        schedule, cuts = self._stages(candidate)
        layer_s = self._layer_s(self._rows(candidate), "seconds")
        scale = self._computing(candidate) / (sum(layer_s) or 1.0)
        sent_s = self._seconds(self._sent(candidate)) / len(cuts)
        part_s, end_s = self._own_s(Kind.W in schedule.kinds, self._rows(candidate))
        work = [
            scale * sum(layer_s[i] for i in cut)
            + part_s / candidate.virtual_stages
            + sent_s
            + 2 * end_s * (schedule.is_cut(stage - 1) + schedule.is_cut(stage))
            for stage, cut in enumerate(cuts)
        ]
        most_s = max(
            sum(work[stage] for stage in schedule.stages_of(rank)) for rank in range(candidate.pp)
        )
        return self.profile.once_s + most_s * candidate.microbatches, work

    def _part_s(self, halved: bool, rows: int) -> tuple[float, float]:
        """Return the processor time of a pipeline's microbatch that its layers and messages do not
        take, however many stages a rank has, and that of each end of a message.

        Layers in a stage of their own take longer than in a whole step, where convolutions pass
        their blocks on in the cache: by 0.4 of 2.7 ms, so it grows with the rows.
        """
        beside_s: dict[tuple[str, int], dict[int, float]] = {key: {} for key in MEASURED}
        for (name, virtual, count), piped_s in self.profile.piped_s.items():
            layer_s, cuts = self._layer_s(count, "seconds"), self.shapes.cuts(2, virtual)
            most_s = max(sum(layer_s[i] for cut in cuts[rank::2] for i in cut) for rank in (0, 1))
            step_s = self.profile.step(count, "seconds") - self.profile.once_s
            beside_s[name, virtual][count] = piped_s - step_s * most_s / (sum(layer_s) or 1.0)
        whole_s, halved_s, sending_s = (
            at_rows(known, rows) if known else 0.0 for known in beside_s.values()
        )
        end_s = max(0.0, sending_s - whole_s) / 4 if beside_s[SENDING] else END_S
        return max(0.0, (halved_s if halved else whole_s) - 2 * end_s), end_s

    def _pipeline(self, candidate: Candidate) -> tuple[Schedule, Costs, Lengths]:
        """Return a pipeline's schedule, its seconds, and the bytes of its messages."""
        schedule, cuts = self._stages(candidate)
        rows = self._rows(candidate)
        forward = self._forward_part(rows)
        backward = 1 - forward
        _, work = self._work(candidate)
        costs = {
            Kind(kind): [part * seconds for seconds in work]
            for kind, part in zip(
                "FBIW", (forward, backward, backward / 2, backward / 2), strict=True
            )
        }

        def lengths(send: Instruction) -> tuple[int]:
            layer = cuts[send.stage + (send.kind is Kind.SEND_ACT)].start
            return (round(self._entering(layer, rows) / candidate.sp),)

        return schedule, costs, lengths

    def _bubble(self, candidate: Candidate) -> float:
        """Return the busiest rank's seconds of waiting in a step."""
        schedule, costs, lengths = self._pipeline(candidate)
        busy_s, _ = self._work(candidate)
        pipelines = self._mesh(*candidate.axes).groups(PP)
        return (
            self.profile.once_s
            - busy_s
            + max(
                simulate_schedule(schedule, costs, machine, lengths).makespan_s
                for machine in self.network.machine.parts(pipelines, candidate.ranks)
            )
        )

    def _stages(self, candidate: Candidate) -> tuple[Schedule, Sequence[range]]:
        pp, virtual = candidate.pp, candidate.virtual_stages
        schedule = self._lowered(candidate.pipeline, pp, candidate.microbatches, virtual)
        return schedule, self.shapes.cuts(pp, virtual)

    def _update_s(self, candidate: Candidate) -> float:
        """Return the seconds of the update, in proportion to a rank's parameters, and of ZeRO."""
        (full,) = self.shapes.states(Candidate().division, 0, 1)  # one rank
        states = self.shapes.states(candidate.division, 0, 1)
        part = max(state.parameters for state in states) / max(full.parameters, 1)
        shared = candidate.replicas if candidate.zero or self._fused(candidate) else 1
        update_s = min(cost.update_s for cost in self.profile.steps.values())
        return update_s * part / shared + self.profile.zero_s.get(candidate.zero, 0.0)

    def _shares_memory(self, candidate: Candidate) -> bool:
        """Whether replicas sum their gradients in their node's shared memory."""
        nodes, groups = self.network.nodes, self._mesh(*candidate.axes).groups(DP, SP)
        alone = all(len({nodes[rank] for rank in ranks}) == 1 for ranks in groups)
        return alone and candidate.replicas > 1 and not self.shapes.backend.is_device

    def _fused(self, candidate: Candidate) -> bool:
        """Whether each rank updates a slice of the node's parameters, see `parallel.fused`."""
        whole = candidate.pp == candidate.tp == 1 and self.compress is None
        return whole and not candidate.zero and self._shares_memory(candidate)

    def _through_memory(self, candidate: Candidate) -> bool:
        """Whether the sums in shared memory have a fitted time."""
        is_plain = self.compress is None
        return is_plain and self.network.has_shared and self._shares_memory(candidate)

    def _exposed(self, candidate: Candidate, busy_s: float, bubble_s: float) -> float:
        """Return the seconds of messages that no computation hides, except a pipeline's.

        With a pipeline, `_work` adds those of sharded layers and `_bubble` those between stages.
        """
        return (
            (0.0 if candidate.pp > 1 else self._seconds(self._sent(candidate)))
            + self._seconds(self._agreements(candidate))
            + self._exposed_sums(candidate, busy_s, bubble_s)
        )

    def _seconds(self, exchanges: Iterable[PlannedExchange]) -> float:
        return sum(
            times * self.network.exchange(what, groups, nbytes)
            for what, groups, nbytes, times in exchanges
        )

    def _agreements(self, candidate: Candidate) -> Iterator[PlannedExchange]:
        """Yield the exchanges of numbers, of gradient norms and of tied parameters."""
        mesh = self._mesh(*candidate.axes)
        if not self._fused(candidate):
            for axes in (AXES, AXES if candidate.zero else (PP, TP)):  # numbers, gradient norm
                groups = mesh.groups(*axes)
                yield "all-gather", groups, len(groups[0]) * NUMBERS_BYTES, 1
        if candidate.pp > 1:
            # assume that the first and the last stage share them, as embedding and output layer do
            ends = [(ranks[0], ranks[-1]) for ranks in mesh.groups(PP)]
            yield "all-reduce", ends, self.shapes.tied_bytes(candidate.division), 1

    def _sent(self, candidate: Candidate) -> Iterator[PlannedExchange]:
        """Yield a microbatch's exchanges between the ranks of sharded layers."""
        mesh, share = self._mesh(*candidate.axes), self.profile.shares[candidate.tp, candidate.sp]
        for what, axis, row_bytes, count in share.exchanges:
            nbytes = round(row_bytes * self._rows(candidate))
            yield what.partition(" ")[0], mesh.groups(axis), nbytes, count

    def _sums(self, candidate: Candidate) -> Iterator[PlannedExchange]:
        """Yield the sums of gradients over replicas, and the gathers of parameters."""
        if candidate.replicas == 1:
            return
        groups = self._mesh(*candidate.axes).groups(DP, SP)
        if self.compress is not None:  # never with ZeRO
            yield from self._compressed(self.compress, candidate, groups)
            return
        states = self.shapes.states(candidate.division, candidate.zero, candidate.replicas)
        in_memory = self._through_memory(candidate)
        if not candidate.zero:
            nbytes = max(state.gradients for state in states)
            yield SHARED if in_memory else "all-reduce", groups, nbytes, 1
            return
        # in a pipeline each microbatch has its own sums, and its own gathers
        piped = candidate.pp > 1 and candidate.zero > 1
        times = candidate.microbatches if piped else 1
        halved = piped and Kind.W in self._stages(candidate)[0].kinds
        gathers = times * (2 + halved) if candidate.zero == 3 else 1
        largest = max(states, key=lambda item: item.total)
        if not in_memory:
            for nbytes in largest.gathered:
                yield "all-gather", groups, nbytes, gathers
        for nbytes in largest.lengths:
            if in_memory:  # one shared copy: nothing to gather
                yield SHARED, groups, nbytes, 0.5
            else:
                yield "reduce-scatter", groups, nbytes, times
                yield "all-gather", groups, nbytes, gathers

    def _compressed(
        self, compress: str, candidate: Candidate, groups: Sequence[Sequence[int]]
    ) -> Iterator[PlannedExchange]:
        """Yield the collectives of compressed gradients, of the pipeline rank with most bytes."""
        shapes, itemsize = self.shapes.gradients(candidate.division), self.shapes.itemsize
        by_rank = [messages_of(compress, items, itemsize) for items in shapes]
        for what, given in max(by_rank, key=lambda messages: sum(n for _, n in messages)):
            # a gather's buffer has the parts of all
            yield what, groups, given * (candidate.replicas if what == "all-gather" else 1), 1

    def _buckets(self, candidate: Candidate, sums: Sequence[PlannedExchange]) -> int:
        """Return how many buckets are summed one by one, so that the backward pass may hide all but
        the last.
        """
        alone = candidate.pp > 1 or len({*self.network.nodes}) == 1
        if alone or not sums or sums[0][0] != "all-reduce":
            return 1
        return max(1, -(-sums[0][2] // BUCKET_BYTES))

    def _exposed_sums(self, candidate: Candidate, busy_s: float, bubble_s: float) -> float:
        """Return the seconds of summing gradients and gathering parameters that are not hidden."""
        sums = [*self._sums(candidate)]
        total_s = self._seconds(sums)
        if not sums or sums[0][0] != "all-reduce" or self.compress is not None:
            return total_s  # compressed ones begin after the backward pass
        what, groups, nbytes, _ = sums[0]
        # In a pipeline the other stages end earlier, and sum while it drains.
        hidden_s, least = bubble_s, groups[: candidate.tp]
        if candidate.pp == 1:
            hidden_s, least = busy_s * (1 - 1 / self._buckets(candidate, sums)), groups
            nbytes = min(nbytes, BUCKET_BYTES)
        least_s = self.network.exchange(what, least, nbytes)
        backward = 1 - self._forward_part(self._rows(candidate))
        return max(total_s - backward * hidden_s, least_s)

    # ---- bytes ----

    def memory(self, candidate: Candidate) -> Memory:
        """Return the bytes by kind, of the rank with the largest sum."""
        return max(self.memory_of_ranks(candidate), key=lambda kinds: sum(kinds.values()))

    def memory_of_ranks(self, candidate: Candidate) -> list[Memory]:
        """Return the bytes by kind of each rank of a pipeline."""
        once = candidate.zero > 0 and self._shares_memory(candidate)
        states = self.shapes.states(candidate.division, candidate.zero, candidate.replicas, once)
        kept = [0] * len(states)
        if self.compress is not None:
            kept = [
                held_bytes(self.compress, shapes, self.shapes.itemsize)
                for shapes in self.shapes.gradients(candidate.division)
            ]
        return [
            self._memory_of(candidate, *item)
            for item in zip(states, self._activations(candidate), kept, strict=True)
        ]

    def _memory_of(
        self, candidate: Candidate, state: StateBytes, activations: int, kept: int
    ) -> Memory:
        # the fused update keeps one shared copy per node
        shares = candidate.replicas if self._fused(candidate) else 1
        return {
            PARAMETERS: state.parameters // shares,
            GRADIENTS: state.gradients,
            STATE: state.optimizer // shares,
            ACTIVATIONS: activations,
            COMMUNICATION: state.units + kept,
            BATCHES: sum(candidate.rows(self.batch_size)) * self.row_bytes // candidate.sp,
        }

    def _activations(self, candidate: Candidate) -> list[int]:
        """Return the activation bytes of each rank of a pipeline: what a pass counts, from the
        measured costs of its microbatches.
        """
        one, stages = candidate, candidate.pp * candidate.virtual_stages
        zero = one.zero if one.zero > 1 else 0
        in_segments = one.pp > 1 or zero > 1
        halves = one.pp > 1 and Kind.W in self._stages(one)[0].kinds
        measured = Candidate(
            1 + (one.dp > 1 and zero > 0),
            stages,
            one.tp,
            one.sp,
            zero,
            "zero-bubble" if halves else "1f1b",
            1,
            min(stages, 2),
            one.recompute and not in_segments,
        )
        counts, costs = self._counted(measured, self._rows(one))
        schedule = executable(
            one.pipeline if one.pp > 1 else SERIAL,
            one.pp,
            one.microbatches,
            one.virtual_stages,
            example_of(one.pipeline).home,
            counts,
            zero,
        )
        own = [{s: costs[s] for s in schedule.stages_of(rank)} for rank in range(one.pp)]
        recomputed = one.recompute and in_segments
        return [
            int(peak_of_stages(item, schedule, rank, item if recomputed else ()))
            for rank, item in enumerate(own)
        ]

    def _count(self, layout: Candidate, rows: int) -> SegmentCosts:
        parts = layout.microbatches
        options = layout.options() | {"batch_size": rows * parts * layout.dp}
        if parts > 1:
            options["split"] = tuple(map(len, self.shapes.cuts(layout.pp, 1)))
        return self._measure(layout.ranks, options)

    def _entering(self, layer: int, rows: int) -> float:
        if not layer:
            return rows * self.row_bytes
        return self.profile.layers[layer - 1].value * rows / self.profile.layer_rows


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its price, each stage's number of layers, and what counts its bytes."""

    candidate: Candidate
    price: LayoutPrice
    split: Sequence[int]
    count: Callable[[Candidate], Memory]

    @cached_property
    def memory(self) -> Memory:
        """The bytes by kind, of the rank with the largest sum."""
        return self.count(self.candidate)

    @property
    def bytes(self) -> int:
        """The sum over all kinds."""
        return sum(self.memory.values())

    def options(self) -> dict[str, object]:
        """Return the train command's options for this layout, with the split."""
        return self.candidate.options() | ({"split": tuple(self.split)} if self.split else {})


@dataclass(frozen=True)
class LayoutSearch:
    """The fastest layouts in order, impossible layouts by reason, and the number of priced ones."""

    best: tuple[PlannedLayout, ...]
    refused: Refusals
    considered: int


def plan(
    pricer: Pricer,
    limit_bytes: int | None = None,
    count: int = BEST,
    kind: Callable[[Candidate], Hashable] = lambda candidate: candidate,
) -> LayoutSearch:
    """Return the best layouts of a workload on a machine.

    Args:
        pricer: of the workload on the machine.
        limit_bytes: the memory of a rank; None for no limit.
        count: the maximal number of layouts returned.
        kind: layout -> its kind. Only the fastest layout of each kind is returned.

    Raises:
        LayoutError: when no layout is possible, or none fits the memory. It names the one that
            needs the least.
    """
    ranks = pricer.network.ranks
    result, refused = candidates(
        ranks,
        pricer.batch_size,
        pricer.profile.shares,
        len(pricer.profile.layers),
        pricer.compress,
    )
    if not result:
        reasons = "; ".join(
            f"{count} excluded: {reason}" for reason, count in refused.most_common()
        )
        raise LayoutError(
            f"{ranks} ranks can have no layout of this model ({reasons}); give other ranks"
        )
    best: dict[Hashable, PlannedLayout] = {}
    too_large: list[PlannedLayout] = []
    # Most pipelines are too slow even without a bubble, and need not be simulated.
    queue = sorted((pricer.price(item, False).seconds, item.pp == 1, item) for item in result)
    while queue and len(best) < count:
        _, simulated, candidate = heappop(queue)
        if kind(candidate) in best:
            continue
        price = pricer.price(candidate)
        if not simulated:
            heappush(queue, (price.seconds, True, candidate))
            continue
        split = (
            tuple(map(len, pricer.shapes.cuts(candidate.pp, candidate.virtual_stages)))
            if candidate.pp > 1
            else ()
        )
        planned = PlannedLayout(candidate, price, split, pricer.memory)
        if limit_bytes is not None and planned.bytes > limit_bytes:
            too_large.append(planned)
            continue
        best[kind(candidate)] = planned
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
