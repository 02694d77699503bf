"""What a layout takes: seconds of a step, bytes by kind, and a bound below which its seconds cannot be.

    step = computing + bubble      the pass: of whole replicas measured, of a pipeline simulated from measured layers
         + exposed messages        sums of gradients, what shared layers and sequences exchange, ties, loss
         + update                  measured, of a rank's part

Bounds: of a pipeline's stage s with M microbatches, whatever the order of its work (the end is not zero bubble's):

    stage 0  F|                              |B        what is before stage s: all forwards and messages to it,
    stage 1    F|                          |B          its own M forwards and backwards, all backwards behind it
    stage s      |F F F B F B ... F B F B B|
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import add
from typing import Protocol

from nnmpi.comm.algorithms.registry import AUTO, NATIVE, SHARED
from nnmpi.comm.gradients import BUCKET_BYTES
from nnmpi.memory.ledger import ACTIVATIONS, BATCHES, COMMUNICATION, GRADIENTS, PARAMETERS, STATE
from nnmpi.mesh import Mesh
from nnmpi.parallel.zero.units import StateBytes
from nnmpi.parallel.zero.window import BLOCK_BYTES
from nnmpi.planner.network import PlannedNetwork
from nnmpi.planner.profile import Profile, Share
from nnmpi.planner.shapes import ComputedAgain, CutModel
from nnmpi.planner.space import Candidate
from nnmpi.schedule.instruction import Kind
from nnmpi.schedule.lower import add_transfers
from nnmpi.schedule.simulate import InstructionCosts, simulate_schedule

NUMBERS_BYTES = 40  # loss, right answers, targets and hashes, which all ranks add up in a step


@dataclass(frozen=True)
class LayoutPrice:
    """What a layout takes.

    Attributes:
        computing_s: forward and backward of the rank that computes longest.
        bubble_s: for how long that rank waits in its pipeline.
        exposed_s: messages with nothing to hide them.
        update_s: of the weights.
        find_memory: returns `memory`, which takes longer than the rest.
        split: how many layers each stage has; empty without a pipeline.
    """

    computing_s: float
    bubble_s: float
    exposed_s: float
    update_s: float
    find_memory: Callable[[], Mapping[str, int]]
    split: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.computing_s + self.bubble_s + self.exposed_s + self.update_s

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes of the rank that has most, by the ledger's kinds."""
        return self.find_memory()

    @property
    def bytes(self) -> int:
        """Of all kinds together."""
        return sum(self.memory.values())


class PlannedBatch(Protocol):
    """What a price takes of a workload: how many rows a batch has, and the bytes of one."""

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample and its labels."""


class PlannedShapes(Protocol):
    """What a price takes of a model: a `shapes.ModelShapes`, or a `described.DescribedShapes`."""

    def state(self, tp: int, pp: int, virtual: int, zero: int, replicas: int, once: bool) -> StateBytes:
        """Return what the rank with most of it holds."""

    def states(self, tp: int, pp: int, virtual: int, zero: int, replicas: int, once: bool) -> tuple[StateBytes, ...]:
        """Return what each sort of a pipeline's ranks holds."""

    def part(self, tp: int, pp: int, virtual: int) -> CutModel:
        """Return where the chain is cut."""

    def channels(self, tp: int) -> list[list[int]]:
        """Return for each layer of the chain how many channels each batch normalization in it has."""

    def activations(self, one: Candidate, rows: Sequence[int]) -> list[int]:
        """Return the activations of each of a pipeline's ranks, for so many rows in its microbatches."""

    def again(self, one: Candidate, rows: int) -> ComputedAgain:
        """Return what a budget for activations costs, for so many rows of the longest microbatch."""


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
        self._passes: dict[tuple[object, ...], tuple[float, float]] = {}
        self._ratios: dict[tuple[Share, int], float] = {}
        self._meshes: dict[tuple[int, ...], Mesh] = {}
        self._times: dict[int, tuple[list[float], ...]] = {}
        self._channels: dict[int, list[list[int]]] = {}

    # ---- bytes ----

    def memory(self, one: Candidate) -> dict[str, int]:
        """Return the bytes of the rank that has most, by kind; see `everyones_memory`."""
        return max(self.everyones_memory(one), key=lambda kinds: sum(kinds.values()))

    def bytes(self, one: Candidate) -> int:
        """Return those of all kinds together."""
        return sum(self.memory(one).values())

    def least_bytes(self, one: Candidate) -> int:
        """Return what the rank with most of it has besides activations, which take longer to tell."""
        return max(sum(kinds.values()) for kinds in self.everyones_memory(one, [0] * one.pp))

    def everyones_memory(self, one: Candidate, activations: Sequence[int] = ()) -> list[dict[str, int]]:
        """Return the bytes of each of a pipeline's ranks, by kind; activations as given, if they are."""
        once = one.zero == 3 and one.allreduce == AUTO and self.network.on_one_node
        states = self.shapes.states(one.tp, one.pp, one.virtual_stages, one.zero, one.replicas, once)
        activations = activations or self.shapes.activations(one, one.rows(self.workload.batch_size))
        if one.pp == 1:
            return [self._held(one, states[0], activations[0])]
        sorts = self.shapes.part(one.tp, one.pp, one.virtual_stages).sorts
        return [self._held(one, states[sort], each) for sort, each in zip(sorts, activations, strict=True)]

    def _held(self, one: Candidate, state: StateBytes, activations: int) -> dict[str, int]:
        """Return a rank's bytes by kind."""
        shares = one.dp if one.allreduce == AUTO and one.has_whole_model else 1  # how often they stand once per node
        communication = state.units
        if one.zero and one.replicas > 1 and one.allreduce in (AUTO, NATIVE):
            communication += min(BLOCK_BYTES, state.longest) if one.allreduce == AUTO else state.longest
        return {
            PARAMETERS: state.parameters // shares,
            GRADIENTS: state.gradients,
            STATE: state.optimizer // shares,
            ACTIVATIONS: activations,
            COMMUNICATION: communication,
            BATCHES: sum(one.rows(self.workload.batch_size)) * self.workload.row_bytes // one.sp,
        }

    # ---- seconds ----

    def bound(self, one: Candidate) -> float:
        """Return seconds below which a step of this layout cannot be, by what is priced here."""
        return self._pass(one, simulated=False)[0] + self._exposed(one, simulated=False) + self._update_s(one)

    def price(self, one: Candidate) -> LayoutPrice:
        """Return what a layout takes."""
        seconds, busy_s = self._pass(one, simulated=True)
        cuts = self.shapes.part(one.tp, one.pp, one.virtual_stages).cuts if one.pp > 1 else ()
        return LayoutPrice(
            busy_s,
            seconds - busy_s,
            self._exposed(one),
            self._update_s(one),
            partial(self.memory, one),
            tuple(map(len, cuts)),
        )

    def _rows(self, one: Candidate) -> int:
        """Return the most rows of a microbatch on one replica."""
        return one.rows(self.workload.batch_size)[0]

    def _pass(self, one: Candidate, simulated: bool) -> tuple[float, float]:
        """Return the seconds of a pass, or a bound of them, and for how long its longest rank computes."""
        if one.pp == 1:
            whole_s = self.profile.seconds((one.tp, one.sp), self._rows(one)) * self.crowding
            if one.activation_memory and simulated:
                whole_s *= self._slower(one) * (1 + self._again(one)[0])
            return whole_s, whole_s
        budget = one.activation_memory if simulated else 0
        key = (simulated, one.schedule, one.axes, one.microbatches, one.virtual_stages, one.recompute, budget)
        if key not in self._passes:
            alone = 1 / self._contention
            plain = replace(one, activation_memory=0)  # with a budget it is no quicker
            self._passes[key] = (
                self._simulated(one) if simulated else (_least(one, self._stage_costs(plain, alone)), 0.0)
            )
        return self._passes[key]

    def _again(self, one: Candidate) -> Sequence[float]:
        """Return which part of its time each stage takes longer, since it computes again what passes its budget."""
        if not one.activation_memory:
            return [0.0] * (one.pp * one.virtual_stages)
        return self.shapes.again(one, self._rows(one)).more

    @property
    def crowding(self) -> float:
        """How many times as long as a processor works for them ranks take; on a machine that is only stated, once."""
        return 1.0 if self.network.fit is None else self.profile.crowding

    @property
    def _contention(self) -> float:
        return self.profile.contention if self.network.on_one_node else 1.0

    def _simulated(self, one: Candidate) -> tuple[float, float]:
        """Return the seconds of a pass, and for how long its longest rank computes.

        Ranks that wait leave the others more of the caches and the memory: each is the slower the longer the others
        compute, which is known when it was simulated; twice is near enough. Where ranks are more than the cores, each
        is as much slower as the others want the cores.
        """
        schedule, measured = add_transfers(one.make()), self._contention
        costs, said = self._stage_costs(one), self._stage_costs(one, 0.0)
        found = simulate_schedule(schedule, costs)
        most = measured * self.crowding
        if most == 1.0:
            return found.makespan_s, max(found.busy_s)
        for _ in range(2):
            waits = sum(_work_s(one, said)) / sum(_work_s(one, costs))  # for those that share layers
            busy = (1 - waits) * sum(found.busy_s) / (len(found.busy_s) * found.makespan_s)
            costs = self._stage_costs(one, (1 + (most - 1) * busy) / measured)
            found = simulate_schedule(schedule, costs)
        return found.makespan_s, max(found.busy_s)

    def _stage_costs(self, one: Candidate, factor: float = 1.0) -> InstructionCosts:
        """Return the seconds of each instruction of a pipeline, by stage.

        Args:
            one: the layout.
            factor: how many times as long as measured computing takes; what ranks that share layers say stays.
        """
        rows, share = self._rows(one), (one.tp, one.sp)
        part, ratio = self.shapes.part(one.tp, one.pp, one.virtual_stages), self._ratio(share, rows)
        stages, (forwards, passes, firsts, seconds) = part.cuts, self._layer_times(rows)
        said = sum(self._said(each, one) for each in self.profile.exchanges(share, rows)) / len(stages)
        ratio *= factor
        forward = [sum(forwards[cut.start : cut.stop]) * ratio for cut in stages]
        backward = [sum(passes[cut.start : cut.stop]) * ratio - f for cut, f in zip(stages, forward, strict=True)]
        slower, again = self._slower(one), self._again(one)
        forward = [f * slower for f in forward]
        if one.activation_memory:  # nothing is replayed
            backward = [slower * b for b in backward]
            backward = [b + part * (f + b) for b, f, part in zip(backward, forward, again, strict=True)]
        end_s = self.profile.end_s(rows)
        # Each of these receives from the one before and sends to the next one, but for the ends of the pipeline.
        ends = [factor * end_s * ((i > 0) + (i + 1 < len(stages))) for i in range(len(stages))]
        sums = self._statistics(one) or [(0.0, 0.0)] * stages[-1].stop
        before = [said / 3 + end_s + sum(sums[i][0] for i in cut) for end_s, cut in zip(ends, stages, strict=True)]
        behind = [
            said * (2 / 3 + part) + end_s + sum(sums[i][1] for i in cut)  # what is computed again is said again
            for part, end_s, cut in zip(again, ends, stages, strict=True)
        ]
        forward = list(map(add, forward, before))
        backward = list(map(add, backward, behind))
        if one.recompute:
            backward = [b + f for b, f in zip(backward, forward, strict=True)]
        ranks = self._line(one)
        sends, returns = [0.0] * len(stages), [0.0] * len(stages)
        for stage in range(len(stages) - 1):
            nbytes = self._entering(stages[stage + 1].start, rows) / one.sp
            sender, receiver = ranks[stage % one.pp], ranks[(stage + 1) % one.pp]
            sends[stage] = self.network.message(sender, receiver, nbytes)
            returns[stage + 1] = self.network.message(receiver, sender, nbytes)
        begins = [sum(firsts[cut.start : cut.stop]) * ratio + each for cut, each in zip(stages, behind, strict=True)]
        if one.recompute:
            begins = [first + f for first, f in zip(begins, forward, strict=True)]
        rests = [sum(seconds[cut.start : cut.stop]) * ratio for cut in stages]
        return InstructionCosts(
            {
                Kind.F: forward,
                Kind.B: backward,
                Kind.I: begins,
                Kind.W: rests,
                Kind.SEND_ACT: sends,
                Kind.SEND_GRAD: returns,
            }
        )

    def _entering(self, layer: int, rows: int) -> float:
        """Return the bytes that go over the cut before a layer."""
        return self.profile.layer(layer - 1, rows, "value_bytes") if layer else rows * self.workload.row_bytes

    def _ratio(self, share: Share, rows: int) -> float:
        """Return how long a pass on ranks that share layers or positions takes, for each second of one without."""
        if (share, rows) not in self._ratios:
            alone_s = self.profile.seconds((1, 1), rows)
            self._ratios[share, rows] = self.profile.seconds(share, rows) / alone_s if alone_s else 1.0
        return self._ratios[share, rows]

    def _slower(self, one: Candidate) -> float:
        """Return how long a layout's forwards take, for each second of a replayed one.

        What was recorded is replayed, unless backwards are done in halves, or activations have a budget.
        """
        share = (one.tp, one.sp) if one.pp == 1 else (1, 1)
        replayed_s = self.profile.seconds(share, self._rows(one))
        if not (one.schedule == "zero-bubble" or one.activation_memory) or not replayed_s:
            return 1.0
        return max(1.0, self.profile.seconds(share, self._rows(one), recorded=False) / replayed_s)

    def _layer_times(self, rows: int) -> tuple[list[float], ...]:
        """Return each layer's seconds: of a forward, of a forward and backward, of a backward's two halves."""
        if rows not in self._times:
            layers = range(len(next(iter(self.profile.layers.values()))))
            names = ("forward_s", "seconds", "input_s", "weights_s")
            self._times[rows] = tuple([self.profile.layer(i, rows, name) for i in layers] for name in names)
        return self._times[rows]

    def _update_s(self, one: Candidate) -> float:
        """Return the seconds of the update: in proportion to what a rank updates."""
        whole = self.shapes.state(1, 1, 1, 0, 1, once=False).parameters
        own = self.shapes.state(one.tp, one.pp, one.virtual_stages, one.zero, one.replicas, once=False)
        part = own.parameters / (one.replicas if one.zero else 1)
        if one.allreduce == AUTO and one.has_whole_model:
            part /= one.dp
        return self.profile.update_s * self.crowding * part / max(whole, 1)

    def _exposed(self, one: Candidate, simulated: bool = True) -> float:
        """Return the seconds of the messages that nothing hides; those of a pipeline's pass are in the pass."""
        mesh, network = self._mesh(one), self.network
        found = 0.0
        if one.pp == 1:
            said = sum(self._said(each, one) for each in self.profile.exchanges((one.tp, one.sp), self._rows(one)))
            found += said * (1 + (self._again(one)[0] if said and simulated else 0.0))
        if one.ranks > 1 and not (one.has_whole_model and one.allreduce == AUTO):
            exchanges = 2 if one.zero or one.ranks > one.dp else 1  # loss and answers; the gradient's length, in parts
            found += exchanges * network.exchange("all-reduce", NATIVE, range(one.ranks), NUMBERS_BYTES)
        if one.pp > 1:
            part, ranks = self.shapes.part(one.tp, one.pp, one.virtual_stages), self._line(one)
            found += network.exchange("all-reduce", NATIVE, (ranks[0], ranks[-1]), part.tied_bytes)
            found += self.profile.around_s * self.crowding
        if one.replicas > 1:
            found += self._sums(one, mesh)
        if one.pp == 1:
            found += sum(map(sum, self._statistics(one)))
        return found

    def _statistics(self, one: Candidate) -> list[tuple[float, float]]:
        """Return the seconds of each layer's sums over the replicas, forward and backward: batch normalization's.

        It sums counts and means, then squares; and two sums of the derivative, in float64 (see `ops.norm`). Nothing
        for a model without.
        """
        if one.tp not in self._channels:
            found = self.shapes.channels(one.tp)
            self._channels[one.tp] = found if any(found) else []
        if one.replicas < 2 or not self._channels[one.tp]:
            return []
        ranks = self._replicas(one, self._mesh(one))

        def sums_s(numbers: int) -> float:
            return self.network.exchange("all-reduce", NATIVE, ranks, 8 * numbers)

        return [
            (sum(sums_s(n + 1) + sums_s(n) for n in layer), sum(sums_s(2 * n) for n in layer))
            for layer in self._channels[one.tp]
        ]

    def _replicas(self, one: Candidate, mesh: Mesh) -> tuple[int, ...]:
        """Return the ranks that have the first part of the model each."""
        return tuple(mesh.rank_at(d, 0, 0, s) for d in range(one.dp) for s in range(one.sp))

    def _said(self, exchange: tuple[str, int, int], one: Candidate) -> float:
        """Return the seconds of what the ranks of shared layers or positions say to one another."""
        what, nbytes, count = exchange
        ranks = [self._mesh(one).rank_at(0, 0, t, s) for s in range(one.sp) for t in range(one.tp)]
        for operation in ("all-reduce", "all-gather", "reduce-scatter"):
            if what.startswith(operation):
                return count * self.network.exchange(operation, NATIVE, ranks, nbytes)
        return count * self.network.message(ranks[0], ranks[-1], nbytes)

    def _sums(self, one: Candidate, mesh: Mesh) -> float:
        """Return the seconds of the sums of gradients over the replicas, and of parameters that are gathered."""
        nbytes = self.shapes.state(one.tp, one.pp, one.virtual_stages, 0, 1, once=False).gradients
        ranks = self._replicas(one, mesh)
        sharing, network = self._sharing(one, ranks), self.network
        if one.zero:
            return self._sharded_sums(one, ranks, sharing)
        if one.allreduce in (AUTO, SHARED):
            return network.exchange("all-reduce", SHARED, ranks, nbytes)
        overlaps = not network.on_one_node  # see `comm.gradients.overlaps`
        whole_s = network.exchange("all-reduce", one.allreduce, ranks, nbytes, sharing, overlaps)
        if not overlaps or one.pp > 1:
            return whole_s
        # Between nodes buckets are summed while backward goes on: all but the last may be hidden under it.
        buckets = max(1, -(-nbytes // BUCKET_BYTES))
        last_s = network.exchange("all-reduce", one.allreduce, ranks, min(nbytes, BUCKET_BYTES), sharing, overlaps)
        layers = self.profile.layers[max(self.profile.layers)]
        backward = 1 - sum(layer.forward_s for layer in layers) / max(sum(layer.seconds for layer in layers), 1e-12)
        hides_s = backward * self._pass(one, simulated=False)[0] * (1 - 1 / buckets)
        return max(whole_s - hides_s, last_s)

    def _sharded_sums(self, one: Candidate, ranks: Sequence[int], sharing: int) -> float:
        """Return the seconds of ZeRO's exchanges, unit by unit, and of what it does besides."""
        network = self.network
        lengths = self.shapes.state(one.tp, one.pp, one.virtual_stages, one.zero, one.replicas, once=False).lengths
        found = self.profile.zero_s.get(one.zero, 0.0) * self.crowding
        for nbytes in lengths:
            if one.allreduce == AUTO:  # parameters of stage 3 stand once, and are not gathered
                found += network.exchange("all-reduce", SHARED, ranks, nbytes) / (2 if one.zero == 3 else 1)
            else:
                gathers = 2 if one.zero == 3 else 1
                found += network.exchange("reduce-scatter", one.allreduce, ranks, nbytes, sharing)
                found += gathers * network.exchange("all-gather", one.allreduce, ranks, nbytes, sharing)
        return found

    def _sharing(self, one: Candidate, ranks: Sequence[int]) -> int:
        """Return how many groups of replicas use a node's link at once."""
        nodes = self.network.nodes
        own = sum(nodes[rank] == nodes[0] for rank in ranks)
        return max(1, nodes.count(nodes[0]) // max(own, 1)) if len({nodes[rank] for rank in ranks}) > 1 else 1

    def _mesh(self, one: Candidate) -> Mesh:
        if one.axes not in self._meshes:
            nodes = None if self.network.on_one_node else self.network.nodes
            self._meshes[one.axes] = Mesh(one.dp, one.pp, one.tp, nodes, one.sp)
        return self._meshes[one.axes]

    def _line(self, one: Candidate) -> list[int]:
        """Return the ranks of the first pipeline."""
        mesh = self._mesh(one)
        return [mesh.rank_at(0, p, 0) for p in range(one.pp)]


def _work_s(one: Candidate, costs: InstructionCosts) -> list[float]:
    """Return the seconds that each stage works on a microbatch."""
    backward = (Kind.I, Kind.W) if one.schedule == "zero-bubble" else (Kind.B,)
    return [sum(each) for each in zip(*(costs.seconds[kind] for kind in (Kind.F, *backward)), strict=True)]


def _least(one: Candidate, costs: InstructionCosts) -> float:
    """Return seconds that this schedule of these stages cannot stay below.

    With zero bubble nothing is known of the end: the weights' halves of a rank may come after all else.
    """
    ends = 0.0 if one.schedule == "zero-bubble" else 1.0
    forward, work = costs.seconds[Kind.F], _work_s(one, costs)
    backward = [whole - f for whole, f in zip(work, forward, strict=True)]
    sends, returns = costs.seconds[Kind.SEND_ACT], costs.seconds[Kind.SEND_GRAD]
    least = 0.0
    for rank in range(one.pp):
        own = range(rank, len(forward), one.pp)
        work_s = one.microbatches * sum(work[s] for s in own)
        before_s = sum(forward[s] + sends[s] for s in range(rank))
        after_s = ends * sum(backward[s] + returns[s + 1] for s in range(rank))
        least = max(least, before_s + work_s + after_s)
    return least
