"""CIFAR-10's cats and dogs: --dataset benchmarks/accuracy/cat_dog.py:cat_dog; $CIFAR is the folder
of its files.
"""

import os
from dataclasses import replace

import numpy as np

from nnmpi.data import Dataset, load

CAT, DOG = 3, 5


def cat_dog() -> list[Dataset]:
    """Return the training and the test part."""
    parts = (
        part.take(np.flatnonzero(np.isin(part.y, (CAT, DOG))))
        for part in load("cifar10", os.environ.get("CIFAR"))
    )
    return [
        replace(part, y=(part.y == DOG) + 0, classes=2, class_names=("cat", "dog"))
        for part in parts
    ]
