"""Samples to predict, from a file: an .npz with x, a .csv with the features that the run knows, or an image."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.data.csvfile import read_features
from nnmpi.data.npz import read_samples
from nnmpi.errors import DataError, UsageError
from nnmpi.train.signature import BYTES, ModelSignature

FULL = 255.0


def read_file(file: Path, signature: ModelSignature, dtype: str, invert: bool = False) -> Array:
    """Return the samples of a file as model input: (n, *sample_shape).

    Args:
        file: .npz, .csv, .csv.gz, or an image that Pillow reads.
        signature: of the model that gets them.
        dtype: of the model.
        invert: take an image's dark for light.

    Raises:
        UsageError: for a file that is not there, or of another kind.
        DataError: for a damaged one, or samples that do not fit the model.
    """
    if not file.is_file():
        raise UsageError(f"there is no file {file}; give an .npz, a .csv or an image")
    try:
        if file.suffix == ".npz":
            return signature.prepare(read_samples(file), dtype)
        if file.name.endswith((".csv", ".csv.gz")):
            if len(signature.sample_shape) != 1:
                raise DataError(f"rows of a table do not fit a model that takes {signature.sample_shape}")
            return signature.prepare(read_features(file, signature.sample_shape[0], signature.target), dtype)
    except DataError as error:
        raise error if str(file) in str(error) else DataError(f"{file}: {error}") from None
    return read_image(file, signature, dtype, invert)


def read_image(file: Path, signature: ModelSignature, dtype: str, invert: bool = False) -> Array:
    """Return an image as model input: (1, height, width, channels), of the size that the model takes.

    It becomes gray for a model of one channel, and is resized; black is 0 and white 1, before the normalization.

    Args:
        file: anything that Pillow reads.
        signature, dtype, invert: see `read_file`.

    Raises:
        UsageError: without Pillow, and for a model whose samples are no images of bytes.
        DataError: when the file cannot be read.
    """
    shape = signature.sample_shape
    if len(shape) != 3 or shape[2] not in (1, 3) or signature.stored != BYTES:
        raise UsageError(
            f"{file} is taken for an image, but the model's samples are {signature.stored} of shape {shape}; give an "
            ".npz or a .csv"
        )
    if importlib.util.find_spec("PIL") is None:
        raise UsageError(f"{file}: images are read by Pillow, which is not installed (pip install 'nnmpi[image]')")
    images: Any = importlib.import_module("PIL.Image")
    try:
        with images.open(file) as image:
            plain = image.convert("L" if shape[2] == 1 else "RGB").resize((shape[1], shape[0]))
            pixels = np.asarray(plain, dtype).reshape(1, *shape) / np.asarray(FULL, dtype)
    except OSError as error:  # what Pillow raises for what is no image, too
        raise DataError(f"{file} cannot be read as an image: {error}") from None
    return signature.normalized(1 - pixels if invert else pixels)
