"""Activations within a limit of bytes: a full model by a plan of its layers, segments by a fit.

full model    planned before each pass         memory.recompute
segments      one pass is measured, then the segments are chosen that are recomputed, or moved
              out meanwhile, so that a pass of this size fits        memory.fitting
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import starmap

import numpy as np

import nnmpi.base.clock as clock
from nnmpi.backend.backend import Backend
from nnmpi.base.units import format_bytes
from nnmpi.comm.agreement import agreed
from nnmpi.compose.arrange import Arrangement
from nnmpi.memory.fitting import StageCost, choose_savings
from nnmpi.memory.plan import Plan
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.memory.store import BYTE_S, Store, measure_bandwidth
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module
from nnmpi.parallel.pipeline.stage import Outputs, Visit, run_whole
from nnmpi.tensor.tensor import Tensor


class ActivationLimit:
    """Keeps a rank's activations within the layout's limit. Collective to make.

    Args:
        arrangement: of the model.
        model, backend: the Worker's.

    Attributes:
        fits: whether segments are chosen by measuring passes.
        size: of the largest batch for which segments were measured.
        run: runs a model that is not cut, under its plan if there is a limit.
    """

    def __init__(self, arrangement: Arrangement, model: Module, backend: Backend) -> None:
        layout, self._mesh, self._backend = arrangement.layout, arrangement.mesh, backend
        self._limit, in_segments = layout.activation_memory, bool(arrangement.stages)
        self._store: Store | None = None
        if layout.offload is not None and (
            layout.limits_activations or (self._limit is not None and not in_segments)
        ):
            with agreed(self._mesh.world):
                self._store = Store(layout.offload, backend)
        self.fits = in_segments and layout.limits_activations
        self.size = 0
        self._text = ""  # how they fit, until it is reported
        self._reported: Plan = ()  # the last reported plan
        self._planned: RecomputedModel | None = None
        self.run = run_whole(model)
        if self._limit is not None and not in_segments:
            self._planned = RecomputedModel(
                model, self._limit, backend, self._mesh.world, self._store
            )
            self._whole, self.run = self.run, self._run_planned

    def _run_planned(self, tensors: Sequence[Tensor], single: bool, visit: Visit) -> Outputs:
        mode = current()
        # `Passes.suspect` observes the layers, which no plan runs as they are
        if not mode.training or mode.recomputing:
            return self._whole(tensors, single, visit)
        assert self._planned is not None
        return [self._planned(tensors[0], visit.end, visit.size, visit.adds)], True

    def fit(
        self,
        measured: Mapping[int, StageCost],
        peak_of: Callable[..., float],
        microbatches: int,
        size: int,
    ) -> tuple[Collection[int], Collection[int], Store | None]:
        """Choose the segments to recompute, the same on ranks with the same ones. Collective.

        Args:
            measured: the costs of this rank's segments.
            peak_of: (costs, recomputed, moved) -> the peak bytes of a pass.
            microbatches, size: of the measured pass.

        Returns:
            The segments to recompute, those to move out, and the store for them.

        Raises:
            UsageError: on all ranks, for too small a limit.
        """
        assert isinstance(self._limit, int)
        mesh, store = self._mesh, self._store
        costs = [[*map(float, cost)] for cost in measured.values()]
        for group in (mesh.replicas, mesh.tp):
            costs = np.max(group.gather(costs), axis=0).tolist() if group.size > 1 else costs
        cost_of = dict(zip(measured, starmap(StageCost, costs), strict=True))
        peak = partial(peak_of, cost_of)
        recomputing_s = {
            number: clock.reproducible(cost.seconds) for number, cost in cost_of.items()
        }
        if not any(recomputing_s.values()):  # times may not decide
            recomputing_s = {number: BYTE_S * (1 + cost.inner) for number, cost in cost_of.items()}
        moving_s = {}
        if store is not None:
            most = int(max(cost.inner for cost in cost_of.values()))
            with agreed(mesh.world):
                byte_s = 1 / measure_bandwidth(store, self._backend, most)
            byte_s = max(map(float, mesh.world.gather(byte_s)))
            moving_s = {number: 2 * byte_s * cost.inner for number, cost in cost_of.items()}
        with agreed(mesh.world):
            # a backward takes twice as long as a forward
            hidden_s = 3 * sum(recomputing_s.values())
            chosen = choose_savings(recomputing_s, moving_s, hidden_s, peak, self._limit)
            if store is not None:
                most = sum(int(cost_of[number].inner) for number in chosen.moved)
                store.reserve(most * microbatches)
        self.size = size
        moved = f", {len(chosen.moved)} go out and come back" if store is not None else ""
        self._text = (
            f"activations take {format_bytes(int(peak(*chosen)))} at most on this rank,"
            f" {format_bytes(int(peak(())))} if all were kept;"
            f" {len(chosen.recomputed)} of {len(costs)} segments are recomputed{moved}"
        )
        return *chosen, store

    def summary(self) -> list[str]:
        """Return a line about a new plan or fit, since the last call."""
        if self._planned is not None and self._planned.plan != self._reported:
            self._reported, self._text = self._planned.plan, self._planned.describe()
        text, self._text = self._text, ""
        return [text] * bool(text)

    def release(self) -> None:
        """Give up the store; a second call does nothing."""
        if self._store is not None:
            self._store.close()
