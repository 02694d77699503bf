"""Models that nobody tuned for, written once for all: a training step of nnmpi beside its peers.

    python benchmarks/training/zoo.py                                 # all models, 3 rounds
    python benchmarks/training/zoo.py --models resnet20,vgg11 --rounds 1
    python benchmarks/training/zoo.py --ranks 2                       # DataParallel, DDP over gloo
    python benchmarks/training/zoo.py --threads 2                     # of one rank
    python benchmarks/training/zoo.py --precision bf16                # the processor's own
    python benchmarks/training/zoo.py --peers-python VENV/bin/python  # has PyTorch and JAX

Each contestant is a process of its own (a job on several ranks) and has its turn in every round.
A step takes AdamW, as a user writes it who changes nothing. On one rank its time is processor time
with one thread; on several ranks or threads it is the wall's on rank 0. Times are medians over all
rounds.
`OPENBLAS_CORETYPE` and `OPENBLAS_L2_SIZE` are removed: a machine that sets them slows NumPy alone.

    nnmpi       `nnmpi.compile`, with the NumPy wheel alone and within `nnmpi.jit`
    PyTorch     eager in both layouts of images, and `torch.compile` of the model
    JAX         the whole step in one `jax.jit`, with donated buffers (zoo_jax.py)

In bf16 nnmpi has `use_precision("bf16")`, and PyTorch `autocast`; JAX has no such line.
"""

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.training import models, turn  # noqa: E402

OURS, JAX = ("nnmpi", "nnmpi, jit"), "JAX"
EAGER = ("PyTorch", "PyTorch, channels_last")
COMPILED = ("torch.compile", JAX)  # on one rank alone


# The shape of x. Of (batch, time) it is text, and each character has a target.
MODELS: Mapping[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "resnet20": (models.resnet20, (64, 32, 32, 3)),
    "vgg11": (models.vgg11, (32, 32, 32, 3)),
    "lenet5": (models.lenet5, (64, 28, 28, 1)),
    "separable": (models.separable, (32, 32, 32, 3)),
    "autoencoder": (models.autoencoder, (64, 28, 28, 1)),
    "mlp-norm": (models.mlp_norm, (128, 784)),
    "char-lstm": (models.lstm, (32, 64)),
    "gpt": (models.gpt, (8, 128)),
    "unet": (models.unet, (4, 128, 128, 3)),
    "strided": (models.strided, (64, 32, 32, 3)),
    "vit": (partial(models.vit, side=64, layers=4), (32, 64, 64, 3)),
    "mixer": (models.mixer, (32, 32, 32, 3)),
    "char-gru": (models.gru, (32, 64)),
}
TEXT = ("char-lstm", "gpt", "char-gru")
WITHOUT_JAX = ("vit", "mixer", "char-gru")


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


def our_step(name: str, who: str, ranks: int, precision: str) -> Callable[[], object]:
    """Return a training step of nnmpi."""
    import nnmpi
    from nnmpi import nn, ops, optim

    group = nnmpi.start() if ranks > 1 else None
    x, y = draw(name, group.rank if group else 0, ranks)
    model = MODELS[name][0](models.our_library()).initialize(seed=0)
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
        with (
            nnmpi.jit() if who == OURS[1] else nullcontext(),
            nnmpi.use_precision(precision),
            nn.training(step=optimizer.steps),
        ):
            return step(x, y).item()

    return run


def their_step(name: str, who: str, ranks: int, precision: str) -> Callable[[], object]:
    """Return a training step of PyTorch."""
    import torch
    from torch import nn

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    x, y = map(
        torch.from_numpy, draw(name, torch.distributed.get_rank() if ranks > 1 else 0, ranks)
    )
    model = MODELS[name][0](models.their_library())
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
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = forward(x)
            loss = nn.functional.cross_entropy(logits.reshape(y.numel(), -1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def jax_step(name: str, who: str, ranks: int, precision: str) -> Callable[[], object]:
    """Return a training step of JAX."""
    from benchmarks.training import zoo_jax

    return zoo_jax.make_step(MODELS[name][0](zoo_jax.library()), *draw(name, 0, ranks))


def take(name: str, who: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of some steps, after four that count for nothing, and the peak memory."""
    make = our_step if who in OURS else jax_step if who == JAX else their_step
    run = make(name, who, options.ranks, options.precision)
    alone = options.ranks == 1 and os.environ["OMP_NUM_THREADS"] == "1"
    clock, seconds = time.process_time if alone else time.perf_counter, []
    for _ in range(options.steps + 4):
        begin = clock()
        run()
        seconds.append(clock() - begin)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"seconds": seconds[4:], "peak_mb": peak_mb}


def start(name: str, who: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Give a contestant its turn, see `turn.start`."""
    words, ranks = ["--ranks", str(options.ranks)], options.ranks
    return turn.start(__file__, (name, who), who in OURS, options, ranks, options.threads, words)


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}, with commas (all)"
    )
    turn.add_options(parser)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="data-parallel (1)")
    parser.add_argument("--threads", default="1", metavar="N", help="of each rank (1)")
    options = parser.parse_args()
    if options.take:
        name, who = options.take
        turn.tell(take(name, who, options), options.ranks > 1 and who in EAGER)
        return
    contestants = (*OURS, *EAGER, *(COMPILED if options.ranks == 1 else ()))
    columns = ("model", *contestants, "fastest peer / nnmpi", "with jit", "MB", "jit", "PyTorch")
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for name in options.models.split(","):
        left_out = {EAGER[1]} if len(MODELS[name][1]) < 4 else set()
        left_out |= {JAX} if name in WITHOUT_JAX or options.precision != "float32" else set()
        field = [who for who in contestants if who not in left_out]
        turns = [{who: start(name, who, options) for who in field} for _ in range(options.rounds)]
        medians, peaks = {}, {}
        for who in field:
            if taken := [one[who] for one in turns if one[who]]:
                medians[who] = 1e3 * statistics.median(s for one in taken for s in one["seconds"])
                peaks[who] = max(one["peak_mb"] for one in taken)
        cells = [f"{medians[who]:.1f}" if who in medians else "-" for who in contestants]
        peers = [medians[who] for who in contestants[2:] if who in medians]
        cells += [f"{min(peers) / medians[who]:.2f}" if peers else "-" for who in OURS]
        cells += [f"{peaks[who]:.0f}" for who in OURS]
        torch_mb = [peaks[who] for who in EAGER if who in peaks]
        cells.append(f"{min(torch_mb):.0f}" if torch_mb else "-")
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
