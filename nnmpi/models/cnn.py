"""A small convolutional network, as in many first courses, and the check of image shapes."""

from collections.abc import Sequence

from nnmpi.base.errors import UsageError, check_ints
from nnmpi.models.mlp import dense_layers, in_turn
from nnmpi.nn.activation import Flatten, ReLU
from nnmpi.nn.container import Sequential
from nnmpi.nn.conv import Conv2d, MaxPool2d
from nnmpi.nn.sharding import Sharding

LEAST = 4  # pixels of an image's height and width: two halvings leave one


def cnn(
    sample_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
) -> Sequential:
    """Return two convolutions with pooling and linear layers; for MNIST 429,258 parameters.

        (batch, 28, 28, 1) -> conv 3x3, 32 -> relu -> max-pool 2 -> (14, 14, 32)
                           -> conv 3x3, 64 -> relu -> max-pool 2 -> (7, 7, 64)
                           -> 3136 -> 128 -> 64 -> 10

    The first linear layer adapts to the image size. The sharding table has the convolutions by
    output channels, and the linear layers by inputs and by outputs in turn: so the first one reads
    the sharded, flattened channels without an exchange.

    Args:
        sample_shape: of one image, (height, width, channels).
        classes: the number of logits.
        hidden: the widths of the linear layers between the convolutions and the logits.
        dropout: the probability of dropping an input of a linear layer, except the first, in
            training.

    Raises:
        UsageError: when samples are no images (height, width, channels) of at least 4 x 4 pixels.

    Example:
        >>> model = models.cnn((28, 28, 1), 10).initialize(seed=0)
        >>> model(np.zeros((2, 28, 28, 1), "float32")).shape
        (2, 10)
    """
    height, width, channels = image_shape("cnn", sample_shape)
    model = Sequential(
        Conv2d(channels, 32, 3, padding=1),
        ReLU(),
        MaxPool2d(2),
        Conv2d(32, 64, 3, padding=1),
        ReLU(),
        MaxPool2d(2),
        Flatten(),
        *dense_layers((height // 4) * (width // 4) * 64, hidden, classes, "relu", dropout),
    )
    model.sharding = {**dict.fromkeys(("0", "3"), Sharding.COLUMN), **in_turn(model, Sharding.ROW)}
    return model


def image_shape(model: str, sample_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the sample shape as (height, width, channels).

    Args:
        model: the model's name, for the error.
        sample_shape: of one sample.

    Raises:
        UsageError: when it is no image of at least LEAST x LEAST pixels.
    """
    if len(check_ints("sample_shape", sample_shape)) != 3 or min(sample_shape[:2]) < LEAST:
        is_turned = len(sample_shape) == 3 and min(sample_shape[1:]) >= LEAST
        remedy = "turn them: x.transpose(0, 2, 3, 1)" if is_turned else "try model mlp"
        raise UsageError(
            f"model {model} needs images (height, width, channels) of at least {LEAST} x {LEAST}"
            f" pixels, not samples of shape {tuple(sample_shape)}; {remedy}"
        )
    height, width, channels = sample_shape
    return height, width, channels
