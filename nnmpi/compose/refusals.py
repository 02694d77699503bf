"""The features that exclude each other, and why: one table.

python -m nnmpi.compose.refusals            prints it as a matrix, and the reasons below
"""

from collections.abc import Mapping

from nnmpi.command import say
from nnmpi.errors import LayoutError

PIPELINE, TENSOR, SEQUENCE, PIPEDREAM = "pp", "tp", "sp", "pipedream"
FIXED, ZERO, ZERO_2, LIMIT, LEAST, EXPERTS = "fixed", "zero", "zero 2", "limit", "least", "experts"
ACTIVATIONS_OUT, STATE_OUT = "activations out", "state out"
FUSED, DEVICE, FP16, CLIP, MATRICES = "fused update", "device", "fp16", "clip", "muon"

_PARTS = (
    "ranks that have parts of the model add in parts, whose rounding depends on how many they are"
)
_WHOLE = "the fused update is for replicas of a whole model, summed as they come"
_VERSIONS = "a microbatch's forward and backward see different versions of the weights"
_MEET = (
    "replicas meet in each mixture of experts of every pass, which is to be the whole model's, once"
)
_OWN_TIME = "each stage updates when its own gradient is there, and no rank waits for the others"

REFUSED: dict[tuple[str, str], str] = {
    (FIXED, PIPELINE): _PARTS,
    (FIXED, TENSOR): _PARTS,
    (FIXED, SEQUENCE): _PARTS,
    (FIXED, ZERO): "sums are scattered as they come, which is not the fixed order",
    (FIXED, PIPEDREAM): _VERSIONS,
    (
        ZERO_2,
        PIPELINE,
    ): "stages hold their gradients over the whole pass; zero 1 goes with a pipeline",
    (ZERO, PIPEDREAM): _VERSIONS,
    (LEAST, PIPEDREAM): _VERSIONS,
    (
        LIMIT,
        PIPELINE,
    ): "its stages keep everything, or their inputs alone: activation_memory least goes with it",
    (ACTIVATIONS_OUT, PIPELINE): "a pipeline's activations do not leave memory",
    (STATE_OUT, PIPEDREAM): "its state is used after every microbatch",
    (EXPERTS, PIPELINE): _MEET,
    (EXPERTS, TENSOR): _MEET,
    (EXPERTS, SEQUENCE): _MEET,
    (EXPERTS, LIMIT): _MEET,
    (EXPERTS, LEAST): _MEET,
    (
        EXPERTS,
        FIXED,
    ): "an expert adds up the rows of all replicas at once, and no microbatch is one replica's",
    (EXPERTS, ZERO): "each rank has weights and state of its own experts alone already",
    (EXPERTS, STATE_OUT): "each rank has weights and state of its own experts alone already",
    (FUSED, EXPERTS): "the fused update keeps the same parameters once per node",
    (FUSED, STATE_OUT): "the fused update shares out the optimizer's state among a node's ranks",
    (FUSED, ZERO): "the fused update keeps the parameters once per node by itself",
    (FUSED, PIPELINE): _WHOLE,
    (FUSED, TENSOR): _WHOLE,
    (FUSED, FIXED): _WHOLE,
    (FUSED, DEVICE): "the fused update works on weights in memory that the ranks of a node share",
    (
        FUSED,
        MATRICES,
    ): "the fused update has its own elements of every matrix, and the optimizer takes whole ones",
    (
        FP16,
        PIPEDREAM,
    ): f"an update that overflows is left out on all ranks, but {_OWN_TIME}; bf16 goes with it",
    (CLIP, PIPEDREAM): f"clipping needs the gradient of all stages at once, but {_OWN_TIME}",
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
                f"{used[first]} does not go with {used[other]}: {reason}; leave one of them out"
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
