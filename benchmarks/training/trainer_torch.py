"""PyTorch's side: eager, SGD; DistributedDataParallel with gloo on several ranks. It does not
import nnmpi.

Parameters are in nnmpi's order, and matched by number: see `layouts.py`.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from benchmarks.training.cases import BLOCK, CNN, CROSS_ENTROPY, GPT, LSTM, Case
from benchmarks.training.contestants import CHANNELS_LAST, Contestant
from benchmarks.training.member import Trainer


class TorchTrainer(Trainer):
    """A rank of PyTorch.

    Args:
        contestant: what it runs.
        rank: of this process.
        folder: of data and first weights, and of the ranks' rendezvous.
    """

    def __init__(self, contestant: Contestant, rank: int, folder: Path) -> None:
        torch.set_num_threads(1)
        super().__init__(contestant, rank, folder)
        self._x, self._y = map(torch.from_numpy, self.load())
        self._model: nn.Module = build(self.case).to(getattr(torch, contestant.dtype))
        if self.case.model == CNN:
            order = (
                torch.channels_last if contestant.way == CHANNELS_LAST else torch.contiguous_format
            )
            self._x = self._x.permute(0, 3, 1, 2).contiguous(memory_format=order)
            self._model = self._model.to(memory_format=order)
        self._run: nn.Module = self._model
        if contestant.ranks > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            address = f"file://{folder / contestant.name.replace(' ', '-')}.rendezvous"
            torch.distributed.init_process_group(
                "gloo", init_method=address, rank=rank, world_size=contestant.ranks
            )
            self._run = nn.parallel.DistributedDataParallel(
                self._model, gradient_as_bucket_view=True
            )
        self._parameters = [
            parameter for parameter in self._model.parameters() if parameter.requires_grad
        ]
        self._optimizer = torch.optim.SGD(self._parameters, lr=0.01, fused=contestant.ranks == 1)

    def one_step(self) -> float:
        """See `Trainer.one_step`."""
        self._optimizer.param_groups[0]["lr"] = self.lr
        self._optimizer.zero_grad()
        output = self._run(self._x)
        if self.case.loss == CROSS_ENTROPY:
            loss = F.cross_entropy(output.flatten(0, -2), self._y.flatten())
        else:
            loss = F.mse_loss(output, self._y)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def barrier(self) -> None:
        """See `Trainer.barrier`."""
        if self.contestant.ranks > 1:
            torch.distributed.barrier()

    def arrays(self) -> list[NDArray[np.floating]]:
        """See `Trainer.arrays`."""
        return [parameter.detach().numpy() for parameter in self._parameters]

    def facts(self) -> dict[str, str]:
        """See `Trainer.facts`."""
        return {"torch_capability": torch.backends.cpu.get_cpu_capability(), "torch_blas": _blas()}

    def close(self) -> None:
        """See `Trainer.close`."""
        if self.contestant.ranks > 1:
            torch.distributed.destroy_process_group()


class Attention(nn.Module):
    """Self-attention over the time axis: (batch, time, features), keeps the shape.

    Args:
        features: of a position.
        heads: they divide the features.
        causal: whether a position sees only those before it.
    """

    def __init__(self, features: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention's result."""
        batch, time, features = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(batch, time, features))


class Block(nn.Module):
    """The pre-LN transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        features: of a position.
        heads: of the attention; they divide the features.
        hidden: features between the two linear layers.
    """

    def __init__(self, features: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(features), Attention(features, heads)
        self.norm2 = nn.LayerNorm(features)
        self.fc1, self.fc2 = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's result: (batch, time, features)."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """GPT-2: tokens (batch, time) -> logits of the next ones (batch, time, vocabulary).

    Args:
        features, heads: of each block; four times as many hidden features.
        layers: how many blocks.
        context: how many positions.
        vocabulary: how many tokens; the output is their table.
    """

    def __init__(
        self, features: int, heads: int, layers: int, context: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, features)
        self.positions = nn.Embedding(context, features)
        self.blocks = nn.Sequential(*(Block(features, heads, 4 * features) for _ in range(layers)))
        self.norm = nn.LayerNorm(features)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Recurrent(nn.Module):
    """Long short-term memory: tokens (batch, time) -> logits of the next ones (batch, time,
    vocabulary).

    PyTorch's layers add two biases; the second ones are 0 and stay so.

    Args:
        features: of the embedding and of each layer.
        layers: how many.
        vocabulary: how many tokens.
    """

    def __init__(self, features: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.layers = nn.LSTM(features, features, layers, batch_first=True)
        self.output = nn.Linear(features, vocabulary)
        for number in range(layers):
            nn.init.zeros_(self.layers.get_parameter(f"bias_hh_l{number}")).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.output(self.layers(self.embedding(tokens))[0])


def build(case: Case) -> nn.Module:
    """Return the case's model."""
    if case.model == BLOCK:
        return Block(*case.sizes[1:])
    if case.model == GPT:
        return Transformer(*case.sizes[1:])
    if case.model == LSTM:
        return Recurrent(*case.sizes[1:])
    if case.model == CNN:
        height, width, channels, classes = case.sizes
        layers: list[nn.Module] = []
        for inputs, outputs in ((channels, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        sizes = [height // 4 * (width // 4) * 64, 128, 64, classes]
        return nn.Sequential(*layers, nn.Flatten(), *_linear(sizes))
    return nn.Sequential(*_linear(case.sizes))


def _linear(sizes: Any) -> list[nn.Module]:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def _blas() -> str:
    """Return the lines of PyTorch's configuration that name its libraries, joined."""
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    return "; ".join(line for line in lines if "Kernel Library" in line or "MKL-DNN" in line)
