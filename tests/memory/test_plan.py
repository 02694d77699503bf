"""Plans as numbers: the dynamic programme against exhaustion and Revolve's formula, and what is
refused.
"""

import heapq
import random
from dataclasses import replace
from math import comb, inf

import pytest

from nnmpi.lab.memory import main
from nnmpi.memory.optimal import OptimalPlans
from nnmpi.memory.plan import Act, Action, LayerCost, PlanState, keep_all, parse_plan, price_plan
from tests.harness.refusals import usage_error


def random_chain(draw, count):
    """Return layers that differ in everything; the last one is the loss."""
    costs, before = [], 0
    for i in range(count):
        last = i == count - 1
        value, saved = 0 if last else draw.randint(1, 9), draw.randint(0, 18)
        costs.append(
            LayerCost(
                str(i),
                value,
                before,
                saved,
                draw.random() < 0.5,
                not last and draw.random() < 0.5,
                *(float(draw.randint(1, 9)) for _ in range(3)),
            )
        )
        before = value
    return costs


def with_work(draw, costs):
    """Return the layers with temporary arrays in both passes."""
    names = ("forward_work", "keep_work", "backward_work")
    return [replace(cost, **{name: draw.randint(0, 9) for name in names}) for cost in costs]


def quickest(costs, budget, bandwidth=inf, bound=inf):
    """Return the least time of all plans, by a search through all that can be done; none takes more
    than `bound`.
    """

    def to_come(state):
        there = state._saved | state._offloaded | state._returned
        return sum(
            costs[i].backward_s + (i not in there) * costs[i].keep_s for i in range(state._grad)
        )

    def actions(state):
        there = state._saved | state._offloaded | state._returned
        for action in (Action(act, i) for act in Act for i in range(len(costs))):
            i, act = action.layer, action.act
            forward = act in (Act.FORWARD, Act.KEEP)
            idle = act is Act.FORWARD and (i + 1 in state._values or i == len(costs) - 1)
            idle |= (forward and (i >= state._grad or i in there)) or (act is Act.DROP and i == 0)
            if not idle and state.has_inputs(action):
                yield action

    waiting, seen, number = [(0.0, 0, PlanState(costs, bandwidth))], {}, 0
    while waiting:
        _, _, state = heapq.heappop(waiting)
        if state.is_complete:
            return state.seconds
        for action in actions(state):
            after = state.copy()
            least = after.do(action) <= budget and after.seconds + to_come(after)
            if least is False or least > bound:
                continue
            sets = (after._values, after._saved, after._offloaded, after._returned)
            waits = (
                after._idle_s,
                *(after.done[item] for item in sorted(after._returned | set(after.leaving))),
            )
            times = (after.seconds, *(max(wait, after.seconds) for wait in waits))
            known = seen.setdefault((*map(frozenset, sets), after._grad, after.leaving), [])
            if not any(all(a <= b for a, b in zip(item, times, strict=True)) for item in known):
                known.append(times)
                number += 1
                heapq.heappush(waiting, (least, number, after))
    return None


@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_quicker(seed, works):
    """The plans take the time of the best of all, and stay within the budget; below the least there
    is none. With temporary arrays as large as all others, one that is outside of the family may be
    a little quicker.
    """
    draw = random.Random(seed)
    costs = random_chain(draw, draw.randint(1, 5))
    costs = with_work(draw, costs) if works else costs
    plans = OptimalPlans(costs)
    for budget in plans.budgets(4):
        price = price_plan(costs, plans.plan(budget))
        assert price.peak <= budget
        best = quickest(costs, budget, bound=price.seconds)
        assert best == price.seconds or (works and 1.12 * best > price.seconds)
    assert quickest(costs, plans.least - 1) is None
    assert price_plan(costs, plans.plan(plans.least)).peak == plans.least
    usage_error(rf"give at least {plans.least}", lambda: plans.plan(plans.least - 1))


@pytest.mark.parametrize("seed", range(12))
def test_more_memory_takes_no_longer(seed):
    """A longer chain, whose layers may leave memory or not: each plan stays within its budget."""
    costs = with_work(random.Random(seed), random_chain(random.Random(seed), 8))
    if seed % 2:  # what lies between layers is most of it
        costs = [replace(cost, gradient=0, saved=cost.saved // 10) for cost in costs]
    moving = [*(replace(cost, moves=True) for cost in costs[:-1]), costs[-1]]
    for plans in (OptimalPlans(moving, [0.01] * 8), OptimalPlans(costs)):
        budgets = plans.budgets(12)
        assert (budgets[0], budgets[-1]) == (plans.least, plans.all)
        prices = [price_plan(plans.costs, plans.plan(budget)) for budget in budgets]
        assert all(price.peak <= budget for price, budget in zip(prices, budgets, strict=True))
    seconds = [price.seconds for price in prices]
    assert seconds == sorted(seconds, reverse=True)


def revolve(layers, slots):
    """Return Griewank and Walther's least number of forward steps (2000, equation 1)."""

    def reach(slots, times):
        return comb(slots + times, slots) if times >= 0 else 0

    times = next(times for times in range(layers + 1) if reach(slots, times) >= layers)
    return times * layers - reach(slots + 1, times - 1)


def test_equal_layers_meet_revolve():
    """Of equal layers, one kept at a time, as many are gone through again as Revolve needs for so
    many checkpoints.
    """
    for count in (*range(1, 10), 14, 20):
        # 1000: so that no second one is kept; the loss has no result, which the others have at the
        # same moment
        layers = [LayerCost("", 1, 0, 1000, True, False, 1.0, 1.0, 1.0)] * count
        layers[-1] = replace(layers[-1], saved=1001)
        plans = OptimalPlans(layers)
        for slots in range(1, 7):
            again = sum(action.act is Act.FORWARD for action in plans.plan(slots + 1001))
            assert again == revolve(count, slots), (count, slots)


def test_what_is_kept_is_counted_once():
    """A value that a layer keeps, too, does not count twice, and goes with the last that has it."""
    cost = LayerCost("a", 10, 0, 5, True, True, 1.0, 2.0, 3.0)
    costs = [cost, cost, replace(cost, value=0, saves_result=False)]
    price = price_plan(costs, keep_all(costs))
    assert [row[7] for row in price.rows] == [15, 30, 30, 35, 35, 30, 15, 0]
    assert (price.peak, price.seconds, price.recomputed) == (35, 15.0, 0)


def test_temporary_arrays_are_at_the_peak_of_their_action():
    """Beside the result, what is saved, and the gradient; nothing of them is left."""
    works = {"forward_work": 7, "keep_work": 8, "backward_work": 9}
    cost = LayerCost("a", 10, 10, 5, True, False, 1.0, 1.0, 1.0, **works)
    rows = price_plan([cost, cost], parse_plan("F0 K1 D1 B1 K0 D1 B0")).rows
    assert [row[6] for row in rows] == [17, 23, 15, 34, 33, 25, 34]
    assert [row[7] for row in rows] == [10, 15, 15, 10, 25, 15, 10]


@pytest.mark.parametrize(
    "text, words",
    (
        ("F0 K1 B1 B0", "B0 of the plan, number 3"),
        ("F0 F2", "F2 of the plan, number 1"),
        ("K0 K1 B0", "B0 of the plan"),
        ("K0 K1 B1", "the plan is incomplete"),
        ("K0 K1 B1 B0", "the plan is incomplete"),
        ("K0 X1", "'X1' is not an action"),
    ),
)
def test_a_plan_that_lacks_something_is_refused(text, words):
    """The simulator names the action."""
    costs = random_chain(random.Random(1), 2)
    usage_error(words, lambda: price_plan(costs, parse_plan(text)))


def test_plans_are_drawn():
    """A row for each layer, a column for each action."""
    costs = random_chain(random.Random(2), 3)
    picture = (
        price_plan(costs, parse_plan("F0 F1 D1 K2 D2 B2 F0 K1 D1 D2 B1 K0 D1 B0"))
        .draw()
        .splitlines()
    )
    assert [row.partition("|")[2].rstrip() for row in picture[:3]] == [
        "F   f  kB",
        " F   kB",
        "  KB",
    ]
    assert picture[3].startswith("bytes |") and "█" in picture[3]


@pytest.mark.host_only("the command computes with NumPy")
def test_the_command_draws_and_says_what_it_costs():
    """Of equal layers, and of a model that is measured."""
    assert "again" in main(["plan", "--model", "mlp", "--budget", "0%"])
    assert "moved     14 MiB, at 8 MiB/s" in main(
        ["plan", "--layers", "6", "--budget", "50%", "--bandwidth", "8MiB"]
    )
    text = main(["plan", "--layers", "8", "--budget", "50%"])
    assert (
        "budget    23.5 MiB (24641536 bytes)\n" in text
        and "K forward and kept (small: again)" in text
    )
    for words, complaint in (
        (["--layers", "6", "--budget", "1"], "give at least"),
        (["--layers", "6", "--budget", "1", "--bandwidth", "8MiB"], "give at least"),
        (["--layers", "6", "--budget", "x"], "number of bytes"),
        (["--batch", "6"], "--batch is for --model"),
    ):
        usage_error(complaint, main, ["plan", *words])
