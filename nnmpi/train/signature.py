"""A trained model's signature: inputs and outputs, saved with its weights.

A checkpoint's model.safetensors has it in its metadata, as JSON:

    {"signature": {"data": "digits", "sample_shape": [8, 8, 1], "classes": 10,
                   "class_names": ["0", ...], "stored": "uint8", "scale": 0.0625,
                   "mean": [0.305], "std": [0.376], ...},
     "model": {"model": "cnn", "hidden": [128, 64], ...}, "versions": {"nnmpi": "0.1.0", ...}}

The layout is not here but in state.json: equal weights give equal files under every layout.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import numpy as np

from nnmpi.backend.array import Array, Integers
from nnmpi.base.errors import CheckpointError, DataError
from nnmpi.base.files import json_text, parse_json, rebuilt
from nnmpi.base.version import VERSION
from nnmpi.data.columns import Encoding, plain
from nnmpi.data.dataset import Dataset, Predicts, Samples, narrowed
from nnmpi.data.lazy import change_rows
from nnmpi.data.tables import TableRules, find_places
from nnmpi.data.transform import Normalize

METADATA = "nnmpi"  # key of the JSON in a file's metadata
BYTES, TOKENS = "uint8", "tokens"
FULL = 255.0  # the largest byte
ROUNDING = 1e-5  # of bytes that were scaled elsewhere


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
        top: the largest scaled sample: 1 if the training's are all below, else what 255 becomes.
        mean, std: of the normalization after the scale; empty for none.
        predicts: "classes"; "quantities"; or "yes-or-no", whose outputs are logits.
        target_shape: of a sample's quantities or yes-or-no targets.
        target: the predicted column of a table, by name or number, or empty.
        columns: the names of a table's features, or empty.
        encoding: the rules that made features of a table's columns, or empty.
        target_mean, target_std: of the quantities' normalization, which the model's outputs have:
            a mean for each column (channel), or empty for none; one standard deviation.
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
    target_mean: tuple[float, ...] = ()
    target_std: float = 1.0
    top: float | None = None

    @classmethod
    def of(
        cls, samples: Samples, normalize: Normalize | None, normalize_targets: bool = False
    ) -> Self:
        """Return the signature of a model trained on these samples.

        Args:
            samples: the training set.
            normalize: its normalization, or None.
            normalize_targets: whether the model learns normalized quantities.
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
        if stored == BYTES and samples.moments.top * samples.scale <= 1:
            last["top"] = 1.0
        if normalize is not None:
            last |= {
                name: tuple(np.ravel(getattr(normalize, name)).tolist()) for name in ("mean", "std")
            }
        if normalize_targets and samples.predicts == "quantities":
            mean, std = samples.target_scale
            last |= {"target_mean": tuple(mean), "target_std": std or 1.0}
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

    def to_learn(self, samples: Samples) -> Samples:
        """Return samples with the targets that the model learns: normalized, if they are."""
        if not self.target_mean or not isinstance(samples, Dataset):
            return samples
        return samples.with_targets(change_rows(samples.y, self._normalized_targets))

    def _normalized_targets(self, y: Array, numbers: Integers) -> Array:
        return ((y.astype(np.float64) - self._target_mean) / self.target_std).astype(np.float32)

    def in_units(self, outputs: Array) -> Array:
        """Return quantities, (n, *target_shape), in the data's units, from the model's outputs."""
        if not self.target_mean:
            return outputs
        return (outputs * self.target_std + self._target_mean).astype(outputs.dtype)

    @property
    def _target_mean(self) -> Array:
        return np.reshape(self.target_mean, (-1,) * bool(self.target_shape))

    def with_units(
        self, state: Mapping[str, Array], layer: str, back: bool = False
    ) -> dict[str, Array]:
        """Return a model's values with the data's units in its last layer, or back without them.

        Args:
            state: parameters and buffers by name.
            layer: the name of the linear layer that ends the model.
            back: whether the values have the units, and are to lose them.
        """
        weight, bias = (f"{layer}.{name}".strip(".") for name in ("weight", "bias"))
        std, old = self.target_std, state[bias].astype(np.float64)
        mean = np.resize(self.target_mean, old.shape)  # repeated over positions
        shifted = (old - mean) / std if back else old * std + mean
        scaled = state[weight] / std if back else state[weight] * std
        kind = state[bias].dtype
        return {**state, weight: scaled.astype(kind), bias: shifted.astype(kind)}

    @property
    def rules(self) -> TableRules:
        """How another table is read; without an encoding if no table fits the model."""
        shape, is_row = self.sample_shape, len(self.sample_shape) == 1 and not self.is_tokens
        return TableRules(
            target=self.target,
            sample_shape=() if is_row else shape,
            encoding=self.encoding or (plain(self.columns, shape[0]) if is_row else ()),
            as_bytes=self.stored == BYTES,
        )

    def in_order(self, x: Array, columns: Sequence[str], source: object) -> Array:
        """Return a table's features in the model's order, by column name.

        Args:
            x: (n, features).
            columns: the table's names, or empty.
            source: of the table, for messages.

        Raises:
            DataError: for other names.
        """
        if () in (tuple(columns), self.columns) or tuple(columns) == self.columns:
            return x
        encoding = plain(self.columns, len(self.columns))
        places = find_places(source, columns, encoding)
        return change_rows(x, lambda rows, _: rows[:, places])

    def name_of(self, number: int) -> str:
        """Return the name of a class, or its number without names."""
        return self.class_names[number] if self.class_names else str(number)

    def prepare(self, x: Array, dtype: str = "float32") -> Array:
        """Return samples as model input.

        Args:
            x: (n, *sample_shape); gray images may lack the last axis. They are `scaled`, and then
                normalized.
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
        return self.normalized(self.scaled(x, dtype))

    def scaled(
        self,
        x: Array,
        dtype: str = "float32",
        name: str = "samples",
        numbers: Integers | None = None,
    ) -> Array:
        """Return numbers on the scale of the model's, before the normalization.

        For a model of bytes, integers are bytes. Floats are bytes or scaled already; each sample
        alone must show which, so that no result depends on the samples beside it.

        Args:
            x: (n, *sample_shape), numbers.
            dtype: of the result.
            name, numbers: of the samples, for the error; None for numbers from 0 on.

        Raises:
            DataError: for bytes, if the model's were not, for samples of floats that fit neither
                scale or both, and for NaN and infinity.
        """
        result, wrong = narrowed(x, dtype)
        numbers = np.arange(len(x)) if numbers is None else numbers
        for index in wrong:
            where = [int(numbers[index[0]]), *index[1:]]
            raise DataError(
                f"{name}{where} is {x[tuple(index)]}, which is no finite {dtype} number; leave the"
                " sample out, or scale it"
            )
        if x.dtype == np.uint8 and self.stored != BYTES:
            raise DataError(
                f"{name} are bytes, but {self.data} had {self.stored} ones; give them in the"
                f" same units, as {self.stored}"
            )
        if self.stored != BYTES or not x.size:
            return result
        top, each = self.top or FULL * self.scale, result.reshape(len(x), -1)
        least, most = each.min(axis=1), each.max(axis=1)
        is_bytes = (least >= 0) & (most <= FULL) & (each == np.rint(each)).all(axis=1)
        is_scaled = (least >= -top * ROUNDING) & (most <= top * (1 + ROUNDING))
        is_scaled &= x.dtype.kind not in "iu"

        # zeros are black on both scales, and with a scale of 1 all is the same
        is_clear = (is_bytes != is_scaled) | ((self.scale == 1) & is_bytes) | ~each.any(axis=1)
        for row in np.flatnonzero(~is_clear)[:1].tolist():
            both = "; it may be either, so give bytes as integers, as x.astype('uint8') makes them"
            raise DataError(
                f"{name}[{numbers[row]}] is from {least[row]:.4g} to {most[row]:.4g}, but the"
                f" model's were bytes, and then from 0 to {top:.4g}; give them in either form"
                f"{both if is_bytes[row] else ''}"
            )
        result[is_bytes] *= np.asarray(self.scale, dtype)
        return result

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
