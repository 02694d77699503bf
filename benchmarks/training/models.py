"""The zoo's models, each written once for nnmpi, PyTorch and, where `zoo.py` has it, JAX.

A model is a function of a library: the names below, by `our_library`, `their_library`, and
`zoo_jax.library`.

    nn                      the layers, by PyTorch's names
    relu                    the function
    join(a, b)              channels of images side by side
    end(width)              layers from an image to 10 classes
    gpt(vocabulary, context, features, layers, heads), lstm(vocabulary, features, layers), cnn()
    tokens(x)               an image's pixels as a sequence: (batch, pixels, channels)
    attention(features, heads), parameter(*shape)
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def resnet20(lib: Any) -> Any:
    """Return the residual network of He et al. for CIFAR-10, as their section 4.2 has it, with 1 x
    1 shortcuts.
    """
    nn = lib.nn

    class Block(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.norm1 = (
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            self.conv2, self.norm2 = (
                nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            short = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            self.short = nn.Sequential(*(short if inputs != outputs else ()))

        def forward(self, x: Any) -> Any:
            y = self.norm2(self.conv2(lib.relu(self.norm1(self.conv1(x)))))
            return lib.relu(y + self.short(x))

    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(a, b, 1 + (a != b)) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(
        *_norm_relu(nn, nn.Conv2d(3, 16, 3, 1, 1, bias=False), 16), *blocks, *lib.end(64)
    )


def vgg11(lib: Any) -> Any:
    """Return VGG-11 with batch normalization, for images of 32 x 32."""
    nn, layers, width = lib.nn, [], 3
    for count, outputs in ((1, 64), (1, 128), (2, 256), (2, 512), (2, 512)):
        for _ in range(count):
            layers += _norm_relu(nn, nn.Conv2d(width, outputs, 3, 1, 1), outputs)
            width = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def lenet5(lib: Any) -> Any:
    """Return LeNet-5 with ReLU."""
    nn = lib.nn
    convolutions = (
        nn.Conv2d(1, 6, 5, 1, 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    dense = nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    return nn.Sequential(*convolutions, nn.Flatten(), *dense)


def separable(lib: Any) -> Any:
    """Return a network of depthwise-separable convolutions, in the manner of MobileNet."""
    nn, layers, width = (
        lib.nn,
        _norm_relu(lib.nn, lib.nn.Conv2d(3, 32, 3, 1, 1, bias=False), 32),
        32,
    )
    for outputs, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        layers += _norm_relu(
            nn, nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False), width
        )
        layers += _norm_relu(nn, nn.Conv2d(width, outputs, 1, bias=False), outputs)
        width = outputs
    return nn.Sequential(*layers, *lib.end(256))


def autoencoder(lib: Any) -> Any:
    """Return an encoder, and a decoder of transposed convolutions, with 10 classes on top."""
    nn = lib.nn
    down = nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
    up = nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
    return nn.Sequential(*down, *up, nn.Flatten(), nn.Linear(784, 10))


def mlp_norm(lib: Any) -> Any:
    """Return an MLP with batch normalization and dropout."""
    nn, layers, width = lib.nn, [], 784
    for outputs in (1024, 1024, 512):
        layers += [nn.Linear(width, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.2)]
        width = outputs
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _norm_relu(nn: Any, layer: Any, outputs: int) -> list[Any]:
    return [layer, nn.BatchNorm2d(outputs), nn.ReLU()]


def gpt(lib: Any) -> Any:
    """Return GPT-2 with 4 layers of 256 features for text of 65 characters."""
    return lib.gpt(65, 128, 256, 4, 4)


def lstm(lib: Any) -> Any:
    """Return two layers of 256 features of long short-term memory for text of 65 characters."""
    return lib.lstm(65, 256, 2)


def cnn(lib: Any) -> Any:
    """Return the network of nnmpi's train command, `nnmpi.models.cnn`, for MNIST."""
    return lib.cnn()


def convnext(lib: Any) -> Any:
    """Return four blocks in the manner of ConvNeXt: 7 x 7 depthwise, then a dense bottleneck."""
    nn, width = lib.nn, 96

    class Block(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(width, width, 7, 1, 3, groups=width)
            self.norm = nn.BatchNorm2d(width)
            self.wide = nn.Conv2d(width, 4 * width, 1)
            self.gelu = nn.GELU()
            self.narrow = nn.Conv2d(4 * width, width, 1)

        def forward(self, x: Any) -> Any:
            return x + self.narrow(self.gelu(self.wide(self.norm(self.depthwise(x)))))

    return nn.Sequential(nn.Conv2d(3, width, 4, 4), *(Block() for _ in range(4)), *lib.end(width))


def vit(lib: Any, side: int = 224, layers: int = 12) -> Any:
    """Return the small vision transformer with patches of 16 x 16, which averages its patches.

    Dosovitskiy et al., "An image is worth 16x16 words", 2021; no token of its own for the class.
    """
    return _of_patches(lib, side, layers, 384, 16, lambda: lib.attention(384, 6))


def mixer(lib: Any, side: int = 32, layers: int = 4) -> Any:
    """Return an MLP-Mixer (Tolstikhin et al., 2021) of 192 features with patches of 4 x 4."""
    nn, count = lib.nn, (side // 4) ** 2

    class Mixing(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.mlp = _mlp(nn, count, 2)

        def forward(self, x: Any) -> Any:
            return self.mlp(x.swapaxes(1, 2)).swapaxes(1, 2)

    return _of_patches(lib, side, layers, 192, 4, Mixing)


def _mlp(nn: Any, width: int, times: int) -> Any:
    return nn.Sequential(
        nn.Linear(width, times * width), nn.GELU(), nn.Linear(times * width, width)
    )


def _of_patches(
    lib: Any, side: int, layers: int, width: int, patch: int, mixing: Callable[[], Any]
) -> Any:
    """Return blocks that mix the patches of an image, and then each one's features."""
    nn = lib.nn

    class Patches(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.positions = lib.parameter((side // patch) ** 2, width)
            self.convolution = nn.Conv2d(3, width, patch, patch)

        def forward(self, x: Any) -> Any:
            return lib.tokens(self.convolution(x)) + self.positions

    class Block(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.mixing = nn.LayerNorm(width), mixing()
            self.norm2, self.mlp = nn.LayerNorm(width), _mlp(nn, width, 4)

        def forward(self, x: Any) -> Any:
            x = x + self.mixing(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Classes(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(width, 10)

        def forward(self, x: Any) -> Any:
            return self.output(x.mean(1))

    blocks = (Block() for _ in range(layers))
    return nn.Sequential(Patches(), *blocks, nn.LayerNorm(width), Classes())


def unet(lib: Any) -> Any:
    """Return a U-Net of three levels, with 10 classes on top."""
    nn = lib.nn

    def twice(inputs: int, outputs: int) -> Any:
        first, second = (nn.Conv2d(width, outputs, 3, 1, 1) for width in (inputs, outputs))
        return nn.Sequential(*_norm_relu(nn, first, outputs), *_norm_relu(nn, second, outputs))

    class Level(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self, inputs: int, width: int, below: Any) -> None:
            super().__init__()
            self.down, self.pool, self.below = twice(inputs, width), nn.MaxPool2d(2), below
            self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
            self.last = twice(2 * width, width)

        def forward(self, x: Any) -> Any:
            x = self.down(x)
            return self.last(lib.join(self.up(self.below(self.pool(x))), x))

    return nn.Sequential(Level(3, 16, Level(16, 32, twice(32, 64))), *lib.end(16))


def strided(lib: Any) -> Any:
    """Return convolutions of 5 x 5 with stride 2."""
    nn, layers = lib.nn, []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += _norm_relu(nn, nn.Conv2d(inputs, outputs, 5, 2, 2, bias=False), outputs)
    return nn.Sequential(*layers, *lib.end(128))


def gru(lib: Any) -> Any:
    """Return two layers of 256 features of gated recurrent units for text of 65 characters."""
    nn = lib.nn

    class Model(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(65, 256)
            self.layers = lib.gru(256, 256, 2)
            self.output = nn.Linear(256, 65)

        def forward(self, x: Any) -> Any:
            h = self.layers(self.embedding(x))
            return self.output(h[0] if isinstance(h, tuple) else h)  # PyTorch's has a state

    return Model()


def gpt6(lib: Any) -> Any:
    """Return GPT-2 with 6 layers of 384 features for text of 65 characters."""
    return lib.gpt(65, 256, 384, 6, 6)


def gpt2(lib: Any) -> Any:
    """Return GPT-2 with 124M parameters."""
    return lib.gpt(50257, 1024, 768, 12, 12)


def our_library() -> SimpleNamespace:
    """Return nnmpi's part of the models."""
    from nnmpi import models, nn, ops
    from nnmpi.tensor import concatenate

    return SimpleNamespace(
        nn=nn,
        relu=ops.relu,
        join=lambda a, b: concatenate((a, b), -1),
        end=lambda width: (nn.GlobalAvgPool2d(), nn.Linear(width, 10)),
        gpt=models.gpt,
        lstm=lambda *sizes: models.lstm(*sizes, tied=False),
        gru=nn.GRU,
        cnn=lambda: models.cnn((28, 28, 1), 10),
        tokens=lambda x: x.reshape(len(x), -1, x.shape[-1]),
        attention=nn.MultiheadAttention,
        parameter=lambda *shape: nn.Parameter(shape, nn.Normal(0.02)),
    )


def their_library() -> SimpleNamespace:
    """Return PyTorch's part of the models."""
    import torch
    from torch import nn

    from benchmarks.training.cases import CASES
    from benchmarks.training.trainer_torch import Attention, Recurrent, Transformer, build

    return SimpleNamespace(
        nn=nn,
        relu=torch.relu,
        join=lambda a, b: torch.cat((a, b), 1),
        end=lambda width: (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)),
        gpt=lambda words, context, features, layers, heads: Transformer(
            features, heads, layers, context, words
        ),
        lstm=lambda words, features, layers: Recurrent(features, layers, words),
        gru=lambda *sizes: nn.GRU(*sizes, batch_first=True),
        cnn=lambda: build(CASES["cnn"]),
        tokens=lambda x: x.flatten(2).transpose(1, 2),
        attention=lambda features, heads: Attention(features, heads, causal=False),
        parameter=lambda *shape: nn.Parameter(torch.zeros(shape)),
    )
