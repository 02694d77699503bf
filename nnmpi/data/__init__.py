"""Data sets, and the batches that each rank reads from them.

Reading order:

    dataset         Dataset: samples and labels; the split into training and test part
    lazy            arrays that are not in memory, whose rows a data set reads batch by batch
    facts           what is measured of all samples, by blocks
    catalogue       data sets by name or path: load reads, prepare downloads
    prepared        large sets: prepared once per node by a team (team), kept in its cache (cache),
                    and mapped (mapped)
    names           what the numbers of a set stand for: classes, columns, tokens
    images          file formats: IDX (MNIST), CIFAR-10, folders of images
    readers         which function reads which files, a row for each form
    tables          CSV and DataFrames, by one rule; cells: what one cell says
    json_lines      JSON lines, and parquet: Parquet in row groups, by the same rule
    arrays          npz; hdf5: HDF5, read by rows
    items           data sets of other libraries: PyTorch's, Hugging Face's
    tokenizer       text to tokens and back
    documents       texts in files: plain, or columns of tables; chat: conversations as texts
    text            documents, as blocks of tokens or as sentences
    sampler         the order of samples and their ranks: pure functions, with a picture
    loader          Loader: one rank's batches, with microbatches and prefetch, on host or device
    transform       normalization and random augmentations

To add a form of files, give it a row in readers; a data set by name, in catalogue. To add an
augmentation, write it in transform and give it a row in AUGMENTATIONS.
"""

from nnmpi.base.words import offer
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

offer(__name__)
