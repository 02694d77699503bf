"""The layouts in the order of their bounds, until the best are proved to be the best under these prices.

bounds     1.0  1.1  1.1  1.3 | 1.6  1.7 ...      a layout's price is never below its bound, so those behind the
prices     1.4  1.2  1.5  1.5 |  not looked at    line cannot be among the best: their bounds are above the worst
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from math import inf

from nnmpi import clock
from nnmpi.errors import LayoutError
from nnmpi.planner.price import LayoutPrice, Pricer
from nnmpi.planner.space import Candidate, Refusals, candidates

KEPT = 10
LOOKED_AT = 10  # layouts, when none fits


@dataclass(frozen=True)
class PlannedLayout:
    """A layout and what it takes."""

    candidate: Candidate
    price: LayoutPrice


@dataclass(frozen=True)
class LayoutSearch:
    """What a search found.

    Attributes:
        best: the layouts of the least times, the least first; of equals the one that needs fewer bytes.
        refused: how many fall out for which reason.
        looked_at: how many layouts there were.
        priced: how many of them had to be priced, until no other could be better than the best.
        seconds: that the search took.
    """

    best: tuple[PlannedLayout, ...]
    refused: Refusals
    looked_at: int
    priced: int
    seconds: float


def search(
    layouts: Iterable[Candidate],
    bound: Callable[[Candidate], float],
    price: Callable[[Candidate], LayoutPrice],
    kept: int = KEPT,
    fits: Callable[[Candidate], bool] = lambda _: True,
    kind: Callable[[Candidate], Hashable] = lambda one: one,
) -> tuple[list[PlannedLayout], int]:
    """Return the layouts of the least seconds, of equals those that need fewer bytes, and how many had to be priced.

    Args:
        layouts: to choose from.
        bound: seconds that the price is not below.
        price: what a layout takes.
        kept: how many are wanted.
        fits: whether one may be taken; asked of those that may be among the best, as it takes longer than a bound.
        kind: of those of one kind only the best counts.
    """
    order = sorted(((bound(one), one) for one in layouts), key=lambda pair: (pair[0], pair[1]))
    best: dict[Hashable, list[PlannedLayout]] = {}  # by kind, those of the least seconds: bytes take longer to tell
    worst_s, priced = inf, 0
    for least_s, one in order:
        if least_s > worst_s:
            break
        if not fits(one):
            continue
        priced += 1
        found = PlannedLayout(one, price(one))
        equals = best.setdefault(kind(one), [])
        if equals and found.price.seconds < equals[0].price.seconds:
            equals.clear()
        if not equals or found.price.seconds == equals[0].price.seconds:
            equals.append(found)
        if len(best) >= kept:
            worst_s = nsmallest(kept, (each[0].price.seconds for each in best.values()))[-1]
    within = [min(each, key=_order) for each in best.values() if each[0].price.seconds <= worst_s]
    return sorted(within, key=_order)[:kept], priced


def _order(one: PlannedLayout) -> tuple[float, int, Candidate]:
    return one.price.seconds, one.price.bytes, one.candidate


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
        kind: see `search`.

    Raises:
        LayoutError: when there is no layout, or none fits the memory; it says what comes nearest.
    """
    begin = clock.now()
    network, profile = pricer.network, pricer.profile
    nodes = network.nodes
    found, refused = candidates(
        network.ranks,
        pricer.workload.batch_size,
        list(profile.steps),
        len(next(iter(profile.layers.values()))),
        network.on_one_node,
        1 < len(set(nodes)) < network.ranks,
        network.has_shared,
    )
    if not found:
        reasons = "; ".join(f"{count} fall out: {reason}" for reason, count in refused.most_common())
        raise LayoutError(f"{network.ranks} ranks can have no layout of this model ({reasons}); give other ranks")
    left_out = 0

    def fits(one: Candidate) -> bool:
        nonlocal left_out
        room = limit_bytes is None or (pricer.least_bytes(one) <= limit_bytes and pricer.bytes(one) <= limit_bytes)
        left_out += not room
        return room

    best, priced = search(found, pricer.bound, pricer.price, kept, fits, kind)
    if not best:
        least, needs = _nearest(found, pricer)
        raise LayoutError(
            f"no layout of {network.ranks} rank{'s'[: network.ranks > 1]} fits {limit_bytes} bytes on each; "
            f"{least} would with {needs}: give that much, more ranks or a smaller batch"
        )
    if left_out:
        refused[f"more than {limit_bytes} bytes on a rank, of those that might be as quick"] = left_out
    return LayoutSearch(tuple(best), refused, len(found), priced, clock.now() - begin)


def _nearest(layouts: Iterable[Candidate], pricer: Pricer) -> tuple[Candidate, int]:
    """Return the layout that needs the fewest bytes of those with the least besides activations, and how many."""
    least = nsmallest(LOOKED_AT, layouts, key=lambda each: (pricer.least_bytes(each), each))
    needs = {each: pricer.bytes(each) for each in least}
    best = min(least, key=needs.__getitem__)
    return best, needs[best]
