"""A model's shapes on the ranks of a layout, without values: where its chain is cut, and what each rank holds of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np

from nnmpi.backend.backend import Backend
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.nn.chain import ChainLayer, ModelPart, open_chain
from nnmpi.nn.module import Module
from nnmpi.parallel.zero.units import StateBytes, predict_bytes
from nnmpi.planner.profile import Profile, Workload
from nnmpi.schedule.partition import partition


@dataclass(frozen=True)
class CutModel:
    """A model cut into stages: where, and the bytes of the parameters that stand on several ranks."""

    cuts: tuple[range, ...]
    tied_bytes: int = 0


class ModelShapes:
    """The shapes of one workload's model; each is found once.

    Args:
        workload: whose model it is.
        profile: its layers' times, by which the chain is cut.
        backend: for shapes alone; nothing is computed.
    """

    def __init__(self, workload: Workload, profile: Profile, backend: Backend) -> None:
        self.workload, self._backend = workload, backend
        self._seconds = [layer.seconds for layer in profile.layers[max(profile.layers)]]
        self.part, self.states, self._model = cache(self._part), cache(self._states), cache(self._spread)

    def _states(self, tp: int, pp: int, virtual: int, zero: int, replicas: int, once: bool) -> tuple[StateBytes, ...]:
        """Return what each of a pipeline's ranks holds."""
        itemsize, arrays = np.dtype(self.workload.dtype).itemsize, self.workload.state_arrays
        unit_bytes = self.workload.unit_bytes if zero else None
        model, layers = self._model(tp)
        parts = [model]
        if pp > 1:
            cuts = self.part(tp, pp, virtual).cuts
            parts = [ModelPart(model, [layers[i] for cut in cuts[rank::pp] for i in cut]) for rank in range(pp)]
        return tuple(predict_bytes(each, zero, 0, replicas, itemsize, arrays, unit_bytes, once) for each in parts)

    def _spread(self, tp: int) -> tuple[Module, tuple[ChainLayer, ...]]:
        """Return the model as the first of tp ranks has it, without values, and its chain."""
        model = self.workload.build()
        if tp > 1:
            sample = self.workload.samples.rows(np.arange(1), self.workload.dtype)

            def spread(group: Group) -> Module:
                own = self.workload.build()
                return arrange(own, group, Layout(1, 1, tp), sample, self.workload.dtype, self._backend).model

            model = simulate(spread, tp)[0]
        return model, open_chain(model)

    def _part(self, tp: int, pp: int, virtual: int) -> CutModel:
        """Return where the chain is cut for so many stages, by the times of the most rows."""
        layers, cuts = self._model(tp)[1], partition(self._seconds, pp * virtual)
        sizes = [{id(p): p.size for _, module in layer.members for p in module.parameters()} for layer in layers]
        held = [{key: size for cut in cuts[r::pp] for i in cut for key, size in sizes[i].items()} for r in range(pp)]
        count = Counter(key for each in held for key in each)
        tied = sum(size for key, size in {k: s for each in held for k, s in each.items()}.items() if count[key] > 1)
        return CutModel(cuts, tied * np.dtype(self.workload.dtype).itemsize)
