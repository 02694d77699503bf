"""What a rank of a tensor group must keep and exchange, counted from the layers' shapes; t is the number of ranks.

MLP, in pairs of a column and a row layer, all of one width; the unit is rows x width x itemsize:

    x --> [column] --> relu --> [row] --> add up --> relu --> x of the next pair
    whole              1/t                whole      whole

CNN, per image: convolutions cut by output channels, and between them the images gathered. Every size is float32 but
the pooling's choices (2 bytes) and a comparison's results (1 byte).
"""

from __future__ import annotations

from benchmarks.tensor.networks import CLASSES, CNN, Network
from nnmpi.ops.conv import COLUMNS_BYTES
from nnmpi.optim.blocks import HOST_BLOCK_BYTES

ITEM_BYTES = 4  # float32
COPIES = 4  # parameters, gradients, and Adam's two slots
SCRATCH_BYTES = 2 * HOST_BLOCK_BYTES  # of the optimizer
POSITIVE = 1 / ITEM_BYTES  # what the comparison with zero takes, of the array that is compared

# The CNN's arrays per image, in elements: the bordered inputs of the convolutions, their results, and the pooled ones.
FIRST_IN, FIRST_OUT, FIRST_POOLED = 30 * 30, 28 * 28 * 32, 14 * 14 * 32
SECOND_IN, SECOND_OUT, SECOND_GRAD = 16 * 16 * 32, 14 * 14 * 64, 16 * 16 * 64  # the last one with a border
FLAT, HIDDEN = 7 * 7 * 64, (128, 64)


def parameter_bytes(network: Network, ranks: int) -> float:
    """Return what a rank's parameters, gradients and optimizer state take."""
    shared, whole = _cnn_elements() if network.name == CNN else _mlp_elements(network)
    return COPIES * ITEM_BYTES * (shared / ranks + whole) + SCRATCH_BYTES


def _mlp_elements(network: Network) -> tuple[int, int]:
    """Return how many elements are shared out, and how many every rank has: the biases of row layers."""
    w, columns = network.width, (network.layers + 1) // 2
    return network.layers * w * w + w * CLASSES + columns * w, (columns - 1) * w + CLASSES


def _cnn_elements() -> tuple[int, int]:
    first, second = HIDDEN
    convolutions = 9 * 32 + 32 + 9 * 32 * 64 + 64
    return convolutions + FLAT * first + first * second + second + second * CLASSES, first + CLASSES


def activation_bytes(network: Network, ranks: int) -> float:
    """Return the most that a step needs beyond parameters, gradients, state and batch."""
    if network.name == CNN:
        return network.rows * _cnn_image_bytes(ranks) + COLUMNS_BYTES
    unit = network.rows * network.width * ITEM_BYTES
    pairs = (network.layers + 1) // 2
    kept = (pairs / ranks + pairs - 1) * unit + 2 * network.rows * CLASSES * ITEM_BYTES
    # A relu's backward holds the gradient, where it counts, and their product: of a part, or of a whole activation,
    # when the part above it is gone.
    product = 2 + POSITIVE
    return kept + max(product / ranks, product - 1 / ranks) * unit


def _cnn_image_bytes(ranks: int) -> float:
    """Return the larger of two moments of the backward pass."""
    at_relu = FIRST_IN + (3 + POSITIVE) * FIRST_OUT / ranks  # the first one's result, gradient, product
    kept = FIRST_IN + (FIRST_OUT + FIRST_POOLED / 2) / ranks + SECOND_IN
    at_conv = kept + (SECOND_OUT + SECOND_GRAD) / ranks + FIRST_POOLED  # the second's gradients, and its input's, whole
    return ITEM_BYTES * max(at_relu, at_conv)


def exchanged_bytes(network: Network, ranks: int) -> dict[str, int]:
    """Return the bytes of the arrays that a step's collectives are given in the layers, by collective."""
    if ranks == 1:
        return {}
    if network.name == CNN:
        images = network.rows * FIRST_POOLED * ITEM_BYTES
        # forward the sums of the first and the last linear layer, backward that of the second one's input
        sums = network.rows * (2 * HIDDEN[0] + CLASSES) * ITEM_BYTES
        return {"all-gather": images, "all-reduce": sums, "reduce-scatter": images}
    pairs = (network.layers + 1) // 2
    # one sum each way for each pair; none of the gradient of the batch
    elements = 2 * (pairs - 1) * network.width + CLASSES
    return {"all-reduce": network.rows * elements * ITEM_BYTES}


def wire_bytes(exchanged: dict[str, int], ranks: int) -> float:
    """Return what each rank sends at least for these collectives (Thakur et al., 2005)."""
    share = (ranks - 1) / ranks
    return sum((2 if name == "all-reduce" else 1) * share * nbytes for name, nbytes in exchanged.items())
