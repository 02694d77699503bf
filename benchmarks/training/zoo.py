"""Models that nobody tuned for, written once for both: a training step of nnmpi beside PyTorch's,
on one core.

    python benchmarks/training/zoo.py                                   # all models, 3 rounds
    python benchmarks/training/zoo.py --models resnet20,vgg11 --rounds 1
    python benchmarks/training/zoo.py --torch-python VENV/bin/python    # where PyTorch is, if not here

Each contestant is a process of its own, with one thread, and has its turn in every round. Times are
processor times of a step with AdamW, medians over all rounds, as they are for somebody who changes
nothing: nnmpi by `nnmpi.compile`, with the NumPy wheel alone and with `nnmpi.jit`; PyTorch eagerly,
in both layouts of images. The fastest PyTorch counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

OURS, THEIRS = ("nnmpi", "nnmpi, jit"), ("PyTorch", "PyTorch, channels_last")


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


MODELS: Mapping[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "resnet20": (resnet20, (64, 32, 32, 3)),
    "vgg11": (vgg11, (32, 32, 32, 3)),
    "lenet5": (lenet5, (64, 28, 28, 1)),
    "separable": (separable, (32, 32, 32, 3)),
    "autoencoder": (autoencoder, (64, 28, 28, 1)),
    "mlp-norm": (mlp_norm, (128, 784)),
}


def our_step(name: str, x: Any, y: Any, jit: bool) -> Callable[[], object]:
    """Return a training step of nnmpi."""
    import nnmpi
    from nnmpi import nn, ops, optim

    lib = SimpleNamespace(
        nn=nn, relu=ops.relu, end=lambda width: (nn.GlobalAvgPool2d(), nn.Linear(width, 10))
    )
    model = MODELS[name][0](lib).initialize(seed=0)
    optimizer = optim.AdamW(model.storage, lr=1e-3)

    @nnmpi.compile
    def step(x: Any, y: Any) -> Any:
        with nn.training(step=optimizer.steps):
            loss = ops.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def run() -> object:
        with nnmpi.jit(jit):
            return step(x, y)

    return run


def their_step(name: str, x: Any, y: Any, channels_last: bool) -> Callable[[], object]:
    """Return a training step of PyTorch."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    end = lambda width: (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))  # noqa: E731
    model = MODELS[name][0](SimpleNamespace(nn=nn, relu=torch.relu, end=end))
    inputs, labels = (
        torch.from_numpy(x.transpose(0, 3, 1, 2).copy() if x.ndim == 4 else x),
        torch.from_numpy(y),
    )
    if channels_last:
        model, inputs = (
            model.to(memory_format=torch.channels_last),
            inputs.to(memory_format=torch.channels_last),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> object:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss

    return run


def take(name: str, who: str, steps: int) -> list[float]:
    """Return the processor seconds of some steps, after four that count for nothing."""
    import numpy as np

    draw, shape = np.random.default_rng(0), MODELS[name][1]
    x, y = draw.standard_normal(shape).astype("float32"), draw.integers(0, 10, shape[0])
    run = (our_step if who in OURS else their_step)(name, x, y, who in (OURS[1], THEIRS[1]))
    found = []
    for _ in range(steps + 4):
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return found[4:]


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}, with commas (all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="turns of each contestant (3)"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of each turn (10)")
    parser.add_argument(
        "--torch-python", default=sys.executable, help="the Python that has PyTorch (this one)"
    )
    parser.add_argument("--take", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        print(json.dumps(take(*options.take, options.steps)))
        return
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    columns = ("model", *OURS, *THEIRS, "fastest PyTorch / nnmpi", "with jit")
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for name in options.models.split(","):
        seconds: dict[str, list[float]] = {who: [] for who in (*OURS, *THEIRS)}
        for _ in range(options.rounds):
            for who, found in seconds.items():
                python = sys.executable if who in OURS else options.torch_python
                words = [python, __file__, "--take", name, who, "--steps", str(options.steps)]
                ran = subprocess.run(
                    words, env={**os.environ, **threads}, capture_output=True, text=True
                )
                if ran.returncode == 0:
                    found += json.loads(ran.stdout.splitlines()[-1])
                elif who in OURS:
                    raise SystemExit(ran.stderr)
        medians = [
            1e3 * statistics.median(found) if found else float("nan") for found in seconds.values()
        ]
        ratios = [min(medians[2:]) / ours for ours in medians[:2]]
        cells = [*(f"{each:.1f}" for each in medians), *(f"{each:.2f}" for each in ratios)]
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
