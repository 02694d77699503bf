"""What a rank of a tensor group must keep and exchange, counted from the layers' shapes; t is the number of ranks.

MLP, in pairs of a column and a row layer, all of one width; the unit is rows x width x itemsize:

    x --> [column] --> relu --> [row] --> add up --> relu --> x of the next pair
    whole              1/t                whole      whole

CNN, per image: convolutions cut by output channels, and between them the images gathered. Every size is float32 but
the pooling's choices (1 byte).

A layer, or a rank's column of it, is one operation with its ReLU and pooling, whose results before the last are never
stored.
"""

from benchmarks.tensor.networks import CLASSES, CNN, Network
from nnmpi.ops.conv.winograd_numpy import TILES_BYTES, image_bytes
from nnmpi.optim.blocks import HOST_BLOCK_BYTES

ITEM_BYTES = 4  # float32
COPIES = 4  # parameters, gradients, and Adam's two slots
SCRATCH_BYTES = 2 * HOST_BLOCK_BYTES  # of the optimizer
CHOICE = 1 / ITEM_BYTES  # what the pooling's choices take, of its result

# What of the CNN is pooled, per image, in elements.
FIRST_POOLED = 14 * 14 * 32
SECOND_POOLED = 7 * 7 * 64
SECOND_SIDE, SECOND_CHANNELS = 14, (32, 64)
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
        return _cnn_bytes(network.rows, ranks)
    unit = network.rows * network.width * ITEM_BYTES
    pairs = (network.layers + 1) // 2
    kept = (pairs / ranks + pairs - 1) * unit + 2 * network.rows * CLASSES * ITEM_BYTES
    if ranks == 1:
        return kept + 3 * unit  # the gradient, the same where it counts, and that of the layer's input
    # A relu's backward holds the gradient, and the same where it counts: most for a whole activation, when the part
    # above it is gone.
    return kept + (2 - 1 / ranks) * unit


def _cnn_bytes(rows: int, ranks: int) -> float:
    """Return the largest of some moments of the second convolution's backward pass."""
    image = ITEM_BYTES * rows
    tiles = _tiles_bytes(rows, SECOND_CHANNELS[0], SECOND_CHANNELS[1] // ranks)
    choices = CHOICE * FIRST_POOLED / ranks  # of the first convolution's pooling
    # its input, the gradient of that, and of what was pooled, with the choices there
    at_conv = 2 * FIRST_POOLED + (1 + CHOICE) * SECOND_POOLED / ranks
    at_sum = 3 * FIRST_POOLED if ranks > 1 else 0  # its input's gradient, the same in parts, and these in one piece
    return max(image * (choices + at_conv) + tiles, image * (choices + at_sum))


def _tiles_bytes(rows: int, c: int, o: int) -> float:
    """Return what the second convolution's tiles take: those of a block of images, and of the last and shorter one."""
    side = SECOND_SIDE
    transforms = image_bytes(side, side, c, o, ITEM_BYTES)
    block = min(rows, TILES_BYTES // transforms)
    # the images with a border, rows of them for each row of tiles, results, one of each tile, and a comparison (a byte)
    others = ((side + 2) ** 2 + 2 * side * (side + 2)) * c + (1 + 1 / 4 + 1 / ITEM_BYTES) * side**2 * o
    kernels = 3 * 16 * c * o  # the kernel's places, the sum of their gradients, and what is added to it
    return (block + rows % block) * (transforms + ITEM_BYTES * others) + ITEM_BYTES * kernels


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
