"""Trains an MLP 4-50-3 on iris with nnmpi and with PyTorch, on the same splits, over several seeds.

    python benchmarks/accuracy/iris.py [--recipes plain,recommended] [--seeds 10]
        [--folds K] [--json FILE]

A seed determines the split (120 + 30 rows), the first weights and the order of the samples. The two
frameworks read the same rows in the same order, and draw their first weights from the same
distributions, but not the same weights. nnmpi's numbers are those of `nnmpi train` with
the same options. PyTorch is skipped if it is missing.

--folds K compares recipes without the test rows, by cross-validation: each seed's 120 training rows
are cut into K parts, and each part is predicted by a network trained on the others.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.command import (  # noqa: E402
    Parser,
    add_options,
    file,
    list_of,
    one_of,
    positive_count,
    run,
)
from benchmarks.harness.machine import machine_facts  # noqa: E402
from nnmpi import data, models, optim  # noqa: E402
from nnmpi.backend.random import stream  # noqa: E402
from nnmpi.comm.group import Group  # noqa: E402
from nnmpi.comm.mpi.start import start  # noqa: E402
from nnmpi.compose.worker import Worker  # noqa: E402

HIDDEN = 50


@dataclass(frozen=True)
class IrisRecipe:
    """A recipe with Adam.

    Attributes:
        lr: the learning rate; with a schedule, the highest one.
        cosine: the rate falls to 0 along half a cosine; otherwise it is constant.
        normalize: each feature gets mean 0 and standard deviation 1 over the training rows.
    """

    epochs: int = 100
    batch_size: int = 64
    lr: float = 1e-3
    cosine: bool = False
    normalize: bool = False

    def schedule(self, steps: int) -> optim.RateSchedule:
        """Return the learning rate by step."""
        return optim.Cosine(self.lr, steps) if self.cosine else optim.ConstantRate(self.lr)


RECIPES = {
    "plain": IrisRecipe(),
    "recommended": IrisRecipe(lr=0.01, cosine=True),
    # the other candidates of the cross-validation that chose "recommended"
    "normalized": IrisRecipe(normalize=True),
    "fast": IrisRecipe(lr=0.01),
    "fast-normalized": IrisRecipe(lr=0.01, normalize=True),
    "cosine-normalized": IrisRecipe(lr=0.01, cosine=True, normalize=True),
    "small-batches": IrisRecipe(lr=0.003, cosine=True, batch_size=16),
    "small-batches-normalized": IrisRecipe(lr=0.003, cosine=True, batch_size=16, normalize=True),
}


class SplitRun:
    """One split of the data; both frameworks read its batches from nnmpi's loaders.

    Args:
        recipe: of the training.
        train, test: the rows.
        seed: of the first weights and the order of the samples.

    Attributes:
        train, test: loaders; the test loader yields all rows as one batch.
    """

    def __init__(
        self, recipe: IrisRecipe, train: data.Dataset, test: data.Dataset, seed: int
    ) -> None:
        self.recipe, self.seed = recipe, seed
        transform = data.Normalize.fit(train) if recipe.normalize else None
        self.train = data.Loader(
            train, recipe.batch_size, seed=seed, transform=transform, workers=0
        )
        self.test = data.Loader(test, len(test), shuffle=False, transform=transform, workers=0)

    def batches(self) -> Iterator[tuple[data.Batch, float]]:
        """Yield every training batch with its learning rate, in the order of `nnmpi.train`."""
        schedule = self.recipe.schedule(self.recipe.epochs * self.train.batches_per_epoch)
        steps = itertools.count()
        for epoch in range(self.recipe.epochs):
            for batch in self.train.epoch(epoch):
                yield batch, schedule(next(steps))

    def run_nnmpi(self, group: Group) -> float:
        """Return the test accuracy after training with nnmpi."""
        dataset = self.train.dataset
        model = models.mlp(dataset.sample_shape, dataset.classes, hidden=(HIDDEN,)).initialize(
            seed=self.seed
        )
        worker = Worker(model, optim.Adam(model.storage), group, seed=self.seed)
        for batch, lr in self.batches():
            worker.step(batch, lr=lr)
        return worker.evaluate(self.test.epoch(0)).accuracy

    def run_torch(self) -> float:
        """Return the test accuracy after training with PyTorch."""
        import torch

        torch.manual_seed(self.seed)
        (features,), classes = self.train.dataset.sample_shape, self.train.dataset.classes
        model = torch.nn.Sequential(
            torch.nn.Linear(features, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, classes)
        )
        optimizer = torch.optim.Adam(model.parameters())
        for batch, lr in self.batches():
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(torch.from_numpy(batch.x)), torch.from_numpy(batch.y)
            )
            torch.autograd.backward(loss)
            optimizer.step()
        (batch,) = self.test.epoch(0)
        with torch.no_grad():
            predicted = model(torch.from_numpy(batch.x)).argmax(1).numpy()
        return float(np.mean(predicted == batch.y))


def splits(seed: int, folds: int) -> Iterator[tuple[data.Dataset, data.Dataset]]:
    """Yield the seed's training and test rows; with folds, each fold of the training rows in the
    place of the test.
    """
    train, test = data.load("iris", seed=seed)
    if not folds:
        yield train, test
        return
    parts = np.array_split(stream(seed, "folds").permutation(len(train)), folds)
    for i, part in enumerate(parts):
        yield train.take(np.concatenate(parts[:i] + parts[i + 1 :])), train.take(part)


def report(group: Group, recipe: IrisRecipe, seeds: int, folds: int) -> dict[str, list[float]]:
    """Print a line per seed and the means; return the accuracies of all seeds by framework.

    Args:
        group: of one rank.
        recipe: of the training.
        seeds: how many, from 0 on.
        folds: of the training rows; 0: the test rows.
    """
    frameworks: dict[str, Callable[[SplitRun], float]] = {
        "nnmpi": lambda element: element.run_nnmpi(group)
    }
    if find_spec("torch"):
        frameworks["torch"] = SplitRun.run_torch
    result: dict[str, list[float]] = {name: [] for name in frameworks}
    print("seed" + "".join(f"{name:>10}" for name in frameworks))
    for seed in range(seeds):
        runs = [SplitRun(recipe, train, test, seed) for train, test in splits(seed, folds)]
        for name, measure in frameworks.items():
            result[name].append(float(np.mean([measure(item) for item in runs])))
        print(
            f"{seed:4}" + "".join(f"{100 * values[-1]:9.2f}%" for values in result.values()),
            flush=True,
        )
    print("mean" + "".join(f"{100 * np.mean(values):9.2f}%" for values in result.values()))
    return result


def main() -> None:
    """Run the recipes, each with all seeds."""
    parser = Parser(description=__doc__)
    recipes = list_of(one_of(*RECIPES, "all"))
    add_options(
        parser,
        ("--recipes", recipes, "plain,recommended", f"of {', '.join(RECIPES)}; or all"),
        ("--seeds", positive_count, "10", "how many"),
        ("--folds", int, "0", "of the training rows; 0: the test rows"),
        ("--json", file, None, "file for the result, with the machine's facts"),
    )
    options = parser.parse_args()
    group, result = start(), {}
    for name in RECIPES if "all" in options.recipes else options.recipes:
        print(f"{name}: {RECIPES[name]}")
        accuracies = report(group, RECIPES[name], options.seeds, options.folds)
        means = {framework: float(np.mean(values)) for framework, values in accuracies.items()}
        result[name] = {"recipe": asdict(RECIPES[name]), "mean": means, "accuracy": accuracies}
    results.write(
        options.json, {"machine": machine_facts(), "folds": options.folds, "recipes": result}
    )


if __name__ == "__main__":
    sys.exit(run("iris.py", main))
