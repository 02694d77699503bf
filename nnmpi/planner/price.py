"""What a layout takes: seconds of a step, and bytes by kind.

    step = computing + bubble      of whole replicas measured; of a pipeline simulated from measured layers
         + exposed messages        sums of gradients, exchanges of shared layers and sequences, ties, loss
         + update                  measured, of a rank's part

Messages take the time of fitted links. Without the bubble a price is a bound, which costs no simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from nnmpi.comm.algorithms.registry import AUTO, NATIVE, SHARED
from nnmpi.comm.gradients import BUCKET_BYTES
from nnmpi.memory.ledger import ACTIVATIONS, BATCHES, COMMUNICATION, GRADIENTS, PARAMETERS, STATE
from nnmpi.mesh import Mesh
from nnmpi.parallel.zero.units import StateBytes
from nnmpi.planner.network import PlannedNetwork
from nnmpi.planner.profile import Profile
from nnmpi.planner.shapes import CutModel
from nnmpi.planner.space import Candidate
from nnmpi.schedule.instruction import Kind
from nnmpi.schedule.lower import add_transfers
from nnmpi.schedule.schedule import most_kept
from nnmpi.schedule.simulate import InstructionCosts, simulate_schedule

NUMBERS_BYTES = 40  # loss, right answers, targets and hashes, which all ranks add up in a step
END_S = 25e-6  # of the processor, which a pipeline's message takes at each end


@dataclass(frozen=True, kw_only=True)
class LayoutPrice:
    """What a layout takes.

    Attributes:
        computing_s: forward and backward of the rank that computes longest.
        bubble_s: for how long that rank waits in its pipeline.
        exposed_s: messages with nothing to hide them.
        update_s: of the weights.
        memory: bytes of the rank that has most, by the ledger's kinds.
        split: how many layers each stage has; empty without a pipeline.
    """

    computing_s: float
    bubble_s: float
    exposed_s: float
    update_s: float
    memory: Mapping[str, int]
    split: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.computing_s + self.bubble_s + self.exposed_s + self.update_s

    @property
    def bytes(self) -> int:
        """Of all kinds together."""
        return sum(self.memory.values())


class PlannedBatch(Protocol):
    """How many rows a batch has, and the bytes of one."""

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample and its labels."""


class PlannedShapes(Protocol):
    """What a price takes of a model: see `shapes.ModelShapes`."""

    def states(self, tp: int, pp: int, virtual: int, zero: int, replicas: int, once: bool, /) -> tuple[StateBytes, ...]:
        """Return what each of a pipeline's ranks holds."""

    def part(self, tp: int, pp: int, virtual: int, /) -> CutModel:
        """Return where the chain is cut."""


class Pricer:
    """Prices layouts of one workload on one machine.

    Args:
        workload: what is to be trained.
        profile: what was measured of it.
        network: what messages cost.
        shapes: where the model is cut, and what ranks hold of it.
    """

    def __init__(
        self, workload: PlannedBatch, profile: Profile, network: PlannedNetwork, shapes: PlannedShapes
    ) -> None:
        self.workload, self.profile, self.network, self.shapes = workload, profile, network, shapes
        self._mesh = cache(self._make_mesh)
        self._times = cache(self._layers)
        self._passes: dict[tuple[object, ...], tuple[float, float]] = {}

    def price(self, one: Candidate, simulated: bool = True) -> LayoutPrice:
        """Return what a layout takes; without the bubble where nothing is simulated, which is a bound."""
        busy_s, bubble_s = self._pass(one, simulated)
        split = tuple(map(len, self._cuts(one))) if one.pp > 1 else ()
        return LayoutPrice(
            computing_s=busy_s,
            bubble_s=bubble_s,
            exposed_s=self._exposed(one, busy_s),
            update_s=self._update_s(one),
            memory=self.memory(one) if simulated else {},
            split=split,
        )

    # ---- bytes ----

    def memory(self, one: Candidate) -> dict[str, int]:
        """Return the bytes of the rank that has most, by kind."""
        return max(self.everyones_memory(one), key=lambda kinds: sum(kinds.values()))

    def everyones_memory(self, one: Candidate) -> list[dict[str, int]]:
        """Return the bytes of each of a pipeline's ranks, by kind."""
        once = one.zero > 0 and one.allreduce == AUTO and self.network.on_one_node
        states = self.shapes.states(one.tp, one.pp, one.virtual_stages, one.zero, one.replicas, once)
        return [self._held(one, *each) for each in zip(states, self._activations(one), strict=True)]

    def _held(self, one: Candidate, state: StateBytes, activations: int) -> dict[str, int]:
        shares = one.dp if one.allreduce == AUTO and one.has_whole_model else 1  # how often they stand once per node
        communication = state.units
        if one.zero and one.replicas > 1 and one.allreduce == NATIVE:
            communication += state.longest
        return {
            PARAMETERS: state.parameters // shares,
            GRADIENTS: state.gradients,
            STATE: state.optimizer // shares,
            ACTIVATIONS: activations,
            COMMUNICATION: communication,
            BATCHES: sum(one.rows(self.workload.batch_size)) * self.workload.row_bytes // one.sp,
        }

    def _activations(self, one: Candidate) -> list[int]:
        """Return the activations of each of a pipeline's ranks: measured without one, else as layers keep them."""
        rows, share = self._rows(one), (one.tp, one.sp)
        if one.pp == 1:
            whole = round(self.profile.step(share, rows, "activations"))
            return [min(one.activation_memory, whole) if one.activation_memory else whole]
        schedule, cuts = one.make(), self._cuts(one)
        found = []
        for rank in range(one.pp):
            stages = {s: cuts[s] for s in schedule.stages_of(rank)}
            entering = {s: self._entering(cut.start, rows) for s, cut in stages.items()}
            inside = {s: self.profile.kept(cut, rows) for s, cut in stages.items()}
            leaving = sum(self._entering(cut.stop, rows) for cut in stages.values() if cut.stop < cuts[-1].stop)
            peak = sum(entering.values()) + leaving  # a receive of each kind is posted ahead
            waiting = inside  # layers save what comes to them, too
            if one.recompute:
                waiting, peak = entering, peak + max(inside.values())
            found.append(round((most_kept(schedule, rank, waiting) + peak) / (one.tp * one.sp)))
        return found

    def least_activations(self, one: Candidate) -> int:
        """Return a budget that suffices without a pipeline: values between layers, and what one layer keeps."""
        rows, layers = self._rows(one), range(self.layers)
        values = sum(self.profile.layer(i, rows, "value") for i in layers)
        return round((values + 2 * max(self.profile.kept(range(i, i + 1), rows) for i in layers)) / one.tp / one.sp)

    # ---- seconds ----

    @property
    def layers(self) -> int:
        """How many the model's chain has."""
        return len(next(iter(self.profile.layers.values())))

    def _rows(self, one: Candidate) -> int:
        """Return the most rows of a microbatch on one replica."""
        return one.rows(self.workload.batch_size)[0]

    def _cuts(self, one: Candidate) -> tuple[range, ...]:
        return self.shapes.part(one.tp, one.pp, one.virtual_stages).cuts

    def _pass(self, one: Candidate, simulated: bool) -> tuple[float, float]:
        """Return for how long the longest rank computes in a pass, and for how long it waits."""
        if one.pp == 1:
            share, rows = (one.tp, one.sp), self._rows(one)
            if not one.activation_memory:
                return self.profile.step(share, rows, "seconds"), 0.0
            whole, least = self.profile.step(share, rows, "activations"), self.least_activations(one)
            part = min(1.0, max(0.0, whole - one.activation_memory) / max(whole - least, 1))
            return self.profile.step(share, rows, "eager_s") * (1 + part * self._forward_part()), 0.0
        key = (simulated, one.schedule, one.axes, one.microbatches, one.virtual_stages, one.recompute)
        if key not in self._passes:
            costs = self._stage_costs(one)
            if simulated:
                found = simulate_schedule(add_transfers(one.make()), costs)
                busy_s = max(found.busy_s)
                self._passes[key] = busy_s, found.makespan_s - busy_s
            else:
                backward = (Kind.I, Kind.W) if one.schedule == "zero-bubble" else (Kind.B,)
                work = [sum(each) for each in zip(*(costs.seconds[k] for k in (Kind.F, *backward)), strict=True)]
                self._passes[key] = one.microbatches * max(sum(work[r :: one.pp]) for r in range(one.pp)), 0.0
        return self._passes[key]

    def _forward_part(self) -> float:
        layers = self.profile.layers[max(self.profile.layers)]
        return sum(layer.keep_s for layer in layers) / max(sum(layer.seconds for layer in layers), 1e-12)

    def _stage_costs(self, one: Candidate) -> InstructionCosts:
        """Return the seconds of each instruction of a pipeline, by stage."""
        rows, share, stages = self._rows(one), (one.tp, one.sp), self._cuts(one)
        alone_s = self.profile.step((1, 1), rows, "seconds") or 1.0
        name = "eager_s" if one.schedule == "zero-bubble" else "seconds"  # halves of backwards are not replayed
        ratio = self.profile.step(share, rows, name) / alone_s
        sent = sum(self._sent(each, one) for each in self.profile.exchanges(share, rows)) / len(stages)
        last = len(stages) - 1
        ends = [END_S * ((s > 0) + (s < last)) for s in range(len(stages))]

        def of_stages(times: Sequence[float], more: float) -> list[float]:
            sums = [ratio * sum(times[cut.start : cut.stop]) for cut in stages]
            return [each + more + end for each, end in zip(sums, ends, strict=True)]

        forwards, passes, inputs, weights = self._times(rows)
        backwards = [whole - forward for whole, forward in zip(passes, forwards, strict=True)]
        forward = of_stages(forwards, sent / 3)
        again = forward if one.recompute else [0.0] * len(stages)
        sends, returns = [0.0] * len(stages), [0.0] * len(stages)
        line = [self._mesh(one.axes).rank_at(0, p, 0) for p in range(one.pp)]
        for stage in range(last):
            nbytes = self._entering(stages[stage + 1].start, rows) / one.sp
            sender, receiver = line[stage % one.pp], line[(stage + 1) % one.pp]
            sends[stage] = self.network.message(sender, receiver, nbytes)
            returns[stage + 1] = self.network.message(receiver, sender, nbytes)
        return InstructionCosts(
            {
                Kind.F: forward,
                Kind.B: [sum(each) for each in zip(of_stages(backwards, 2 * sent / 3), again, strict=True)],
                Kind.I: [sum(each) for each in zip(of_stages(inputs, 2 * sent / 3), again, strict=True)],
                Kind.W: [ratio * sum(weights[cut.start : cut.stop]) for cut in stages],
                Kind.SEND_ACT: sends,
                Kind.SEND_GRAD: returns,
            }
        )

    def _layers(self, rows: int) -> tuple[list[float], ...]:
        names = ("keep_s", "seconds", "input_s", "weights_s")
        return tuple([self.profile.layer(i, rows, name) for i in range(self.layers)] for name in names)

    def _entering(self, layer: int, rows: int) -> float:
        """Return the bytes that go over the cut before a layer."""
        return self.profile.layer(layer - 1, rows, "value") if layer else rows * self.workload.row_bytes

    def _update_s(self, one: Candidate) -> float:
        """Return the seconds of the update: in proportion to what a rank updates."""
        (whole,) = self.shapes.states(1, 1, 1, 0, 1, False)
        states = self.shapes.states(one.tp, one.pp, one.virtual_stages, 0, 1, False)
        part = max(each.parameters for each in states) / max(whole.parameters, 1)
        shared = one.replicas if one.zero else one.dp if one.allreduce == AUTO and one.has_whole_model else 1
        return min(cost.update_s for cost in self.profile.steps[1, 1].values()) * part / shared

    def _exposed(self, one: Candidate, busy_s: float) -> float:
        """Return the seconds of the messages that nothing hides; those of a pipeline's pass are in the pass."""
        network, mesh, found = self.network, self._mesh(one.axes), 0.0
        if one.pp == 1:
            sent = self.profile.exchanges((one.tp, one.sp), self._rows(one))
            found += sum(self._sent(each, one) for each in sent)
        if one.ranks > 1 and not (one.has_whole_model and one.allreduce == AUTO):
            found += network.exchange("all-reduce", NATIVE, range(one.ranks), NUMBERS_BYTES)
        if one.pp > 1:
            ends = mesh.rank_at(0, 0, 0), mesh.rank_at(0, one.pp - 1, 0)
            tied = self.shapes.part(one.tp, one.pp, one.virtual_stages).tied_bytes
            found += network.exchange("all-reduce", NATIVE, ends, tied)
        return found + (self._sums(one, mesh, busy_s) if one.replicas > 1 else 0.0)

    def _sent(self, exchange: tuple[str, int, int], one: Candidate) -> float:
        """Return the seconds of one sort of the messages between the ranks of shared layers or positions."""
        what, nbytes, count = exchange
        ranks = [self._mesh(one.axes).rank_at(0, 0, t, s) for s in range(one.sp) for t in range(one.tp)]
        for operation in ("all-reduce", "all-gather", "reduce-scatter"):
            if what.startswith(operation):
                return count * self.network.exchange(operation, NATIVE, ranks, nbytes)
        return count * self.network.message(ranks[0], ranks[-1], nbytes)

    def _sums(self, one: Candidate, mesh: Mesh, busy_s: float) -> float:
        """Return the seconds of the sums of gradients over the replicas, and of parameters that are gathered."""
        ranks = tuple(mesh.rank_at(d, 0, 0, s) for d in range(one.dp) for s in range(one.sp))
        network, how = self.network, SHARED if one.allreduce == AUTO else one.allreduce
        nodes = network.nodes
        sharing = 1  # groups of replicas that use a node's link at once
        if len({nodes[rank] for rank in ranks}) > 1:
            sharing = max(1, nodes.count(nodes[0]) // sum(nodes[rank] == nodes[0] for rank in ranks))
        states = self.shapes.states(one.tp, one.pp, one.virtual_stages, one.zero, one.replicas, False)
        found = 0.0
        if one.zero:
            gathers = 2 if one.zero == 3 else 1
            for nbytes in max(states, key=lambda each: each.total).lengths:
                if how == SHARED:  # parameters stand once, and are not gathered
                    found += network.exchange("all-reduce", SHARED, ranks, nbytes) / 2
                else:
                    found += network.exchange("reduce-scatter", how, ranks, nbytes, sharing)
                    found += gathers * network.exchange("all-gather", how, ranks, nbytes, sharing)
            return found
        nbytes = max(each.gradients for each in states)
        overlaps = not network.on_one_node and how != SHARED  # see `comm.gradients.overlaps`
        whole_s = network.exchange("all-reduce", how, ranks, nbytes, sharing, overlaps)
        if not overlaps or one.pp > 1:
            return whole_s
        # Between nodes buckets are summed while backward goes on: all but the last may be hidden under it.
        last_s = network.exchange("all-reduce", how, ranks, min(nbytes, BUCKET_BYTES), sharing, overlaps)
        hidden = 1 - 1 / max(1, -(-nbytes // BUCKET_BYTES))
        return max(whole_s - (1 - self._forward_part()) * busy_s * hidden, last_s)

    def _make_mesh(self, axes: tuple[int, int, int, int]) -> Mesh:
        dp, pp, tp, sp = axes
        return Mesh(dp, pp, tp, None if self.network.on_one_node else self.network.nodes, sp)
