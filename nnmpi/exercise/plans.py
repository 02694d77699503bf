"""Memory plans to write: what a pass keeps, drops and computes again; run on numbers by `memory.plan.price_plan`."""

from collections.abc import Callable
from functools import partial

from nnmpi.errors import UsageError
from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, call
from nnmpi.memory.optimal import OptimalPlans
from nnmpi.memory.plan import Costs, LayerCost, parse_plan, price_plan

LENGTHS = (1, 2, 4, 6, 9)


def even(layers: int) -> Costs:
    """Return the costs of equal layers: a value takes a byte, what is kept four more and what came in."""
    return [LayerCost(f"{i}", 1, 1, 4, True, False, 1.0, 1.0, 2.0) for i in range(layers)]


def check(budget: Callable[[OptimalPlans], float], again: Callable[[int], int], function: Function) -> str:
    """Return what a right plan takes.

    Args:
        budget: the bytes that it may take at any moment.
        again: layers -> how many forwards may be done once more.

    Raises:
        WrongAnswer: naming the action that lacks what it needs, or the one at which there is too much.
    """
    for layers in LENGTHS:
        costs = even(layers)
        text = call(function, layers)
        if not isinstance(text, str):
            raise WrongAnswer(f"with {layers} layers it gives {text!r}; give a text such as 'K0 B0'")
        try:
            plan = parse_plan(text)
            price = price_plan(costs, plan)
        except UsageError as error:
            raise WrongAnswer(f"with {layers} layers, {text!r}: {error}") from None
        most = budget(OptimalPlans(costs))
        over = [at for at, peak in enumerate(price.peaks) if peak > most]
        if over:
            raise WrongAnswer(
                f"with {layers} layers, {text!r} takes {price.peaks[over[0]]} bytes in action {plan[over[0]]}, number "
                f"{over[0]}, and {most:g} are allowed"
            )
        if price.again > again(layers):
            raise WrongAnswer(
                f"with {layers} layers, {text!r} goes through {price.again} layers again, "
                f"and {again(layers)} are enough"
            )
    return f"right for {LENGTHS[0]} to {layers} layers; for {layers}: {price.peak} bytes, {price.again} layers again"


_HOW = """

A chain of layers. Value i comes to layer i, and layer i makes value i + 1 of it; the last layer is the loss. Actions:
    F0  forward through layer 0; nothing stays but value 1        K0  the same, and what its backward needs stays
    B0  backward through layer 0, which was kept                  D1  value 1 goes (value 0, the batch, stays)
Return the plan for so many layers as a text, such as "K0 K1 D1 B1 B0". A value takes a byte, what is kept four more."""

_TABLE: tuple[tuple[str, str, Callable[[OptimalPlans], float], Callable[[int], int]], ...] = (
    ("plan-all-kept", "An ordinary pass: everything is kept, nothing is computed again.", lambda p: p.all, lambda n: 0),
    (
        "plan-half",
        "Half the way from an ordinary pass to the least memory; each layer at most once more.",
        lambda plans: (plans.all + plans.least) / 2,
        lambda n: n,
    ),
    (
        "plan-least",
        "The least memory that any plan takes, however long it lasts.",
        lambda plans: plans.least,
        lambda n: n * n,
    ),
)

EXERCISES = tuple(
    Exercise(name, f"{title}{_HOW}", "layers", partial(check, budget, again)) for name, title, budget, again in _TABLE
)
