"""The layouts in the order of their bounds, until the best are proved to be the best under these prices.

bounds     1.0  1.1  1.1  1.3 | 1.6  1.7 ...      a layout's price is never below its bound, so those behind the
prices     1.4  1.2  1.5  1.5 |  not looked at    line cannot be among the best: their bounds are above the worst

The least of all bounds and prices is next: what has a bound is priced, what has a price is asked whether it fits the
memory. What does not fit may come again with a budget for its activations, some of which are then computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count
from math import inf
from typing import Any

from nnmpi import clock
from nnmpi.errors import LayoutError
from nnmpi.planner.price import LayoutPrice, Pricer
from nnmpi.planner.space import Candidate, Refusals, candidates

KEPT = 10
LOOKED_AT = 10  # layouts, when none fits
SAYS_S = 10.0  # after so long a search says how far it is


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
    instead: Callable[[Candidate], Candidate | None] = lambda _: None,
) -> tuple[list[PlannedLayout], int]:
    """Return the layouts of the least seconds, of equals those that need fewer bytes, and how many had to be priced.

    Args:
        layouts: to choose from.
        bound: seconds that the price is not below.
        price: what a layout takes.
        kept: how many are wanted.
        fits: whether one may be taken; asked only of those that are among the best else, as it takes longer.
        kind: of those of one kind only the best counts.
        instead: returns what may be taken where one does not fit, which is no quicker; None for nothing.
    """
    numbers, priced = count(), 0
    ahead: list[tuple[float, int, Candidate, PlannedLayout | None]] = [
        (bound(one), next(numbers), one, None) for one in layouts
    ]
    heapify(ahead)
    best: dict[Hashable, list[PlannedLayout]] = {}  # by kind, those of the least seconds: bytes take longer to tell
    worst_s = inf

    def look_at(one: Candidate) -> None:
        found = PlannedLayout(one, price(one))
        heappush(ahead, (found.price.seconds, next(numbers), one, found))

    while ahead and ahead[0][0] <= worst_s:
        seconds, _, one, found = heappop(ahead)
        equals = best.get(kind(one), [])
        if equals and seconds > equals[0].price.seconds:
            continue
        if found is None:
            priced += 1
            look_at(one)
        elif fits(one):
            best.setdefault(kind(one), []).append(found)
            worst_s = seconds if len(best) == kept else worst_s
        elif (other := instead(one)) is not None:
            look_at(other)
    return sorted((min(each, key=_order) for each in best.values()), key=_order)[:kept], priced


def _order(one: PlannedLayout) -> tuple[float, int, Candidate]:
    return one.price.seconds, one.price.bytes, one.candidate


def plan(
    pricer: Pricer,
    limit_bytes: int | None = None,
    kept: int = KEPT,
    kind: Callable[[Candidate], Hashable] = lambda one: one,
    say: Callable[[str], None] = lambda _: None,
) -> LayoutSearch:
    """Return the best layouts of a workload on the ranks of a machine.

    Args:
        pricer: of the workload there.
        limit_bytes: what a rank may have of everything; None for any.
        kept: how many are wanted.
        kind: see `search`.
        say: called with a sentence now and then while it takes its time: bytes are measured where memory is tight.

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
    left_out = asked = 0
    next_s = begin + SAYS_S

    def fits(one: Candidate) -> bool:
        nonlocal left_out, asked, next_s
        asked += 1
        if limit_bytes is not None and clock.now() > next_s:
            next_s = clock.now() + SAYS_S
            say(f"looking for layouts that fit {limit_bytes} bytes: {asked} looked at, {left_out} need more")
        room = limit_bytes is None or (pricer.least_bytes(one) <= limit_bytes and pricer.bytes(one) <= limit_bytes)
        left_out += not room and not one.activation_memory
        return room

    def instead(one: Candidate) -> Candidate | None:
        """Return the same layout with what memory leaves as its budget for activations."""
        budget = 0 if limit_bytes is None else limit_bytes - pricer.least_bytes(one)
        return replace(one, activation_memory=budget) if budget > 0 and _can_have_budget(one) else None

    best, priced = search(found, pricer.bound, pricer.price, kept, fits, kind, instead)
    if not best:
        least, needs = _nearest(found, pricer)
        raise LayoutError(
            f"no layout of {network.ranks} rank{'s'[: network.ranks > 1]} fits {limit_bytes} bytes on each; "
            f"{least} would with {needs}: give that much, more ranks or a smaller batch"
        )
    if left_out:
        refused[f"more than {limit_bytes} bytes on a rank, of those that might be as quick"] = left_out
    return LayoutSearch(tuple(best), refused, len(found), priced, clock.now() - begin)


def _nearest(layouts: Sequence[Candidate], pricer: Pricer) -> tuple[Candidate, int]:
    """Return the layout that needs the fewest bytes of those with the least besides activations, and how many."""

    def few_first(one: Candidate) -> tuple[Any, ...]:
        return pricer.least_bytes(one), -one.microbatches, not one.recompute, one

    needs = {one: pricer.bytes(one) for one in nsmallest(LOOKED_AT, layouts, key=few_first)}
    for one in nsmallest(LOOKED_AT, filter(_can_have_budget, layouts), key=few_first):
        rows = one.rows(pricer.workload.batch_size)
        least = max(pricer.shapes.activations(replace(one, activation_memory=1), rows))
        needs[replace(one, activation_memory=least)] = pricer.least_bytes(one) + least
    best = min(needs, key=needs.__getitem__)
    return best, needs[best]


def _can_have_budget(one: Candidate) -> bool:
    return one.pp == 1 and not one.activation_memory
