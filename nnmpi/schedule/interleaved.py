"""Interleaved 1F1B: each rank has several thin stages, so the pipeline fills and drains in thin steps.

With R ranks and V virtual stages on each, microbatches go in rounds of R (or a few more: what does not divide is dealt
to the rounds, so M >= R may be any number). In a round a rank does its first stage for all microbatches, then its
second, and so on; backwards in the opposite order of stages.

    python -m nnmpi.schedule --schedule interleaved --stages 3 --microbatches 3 --virtual-stages 2

    time    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21  22  23
    rank 0  0F0 0F1 0F2 3F0 3F1 3F2 .   .   .   .   3B0---- .   3B1---- .   3B2----+0B0---- 0B1---- 0B2----|
    rank 1  .   1F0 1F1 1F2 4F0 4F1 4F2 .   4B0---- .   4B1---- .   4B2----+1B0---- 1B1---- 1B2----|.   .
    rank 2  .   .   2F0 2F1 2F2 5F0 5B0---- 5F1 5B1---- 5F2 5B2----+2B0---- 2B1---- 2B2----|.   .   .   .

With M >= R microbatches of even cost the bubble is (R-1)/(V M + R-1), V times less than 1F1B's, for V times the
messages and for more activations: rank r warms up with 2 (R-1-r) + (V-1) k forwards, k microbatches in the first round.
Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021.
"""

from nnmpi.schedule.inference import inference
from nnmpi.schedule.instruction import Instruction, Kind
from nnmpi.schedule.one_f_one_b import one_f_one_b
from nnmpi.shard import split


def interleaved(rank: int, ranks: int, microbatches: int, virtual: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: a warm-up of forwards, then a forward and a backward in turn, then backwards."""
    if virtual == 1:
        return one_f_one_b(rank, ranks, microbatches)
    stages = range(rank, ranks * virtual, ranks)
    rounds = split(microbatches, max(1, microbatches // ranks))
    forwards = list(inference(rank, ranks, microbatches, virtual))
    backwards = [Kind.B.at(stage, m) for round_ in rounds for stage in reversed(stages) for m in round_]
    warm_up = min(2 * (ranks - 1 - rank) + (virtual - 1) * len(rounds[0]), len(forwards))
    program = forwards[:warm_up]
    for i, backward in enumerate(backwards):
        program += [*forwards[warm_up + i : warm_up + i + 1], backward]
    return tuple(program)
