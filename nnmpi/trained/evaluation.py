"""How well a run's model does on a data set: sample by sample, so that it can be said which ones it gets wrong."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.comm.agreement import agreed
from nnmpi.compose.inference import Inference
from nnmpi.data.dataset import IGNORED, Dataset, Samples
from nnmpi.errors import DataError, UsageError
from nnmpi.ops.loss import cross_entropy
from nnmpi.shard import part
from nnmpi.tensor.tensor import Tensor
from nnmpi.train.signature import ModelSignature
from nnmpi.trained.run import TrainedRun

LOGITS_BYTES = 2**26  # of one pass, on each rank
MOST_CLASSES = 40  # that a confusion matrix can show


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a model made of some samples.

    Attributes:
        labels: (n,) or (n, time); `IGNORED` is what is not to be predicted.
        predicted: of their shape, the class with the largest output.
        losses: of their shape, the cross-entropy of each; 0 where nothing is to be predicted.
    """

    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    losses: NDArray[np.float64]

    @property
    def targets(self) -> int:
        """How many labels count."""
        return int((self.labels != IGNORED).sum())

    @property
    def correct(self) -> int:
        """How many of them were predicted."""
        return int((self.labels == self.predicted).sum())

    @property
    def accuracy(self) -> float:
        """The share of them."""
        return self.correct / max(self.targets, 1)

    @property
    def loss(self) -> float:
        """Their mean cross-entropy."""
        return float(self.losses.sum()) / max(self.targets, 1)

    def confusion(self, classes: int) -> NDArray[np.int64]:
        """Return how many samples of each class (rows) were taken for each class (columns)."""
        counts = np.zeros((classes, classes), np.int64)
        known = self.labels != IGNORED
        np.add.at(counts, (self.labels[known], self.predicted[known]), 1)
        return counts


def evaluate(run: TrainedRun, samples: Samples, batch_size: int) -> Evaluation:
    """Return what a run's model makes of samples. Collective; the replicas share them.

    Args:
        run: opened on these ranks.
        samples: any that fit its model.
        batch_size: how many are taken through the model at once, at most.

    Raises:
        DataError: for samples that do not fit.
    """
    with agreed(run.where.mesh.world):
        labels = match_labels(run.signature, samples)
    dp = run.where.mesh.dp
    mine = part(len(samples), dp.size, dp.rank)
    predicted, losses = np.full(labels.shape, IGNORED, np.int64), np.zeros(labels.shape)
    each = 8 * run.classes * int(np.prod(labels.shape[1:]))
    rows = max(1, min(batch_size, LOGITS_BYTES // each))
    inference = Inference(run.where, run.backend, run.config.run.precision)
    for start in range(mine.start, mine.stop, rows):
        indices = np.arange(start, min(start + rows, mine.stop))
        x, width = _input(run.signature, samples, indices, run.config.run.dtype)
        logits = inference(x)
        wanted = labels[indices] if width is None else labels[indices, :width]
        found = (logits.argmax(axis=-1), _losses(logits, wanted))
        for whole, values in zip((predicted, losses), found, strict=True):
            whole[indices if width is None else (indices, slice(width))] = values
    inference.release()
    if dp.size > 1:  # each replica has filled in its own samples
        others = np.ones(len(samples), bool)
        others[mine.start : mine.stop] = False
        predicted[others] = losses[others] = 0
        dp.all_reduce(predicted.reshape(-1))
        dp.all_reduce(losses.reshape(-1))
    return Evaluation(labels, predicted, losses)


def match_labels(signature: ModelSignature, samples: Samples) -> NDArray[np.int64]:
    """Return the labels of samples as numbers of the model's classes: (n,) or (n, time).

    Raises:
        DataError: for samples of another shape or kind, and labels that the model does not know.
    """
    fits = samples.is_tokens == signature.is_tokens
    if not fits or (not samples.is_tokens and tuple(samples.sample_shape) != signature.sample_shape):
        kind = "tokens" if samples.is_tokens else f"samples of shape {tuple(samples.sample_shape)}"
        raise DataError(f"{samples.name} has {kind}, which do not fit a model that takes {signature.sample_shape}")
    labels = samples.labels(np.arange(len(samples)))
    theirs = samples.class_names if isinstance(samples, Dataset) else ()
    if theirs and signature.class_names and theirs != signature.class_names:
        unknown = [name for name in theirs if name not in signature.class_names]
        if unknown:
            raise DataError(f"{samples.name} has the class {unknown[0]!r}, which the model does not know")
        labels = np.array([signature.class_names.index(name) for name in theirs])[labels]
    if labels.size and labels.max() >= signature.classes:
        raise DataError(f"{samples.name} has the label {labels.max()}, but the model {signature.classes} classes")
    return labels


def _input(
    signature: ModelSignature, samples: Samples, indices: NDArray[np.int64], dtype: str
) -> tuple[Array, int | None]:
    """Return samples as model input, and how long they are where their lengths differ."""
    if samples.lengths is not None:
        width = int(samples.lengths[indices].max())
        return samples.rows(indices, length=width), width
    x = samples.rows(indices, dtype)
    return (x if samples.is_tokens else signature.normalized(x)), None


def _losses(logits: Array, labels: NDArray[np.int64]) -> Array:
    """Return the cross-entropy of each label; 0 for those that do not count."""
    return cross_entropy(Tensor(logits), labels, "none", IGNORED).numpy()


def draw(found: Evaluation, run: TrainedRun, samples: Samples, folder: Path) -> list[Path]:
    """Draw the confusion matrix, and of images those that the model is most wrong about; return the files.

    Args:
        found: what the model made of the samples.
        run, samples: as `evaluate` was given them.
        folder: where the PNG files go.

    Raises:
        UsageError: without matplotlib, and for what is no classification of samples.
        OSError: when a file cannot be written.
    """
    if found.labels.ndim > 1 or run.classes > MOST_CLASSES:
        raise UsageError(f"--plot draws classes, at most {MOST_CLASSES}, one for each sample; leave it out")
    try:
        figure_type: Any = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise UsageError("--plot draws with matplotlib, which is not installed (pip install 'nnmpi[plot]')") from None
    folder.mkdir(parents=True, exist_ok=True)
    files = [_draw_confusion(figure_type, found, run, folder / "confusion.png")]
    if len(samples.sample_shape) == 3 and isinstance(samples, Dataset):
        files.append(_draw_wrong(figure_type, found, run, samples, folder / "wrong.png"))
    return files


def _draw_confusion(figure_type: Any, found: Evaluation, run: TrainedRun, file: Path) -> Path:
    counts, names = found.confusion(run.classes), run.class_names
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = max(4.0, 0.5 * len(names) + 1.5)
    figure = figure_type(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(counts):
        dark = shares[row, column] > 0.5
        axes.text(column, row, counts[row, column], ha="center", va="center", color="white" if dark else "black")
    turned = {"rotation": 45, "ha": "right"} if max(map(len, names)) > 3 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted", ylabel="label", title=f"{run.folder.name}: {100 * found.accuracy:.2f} %")
    figure.savefig(file, dpi=120)
    return file


def _draw_wrong(figure_type: Any, found: Evaluation, run: TrainedRun, samples: Dataset, file: Path) -> Path:
    """Draw the images with the largest losses, of those that are taken for another class."""
    wrong = np.flatnonzero(found.labels != found.predicted)
    worst = wrong[np.argsort(-found.losses[wrong], kind="stable")][:25]
    columns = 5
    figure = figure_type(figsize=(1.7 * columns, 1.9 * max(1, -(-len(worst) // columns))), layout="constrained")
    figure.suptitle(f"{run.folder.name}: {len(wrong)} of {len(samples)} wrong")
    for place, number in enumerate(worst):
        axes = figure.add_subplot(-(-len(worst) // columns), columns, place + 1)
        image = samples.rows(np.array([number]))[0]
        axes.imshow(image[..., 0] if image.shape[-1] == 1 else np.clip(image, 0, 1), cmap="gray")
        label, taken = (run.signature.name_of(int(each[number])) for each in (found.labels, found.predicted))
        axes.set_title(f"{label}, not {taken}\n(sample {number})", fontsize=8)
        axes.set_axis_off()
    figure.savefig(file, dpi=120)
    return file
