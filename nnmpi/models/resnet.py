"""A small residual network with batch normalization."""

from collections.abc import Sequence

from nnmpi.base.errors import check_int
from nnmpi.models.cnn import image_shape
from nnmpi.nn.activation import ReLU
from nnmpi.nn.container import Residual, Sequential
from nnmpi.nn.conv import Conv2d, GlobalAvgPool2d
from nnmpi.nn.linear import Linear
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm
from nnmpi.nn.sharding import Sharding


def resnet(
    sample_shape: Sequence[int], classes: int, width: int = 16, blocks: int = 1
) -> Sequential:
    """Return a residual network in three stages of doubling width (He et al., 2016, section 4.2).

        images -> conv 3x3, w -> [block, w] x blocks
                              -> [block, 2w] x blocks, half the image size
                              -> [block, 4w] x blocks, half again
               -> mean over pixels -> linear -> logits

    A block is relu(conv-norm-relu-conv-norm(x) + shortcut(x)); `blocks` = 3 is ResNet-20. The
    sharding table has a block's first convolution by output channels, the second by input channels.

    Args:
        sample_shape: of one image, (height, width, channels).
        classes: the number of logits.
        width: the channels of the first stage.
        blocks: the number of blocks in each of the three stages.

    Raises:
        UsageError: when samples are no images of at least 4 x 4 pixels, or for a width or number of
            blocks below 1.

    Example:
        >>> model = models.resnet((32, 32, 3), 10).initialize(seed=0)
        >>> model(np.zeros((2, 32, 32, 3), "float32")).shape
        (2, 10)
    """
    width, blocks = check_int("resnet's width", width), check_int("resnet's blocks", blocks)
    _, _, channels = image_shape("resnet", sample_shape)
    layers: list[Module] = [
        Conv2d(channels, width, 3, padding=1, bias=False),
        BatchNorm(width),
        ReLU(),
    ]
    features = width
    for stage in range(3):
        for number in range(blocks):
            shrinks = stage > 0 and number == 0
            layers.append(residual_block(features, width * 2**stage, 2 if shrinks else 1))
            features = width * 2**stage
    model = Sequential(*layers, GlobalAvgPool2d(), Linear(features, classes))
    model.sharding = {
        name: Sharding.ROW if name.endswith(".body.3") else Sharding.COLUMN
        for name, layer in model.named_modules()
        if isinstance(layer, Conv2d | Linear)
    }
    return model


def residual_block(inputs: int, outputs: int, stride: int) -> Residual:
    """Return two 3x3 convolutions with a shortcut, a 1x1 convolution if size or width changes.

    Args:
        inputs, outputs: numbers of channels.
        stride: of the first convolution, and of the shortcut's.
    """
    body = Sequential(
        Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        BatchNorm(outputs),
        ReLU(),
        Conv2d(outputs, outputs, 3, padding=1, bias=False),
        BatchNorm(outputs),
    )
    if inputs == outputs and stride == 1:
        return Residual(body)
    return Residual(
        body, Sequential(Conv2d(inputs, outputs, 1, stride=stride, bias=False), BatchNorm(outputs))
    )
