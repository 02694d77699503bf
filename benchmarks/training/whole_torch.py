"""A plain PyTorch script that trains with a DataLoader, as people write it; see `whole.py`.

    python whole_torch.py DATA.npz MODEL --epochs 20 --batch-size 32 --out weights.pt
    torchrun --standalone --nproc_per_node 2 whole_torch.py DATA.npz MODEL ...   # DDP over gloo

DATA.npz holds x_train, y_train, x_test and y_test; bytes are divided by 255. MODEL is "mlp" (one
hidden layer of 50) or "cnn" (that of `nnmpi.models.cnn`). Adam, a warm-up of one epoch and then a
cosine; the test data after each epoch.
"""

import argparse
import os
from math import cos, pi

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build(model: str, shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Return the network for samples of this shape (features or height, width)."""
    if model == "mlp":
        return nn.Sequential(nn.Linear(shape[0], 50), nn.ReLU(), nn.Linear(50, classes))
    blocks = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    blocks += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    features = shape[0] // 4 * (shape[1] // 4) * 64
    linear = [
        nn.Linear(features, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    ]
    return nn.Sequential(*blocks, *linear)


def load(file: str, part: str) -> TensorDataset:
    """Return a part of the data; images as (n, 1, height, width)."""
    with np.load(file) as arrays:
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    scaled = torch.from_numpy(x).float() / (255 if x.dtype == np.uint8 else 1)
    return TensorDataset(scaled if x.ndim == 2 else scaled[:, None], torch.from_numpy(y).long())


def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy, over all ranks."""
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    if distributed.is_initialized():
        distributed.all_reduce(right)
    return float(right[0] / right[1])


def main() -> None:
    """Train, print a line per epoch, and save the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("model", choices=("mlp", "cnn"))
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = load(options.data, "train"), load(options.data, "test")
    sampler = DistributedSampler(train) if ranks > 1 else None
    loader = DataLoader(
        train, options.batch_size // ranks, shuffle=sampler is None, sampler=sampler
    )
    test_loader = DataLoader(
        test, 256, sampler=DistributedSampler(test, shuffle=False) if ranks > 1 else None
    )
    x, y = train.tensors
    net = build(options.model, x.shape[-2:] if x.ndim == 4 else x.shape[1:], int(y.max()) + 1)
    model = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    warm, steps = len(loader), options.epochs * len(loader)

    def factor(step: int) -> float:
        return (
            (step + 1) / warm
            if step < warm
            else (1 + cos(pi * (step - warm) / max(1, steps - warm))) / 2
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for epoch in range(options.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        accuracy = evaluate(model, test_loader)
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            print(
                f"epoch {epoch + 1}: loss {total / len(loader):.4f}, test accuracy {accuracy:.2%}",
                flush=True,
            )
            torch.save(net.state_dict(), options.out)
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
