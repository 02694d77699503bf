"""Data sets, and the batches that each rank gets of them."""

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
