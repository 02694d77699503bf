"""What a rank of a pipeline must keep, counted from the layers' shapes.

An activation of one layer and microbatch is the unit: rows x width x itemsize bytes. A layer keeps its result, which is
the next one's input; a stage also keeps the input that it received.

    kept       per microbatch: the stage's layers, and its input beyond the first stage (the first one's is the batch)
    live       how many microbatches: all M (GPipe), min(S - s, M) (1F1B), 1 without a pipeline
    at work    what a backward has in hand near its beginning, where the peak is
    under way  received ahead, or sent and not gone yet: one message each way

A linear layer and its ReLU are one operation. Its backward has in hand the gradient, the same where the result was
positive, and that of the input; and that of the weights, except in a step's first microbatch, which computes it in its
place. The walk drops a layer's gradients when the next one's are there.
"""

from benchmarks.pipeline.network import CLASSES, EvenMlp
from nnmpi.optim.blocks import HOST_BLOCK_BYTES

ITEM_BYTES = 4  # float32
COPIES = 4  # parameters, gradients, and Adam's two slots
SCRATCH_BYTES = 2 * HOST_BLOCK_BYTES  # of the optimizer
NEVER, ALWAYS = "never", "always"


def parameter_bytes(network: EvenMlp, stage: int, stages: int) -> int:
    """Return the bytes of a stage's parameters, gradients and optimizer state.

    Args:
        network: the whole one.
        stage: its number.
        stages: how many there are.
    """
    w, layers = network.width, network.layers // stages
    elements = layers * (w * w + w)
    if stage == 0:
        elements += (network.features - w) * w
    if stage == stages - 1:
        elements += (w + 1) * CLASSES
    return COPIES * ITEM_BYTES * elements + SCRATCH_BYTES


def live_microbatches(network: EvenMlp, stage: int, stages: int, schedule: str) -> int:
    """Return for how many microbatches a stage keeps activations at once.

    Args:
        network: the whole one, with the microbatches of a step.
        stage: its number.
        stages: how many there are.
        schedule: "gpipe" or "1f1b".
    """
    if stages == 1:
        return 1
    return network.microbatches if schedule == "gpipe" else min(stages - stage, network.microbatches)


def activation_bytes(network: EvenMlp, stage: int, stages: int, schedule: str, recompute: str) -> int:
    """Return the most that a step needs beyond parameters, gradients, state and batch.

    Args:
        network: the whole one.
        stage: of so many `stages`, one on each rank.
        stages: how many.
        schedule: "gpipe" or "1f1b", with more microbatches than stages.
        recompute: "never" or "always".
    """
    unit = network.rows * network.width * ITEM_BYTES
    logits = 2 * network.rows * CLASSES * ITEM_BYTES  # and the probabilities
    layers, live = network.layers // stages, live_microbatches(network, stage, stages, schedule)
    is_first, is_last, is_repeated = stage == 0, stage == stages - 1, recompute == ALWAYS and stages > 1
    received = 0 if is_first else unit
    each = received + layers * unit + is_last * logits  # of a microbatch
    kept = (live - 1) * received + each if is_repeated else live * each
    later = network.width**2 * ITEM_BYTES * (1 if is_last else 2)  # the weights' gradients of one layer, or of two
    if schedule == "gpipe" and stages > 1 and not is_repeated:
        later = max(0, later - each)  # there is a microbatch less when gradients are added to others
    work = (3 if is_last else 4) * unit  # beyond the last stage also what was received, to the end
    return kept + work + later + _under_way(unit, is_first, is_last, is_repeated, schedule)


def _under_way(unit: int, is_first: bool, is_last: bool, is_repeated: bool, schedule: str) -> int:
    """Return the buffers of messages, all of one activation's size."""
    next_gradient = 0 if is_last else unit
    next_activation = 0 if is_first or schedule == "gpipe" else unit  # GPipe has received them all by then
    sent = unit if is_repeated and not is_last and schedule != "gpipe" else 0  # else it is one of those kept
    return next_gradient + next_activation + sent
