"""Data sets, and the batches that each rank gets of them.

In the order to read it:

    dataset         Dataset: samples and labels in memory, and the split into training and test part
    catalogue       data sets by name or path: load and prepare
    sampler         who sees which sample when; pure functions, with a picture
    partition       ... where every worker has samples of its own
    loader          Loader: one rank's batches, with their microbatches
    transform       normalizing, and the random changes of images; draws: their random numbers
    prefetch        batches made ahead of time by threads
    upload          batches copied to a device ahead of time

Files: idx (MNIST), cifar, npz and csvfile read one format each; files finds and unpacks them; sources says where the
known sets are downloaded from, and download does it.

A new data set by name: sources and catalogue. A new file format: a module like idx, and catalogue. A new augmentation:
transform, and `train.inputs.augmentations`.
"""

from nnmpi.data.catalogue import NAMES, load, prepare
from nnmpi.data.dataset import Dataset, split
from nnmpi.data.loader import Batch, Loader
from nnmpi.data.transform import Compose, Flip, Normalize, Shift, Transform
from nnmpi.data.upload import Uploads, batches

__all__ = [
    "NAMES",
    "Batch",
    "Compose",
    "Dataset",
    "Flip",
    "Loader",
    "Normalize",
    "Shift",
    "Transform",
    "Uploads",
    "batches",
    "load",
    "prepare",
    "split",
]
