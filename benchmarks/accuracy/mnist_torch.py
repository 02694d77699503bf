"""Trains nnmpi's `cnn` in PyTorch on MNIST, by the plain recipe, to compare the accuracies.

    python benchmarks/accuracy/mnist_torch.py --seed 0 --data-dir DIR --out runs/mnist-torch-0

Same files, same batches in the same order, same distributions of the first weights (not the same
weights), Adam 0.001, batches of 64, inputs from 0 to 1. The run folder gets a `config.json`, and a
`metrics.jsonl` with the lines "eval" and "test" of `nnmpi.train`, so that `collect.py` reads both.
"""

import argparse
import json
import sys
import time
from pathlib import Path

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.training.cases import CASES  # noqa: E402
from benchmarks.training.trainer_torch import build  # noqa: E402
from nnmpi import data  # noqa: E402
from nnmpi.data.sampler import order  # noqa: E402


def tensors(dataset: data.Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (n, 1, height, width) float32 from 0 to 1 and labels (n,) int64."""
    x = dataset.rows(np.arange(len(dataset)))
    return torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(dataset.y)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    rows: torch.Tensor,
    batch: int,
) -> None:
    """Do one epoch of updates over the samples in the order of `rows`; the last batch may be short.

    Args:
        model: the network.
        optimizer: of its parameters.
        x, y: all images (n, 1, height, width) float32 and labels (n,) int64.
        rows: (n,) int64, the order of the samples.
        batch: samples per update.
    """
    model.train()
    for indices in torch.split(rows, batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[indices]), y[indices])
        torch.autograd.backward(loss)
        optimizer.step()


def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return the mean loss and the accuracy.

    Args:
        model: a classifier.
        x, y: images (n, 1, height, width) float32 and labels (n,) int64.
    """
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in torch.split(x, 1000)])
        loss = nn.functional.cross_entropy(logits, y).item()
    return loss, (logits.argmax(1) == y).double().mean().item()


def main() -> None:
    """Train, print a line per epoch, and write the metrics to the run folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's four files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="run folder, made if it is missing")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    train, test = data.load("mnist", options.data_dir)
    (x, y), (test_x, test_y) = tensors(train), tensors(test)
    model = build(CASES["cnn"])
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "config.json").write_text(
        json.dumps(vars(options), indent=1, default=str) + "\n"
    )
    with (options.out / "metrics.jsonl").open("w") as file:
        for epoch in range(options.epochs):
            begin = time.perf_counter()
            rows = torch.from_numpy(order(len(train), options.seed, epoch))
            train_epoch(model, optimizer, x, y, rows, options.batch_size)
            seconds = time.perf_counter() - begin
            loss, accuracy = evaluate(model, test_x, test_y)
            kinds = ("eval", "test") if epoch + 1 == options.epochs else ("eval",)
            for kind in kinds:
                line = {"kind": kind, "epoch": float(epoch + 1), "loss": loss, "accuracy": accuracy}
                file.write(json.dumps(line) + "\n")
            print(
                f"epoch {epoch + 1}: test accuracy {100 * accuracy:.2f} %, trained in"
                f" {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
