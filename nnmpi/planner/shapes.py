"""A model's shapes on the ranks of a layout, without values: where its chain is cut, and what each rank holds of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from nnmpi.backend.backend import Backend
from nnmpi.comm.algorithms.registry import AUTO
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.errors import NnmpiError
from nnmpi.memory.optimal import OptimalPlans
from nnmpi.memory.plan import Costs, LayerCost, Plan, keep_all, price_plan
from nnmpi.nn.chain import ChainLayer, ModelPart, open_chain
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm
from nnmpi.parallel.zero.units import StateBytes, predict_bytes
from nnmpi.planner.activations import measure_costs, measure_pipeline, measure_whole
from nnmpi.planner.profile import LONGEST_S, Profile, Workload, between
from nnmpi.planner.space import Candidate
from nnmpi.schedule.partition import partition


@dataclass(frozen=True)
class CutModel:
    """A model cut into stages in one way: where, the parts of the pipeline's ranks, each sort once, and its ties."""

    cuts: tuple[range, ...]
    parts: tuple[Module, ...]
    sorts: tuple[int, ...]  # which of the parts each rank has
    tied_bytes: int  # of parameters that stand on several ranks


@dataclass(frozen=True)
class ComputedAgain:
    """What a budget for activations costs.

    Attributes:
        bytes: that the activations of each of a pipeline's ranks take at most; more than the budget where nothing fits.
            Which plan a run takes hangs on the times that it measures itself: it may take fewer.
        more: for each stage, which part of a microbatch's time comes on top.
    """

    bytes: tuple[int, ...]
    more: tuple[float, ...]


class ModelShapes:
    """The shapes of one workload's model; each is found once.

    Args:
        workload: whose model it is.
        profile: its layers' times, by which the chain is cut.
        backend: for shapes alone; nothing is computed.
    """

    def __init__(self, workload: Workload, profile: Profile, backend: Backend) -> None:
        self.workload, self.profile, self._backend = workload, profile, backend
        self._models: dict[int, tuple[Module, tuple[ChainLayer, ...]]] = {}
        self._parts: dict[tuple[int, int, int], CutModel] = {}
        self._states: dict[tuple[int, ...], tuple[StateBytes, ...]] = {}
        self._whole: dict[tuple[tuple[int, int], int, bool], int] = {}
        self._stages: dict[tuple[Any, ...], list[int]] = {}
        self._plans: dict[tuple[int, ...], OptimalPlans] = {}
        self._again: dict[Candidate, ComputedAgain] = {}

    def state(self, tp: int, pp: int, virtual: int, zero: int, replicas: int, once: bool) -> StateBytes:
        """Return what the rank with most of it holds; see `states`."""
        return max(self.states(tp, pp, virtual, zero, replicas, once), key=lambda each: each.total)

    def states(self, tp: int, pp: int, virtual: int, zero: int, replicas: int, once: bool) -> tuple[StateBytes, ...]:
        """Return what each sort of a pipeline's ranks holds; that of all layers without one."""
        key = (tp, pp, virtual, zero, replicas, int(once))
        if key not in self._states:
            itemsize, arrays = np.dtype(self.workload.dtype).itemsize, self.workload.state_arrays
            unit_bytes = self.workload.unit_bytes if zero else None
            parts = [self._model(tp)[0]] if pp == 1 else self.part(tp, pp, virtual).parts
            self._states[key] = tuple(
                predict_bytes(each, zero, 0, replicas, itemsize, arrays, unit_bytes, once) for each in parts
            )
        return self._states[key]

    def _model(self, tp: int) -> tuple[Module, tuple[ChainLayer, ...]]:
        """Return the model as the first of tp ranks has it, without values, and its chain."""
        if tp not in self._models:
            model = self.workload.build()
            if tp > 1:
                sample = self.workload.samples.rows(np.arange(1), self.workload.dtype)

                def spread(group: Group) -> Module:
                    own = self.workload.build()
                    return arrange(own, group, Layout(1, 1, tp), sample, self.workload.dtype, self._backend).model

                model = simulate(spread, tp)[0]
            self._models[tp] = model, open_chain(model)
        return self._models[tp]

    def channels(self, tp: int) -> list[list[int]]:
        """Return for each layer of the chain how many channels each batch normalization in it has."""
        layers = self._model(tp)[1]
        inside = [[each for _, member in layer.members for _, each in member.named_modules()] for layer in layers]
        return [[each.weight.size for each in modules if isinstance(each, BatchNorm)] for modules in inside]

    @cached_property
    def _layer_seconds(self) -> list[float]:
        return [layer.seconds for layer in self.profile.layers[max(self.profile.layers)]]

    def part(self, tp: int, pp: int, virtual: int) -> CutModel:
        """Return where the chain is cut for so many stages, by the times of the most rows."""
        key = (tp, pp, virtual)
        if key not in self._parts:
            model, layers = self._model(tp)
            cuts = partition(self._layer_seconds, pp * virtual)
            ids = [{id(p): p.size for _, module in layer.members for p in module.parameters()} for layer in layers]
            own = [[i for cut in cuts[rank::pp] for i in cut] for rank in range(pp)]
            # Ranks whose layers have parameters of the same sizes, as those with the blocks of a GPT, hold as much.
            alike = {tuple(tuple(ids[i].values()) for i in each): each for each in own}
            parts = tuple(ModelPart(model, [layers[i] for i in each]) for each in alike.values())
            order = list(alike)
            sorts = tuple(order.index(tuple(tuple(ids[i].values()) for i in each)) for each in own)
            held = [{number: size for i in each for number, size in ids[i].items()} for each in own]
            times = Counter(number for each in held for number in each)
            sizes = {number: size for each in held for number, size in each.items()}
            tied = sum(sizes[number] for number, count in times.items() if count > 1)
            self._parts[key] = CutModel(cuts, parts, sorts, tied * np.dtype(self.workload.dtype).itemsize)
        return self._parts[key]

    def activations(self, one: Candidate, rows: Sequence[int]) -> list[int]:
        """Return the activations of each of a pipeline's ranks; one number of ranks without one.

        Microbatches that take long are told from those of fewer rows.

        Args:
            one: the layout.
            rows: of each microbatch on a replica.
        """
        if one.activation_memory:
            return list(self.again(one, max(rows)).bytes)
        few = self._measured_rows(max(rows))
        if len(few) == 1:
            return self._activations(one, rows)
        places = zip(*(self._activations(one, [count] * len(rows)) for count in few), strict=True)
        return [round(between(dict(zip(few, known, strict=True)), max(rows))) for known in places]

    def _measured_rows(self, rows: int) -> list[int]:
        """Return for how many rows a microbatch of so many is measured: two fewer ones where it would take long."""
        known = sorted(self.profile.steps[1, 1])
        most = max([r for r in known if self.profile.seconds((1, 1), r) <= LONGEST_S], default=known[0])
        return [rows] if rows <= most else sorted({max(most // 2, 1), most})

    def _activations(self, one: Candidate, rows: Sequence[int]) -> list[int]:
        if one.pp == 1:
            return [self._of_whole((one.tp, one.sp), rows[0], one.zero < 2)]
        key = (one.axes[1:], one.schedule, one.virtual_stages, one.microbatches, one.recompute, max(rows))
        if key not in self._stages:
            cuts = self.part(one.tp, one.pp, one.virtual_stages).cuts
            self._stages[key] = measure_pipeline(self.workload, one, cuts, max(rows), self._backend)
        return self._stages[key]

    def again(self, one: Candidate, rows: int) -> ComputedAgain:
        """Return what a budget for activations costs.

        Args:
            one: the layout, with a budget.
            rows: of its longest microbatch on a replica.
        """
        alike = replace(one, zero=one.zero if one.zero > 1 else 0, allreduce=AUTO)
        if alike not in self._again:
            try:
                found = self._in_whole(one, rows)
            except NnmpiError:  # there is no plan: no memory is enough
                found = ComputedAgain((sys.maxsize,) * one.pp, (0.0,) * (one.pp * one.virtual_stages))
            self._again[alike] = found
        return self._again[alike]

    def _in_whole(self, one: Candidate, rows: int) -> ComputedAgain:
        share, zero = (one.tp, one.sp), one.zero if one.zero > 1 else 0
        key = (*share, zero, rows)
        if key not in self._plans:
            known = {
                count: measure_costs(self.workload, share, zero, count, self._backend)
                for count in self._measured_rows(rows)
            }
            self._plans[key] = OptimalPlans(_costs_for(rows, known))
        plans = self._plans[key]
        budget = max(one.activation_memory, plans.least)
        return ComputedAgain((min(budget, plans.all),), (_more(plans.costs, plans.plan(budget)),))

    def _of_whole(self, share: tuple[int, int], rows: int, recorded: bool) -> int:
        measured, key = self.profile.steps[share].get(rows), (share, rows, recorded)
        if measured is not None:
            return measured.activations if recorded else measured.unrecorded_bytes
        if key not in self._whole:
            self._whole[key] = measure_whole(self.workload, share, rows, self._backend, recorded)
        return self._whole[key]


def _more(costs: Costs, plan: Plan) -> float:
    """Return which part of an ordinary pass a plan takes longer."""
    ordinary_s = price_plan(costs, keep_all(costs)).seconds
    return price_plan(costs, plan).seconds / ordinary_s - 1 if ordinary_s else 0.0


def _costs_for(rows: int, known: Mapping[int, Costs]) -> tuple[LayerCost, ...]:
    """Return the layers' costs for a number of rows, on straight lines between those known, by rows."""
    if rows in known:
        return tuple(known[rows])
    found = []
    for layer in zip(*known.values(), strict=True):
        told: dict[str, Any] = {}
        for each in fields(LayerCost):
            values = [getattr(cost, each.name) for cost in layer]
            if isinstance(values[0], int | float) and not isinstance(values[0], bool):
                value = between(dict(zip(known, values, strict=True)), rows)
                told[each.name] = value if isinstance(values[0], float) else round(value)
        found.append(replace(layer[-1], **told))
    return tuple(found)
