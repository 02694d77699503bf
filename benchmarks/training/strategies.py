"""PyTorch's own strategies on two ranks over gloo, beside nnmpi's: a training step of one GPT.

    python benchmarks/training/strategies.py                          # all, 3 rounds
    python benchmarks/training/strategies.py --ways "tensor parallel" --precision bf16
    python benchmarks/training/strategies.py --peers-python VENV/bin/python  # has PyTorch

GPT-2's blocks, 6 layers of 384 features, 6 heads, text of 65 characters, batches of 8 x 256, AdamW:

    way               nnmpi                         PyTorch
    data parallel     Layout()                      DistributedDataParallel
    sharded weights   Layout(zero=3)                FSDP2: fully_shard of each block and the model
    tensor parallel   Layout(tp=2)                  DTensor: columns and rows by parallelize_module
    pipeline          Layout(pp=2), 1F1B            Schedule1F1B

A pipeline has 8 microbatches of a row each. PyTorch's does not sum the gradients of tied weights:
its output layer has weights of its own. Each contestant is a job of its own, with one thread a
rank, and has its turn in every round; a time is the median of the wall's on rank 0.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.training import turn  # noqa: E402

OURS, THEIRS, JIT = "nnmpi", "PyTorch", "nnmpi, jit"
DATA, SHARDED, TENSOR, PIPELINE = "data parallel", "sharded weights", "tensor parallel", "pipeline"
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    DATA: {},
    SHARDED: {"zero": 3},
    TENSOR: {"tp": 2},
    PIPELINE: {"pp": 2},
}
RANKS, ROWS, CONTEXT, WORDS = 2, 8, 256, 65
FEATURES, HEADS, LAYERS = 384, 6, 6
LR = 1e-3


def draw() -> tuple[Any, Any]:
    """Return the batch's texts and their next characters, (ROWS, CONTEXT) each."""
    import numpy as np

    text = np.random.default_rng(0).integers(0, WORDS, (ROWS, CONTEXT + 1))
    return text[:, :-1].copy(), text[:, 1:].copy()


def our_step(way: str, precision: str, jit: bool) -> Callable[[], float]:
    """Return a training step of nnmpi."""
    import nnmpi
    from nnmpi import data, models, optim

    group = nnmpi.start()
    model = models.gpt(WORDS, CONTEXT, FEATURES, LAYERS, HEADS)
    x, y = draw()
    microbatches = ROWS if way == PIPELINE else 1
    with nnmpi.jit(jit):
        arrangement = nnmpi.arrange(model, group, nnmpi.Layout(**LAYOUTS[way]), x[:1])
        arrangement.model.initialize(seed=0, storage=arrangement.storage)
        worker = nnmpi.Worker(
            arrangement.model,
            optim.AdamW(arrangement.model.storage, lr=LR),
            group,
            arrangement=arrangement,
            numerics=nnmpi.Numerics(precision=precision),
        )
        loader = data.Loader(
            data.Dataset("random text", x, y, WORDS),
            ROWS,
            worker.arrangement,
            microbatches=microbatches,
            shuffle=False,
        )
    epochs = iter(range(10**9))

    def run() -> float:
        with nnmpi.jit(jit):
            (batch,) = loader.epoch(next(epochs))
            return float(worker.step(batch).loss)

    return run


def their_step(way: str, precision: str) -> Callable[[], float]:
    """Return a training step of PyTorch."""
    import torch
    from torch import distributed, nn
    from torch.nn import functional

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    x, y = map(torch.from_numpy, draw())

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.proj = (nn.Linear(FEATURES, FEATURES) for _ in range(4))

        def forward(self, x: Any) -> Any:
            # of as many heads as this rank has
            q, k, v = (
                layer(x).unflatten(-1, (-1, FEATURES // HEADS)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.proj(y.transpose(1, 2).flatten(-2))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attention = nn.LayerNorm(FEATURES), Attention()
            self.norm2 = nn.LayerNorm(FEATURES)
            self.fc1, self.fc2 = (
                nn.Linear(FEATURES, 4 * FEATURES),
                nn.Linear(4 * FEATURES, FEATURES),
            )

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        """The layers of a stage, or all of them."""

        def __init__(self, first: bool = True, last: bool = True, layers: int = LAYERS) -> None:
            super().__init__()
            self.first, self.last = first, last
            if first or last:
                self.tokens = nn.Embedding(WORDS, FEATURES)
            if first:
                self.positions = nn.Embedding(CONTEXT, FEATURES)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            if last:
                self.norm = nn.LayerNorm(FEATURES)

        def forward(self, x: Any) -> Any:
            if self.first:
                x = self.tokens(x) + self.positions.weight[: x.shape[1]]
            for block in self.blocks:
                x = block(x)
            return functional.linear(self.norm(x), self.tokens.weight) if self.last else x

    def loss_of(logits: Any, labels: Any) -> Any:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    if way == PIPELINE:
        from torch.distributed import pipelining

        part = Gpt(rank == 0, rank == 1, LAYERS // RANKS)
        stage = pipelining.PipelineStage(part, rank, RANKS, torch.device("cpu"))
        schedule = pipelining.Schedule1F1B(stage, ROWS, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(part.parameters(), lr=LR)

        def run_stage() -> float:
            optimizer.zero_grad()
            losses: list[Any] = []
            with autocast():
                if rank == 0:
                    schedule.step(x)
                else:
                    schedule.step(target=y, losses=losses)
            optimizer.step()
            distributed.barrier()
            return float(sum(map(float, losses)))

        return run_stage

    model = Gpt()
    forward: Any = model
    if way == TENSOR:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (RANKS,))
        columns = ("attention.q", "attention.k", "attention.v", "fc1")
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attention.proj", "fc2")}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
    else:
        rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
        x, y = x[rows], y[rows]
    if way == DATA:
        forward = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif way == SHARDED:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    # with DTensors AdamW's own loop over them is its default
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def run() -> float:
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(forward(x), y)
        loss.backward()
        optimizer.step()
        return float(loss)

    return run


def take(way: str, who: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of some steps, after four that count for nothing."""
    if who == THEIRS:
        run = their_step(way, options.precision)
    else:
        run = our_step(way, options.precision, who == JIT)
    seconds = []
    for _ in range(options.steps + 4):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds[4:]}


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ways", default=",".join(LAYOUTS), help=f"of {', '.join(LAYOUTS)}, with commas (all)"
    )
    turn.add_options(parser)
    options = parser.parse_args()
    if options.take:
        way, who = options.take
        turn.tell(take(way, who, options), who == THEIRS)
        return
    field = (OURS, JIT, THEIRS)
    print(f"| ms, {options.precision} | {' | '.join(field)} | PyTorch / nnmpi | with jit |")
    print("|---" * (len(field) + 3) + "|")
    for way in options.ways.split(","):
        turns = [
            {who: turn.start(__file__, (way, who), who != THEIRS, options, RANKS) for who in field}
            for _ in range(options.rounds)
        ]
        medians = {
            who: 1e3 * statistics.median(s for one in taken for s in one["seconds"])
            for who in field
            if (taken := [one[who] for one in turns if one[who]])
        }
        cells = [f"{medians[who]:.0f}" if who in medians else "-" for who in field]
        theirs = medians.get(THEIRS)
        cells += [f"{theirs / medians[who]:.2f}" if theirs else "-" for who in (OURS, JIT)]
        print(f"| {' | '.join([way, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
