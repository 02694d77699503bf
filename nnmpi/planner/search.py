"""The layouts in the order of their bounds, until no other one can be among the best.

bounds     1.0  1.1  1.1  1.3 | 1.6  1.7 ...      a bound is a price without the bubble, so those behind the line
prices     1.4  1.2  1.5  1.5 |  not simulated    cannot be among the best: their bounds are above the worst

What does not fit the memory may come again with a budget for its activations, some of which are then computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from nnmpi import clock
from nnmpi.errors import LayoutError
from nnmpi.memory.ledger import ACTIVATIONS
from nnmpi.planner.price import LayoutPrice, Pricer
from nnmpi.planner.space import Candidate, Refusals, candidates

KEPT = 10


@dataclass(frozen=True)
class PlannedLayout:
    """A layout and what it takes."""

    candidate: Candidate
    price: LayoutPrice

    @property
    def order(self) -> tuple[float, int, Candidate]:
        """The best first: by seconds, of ties the one that needs fewer bytes."""
        return self.price.seconds, self.price.bytes, self.candidate


@dataclass(frozen=True)
class LayoutSearch:
    """What a search found.

    Attributes:
        best: the layouts of the least times, the least first.
        refused: how many fall out for which reason.
        looked_at: how many layouts there were.
        priced: how many of them had to be simulated, until no other could be better than the best.
        seconds: that the search took.
        replicas: the best of those that have the whole model on each rank, whose prices are measured as a whole.
    """

    best: tuple[PlannedLayout, ...]
    refused: Refusals
    looked_at: int
    priced: int
    seconds: float
    replicas: PlannedLayout | None


def plan(
    pricer: Pricer,
    limit_bytes: int | None = None,
    kept: int = KEPT,
    kind: Callable[[Candidate], Hashable] = lambda one: one,
) -> LayoutSearch:
    """Return the best layouts of a workload on the ranks of a machine.

    Args:
        pricer: of the workload there.
        limit_bytes: what a rank may have of everything; None for any.
        kept: how many are wanted.
        kind: of those of one kind only the best counts.

    Raises:
        LayoutError: when there is no layout, or none fits the memory; it says what comes nearest.
    """
    begin, network = clock.now(), pricer.network
    levels = 1 < len(set(network.nodes)) < network.ranks
    shares, one_node = list(pricer.profile.steps), network.on_one_node
    found, refused = candidates(
        network.ranks, pricer.workload.batch_size, shares, pricer.layers, one_node, levels, network.has_shared
    )
    if not found:
        reasons = "; ".join(f"{count} fall out: {reason}" for reason, count in refused.most_common())
        raise LayoutError(f"{network.ranks} ranks can have no layout of this model ({reasons}); give other ranks")
    best: dict[Hashable, PlannedLayout] = {}
    nearest: PlannedLayout | None = None
    replicas: PlannedLayout | None = None
    priced = left_out = 0
    for bound_s, one in sorted((pricer.price(each, simulated=False).seconds, each) for each in found):
        is_replica = replicas is None and one.dp == one.ranks
        full = len(best) >= kept and bound_s > sorted(each.price.seconds for each in best.values())[kept - 1]
        if full and not is_replica:
            if replicas is not None:
                break
            continue
        priced += 1
        planned = PlannedLayout(one, pricer.price(one))
        if limit_bytes is not None and planned.price.bytes > limit_bytes:
            left_out += 1
            planned, least = _with_budget(pricer, planned, limit_bytes)
            nearest = least if nearest is None or least.price.bytes < nearest.price.bytes else nearest
            if planned.price.bytes > limit_bytes:
                continue
        replicas = planned if is_replica else replicas
        known = best.get(kind(one))
        if known is None or planned.order < known.order:
            best[kind(one)] = planned
    if nearest is not None and not best:
        raise LayoutError(
            f"no layout of {network.ranks} rank{'s'[: network.ranks > 1]} fits {limit_bytes} bytes on each; "
            f"{nearest.candidate} would with {nearest.price.bytes}: give that much, more ranks or a smaller batch"
        )
    if left_out:
        refused[f"more than {limit_bytes} bytes on a rank, of those that might be as quick"] = left_out
    order = sorted(best.values(), key=lambda each: each.order)
    return LayoutSearch(tuple(order[:kept]), refused, len(found), priced, clock.now() - begin, replicas)


def _with_budget(pricer: Pricer, planned: PlannedLayout, limit_bytes: int) -> tuple[PlannedLayout, PlannedLayout]:
    """Return a layout with the budget for activations that memory leaves, and with the least budget."""
    one = planned.candidate
    if one.pp > 1:
        return planned, planned
    least = pricer.least_activations(one)
    smallest = replace(one, activation_memory=least)
    tight = PlannedLayout(smallest, pricer.price(smallest))
    if tight.price.bytes > limit_bytes:
        return planned, tight
    budget = limit_bytes - (tight.price.bytes - tight.price.memory[ACTIVATIONS])
    fitting = replace(one, activation_memory=max(budget, least))
    return PlannedLayout(fitting, pricer.price(fitting)), tight
