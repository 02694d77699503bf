"""Models that nobody tuned for, written once for all: a training step of nnmpi beside its peers.

    python benchmarks/training/zoo.py                                   # all models, 3 rounds
    python benchmarks/training/zoo.py --models resnet20,vgg11 --rounds 1
    python benchmarks/training/zoo.py --ranks 2                         # DataParallel, and DDP over gloo
    python benchmarks/training/zoo.py --peers-python VENV/bin/python    # has PyTorch and JAX

Each contestant is a process of its own (a job on several ranks) and has its turn in every round.
A step takes AdamW, as a user writes it who changes nothing. On one rank its time is processor time
with one thread; on several it is the wall's on rank 0. Times are medians over all rounds.

    nnmpi       `nnmpi.compile`, with the NumPy wheel alone and within `nnmpi.jit`
    PyTorch     eager in both layouts of images, and `torch.compile` of the model
    JAX         the whole step in one `jax.jit`, with donated buffers (zoo_jax.py)
"""

import argparse
import json
import os
import resource
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

OURS, JAX = ("nnmpi", "nnmpi, jit"), "JAX"
EAGER = ("PyTorch", "PyTorch, channels_last")
COMPILED = ("torch.compile", JAX)  # on one rank alone


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


# The shape of x. Of (batch, time) it is text, and each character has a target.
MODELS: Mapping[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "resnet20": (resnet20, (64, 32, 32, 3)),
    "vgg11": (vgg11, (32, 32, 32, 3)),
    "lenet5": (lenet5, (64, 28, 28, 1)),
    "separable": (separable, (32, 32, 32, 3)),
    "autoencoder": (autoencoder, (64, 28, 28, 1)),
    "mlp-norm": (mlp_norm, (128, 784)),
    "char-lstm": (lstm, (32, 64)),
    "gpt": (gpt, (8, 128)),
}
TEXT = ("char-lstm", "gpt")


def draw(name: str, rank: int, ranks: int) -> tuple[Any, Any]:
    """Return a rank's rows of a model's batch, and their targets."""
    import numpy as np

    random, shape = np.random.default_rng(0), MODELS[name][1]
    rows = slice(rank * shape[0] // ranks, (rank + 1) * shape[0] // ranks)
    if name in TEXT:
        text = random.integers(0, 65, (shape[0], shape[1] + 1))[rows]
        return text[:, :-1].copy(), text[:, 1:].copy()
    x, y = random.standard_normal(shape).astype("float32"), random.integers(0, 10, shape[0])
    return x[rows].copy(), y[rows].copy()


def our_step(name: str, who: str, ranks: int) -> Callable[[], object]:
    """Return a training step of nnmpi."""
    import nnmpi
    from nnmpi import models, nn, ops, optim

    group = nnmpi.start() if ranks > 1 else None
    x, y = draw(name, group.rank if group else 0, ranks)
    lib = SimpleNamespace(
        nn=nn,
        relu=ops.relu,
        end=lambda width: (nn.GlobalAvgPool2d(), nn.Linear(width, 10)),
        gpt=models.gpt,
        lstm=lambda *sizes: models.lstm(*sizes, tied=False),
    )
    model = MODELS[name][0](lib).initialize(seed=0)
    optimizer = optim.AdamW(model.storage, lr=1e-3)
    parallel = nnmpi.DataParallel(model, group) if group else None

    @nnmpi.compile
    def step(x: Any, y: Any) -> Any:
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y, reduction="sum" if parallel else "mean")
        if parallel:
            parallel.backward(loss, y.size * ranks)
        else:
            loss.backward()
        optimizer.step()
        return loss

    def run() -> object:
        with nnmpi.jit(who == OURS[1]), nn.training(step=optimizer.steps):
            return step(x, y).item()

    return run


def their_step(name: str, who: str, ranks: int) -> Callable[[], object]:
    """Return a training step of PyTorch."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    x, y = map(
        torch.from_numpy, draw(name, torch.distributed.get_rank() if ranks > 1 else 0, ranks)
    )
    from benchmarks.training.trainer_torch import Recurrent, Transformer

    lib = SimpleNamespace(
        nn=nn,
        relu=torch.relu,
        end=lambda width: (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)),
        gpt=lambda words, context, features, layers, heads: Transformer(
            features, heads, layers, context, words
        ),
        lstm=lambda words, features, layers: Recurrent(features, layers, words),
    )
    model = MODELS[name][0](lib)
    if x.ndim == 4:
        last = who != EAGER[0]  # torch.compile, too, is faster with it
        layout = torch.channels_last if last else torch.contiguous_format
        x = x.permute(0, 3, 1, 2).contiguous(memory_format=layout)
        model = model.to(memory_format=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = model
    if ranks > 1:
        forward = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif who in COMPILED:
        forward = torch.compile(model)

    def run() -> object:
        optimizer.zero_grad()
        logits = forward(x)
        loss = nn.functional.cross_entropy(logits.reshape(y.numel(), -1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def jax_step(name: str, who: str, ranks: int) -> Callable[[], object]:
    """Return a training step of JAX."""
    from benchmarks.training import zoo_jax

    return zoo_jax.make_step(MODELS[name][0](zoo_jax.library()), *draw(name, 0, ranks))


def take(name: str, who: str, steps: int, ranks: int) -> dict[str, Any]:
    """Return the seconds of some steps, after four that count for nothing, and the peak memory."""
    make = our_step if who in OURS else jax_step if who == JAX else their_step
    run = make(name, who, ranks)
    clock, seconds = time.process_time if ranks == 1 else time.perf_counter, []
    for _ in range(steps + 4):
        begin = clock()
        run()
        seconds.append(clock() - begin)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"seconds": seconds[4:], "peak_mb": peak_mb}


def start(name: str, who: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Give a contestant its turn; return what rank 0 took, or None where it is not installed."""
    python = sys.executable if who in OURS else options.peers_python
    words = [__file__, "--take", name, who]
    words += ["--steps", str(options.steps), "--ranks", str(options.ranks)]
    command, ranks = [python, *words], str(options.ranks)
    if options.ranks > 1 and who in OURS:
        command = [os.environ.get("NNMPI_MPIRUN", "mpirun"), "-n", ranks, *command]
    elif options.ranks > 1:
        command = [python, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", ranks, *words]
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    # XLA's pool and gloo's device
    threads |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True)
    if ran.returncode == 0:
        result: dict[str, Any] = json.loads(
            next(line for line in ran.stdout.splitlines() if line.startswith("{"))
        )
        return result
    if who in OURS or "ModuleNotFoundError" not in ran.stderr:
        raise SystemExit(f"{who} on {name}:\n{ran.stderr}")
    return None


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
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="data-parallel (1)")
    parser.add_argument(
        "--peers-python", default=sys.executable, help="the Python that has the peers (this one)"
    )
    parser.add_argument("--take", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        taken = json.dumps(take(*options.take, options.steps, options.ranks))
        ranks = [os.environ.get(name, "0") for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")]
        if {*ranks} == {"0"}:
            print(taken, flush=True)
        if options.ranks > 1 and options.take[1] in EAGER:
            sys.modules["torch"].distributed.barrier()
            os._exit(0)  # gloo's threads abort an ordinary end now and then
        return
    contestants = (*OURS, *EAGER, *(COMPILED if options.ranks == 1 else ()))
    columns = ("model", *contestants, "fastest peer / nnmpi", "with jit", "MB", "jit", "PyTorch")
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for name in options.models.split(","):
        field = [who for who in contestants if who != EAGER[1] or len(MODELS[name][1]) == 4]
        turns = [{who: start(name, who, options) for who in field} for _ in range(options.rounds)]
        medians, peaks = {}, {}
        for who in field:
            if taken := [turn[who] for turn in turns if turn[who]]:
                medians[who] = 1e3 * statistics.median(s for turn in taken for s in turn["seconds"])
                peaks[who] = max(turn["peak_mb"] for turn in taken)
        cells = [f"{medians[who]:.1f}" if who in medians else "-" for who in contestants]
        peers = [medians[who] for who in contestants[2:] if who in medians]
        cells += [f"{min(peers) / medians[who]:.2f}" if peers else "-" for who in OURS]
        cells += [f"{peaks[who]:.0f}" for who in OURS]
        torch_mb = [peaks[who] for who in EAGER if who in peaks]
        cells.append(f"{min(torch_mb):.0f}" if torch_mb else "-")
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
