"""The models as they fill a card, the precisions, and the contestants.

The models are `benchmarks.training.models`'; the batches are larger than the host's. They stand in
the order of their worth, so that a run that is cut short has the first ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training import models
from nnmpi.models.torch_weights import to_torch

FLOAT32, TF32, BF16 = "float32", "tf32", "bf16"
MODES = (FLOAT32, TF32, BF16)
# nnmpi's loop and the same within `nnmpi.compile`; PyTorch eager, `torch.compile` of the model and
# its loss, and the same with mode="reduce-overhead", which captures CUDA graphs.
EAGER, COMPILED = "nnmpi", "nnmpi.compile"
TORCH, TORCH_COMPILE, TORCH_GRAPHS = "PyTorch", "torch.compile", "reduce-overhead"
OURS, PEERS = (EAGER, COMPILED), (TORCH, TORCH_COMPILE, TORCH_GRAPHS)


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        name: on the command line.
        make: (library) -> the model, see `benchmarks.training.models`.
        shape: of x. Of text it is (batch, time), and each token has a target.
        words: of a text; 0 for images and rows, whose targets are 10 classes.
        random: whether it draws dropout, so that each library's losses are its own.
    """

    name: str
    make: Callable[[Any], Any]
    shape: tuple[int, ...]
    words: int = 0
    random: bool = False

    @cached_property
    def data(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The batch x and its targets, the same for every contestant."""
        draw, (batch, *rest) = np.random.default_rng(0), self.shape
        if self.words:
            tokens = draw.integers(0, self.words, (batch, rest[0] + 1))
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()
        x = draw.standard_normal(self.shape, dtype=np.float32)
        return x, draw.integers(0, 10, batch)

    @cached_property
    def first(self) -> Any:
        """nnmpi's model on the host with the first weights, which every contestant starts from."""
        return self.make(models.our_library()).initialize(seed=0)

    @cached_property
    def torch_weights(self) -> list[NDArray[Any]]:
        """The first weights in PyTorch's layouts, in the order of definition, and then buffers."""
        x = self.data[0][:1]
        arrays = to_torch(self.first, x[:, :1] if self.words else x).values()
        return [np.ascontiguousarray(array) for array in arrays]


CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case("gpt2-124M", models.gpt2, (8, 1024), 50257),
            Case("resnet20", models.resnet20, (256, 32, 32, 3)),
            Case("char-lstm", models.lstm, (64, 128), 65),
            Case("convnext", models.convnext, (64, 64, 64, 3)),
            Case("gpt6", models.gpt6, (32, 256), 65),
            Case("vgg11", models.vgg11, (256, 32, 32, 3)),
            Case("separable", models.separable, (128, 32, 32, 3)),
            Case("vit", models.vit, (32, 224, 224, 3)),
            Case("char-gru", models.gru, (64, 128), 65),
            Case("mlp-norm", models.mlp_norm, (1024, 784), random=True),
            Case("autoencoder", models.autoencoder, (256, 28, 28, 1)),
            Case("lenet5", models.lenet5, (256, 28, 28, 1)),
            Case("mnist-cnn", models.cnn, (64, 28, 28, 1)),
        )
    }
)
# The models that are small enough, with small batches, for checks of the benchmark itself.
TINY: Mapping[str, Case] = MappingProxyType(
    {
        "vit": Case("vit", partial(models.vit, side=32, layers=1), (2, 32, 32, 3)),
        **{
            name: replace(CASES[name], shape=shape)
            for name, shape in (
                ("char-lstm", (2, 5)),
                ("char-gru", (2, 5)),
                ("mlp-norm", (64, 784)),
                ("lenet5", (3, 28, 28, 1)),
            )
        },
    }
)
# Those that torch.compile takes part in: it takes up to a minute for each, in each mode.
COMPILES = ("gpt2-124M", "resnet20", "gpt6", "convnext")
