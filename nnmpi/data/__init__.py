"""Data sets, and the batches that each rank gets of them.

In the order to read it:

    dataset         Dataset: samples and labels in memory, and the split into training and test part
    catalogue       data sets by name or path: load and prepare
    text            texts: blocks of tokens, or sentences; tokenizer, documents, token_file: where they come from
    sampler         who sees which sample when; pure functions, with a picture; workers with samples of their own
    loader          Loader: one rank's batches, with their microbatches
    transform       normalizing, and the random changes of images
    prefetch        batches made ahead of time by threads
    upload          batches copied to a device ahead of time

Files: idx (MNIST), cifar, npz and csvfile read one format each; files finds and unpacks them; sources says where the
known sets are downloaded from, and download does it.

A new data set by name: sources and catalogue. A new file format: a module like idx, and catalogue. A new augmentation:
transform, and `train.inputs.augmentations`.
"""

from nnmpi.data.catalogue import NAMES, load, prepare
from nnmpi.data.dataset import IGNORED, Dataset, choose_classes, split
from nnmpi.data.loader import Batch, Loader
from nnmpi.data.text import Text, load_text
from nnmpi.data.token_file import TextSource, prepare_tokens
from nnmpi.data.tokenizer import Tokenizer, load_tokenizer
from nnmpi.data.transform import Compose, Flip, Normalize, Shift, Transform
from nnmpi.data.upload import Uploads, batches

__all__ = [
    "IGNORED",
    "NAMES",
    "Batch",
    "Compose",
    "Dataset",
    "Flip",
    "Loader",
    "Normalize",
    "Shift",
    "Text",
    "TextSource",
    "Tokenizer",
    "Transform",
    "Uploads",
    "batches",
    "choose_classes",
    "load",
    "load_text",
    "load_tokenizer",
    "prepare",
    "prepare_tokens",
    "split",
]
