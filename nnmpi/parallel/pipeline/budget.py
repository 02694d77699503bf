"""Plans for a pipeline's stages within a budget of a rank's activations, all microbatches on their way counted.

    a stage's plan      F0 F1 D1 K2 | B2 ..        up to the loss, or the stage's end: an instruction F of the schedule;
                                                   the rest: its B
    a rank's bytes      what F, B and messages do to memory, in the order of the schedule (`passed.most_bytes`)

A plan is the quickest one of those that hold no more than so much between F and B, and take no more than so much
meanwhile. Some levels are tried of what is held, and the quickest plans that fit are taken. The first bound is as if
the end of the chain took more memory, for a moment: so the dynamic programme is that of `memory.optimal`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from nnmpi.memory.optimal import OptimalPlans
from nnmpi.memory.plan import Act, Action, Costs, LayerCost, Plan, keep_all, price_plan
from nnmpi.parallel.pipeline.pass_report import InstructionBytes, StageBytes, most_bytes
from nnmpi.schedule.instruction import Kind
from nnmpi.schedule.schedule import Schedule
from nnmpi.units import format_bytes

_Found = tuple[float, int, dict[int, Plan]]  # a microbatch's seconds, a pass's bytes, and the plans

LEVELS = 12  # of what a stage holds of a microbatch that are tried
TRIES = 6  # of less memory for a microbatch, at each level


@dataclass(frozen=True)
class StageCosts:
    """What a stage takes for a microbatch.

    Attributes:
        first, later: of its layers, and the loss or the stage's end: for the first backward of a pass, which writes
            gradients, and for later ones, which add to them.
        received: bytes of what comes from the stage before.
        needed: whether a gradient goes back there.
        is_last: whether the loss is its end.
        copied: whether its result is sent from a copy, since it does not lie in rows.
        staged: whether messages go through other memory, as a device's do: none of its own is kept for them.
    """

    first: tuple[LayerCost, ...]
    later: tuple[LayerCost, ...]
    received: int
    needed: bool
    is_last: bool
    copied: bool
    staged: bool

    @cached_property
    def plans(self) -> OptimalPlans:
        """All plans of a microbatch by itself, for each budget."""
        return OptimalPlans(self.later)

    def instructions(self, stage: int, plan: Plan) -> dict[tuple[Kind, int, bool], InstructionBytes]:
        """Return what the stage's instructions and those of its neighbours' messages do to memory."""
        found: dict[tuple[Kind, int, bool], InstructionBytes] = {}
        for is_first, costs in ((True, self.first), (False, self.later)):
            forward, message, backward, message_back = self._bytes(costs, plan)
            for kind, taken in {
                Kind.F: forward,
                Kind.B: backward,
                Kind.I: backward,
                Kind.W: InstructionBytes(0, 0),  # all is done in the first half
                Kind.SEND_ACT: message,
                Kind.SEND_GRAD: message_back,
            }.items():
                found[kind, stage, is_first] = taken
            posted = (0, 0) if self.staged else (self.received, costs[-1].gradient)  # memory of receives
            found[Kind.SEND_ACT, stage - 1, is_first] = InstructionBytes(0, 0, posted[0])
            found[Kind.SEND_GRAD, stage + 1, is_first] = InstructionBytes(0, 0, posted[1])
        return found

    def _bytes(self, costs: Costs, plan: Plan) -> tuple[InstructionBytes, ...]:
        """Return what forward, the message after it, backward, and the message after that do."""
        price, end = price_plan(costs, plan), len(costs) - 1
        turn = plan.index(Action(Act.BACKWARD, end))
        held, result, came = price.bytes[turn - 1], costs[end - 1].value, costs[end].gradient
        stays = costs[end].keeps_input or (
            costs[end - 1].keeps_result and Action(Act.KEEP, end - 1) in plan[:turn] and end > 0
        )
        back = costs[0].gradient if self.needed else 0  # in a copy
        alone = 0 if stays or self.is_last else result  # until it is sent, nothing else has it
        most = max(*price.peaks[:turn], held + alone)
        if self.is_last:
            came, peak = 0, max(price.peaks[turn:])
        else:  # the gradient that came is there from before the backward to its end
            gone = plan.index(Action(Act.BACKWARD, end - 1)) + 1
            peak = max(max(price.peaks[turn:gone]) - came, *price.peaks[gone:], 0)
        peak = max(peak, price.bytes[-1] + back)
        if self.staged:  # what comes is there from when it is used, and what goes until it is sent
            return (
                InstructionBytes(self.received + held + alone, self.received + most),
                InstructionBytes(-alone, result if self.copied else 0),
                InstructionBytes(back - held - self.received, came + peak - held),
                InstructionBytes(-back, 0),
            )
        return (
            InstructionBytes(held + alone, most),
            InstructionBytes(result - alone, result, result, result, result)
            if self.copied
            else InstructionBytes(0, 0, result, result, alone),
            InstructionBytes(back - held - self.received - came, peak - held),
            InstructionBytes(0, 0, back, back, back),
        )


class StagePlans:
    """The plans of a rank's stages.

    Args:
        schedule: with messages.
        rank: whose.
        stages: its stages.
        budget: in bytes.

    Attributes:
        plans: by stage.
        most: the bytes of the rank's activations in a pass: more than the budget, and the least, where nothing fits.
        most_kept: the same if all is kept.
        seconds, seconds_kept: of a microbatch through all of the stages, and if all is kept.
    """

    def __init__(self, schedule: Schedule, rank: int, stages: Mapping[int, StageCosts], budget: int) -> None:
        self._schedule, self._rank, self._stages = schedule, rank, dict(sorted(stages.items()))
        self.plans = kept = {number: keep_all(each.later) for number, each in self._stages.items()}
        self.most_kept, self.seconds_kept = self._take(kept)
        if self.most_kept <= budget:
            self.most, self.seconds = self.most_kept, self.seconds_kept
            return
        found = [each for level in range(LEVELS + 1) if (each := self._fit(level / LEVELS, budget)) is not None]
        if not found:
            found = [self._try({number: _Holder(each.plans, 0.0).shortest() for number, each in self._stages.items()})]
        self.seconds, self.most, self.plans = min(found, key=lambda each: each[:2])

    def _fit(self, part: float, budget: int) -> _Found | None:
        """Return plans within the budget, each of which holds a part of what it may; None if there are none.

        Args:
            part: from 0, the least, to 1, for all.
            budget: in bytes.
        """
        holders = {number: _Holder(each.plans, part) for number, each in self._stages.items()}
        limits = dict.fromkeys(holders, budget)
        for _ in range(TRIES):
            plans = {number: holder.plan(limits[number]) for number, holder in holders.items()}
            known = {number: plan for number, plan in plans.items() if plan is not None}
            if len(known) < len(plans):
                return None
            found = self._try(known)
            if found[1] <= budget:
                return found
            limits = {number: limit - (found[1] - budget) for number, limit in limits.items()}
        return None

    def _try(self, plans: dict[int, Plan]) -> _Found:
        most, seconds = self._take(plans)
        return seconds, most, plans

    def _take(self, plans: Mapping[int, Plan]) -> tuple[int, float]:
        """Return the most bytes, and the seconds of a microbatch."""
        units, seconds = dict[tuple[Kind, int, bool], InstructionBytes](), 0.0
        found = {number: stage.instructions(number, plans[number]) for number, stage in self._stages.items()}
        for each in found.values():
            units = {**each, **units}
        for number, each in found.items():
            units |= {key: taken for key, taken in each.items() if key[1] == number}
            seconds += price_plan(self._stages[number].later, plans[number]).seconds
        after = (0,) * self._schedule.stages
        bytes_ = [StageBytes(units, 0, after)] * self._schedule.microbatches
        return most_bytes(self._schedule, self._rank, bytes_), seconds

    def describe(self) -> str:
        """Return what the plans take, beside an ordinary pass, in a sentence."""
        again = sum(price_plan(self._stages[number].later, plan).again for number, plan in self.plans.items())
        layers = sum(len(each.later) - 1 for each in self._stages.values())
        return (
            f"activations take {format_bytes(self.most)} at most, {format_bytes(self.most_kept)} if all were kept; "
            f"{again} of {layers} layers are computed again, "
            f"predicted {self.seconds / self.seconds_kept:.2f} of the time"
        )


class _Holder:
    """The plans of a stage that hold no more than a part of what it may hold between forward and backward.

    Args:
        plans: of the stage's layers, and its end.
        part: from 0, the least, to 1, for all.
    """

    def __init__(self, plans: OptimalPlans, part: float) -> None:
        self._plans, self._costs = plans, plans.costs
        self._far = sum(cost.value + cost.kept + cost.keep_peak + cost.backward_peak for cost in self._costs)
        least = self._with(self._far).least - self._far
        plan = keep_all(self._costs)
        most = price_plan(self._costs, plan).peaks[plan.index(Action(Act.KEEP, len(self._costs) - 1))]
        self._holds = least + int(part * max(0, most - least))

    def plan(self, limit: int) -> Plan | None:
        """Return the quickest plan that takes no more than a limit; None if there is none."""
        plans = self._with(max(0, limit - self._holds))
        return plans.plan(limit) if limit >= plans.least else None

    def shortest(self) -> Plan:
        """Return the plan that takes least."""
        low, high = self._holds, self._holds + self._far
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.plan(middle) is not None else (middle + 1, high)
        plan = self.plan(low)
        assert plan is not None
        return plan

    def _with(self, more: int) -> OptimalPlans:
        """Return the plans of a chain whose end takes more memory."""
        end = self._costs[-1]
        costs = [*self._costs[:-1], replace(end, keep_peak=end.keep_peak + more)]
        return OptimalPlans(costs, alike=self._plans)
