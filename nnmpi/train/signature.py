"""A trained model's signature: inputs and outputs, saved with its weights.

A checkpoint's model.safetensors has it in its metadata, as JSON:

    {"signature": {"data": "digits", "sample_shape": [8, 8, 1], "classes": 10, "class_names": ["0", ...],
                   "stored": "uint8", "scale": 0.0625, "mean": [0.305], "std": [0.376]},
     "model": {"model": "cnn", "hidden": [128, 64], ...}, "versions": {"nnmpi": "0.1.0", ...}}

The layout stands in state.json beside it: the same weights are the same file, whatever layout they
were found with.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.data.dataset import Dataset, Predicts, Samples
from nnmpi.data.transform import Normalize
from nnmpi.errors import CheckpointError, DataError, shortened
from nnmpi.files import rebuilt
from nnmpi.version import VERSION

METADATA = "nnmpi"  # the name of the JSON in a file's metadata
BYTES, TOKENS = "uint8", "tokens"


@dataclass(frozen=True)
class ModelSignature:
    """What samples a model takes, what is done to them before, and what its outputs stand for.

    Attributes:
        data: the name of the data set that it was trained on.
        sample_shape: of one sample.
        classes: how many there are; of texts the size of the vocabulary; 0 where quantities are
            predicted.
        class_names: one for each class, or empty.
        stored: what samples are before they are model input: "uint8", "float32" or "tokens".
        scale: what bytes are multiplied by.
        mean, std: of the normalization that follows; empty where there is none.
        predicts: "classes"; "quantities"; or "yes-or-no", of which an output is the logit.
        target_shape: of quantities, and yes or no, how many are predicted for a sample.
        target: the column of a table that is predicted, by name or number; empty for the last.
        columns: the names of a table's features, or empty.
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

    @classmethod
    def of(cls, samples: Samples, normalize: Normalize | None, target: str = "") -> Self:
        """Return the signature of a model that is trained on these samples.

        Args:
            samples: of the training set.
            normalize: what shifts and scales them; None for nothing.
            target: the column of a table that is predicted.
        """
        first = (samples.name, tuple(samples.sample_shape), samples.classes)
        if not isinstance(samples, Dataset):
            return cls(*first, stored=TOKENS)
        shape = () if samples.predicts == "classes" else samples.target_shape
        last: dict[str, Any] = {
            "predicts": samples.predicts,
            "target_shape": shape,
            "target": target,
        }
        last["columns"] = samples.columns
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
        """How many outputs a model has for each target."""
        return self.classes if self.predicts == "classes" else prod(self.target_shape)

    @property
    def is_tokens(self) -> bool:
        """Whether samples are tokens, and not quantities."""
        return self.stored == TOKENS

    @property
    def normalize(self) -> Normalize | None:
        """What shifts and scales samples; None where nothing does."""
        return Normalize(np.array(self.mean), np.array(self.std)) if self.mean else None

    def in_order(self, x: Array, columns: Sequence[str], source: object) -> Array:
        """Return a table's features in the run's order, by name; unknown names are ignored.

        Raises:
            DataError: for a table that has a name of the run's at another place, and not all of its
                names.
        """
        places = {name: place for place, name in enumerate(self.columns)}
        if all(places.get(name, place) == place for place, name in enumerate(columns)):
            return x
        if sorted(columns) != sorted(places):
            theirs, ours = (shortened(", ".join(item)) for item in (columns, self.columns))
            raise DataError(
                f"{source} has the columns {theirs}, and the model takes {ours}; put them in this"
                " order"
            )
        return x[:, [columns.index(name) for name in self.columns]]

    def name_of(self, number: int) -> str:
        """Return the name of a class, its number where it has none."""
        return self.class_names[number] if self.class_names else str(number)

    def prepare(self, x: Array, dtype: str = "float32") -> Array:
        """Return samples as model input.

        Args:
            x: (n, *sample_shape), the last axis of a gray image may be missing. Bytes are scaled as
                those of the training data; other numbers are taken as they are. Then both are
                normalized.
            dtype: of the result; tokens are int64.

        Raises:
            DataError: for samples of another shape or kind.
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
                f"samples are bytes, but those of {self.data} were {self.stored}; give them in the"
                f" same units, as {self.stored}"
            )
        result: Array = x.astype(dtype)
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
            CheckpointError: when fields are missing, unknown, or of another kind.
        """
        try:
            return rebuilt(cls, values)
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the signature of the weights cannot be read: {error}") from None


def versions() -> dict[str, str]:
    """Return what numbers depend on besides the machine: versions by name."""
    return {"nnmpi": VERSION, "python": platform.python_version(), "numpy": np.__version__}


def to_metadata(signature: ModelSignature, model: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a file of weights."""
    values = {"signature": asdict(signature), "model": dict(model), "versions": versions()}
    return {METADATA: json.dumps(values, allow_nan=False)}


def read_metadata(metadata: Mapping[str, str], file: object) -> dict[str, Any]:
    """Return the values that `to_metadata` put into a file's metadata.

    Raises:
        CheckpointError: when there are none, or they cannot be read.
    """
    try:
        values: dict[str, Any] = json.loads(metadata[METADATA])
    except (KeyError, ValueError, RecursionError):
        raise CheckpointError(
            f"{file} does not say what data its model takes: it was not written by this version of"
            " nnmpi; train on with --resume for one checkpoint more"
        ) from None
    return values
