"""The layouts in the order of their bounds, until the best are proved to be the best under these prices.

bounds     1.0  1.1  1.1  1.3 | 1.6  1.7 ...      a layout's price is never below its bound, so those behind the
prices     1.4  1.2  1.5  1.5 |  not looked at    line cannot be among the best: their bounds are above the worst
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nnmpi import clock
from nnmpi.errors import LayoutError
from nnmpi.planner.price import LayoutPrice, Pricer
from nnmpi.planner.space import Candidate, Refusals, candidates

KEPT = 10


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
) -> tuple[list[PlannedLayout], int]:
    """Return the layouts of the least seconds, and how many had to be priced.

    Args:
        layouts: to choose from.
        bound: seconds that the price is not below.
        price: what a layout takes.
        kept: how many are wanted.
    """
    order = sorted(((bound(one), one) for one in layouts), key=lambda pair: (pair[0], pair[1]))
    best: list[PlannedLayout] = []
    priced = 0
    for least_s, one in order:
        if len(best) == kept and least_s > best[-1].price.seconds:
            break
        priced += 1
        best.append(PlannedLayout(one, price(one)))
        best.sort(key=lambda each: (each.price.seconds, each.price.bytes, each.candidate))
        del best[kept:]
    return best, priced


def plan(pricer: Pricer, limit_bytes: int | None = None, kept: int = KEPT) -> LayoutSearch:
    """Return the best layouts of a workload on the ranks of a machine.

    Args:
        pricer: of the workload there.
        limit_bytes: what a rank may have of everything; None for any.
        kept: how many are wanted.

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
        len(next(iter(profile.links.values()))),
        network.on_one_node,
        1 < len(set(nodes)) < network.ranks,
        network.has_shared,
    )
    if not found:
        reasons = "; ".join(f"{count} fall out: {reason}" for reason, count in refused.most_common())
        raise LayoutError(f"{network.ranks} ranks can have no layout of this model ({reasons}); give other ranks")
    fitting = found
    if limit_bytes is not None:
        needs = {one: sum(pricer.memory(one).values()) for one in found}
        fitting = [one for one in found if needs[one] <= limit_bytes]
        refused[f"more than {limit_bytes} bytes on a rank"] += len(found) - len(fitting)
        if not fitting:
            least = min(found, key=lambda one: needs[one])
            raise LayoutError(
                f"no layout of {network.ranks} ranks fits {limit_bytes} bytes on each; {least} comes nearest with "
                f"{needs[least]}: give that much, more ranks or a smaller batch"
            )
    best, priced = search(fitting, pricer.bound, pricer.price, kept)
    return LayoutSearch(tuple(best), refused, len(found), priced, clock.now() - begin)
