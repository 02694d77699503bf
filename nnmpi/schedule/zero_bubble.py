"""Zero bubble (ZB-H1): backwards are cut in two, and the half that nobody waits for fills the bubble.

I gives the gradient of the input, which the stage before waits for; W gives the gradients of the weights, which can
wait. Stage s runs as in 1F1B, and stays s microbatches behind with W: it works them off while others drain.

    python -m nnmpi.schedule --schedule zero-bubble --stages 4 --microbatches 6

    time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
    rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5|
    rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5|
    rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5|
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5|

With F, I and W equally long, S stages and M >= S microbatches, the bubble is (S-1)/(3M+S-1): a third of 1F1B's. Every
stage keeps min(S, M) activations (until their W), as many as the first stage of 1F1B does.
Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024.
"""

from nnmpi.schedule.instruction import Instruction, Kind


def zero_bubble(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
    """Return what a rank computes: 1F1B with halved backwards, the second half `rank` microbatches later."""
    warm_up, behind = min(ranks - 1 - rank, microbatches), min(rank, microbatches)
    program = [Kind.F.at(rank, m) for m in range(warm_up)]
    for m in range(microbatches):
        if warm_up + m < microbatches:
            program.append(Kind.F.at(rank, warm_up + m))
        program.append(Kind.I.at(rank, m))
        if m >= behind:
            program.append(Kind.W.at(rank, m - behind))
    return (*program, *(Kind.W.at(rank, m) for m in range(microbatches - behind, microbatches)))
