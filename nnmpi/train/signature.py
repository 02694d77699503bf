"""A trained model's signature: inputs and outputs, saved with its weights.

A checkpoint's model.safetensors has it in its metadata, as JSON:

    {"signature": {"data": "digits", "sample_shape": [8, 8, 1], "classes": 10,
                   "class_names": ["0", ...], "stored": "uint8", "scale": 0.0625,
                   "mean": [0.305], "std": [0.376]},
     "model": {"model": "cnn", "hidden": [128, 64], ...}, "versions": {"nnmpi": "0.1.0", ...}}

The layout is not here but in state.json: equal weights give equal files under every layout.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.base.errors import CheckpointError, DataError, shortened
from nnmpi.base.files import json_text, parse_json, rebuilt
from nnmpi.base.version import VERSION
from nnmpi.data.columns import Encoding
from nnmpi.data.dataset import Dataset, Predicts, Samples
from nnmpi.data.transform import Normalize

METADATA = "nnmpi"  # key of the JSON in a file's metadata
BYTES, TOKENS = "uint8", "tokens"


@dataclass(frozen=True)
class ModelSignature:
    """A trained model's inputs and outputs, and the transform from samples to inputs.

    Attributes:
        data: name of the training set.
        sample_shape: of one sample.
        classes: the number of classes; for texts the size of the vocabulary; 0 for quantities.
        class_names: one per class, or empty.
        stored: the kind of samples before the transform: "uint8", "float32" or "tokens".
        scale: factor on bytes.
        mean, std: of the normalization after the scale; empty for none.
        predicts: "classes"; "quantities"; or "yes-or-no", whose outputs are logits.
        target_shape: of a sample's quantities or yes-or-no targets.
        target: the predicted column of a table, by name or number, or empty.
        columns: the names of a table's features, or empty.
        encoding: the rules that made features of a table's columns, or empty.
    """

    data: str
    sample_shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...] = ()
    stored: str = "float32"
    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    predicts: Predicts = "classes"
    target_shape: tuple[int, ...] = ()
    target: str = ""
    columns: tuple[str, ...] = ()
    encoding: Encoding = ()

    @classmethod
    def of(cls, samples: Samples, normalize: Normalize | None) -> Self:
        """Return the signature of a model trained on these samples.

        Args:
            samples: the training set.
            normalize: its normalization, or None.
        """
        first = (samples.name, tuple(samples.sample_shape), samples.classes)
        if not isinstance(samples, Dataset):
            return cls(*first, stored=TOKENS)
        last: dict[str, Any] = {
            "predicts": samples.predicts,
            "target_shape": () if samples.predicts == "classes" else samples.target_shape,
            "target": samples.target,
            "columns": samples.columns,
            "encoding": samples.encoding,
        }
        if samples.is_tokens:
            return cls(*first, samples.class_names, TOKENS, **last)
        stored = BYTES if samples.x.dtype == np.uint8 else "float32"
        if normalize is not None:
            last |= {
                name: tuple(np.ravel(getattr(normalize, name)).tolist()) for name in ("mean", "std")
            }
        return cls(*first, samples.class_names, stored, samples.scale, **last)

    @property
    def outputs(self) -> int:
        """The number of outputs: classes, or the quantities of a sample."""
        return self.classes if self.predicts == "classes" else prod(self.target_shape)

    @property
    def is_tokens(self) -> bool:
        """Whether samples are tokens, not quantities."""
        return self.stored == TOKENS

    @property
    def normalize(self) -> Normalize | None:
        """The normalization of samples, or None."""
        return Normalize(np.array(self.mean), np.array(self.std)) if self.mean else None

    def in_order(self, x: Array, columns: Sequence[str], source: object) -> Array:
        """Return a table's features in the model's order, by column name.

        A table without any of the model's names at a wrong position passes unchanged: it may lack
        a header, or have other names.

        Args:
            x: (n, features).
            columns: the table's names, or empty.
            source: of the table, for messages.

        Raises:
            DataError: for a name at a wrong position in a table without all of the model's names.
        """
        indices = {name: index for index, name in enumerate(self.columns)}
        if all(indices.get(name, index) == index for index, name in enumerate(columns)):
            return x
        if sorted(columns) != sorted(indices):
            has, expected = (shortened(", ".join(item)) for item in (columns, self.columns))
            raise DataError(
                f"{source} has the columns {has}, but the model takes {expected}; give these, in"
                " this order"
            )
        return x[:, [columns.index(name) for name in self.columns]]

    def name_of(self, number: int) -> str:
        """Return the name of a class, or its number without names."""
        return self.class_names[number] if self.class_names else str(number)

    def prepare(self, x: Array, dtype: str = "float32") -> Array:
        """Return samples as model input.

        Args:
            x: (n, *sample_shape); gray images may lack the last axis. Bytes are scaled like the
                training data, other numbers are not. Then both are normalized.
            dtype: of the result; tokens are int64.

        Raises:
            DataError: for samples of another shape or kind, and for NaN and infinity.
        """
        if x.ndim == len(self.sample_shape) and self.sample_shape[-1:] == (1,):
            x = x[..., np.newaxis]
        if x.ndim != len(self.sample_shape) + 1 or (
            tuple(x.shape[1:]) != self.sample_shape and not self.is_tokens
        ):
            raise DataError(
                f"samples of shape {x.shape[1:]} do not fit a model that takes {self.sample_shape}"
            )
        if x.dtype.kind not in ("iu" if self.is_tokens else "biuf"):
            expected = "whole numbers, tokens" if self.is_tokens else "numbers"
            raise DataError(f"samples are {x.dtype}; this model takes {expected}")
        if self.is_tokens:
            return x.astype(np.int64)
        if x.dtype == np.uint8 and self.stored != BYTES:
            raise DataError(
                f"samples are bytes, but {self.data} had {self.stored} ones; give them in the"
                f" same units, as {self.stored}"
            )
        with np.errstate(over="ignore"):
            result = x.astype(dtype)
        for index in np.argwhere(~np.isfinite(result))[:1].tolist():
            raise DataError(
                f"samples{index} is {x[tuple(index)]}, which is no finite {dtype} number; leave the"
                " sample out, or scale it"
            )
        if x.dtype == np.uint8:
            result *= np.asarray(self.scale, dtype)
        return self.normalized(result)

    def normalized(self, x: Array) -> Array:
        """Return scaled samples, (n, *sample_shape), as model input."""
        if self.normalize is None:
            return x
        return self.normalize(x, np.arange(len(x)), 0, 0)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the signature with these fields.

        Raises:
            CheckpointError: for missing or unknown fields, and for values of another type.
        """
        try:
            return rebuilt(cls, values)
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the signature of the weights cannot be read: {error}") from None


def versions() -> dict[str, str]:
    """Return {name: version} of the software on which results depend."""
    return {"nnmpi": VERSION, "python": platform.python_version(), "numpy": np.__version__}


def to_metadata(signature: ModelSignature, model: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata for a file of weights."""
    values = {"signature": asdict(signature), "model": dict(model), "versions": versions()}
    return {METADATA: json_text(values)}


def read_metadata(metadata: Mapping[str, str], file: object) -> dict[str, Any]:
    """Return the values that `to_metadata` put into a file's metadata.

    Raises:
        CheckpointError: for missing or damaged metadata.
    """
    try:
        values: dict[str, Any] = parse_json(metadata[METADATA])
    except (KeyError, ValueError, RecursionError):
        raise CheckpointError(
            f"{file} lacks the signature of its model's data: another version of nnmpi wrote it;"
            " train with --resume until the next checkpoint"
        ) from None
    return values
