"""What a rank of a pipeline must keep, counted from the layers' shapes.

An activation of one layer and microbatch is the unit: rows x width x itemsize bytes. A layer keeps its result, which is
the next one's input; a stage also keeps the input that it received.

    kept       per microbatch: the stage's layers, and its input beyond the first stage (the first one's is the batch)
    live       how many microbatches: all M (GPipe), min(S - s, M) (1F1B), 1 without a pipeline
    at work    the gradients that a backward has in hand when it begins, where the peak is
    under way  received ahead, or sent and not gone yet: one message each way
"""

from __future__ import annotations

from benchmarks.pipeline.subject import CLASSES, Subject
from nnmpi.optim.blocks import HOST_BLOCK_BYTES

ITEM_BYTES = 4  # float32
COPIES = 4  # parameters, gradients, and Adam's two slots
SCRATCH_BYTES = 2 * HOST_BLOCK_BYTES  # of the optimizer
NEVER, ALWAYS = "never", "always"


def parameter_bytes(subject: Subject, stage: int, stages: int) -> int:
    """Return what a stage's parameters, gradients and optimizer state take."""
    w, layers = subject.width, subject.layers // stages
    elements = layers * (w * w + w)
    if stage == 0:
        elements += (subject.features - w) * w
    if stage == stages - 1:
        elements += (w + 1) * CLASSES
    return COPIES * ITEM_BYTES * elements + SCRATCH_BYTES


def live_microbatches(subject: Subject, stage: int, stages: int, schedule: str) -> int:
    """Return for how many microbatches a stage keeps activations at once."""
    if stages == 1:
        return 1
    return subject.microbatches if schedule == "gpipe" else min(stages - stage, subject.microbatches)


def activation_bytes(subject: Subject, stage: int, stages: int, schedule: str, recompute: str) -> int:
    """Return the most that a step needs beyond parameters, gradients, state and batch.

    Args:
        schedule: "gpipe" or "1f1b", with more microbatches than stages.
        recompute: "never" or "always".
    """
    unit = subject.rows * subject.width * ITEM_BYTES
    logits = 2 * subject.rows * CLASSES * ITEM_BYTES  # and the probabilities
    layers, live = subject.layers // stages, live_microbatches(subject, stage, stages, schedule)
    is_first, is_last, is_repeated = stage == 0, stage == stages - 1, recompute == ALWAYS and stages > 1
    received = 0 if is_first else unit
    if is_repeated:
        kept = live * received + layers * unit + is_last * logits
    else:
        kept = live * (received + layers * unit + is_last * logits)
    return kept + _at_work(subject, unit, is_last) + _under_way(unit, is_first, is_last, is_repeated, schedule)


def _at_work(subject: Subject, unit: int, is_last: bool) -> int:
    """Return what the first layers of a backward hold beside all that is kept."""
    if is_last:  # the gradient of the last activation, where that was positive (a byte each), and their product
        return 2 * unit + unit // ITEM_BYTES
    # the gradient that was received, that of the product, that of the layer's input, and that of its weights
    return 3 * unit + subject.width**2 * ITEM_BYTES


def _under_way(unit: int, is_first: bool, is_last: bool, is_repeated: bool, schedule: str) -> int:
    """Return the buffers of messages, all of one activation's size."""
    next_gradient = 0 if is_last else unit
    next_activation = 0 if is_first or schedule == "gpipe" else unit  # GPipe has received them all by then
    sent = unit if is_repeated and not is_last and schedule != "gpipe" else 0  # else it is one of those kept
    return next_gradient + next_activation + sent
