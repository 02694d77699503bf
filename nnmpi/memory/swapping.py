"""Plans that move what is kept out of memory and back, where that is cheaper than to compute it again.

Which layers leave is searched for; all else is the exact programme (`memory.optimal`), for which a layer that leaves
takes no memory meanwhile. Its plan moves a layer all at once, and waits; here out and in are then drawn apart, so that
layers move while others compute:

    the programme's       K0 O0 A0 K1 D1 K2 D2 B2 B1 I0 B0         A  as late as the memory lasts, the first one first
    drawn apart           K0 O0 K1 D1 A0 K2 D2 B2 I0 B1 B0         I  as early as it allows, the next one first

This is KARMA's mix of swapping and recomputation (Wahib et al., "Scaling distributed deep learning workloads beyond
the memory capacity with KARMA", 2020). To find the best of all such plans is NP-hard (Beaumont et al., "Efficient
combination of rematerialization and offloading for training DNNs", 2021), so this is a search: it begins with no layer,
with each number of first layers (they have the most time until they are needed), and goes on one layer more or less
at a time. Of short chains all sets of layers are tried.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from nnmpi.memory.optimal import OptimalPlans
from nnmpi.memory.plan import Act, Action, Costs, Plan, PlanState, moved_bytes, price_plan

SEARCHED = 96  # sets of layers, at most
SAME = 1e-9  # times that differ by no more are the same


class _Row(NamedTuple):
    """An action of a plan, the most bytes that there are meanwhile, and when it would begin if nobody waited."""

    action: Action
    peak: int
    begin: float


def swapping_plan(plans: OptimalPlans, budget: int, bandwidth: float) -> Plan:
    """Return the quickest plan that is found within a budget; without anything moved if that is as quick.

    Args:
        plans: without anything moved.
        budget: in bytes.
        bandwidth: bytes per second that go out or come in.

    Raises:
        UsageError: for a budget below the least.
    """
    costs = plans.costs
    able = [i for i in range(len(costs) - 1) if moved_bytes(costs, i)]
    tried: dict[frozenset[int], tuple[float, Plan] | None] = {}

    def take(layers: frozenset[int]) -> float:
        if layers not in tried:
            tried[layers] = _best(costs, layers, budget, bandwidth)
        found = tried[layers]
        return float("inf") if found is None else found[0]

    if budget >= plans.least:
        tried[frozenset()] = _priced(costs, plans.plan(budget), bandwidth)
    starts = [frozenset(able[:count]) for count in range(len(able) + 1)]
    if 2 ** len(able) <= SEARCHED:
        starts = [frozenset(layers) for count in range(len(able) + 1) for layers in combinations(able, count)]
    ideal = sum(cost.keep_s + cost.backward_s for cost in costs) * (1 + SAME)
    best, improved = frozenset[int](), True
    for layers in starts:
        if take(best) > ideal:
            best = min(best, layers, key=take)
    while take(best) > ideal and improved and len(tried) < SEARCHED:
        nearest = min((best ^ {i} for i in able), key=take, default=best)
        improved = take(nearest) < take(best)
        best = nearest if improved else best
    found = tried[best]
    if found is None:
        least = min(OptimalPlans(costs, layers).least for layers in starts)
        raise plans.too_few(budget, min(least, plans.least))
    return found[1]


def _best(costs: Costs, layers: frozenset[int], budget: int, bandwidth: float) -> tuple[float, Plan] | None:
    """Return the time of the best plan in which no other layers leave, and the plan; None if there is none."""
    plans = OptimalPlans(costs, layers)
    if budget < plans.least:
        return None
    late = _leave_late(costs, plans.plan(budget), budget)
    tries = [_priced(costs, _come_early(costs, late, budget, bandwidth, just), bandwidth) for just in (False, True)]
    return min(tries, key=lambda each: each[0])


def _priced(costs: Costs, plan: Plan, bandwidth: float) -> tuple[float, Plan]:
    return price_plan(costs, plan, bandwidth).seconds, plan


def _units(costs: Costs, plan: list[Action]) -> list[list[Action]]:
    """Return the actions one by one, but the loss's together: nobody can do anything between them."""
    first = plan.index(Action(Act.KEEP, len(costs) - 1))
    stop = plan.index(Action(Act.BACKWARD, len(costs) - 1)) + 1
    return [*([each] for each in plan[:first]), plan[first:stop], *([each] for each in plan[stop:])]


def _leave_late(costs: Costs, plan: Plan, budget: int) -> Plan:
    """Return a plan that waits for what leaves only when the memory is needed."""
    state, late = PlanState(costs), list[Action]()
    for unit in _units(costs, [action for action in plan if action.act is not Act.AWAY]):
        while True:
            trial = state.copy()
            fits = all(trial.has_for(action) and trial.do(action) <= budget for action in unit)
            if fits or not state.leaving:
                break
            late.append(Action(Act.AWAY, state.leaving[0]))
            state.do(late[-1])
        state = trial
        late += unit
    return tuple(late)


def _come_early(costs: Costs, plan: Plan, budget: int, bandwidth: float, just: bool) -> Plan:
    """Return a plan that begins to bring layers in as early as the memory allows, or just early enough."""
    state, rows = PlanState(costs), list[_Row]()
    for action in plan:
        begin = state.seconds
        rows.append(_Row(action, state.do(action), begin))
    starts = _starts(costs, rows, bandwidth) if just else {}
    for layer in [row.action.layer for row in rows if row.action.act is Act.IN]:
        coming = Action(Act.IN, layer)
        place = next(i for i, row in enumerate(rows) if row.action == coming)
        moved, best = moved_bytes(costs, layer), place
        for i in reversed(range(place)):
            before = rows[i].action
            if before.act in (Act.IN, Act.OUT) or before == Action(Act.AWAY, layer) or rows[i].peak + moved > budget:
                break
            if before.layer < len(costs) - 1 or before.act is Act.KEEP:  # else nobody can, see `_units`
                best = i
                if rows[i].begin <= starts.get(layer, -1.0):
                    break
        rows[best:place] = [row._replace(peak=row.peak + moved) for row in rows[best:place]]
        rows.insert(best, rows.pop(place)._replace(begin=rows[best].begin, peak=rows[best].peak))
    return tuple(row.action for row in rows)


def _starts(costs: Costs, rows: list[_Row], bandwidth: float) -> dict[int, float]:
    """Return by which time each layer must begin to come in, so that it is there when its backward begins."""
    backward = {row.action.layer: row.begin for row in rows if row.action.act is Act.BACKWARD}
    starts, after = dict[int, float](), float("inf")
    for row in reversed(rows):
        layer = row.action.layer
        if row.action.act is Act.IN:
            after = starts[layer] = min(after, backward[layer]) - moved_bytes(costs, layer) / bandwidth
    return starts
