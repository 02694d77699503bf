"""CIFAR-10's cats and dogs: --dataset benchmarks/accuracy/cat_dog.py:cat_dog, with $CIFAR naming the folder."""

import os

from nnmpi.data import Dataset, choose_classes, load


def cat_dog() -> list[Dataset]:
    """Return the training and the test part."""
    return [choose_classes(part, ("cat", "dog")) for part in load("cifar10", os.environ.get("CIFAR"))]
