"""Data sets, and the batches that each rank gets of them.

In the order to read it:

    dataset         Dataset: samples and labels in memory, and the split into training and test part
    catalogue       data sets by name or path: load; prepare downloads
    images, tables  what files hold: IDX (MNIST), CIFAR-10, folders of images; CSV and npz
    items           data sets of other libraries: PyTorch's, Hugging Face's, DataFrames
    tokenizer       text to numbers; text: documents in files, in blocks of tokens or sentences
    sampler         who sees which sample when; pure functions, with a picture; workers with samples
                    of their own
    loader          Loader: one rank's batches, with their microbatches, on the host or on a device
    transform       normalizing, and the random changes of images
    prefetch        batches made ahead of time by threads

A new data set by name, or a new file format: catalogue. A new augmentation: transform, with a row
in its table.
"""

from nnmpi.data.catalogue import NAMES, load, prepare
from nnmpi.data.dataset import IGNORED, Dataset, split
from nnmpi.data.loader import Batch, Loader
from nnmpi.data.text import Text, TextSource, load_text, prepare_tokens
from nnmpi.data.tokenizer import Tokenizer, load_tokenizer
from nnmpi.data.transform import (
    ColorJitter,
    Compose,
    Cutout,
    Flip,
    Normalize,
    Rotate,
    Shift,
    Transform,
)

__all__ = [
    "IGNORED",
    "NAMES",
    "Batch",
    "ColorJitter",
    "Compose",
    "Cutout",
    "Dataset",
    "Flip",
    "Loader",
    "Normalize",
    "Rotate",
    "Shift",
    "Text",
    "TextSource",
    "Tokenizer",
    "Transform",
    "load",
    "load_text",
    "load_tokenizer",
    "prepare",
    "prepare_tokens",
    "split",
]
