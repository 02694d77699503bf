"""Evaluation over many batches: loss and score as means over the ranks.

evaluate_all      the sums over all batches, of all ranks
as_many           batches of which every rank has as many
refuse_uneven     the error of ranks that have not
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import nnmpi.base.clock as clock
from nnmpi.base.errors import UsageError, name_ranks
from nnmpi.base.loop import Taken
from nnmpi.comm.group import Group
from nnmpi.compose.scalars import LOSS, SCORE, WEIGHTS, DeferredScalars
from nnmpi.compose.stats import Totals
from nnmpi.data.loader import Batch
from nnmpi.parallel.witness import SAME_DATA, StepWitness
from nnmpi.tensor.function import no_grad

_END = object()


def evaluate_all(
    group: Group,
    batches: Iterable[Batch],
    evaluate: Callable[[Batch], bool],
    scalars: DeferredScalars,
    witness: StepWitness,
    parts: int = 1,
    rows_seen: Sequence[int] = (),
) -> Totals:
    """Return loss and score over this rank's parts of all batches, summed over ranks. Collective.

    On a device the sums are read once, at the end.

    Args:
        evaluate: adds loss and score of a batch to the scalars; returns whether they count.
        scalars: of evaluations; their sums begin anew.
        parts: the number of ranks that share the positions of each sample; every one of them
            counts its rows.
        witness: compares what the ranks were given.
        rows_seen: a checksum of each batch, where several ranks compute the same rows.

    Raises:
        UsageError: on all ranks, if they have different numbers of batches, other ones, or not all
            rows of each once.
    """
    begin = clock.now()
    rows, own_targets, taken = 0, 0, list[Taken]()
    scalars.clear()
    with no_grad():
        for batch in batches:
            taken.append(batch.taken())
            if evaluate(batch):
                rows, own_targets = rows + len(batch.y), own_targets + batch.own_targets
    values = scalars.read()
    own = values.get(LOSS, 0.0), values.get(SCORE, 0.0), values.get(WEIGHTS, own_targets)
    # as JSON, since another rank may have a further batch, whose rows the ranks tell in this way
    by_rank = group.gather({"sums": [*own, rows, own_targets]})
    refuse_uneven(by_rank)
    loss, score, weights, samples, targets = map(
        sum, zip(*(item["sums"] for item in by_rank), strict=True)
    )
    witness.compare_evaluation(taken, rows_seen)
    return Totals(
        samples=int(samples) // parts,
        targets=int(targets),
        loss_sum=loss * (targets / weights if weights else 1.0),
        score_sum=score,
        wall_s=clock.now() - begin,
    )


def as_many(group: Group, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, as long as every rank has one more. Collective at each.

    For layers that meet in each batch: they would wait for ranks that have none.
    """
    for item in chain(items, [_END]):
        have = group.gather_floats([item is not _END])[:, 0].tolist()
        refuse_uneven([() if more else {} for more in have])
        if item is _END:
            return
        yield item


def refuse_uneven(by_rank: Sequence[object]) -> None:
    """Refuse ranks of which some have evaluated all their batches, and others have one more."""
    done = [rank for rank, item in enumerate(by_rank) if isinstance(item, dict)]
    if 0 < len(done) < len(by_rank):
        raise UsageError(
            f"the ranks give evaluate different numbers of batches, {name_ranks(done)} fewer than"
            f" the others; {SAME_DATA}"
        )
