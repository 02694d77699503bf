"""The features that exclude each other, and why: one table.

python -m nnmpi.compose.refusals            prints it as a matrix, and the reasons below
"""

from collections.abc import Mapping

from nnmpi.base.command import say
from nnmpi.base.errors import LayoutError
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES, NAMES
from nnmpi.comm.collective import REDUCE_SCATTER

PIPELINE, TENSOR, SEQUENCE, PIPEDREAM = "pp", "tp", "sp", "pipedream"
FIXED, ZERO, LIMIT, LEAST, EXPERTS = "fixed", "zero", "limit", "least", "experts"
STATE_OUT, FP16, CLIP = "state out", "fp16", "clip"
CHOSEN, UNCUT = "allreduce", "star"  # one that is not "auto"; one that has no reduce-scatter
OWN_SUM, COMPRESSED, LOW_RANK = "sum", "compress", "powersgd"
BUCKETS, FUSED = "buckets", "fused update"  # options of their sizes, or of overlap
CUT = tuple(n for n in NAMES if n not in ALGORITHMS or (REDUCE_SCATTER.name, n) in COLLECTIVES)

_PARTS = "the rounding of sums over a sharded model depends on the number of its ranks"
_VERSIONS = "a microbatch's forward and backward see different versions of the weights"
_OWN_TIME = "each stage updates when its own gradient is ready, without waiting for the others"
_OWN_ORDER = "its sums have an order of their own, whichever ranks add them"
_UNITS = "ZeRO sums unit by unit, by reduce-scatters of exact gradients"
_EACH = "each microbatch is an update, and would be summed by itself"
_NOT_EXPERTS = "the gradients of one rank's experts are summed by nobody"
_SCALED = "gradients are multiplied by a loss scale, which changes from step to step"
_OTHER_SUMS = "both say how gradients are summed"

REFUSED: dict[tuple[str, str], str] = {
    (FIXED, PIPELINE): _PARTS,
    (FIXED, TENSOR): _PARTS,
    (FIXED, SEQUENCE): _PARTS,
    (FIXED, ZERO): "ZeRO's reduce-scatters do not add in the fixed order",
    (FIXED, PIPEDREAM): _VERSIONS,
    (FIXED, CHOSEN): _OWN_ORDER,
    (FIXED, BUCKETS): _OWN_ORDER,
    (ZERO, BUCKETS): "ZeRO sums unit by unit, whose size is `unit_bytes` of the Layout",
    (ZERO, UNCUT): f"ZeRO needs a reduce-scatter and an all-gather, which {', '.join(CUT)} have",
    (ZERO, PIPEDREAM): _VERSIONS,
    (LEAST, PIPEDREAM): _VERSIONS,
    (LIMIT, PIPEDREAM): _VERSIONS,
    (STATE_OUT, PIPEDREAM): "pipedream uses the optimizer state after every microbatch",
    (
        EXPERTS,
        FIXED,
    ): "an expert sums over the rows of all replicas at once, so no microbatch is one replica's",
    (
        FP16,
        PIPEDREAM,
    ): f"all ranks must skip an update that overflows, but {_OWN_TIME}; bf16 goes with it",
    **{
        (kind, other): reason
        for kind in (OWN_SUM, COMPRESSED)
        for other, reason in {
            FIXED: "a fixed order gives exact sums with the same bits, and these need not be",
            ZERO: _UNITS,
            PIPEDREAM: _EACH,
            EXPERTS: _NOT_EXPERTS,
            FP16: _SCALED,
            CHOSEN: _OTHER_SUMS,
            BUCKETS: _OTHER_SUMS,
            FUSED: _OTHER_SUMS,
        }.items()
    },
    (OWN_SUM, COMPRESSED): _OTHER_SUMS,
    (LOW_RANK, TENSOR): "it takes whole matrices, of which each of these ranks has a part",
    (CLIP, PIPEDREAM): f"clipping needs the gradient norm over all stages, but {_OWN_TIME}",
}


def refuse(used: Mapping[str, str]) -> None:
    """Refuse features that exclude each other.

    Args:
        used: the features in use, each as the user gave it.

    Raises:
        LayoutError: naming the first two, and the reason.
    """
    for (first, other), reason in REFUSED.items():
        if first in used and other in used:
            raise LayoutError(
                f"{used[first]} cannot be combined with {used[other]}: {reason}; leave one of them"
                " out"
            )


def matrix() -> list[str]:
    """Return the table in Markdown: a dot for compatible features, else a reason's number."""
    names = list(dict.fromkeys(name for pair in REFUSED for name in pair))
    reasons = list(dict.fromkeys(REFUSED.values()))
    result = {frozenset(pair): str(1 + reasons.index(reason)) for pair, reason in REFUSED.items()}
    rows = [
        [name, *(result.get(frozenset((name, other)), "·") for other in names)] for name in names
    ]
    lines = [f"| {' | '.join(row)} |" for row in (["", *names], ["---"] * (1 + len(names)), *rows)]
    return [*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))]


if __name__ == "__main__":
    raise SystemExit(say(lambda words: "\n".join(matrix())))
