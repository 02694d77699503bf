"""The fastest plan within a memory budget for unequal layers: dynamic programming.

The layers s..t, given the value before them and the gradient after them, can begin in two ways, and
in a third if layer s can be offloaded:

    keep     K s, then s + 1..t, then B s
    again    F s .. F m-1, dropping all but the value before s; then m..t; then s..m-1, from that
             value
    swap     K s, O s, A s, then s + 1..t, with all of the memory, then I s, B s

    least time(s, t, bytes) = min over these, and over m

This is rotor's algorithm (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing
for heterogeneous chains: how to train deep neural networks with limited memory", 2019). A saved
value stays until the layers after it have run back (plans are memory-persistent, as in rotor), and
no layer is kept before the layers below it. Among such plans this one is the fastest. For equal
layers with one kept at a time it is Revolve's (Griewank and Walther, "Algorithm 799: Revolve",
2000).
Rotor rounds bytes to 500 slots. Here each (s, t) has its exact curve of least time over bytes, with
a point wherever more bytes save time, so no byte of the budget is lost.

Each (s, t) has two curves. In one, earlier layers hold the value before s. In the other, the layers
s..t own it: its bytes count here, and it is dropped as soon as nothing needs it: after K s, unless
K s saves it.

The time of a transfer depends on the computation beside it. So the dynamic program is run for
several prices of an offloaded layer. A price may rise with the layer's index, since a later layer
is needed sooner. Its plans move a layer all at once; then out and in are drawn apart, and the
fastest of these plans is used:

    the program's     K0 O0 A0 K1 D1 K2 D2 B2 B1 I0 B0
    drawn apart       K0 O0 K1 D1 A0 K2 D2 B2 I0 B1 B0

Drawn apart, A comes as late as the memory lasts, in the order of O; I comes as early as the memory
allows, the layer needed next first.

This is KARMA's mix of swapping and recomputation (Wahib et al., "Scaling distributed deep learning
workloads beyond the memory capacity with KARMA", 2020). Finding the best of all such plans is
NP-hard (Beaumont et al., "Efficient combination of rematerialization and offloading for training
DNNs", 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nnmpi.base.errors import UsageError
from nnmpi.base.units import format_bytes
from nnmpi.memory.plan import (
    Act,
    Action,
    LayerCosts,
    Plan,
    PlanState,
    keep_all,
    moved_bytes,
    price_plan,
)

# the most points of a curve; with more, the plan may be a little slower than the best
POINTS = 2048
KEEP, SWAP = -1, -2
TIE_S = 1e-15  # the least cost of moving a byte, so that nothing moves without need
# A layer's price: this part of its transfers' time, times this power of its relative index.
SWAP_PRICES = ((0.0, 0), *((part, power) for part in (0.2, 0.5, 1.0) for power in (0, 1, 3)))


@dataclass(frozen=True)
class TimeCurve:
    """Least time over bytes.

    Attributes:
        bytes: of each point, rising.
        seconds: falling.
        choice: `KEEP`, `SWAP`, or m, the layer at which the run is split.
    """

    bytes: Any
    seconds: Any
    choice: Any


class OptimalPlans:
    """All plans of least time for a chain, one for each budget.

    Args:
        costs: of the layers; the last one is the loss.
        swap_s: the price of offloading a byte of each layer, in seconds; empty for no offloading.

    Attributes:
        least: the least budget with a plan.
    """

    def __init__(self, costs: LayerCosts, swap_s: Sequence[float] = ()) -> None:
        self.costs = costs
        sizes = [(moved_bytes(costs, i), swap_) for i, swap_ in enumerate(swap_s[:-1])]
        self._moves = {
            i: (nbytes, nbytes * (TIE_S + item)) for i, (nbytes, item) in enumerate(sizes) if nbytes
        }
        self._values = [0, *(cost.value for cost in costs[:-1]), 0]  # value i is layer i's input
        self._grads = [*(cost.gradient for cost in costs), 0]
        self._curves: dict[tuple[int, int, bool], TimeCurve] = {}
        for length in range(len(costs)):
            for s in range(len(costs) - length):
                for owned in (False, True):
                    self._curves[s, s + length, owned] = self._curve(s, s + length, owned)
        self.least = int(self._curves[0, len(costs) - 1, False].bytes[0])

    @cached_property
    def all(self) -> int:
        """The bytes of an ordinary pass."""
        return price_plan(self.costs, keep_all(self.costs)).peak

    def plan(self, budget: int) -> Plan:
        """Return the plan of least time.

        Raises:
            UsageError: for a budget below the least.
        """
        if budget < self.least:
            raise self.budget_error(budget, self.least)
        plan: list[Action] = []
        self._write(plan, 0, len(self.costs) - 1, False, budget)
        return tuple(plan)

    def budget_error(self, budget: int, least: int) -> UsageError:
        """Return the error for a budget below the least."""
        return UsageError(
            f"{budget} bytes are too few for the activations of this model: even when all is"
            f" computed again, {least} are needed ({format_bytes(least)}), and {self.all} when"
            f" nothing is; give at least {least}, or smaller microbatches"
        )

    def budgets(self, count: int) -> list[int]:
        """Return this many budgets, evenly from the least to an ordinary pass's."""
        return [self.least + (self.all - self.least) * i // (count - 1) for i in range(count)]

    def _saved_bytes(self, s: int, owned: bool) -> tuple[int, bool]:
        """Return the bytes saved for layer s's backward, and whether they include its result."""
        cost = self.costs[s]
        saved = cost.saved + (self._values[s] if owned and cost.saves_input else 0)
        return saved + (self._values[s + 1] if cost.saves_result else 0), cost.saves_result

    def _curve(self, s: int, t: int, owned: bool) -> TimeCurve:
        """Return the curve of the layers s..t, which own the value before s, or not."""
        cost, grads, values = self.costs[s], self._grads, self._values
        behind, local = grads[t + 1], values[s] if owned else 0
        saved, holds = self._saved_bytes(s, owned)
        first = behind + local + cost.saved + values[s + 1] + cost.keep_work
        back = grads[s + 1] + cost.gradient + cost.backward_work
        least = max(first, saved + back)
        spent = cost.keep_s + cost.backward_s
        if s == t:
            points = [(np.array([least]), np.array([spent]), KEEP)]
        else:
            inner = self._curves[s + 1, t, not holds]
            points = [(np.maximum(inner.bytes + saved, least), inner.seconds + spent, KEEP)]
            if s in self._moves:
                (moved, moving_s), inner = self._moves[s], self._curves[s + 1, t, True]
                floor = max(first, moved + back)
                points.append(
                    (np.maximum(inner.bytes, floor), inner.seconds + spent + moving_s, SWAP)
                )
        floor, seconds = 0, 0.0
        for m in range(s + 1, t + 1):
            layer = self.costs[m - 1]
            entering = values[m - 1] if m - 1 > s else 0
            floor = max(floor, behind + local + values[m] + entering + layer.forward_work)
            seconds += layer.forward_s
            right, left = self._curves[m, t, True], self._curves[s, m - 1, owned]
            points.append((*_in_sequence(right, local, left, floor, seconds), m))
        return _lower_envelope(points)

    def _write(self, plan: list[Action], s: int, t: int, owned: bool, budget: int) -> None:
        """Append the plan for the layers s..t within a budget."""
        while True:
            curve = self._curves[s, t, owned]
            # the best within the budget
            choice = int(curve.choice[np.searchsorted(curve.bytes, budget, "right") - 1])
            if choice in (KEEP, SWAP):
                break
            plan.append(Action(Act.FORWARD, s))
            for i in range(s + 1, choice):
                plan += [Action(Act.FORWARD, i), Action(Act.DROP, i)]
            self._write(plan, choice, t, True, budget - (self._values[s] if owned else 0))
            t = choice - 1
        saved, holds = self._saved_bytes(s, owned)
        plan += [Action(Act.KEEP, s), *[Action(Act.DROP, s)] * owned]
        if choice == SWAP:
            plan += [Action(Act.OUT, s), Action(Act.AWAY, s)]
            self._write(plan, s + 1, t, True, budget)
            plan += [Action(Act.IN, s), Action(Act.BACKWARD, s)]
            return
        if s < t:
            self._write(plan, s + 1, t, not holds, budget - saved)
        if s + 1 < len(self.costs) and (holds or s == t):
            plan.append(Action(Act.DROP, s + 1))
        plan.append(Action(Act.BACKWARD, s))


def _in_sequence(
    right: TimeCurve, value: int, left: TimeCurve, floor: int, seconds: float
) -> tuple[Any, Any]:
    """Return the curve of two runs one after the other, within the same bytes."""
    need = np.unique(np.concatenate([right.bytes + value, left.bytes]))
    need = need[np.searchsorted(need, max(right.bytes[0] + value, left.bytes[0])) :]
    first = right.seconds[np.searchsorted(right.bytes + value, need, "right") - 1]
    second = left.seconds[np.searchsorted(left.bytes, need, "right") - 1]
    return np.maximum(need, floor), first + second + seconds


def _lower_envelope(points: list[tuple[Any, Any, int]]) -> TimeCurve:
    """Return the lower envelope of some curves: at each number of bytes the least time."""
    need = np.concatenate([item for item, _, _ in points])
    seconds = np.concatenate([item for _, item, _ in points])
    choice = np.repeat([item for _, _, item in points], [len(item) for item, _, _ in points])
    order = np.lexsort((seconds, need))
    need, seconds, choice = need[order], seconds[order], choice[order]
    best = np.concatenate([[np.inf], np.minimum.accumulate(seconds)[:-1]])
    better = seconds < best
    need, seconds, choice = need[better], seconds[better], choice[better]
    if len(need) > POINTS:  # thin out, but keep both ends
        some = np.linspace(0, len(need) - 1, POINTS).astype(int)
        need, seconds, choice = need[some], seconds[some], choice[some]
    return TimeCurve(need, seconds, choice)


def swapping_plan(plans: OptimalPlans, budget: int, bandwidth: float) -> Plan:
    """Return the fastest plan found within a budget, without swapping if that is as fast.

    It was compared with an exhaustive search over all orders of actions, on 120 random chains of 2
    to 4 layers: it found the fastest plan for 103, and the worst of its other plans took 17 %
    longer.

    Args:
        plans: without swapping.
        budget: in bytes.
        bandwidth: of the store, in bytes per second.

    Raises:
        UsageError: for a budget below the least.
    """
    costs, least = plans.costs, plans.least
    result = [plans.plan(budget)] if budget >= least else []
    for part, power in SWAP_PRICES:
        byte_s = 2 * part / bandwidth
        swapped = OptimalPlans(
            costs, [byte_s * ((i + 1) / len(costs)) ** power for i in range(len(costs))]
        )
        least = min(least, swapped.least)
        if budget >= swapped.least:
            result.append(
                _fetch_early(costs, _offload_late(costs, swapped.plan(budget), budget), budget)
            )
    if not result:
        raise plans.budget_error(budget, least)
    return min(result, key=lambda plan: price_plan(costs, plan, bandwidth).seconds)


def _offload_late(costs: LayerCosts, plan: Plan, budget: int) -> Plan:
    """Return a plan that waits for a transfer out only when the memory is needed."""
    state, late, last = PlanState(costs), list[Action](), len(costs) - 1
    remaining = [action for action in plan if action.act is not Act.AWAY]
    while remaining:
        # the loss's actions as one: no other action can come between them
        count = (
            remaining.index(Action(Act.BACKWARD, last)) + 1
            if remaining[0] == Action(Act.KEEP, last)
            else 1
        )
        trial = state.copy()
        if (
            all(trial.has_inputs(item) and trial.do(item) <= budget for item in remaining[:count])
            or not state.leaving
        ):
            late += remaining[:count]
            state, remaining = trial, remaining[count:]
        else:
            late.append(Action(Act.AWAY, state.leaving[0]))
            state.do(late[-1])
    return tuple(late)


def _fetch_early(costs: LayerCosts, plan: Plan, budget: int) -> Plan:
    """Return a plan that starts transfers in as early as the memory allows."""
    state, last = PlanState(costs), len(costs) - 1
    rows = [(action, state.do(action)) for action in plan]
    for layer in [action.layer for action in plan if action.act is Act.IN]:
        index = next(i for i, (action, _) in enumerate(rows) if action == Action(Act.IN, layer))
        moved, best = moved_bytes(costs, layer), index
        for i in reversed(range(index)):
            before, peak = rows[i]
            if (
                before.act in (Act.IN, Act.OUT)
                or before == Action(Act.AWAY, layer)
                or peak + moved > budget
            ):
                break
            if before.layer < last or before.act is Act.KEEP:
                best = i
        later = [(action, peak + moved) for action, peak in rows[best:index]]
        rows[best : index + 1] = [(rows[index][0], later[0][1]) if later else rows[index], *later]
    return tuple(action for action, _ in rows)
