"""Memory plans as animations for a page: what layers hold, the bytes and the time, action by action.

{"actions": [["K", 0, "=- ", begin, computes, end, peak, after, transfer], ...],     in seconds and bytes
 "peak": 9437184, "seconds": 40.0, "again": 8, "moved": 0}

An action waits from `begin` to `computes`, and computes until `end`. Meanwhile there are at most `peak` bytes, and then
`after`. The text is that of `signs`; a transfer is [begin, end] of `O` and `I`, else null.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from nnmpi.errors import UsageError
from nnmpi.memory.optimal import OptimalPlans, swapping_plan
from nnmpi.memory.plan import Act, Action, Costs, Plan, PlanState, keep_all, moved_bytes, price_plan, signs

MOST_LAYERS = 64  # that fit a page
POINTS = 11  # budgets from the least to the most
_DIGITS = 9


def animation(costs: Costs, plan: Plan, bandwidth: float = inf) -> dict[str, Any]:
    """Return the animation of a plan that is right, as JSON values.

    Args:
        costs: of the layers.
        plan: for them.
        bandwidth: bytes per second that go out or come in.

    Raises:
        UsageError: for a plan that is not right; see `price_plan`.
    """
    price, state, actions = price_plan(costs, plan, bandwidth), PlanState(costs, bandwidth), list[list[Any]]()
    for number, (action, held) in enumerate(zip(plan, signs(costs, plan), strict=True)):
        begin = state.seconds
        state.do(action)
        times = (begin, state.seconds - _computes(costs, action), state.seconds)
        transfer = None
        if action.act in (Act.OUT, Act.IN):
            over = state.done[action.layer]
            transfer = _round([over - moved_bytes(costs, action.layer) / bandwidth, over])
        row = [action.act.value, action.layer, held, *_round(times), price.peaks[number], price.bytes[number]]
        actions.append([*row, transfer])
    figures = {"peak": price.peak, "seconds": round(price.seconds, _DIGITS), "again": price.again}
    return {"actions": actions, **figures, "moved": price.moved}


def _computes(costs: Costs, action: Action) -> float:
    """Return for how many seconds an action computes."""
    cost = costs[action.layer]
    return {Act.FORWARD: cost.forward_s, Act.KEEP: cost.keep_s, Act.BACKWARD: cost.backward_s}.get(action.act, 0.0)


def _round(seconds: Iterable[float]) -> list[float]:
    return [round(each, _DIGITS) for each in seconds]


def compare(plans: OptimalPlans, budget: int, bandwidth: float | None = None) -> dict[str, Any]:
    """Return what a page needs to show the plans of a chain under several budgets.

    Args:
        plans: of the chain.
        budget: with which the page begins.
        bandwidth: bytes per second that go out or come in; None where nothing leaves memory.

    Raises:
        UsageError: for a chain that does not fit a page, or a budget below the least.
    """
    costs = plans.costs
    if len(costs) > MOST_LAYERS:
        raise UsageError(f"a page draws up to {MOST_LAYERS} layers, not {len(costs)}; look at the text")
    kinds: dict[str, Callable[[int], Plan]] = {"computed again": plans.plan}
    if bandwidth is not None:
        kinds = {"swapped, too": lambda limit: swapping_plan(plans, limit, bandwidth), **kinds}
    kinds["all kept"] = lambda limit: keep_all(costs)
    budgets = sorted({*plans.budgets(POINTS), budget})
    return {
        "layers": [cost.name for cost in costs],
        "budgets": budgets,
        "budget": budget,
        "plans": {
            name: [animation(costs, make(limit), bandwidth or inf) for limit in budgets] for name, make in kinds.items()
        },
    }
