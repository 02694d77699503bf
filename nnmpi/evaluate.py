"""`python -m nnmpi.evaluate`: accuracy and loss of a run on its test data, or on other data.

Sample by sample, so that it can be said which ones the model gets wrong.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.compose.inference import Inference
from nnmpi.compose.losses import ERRORS
from nnmpi.compose.stats import perplexity, r2, rmse
from nnmpi.data.dataset import IGNORED, Dataset, Samples
from nnmpi.errors import DataError
from nnmpi.ops.loss import cross_entropy, mse
from nnmpi.shard import part
from nnmpi.tensor.tensor import Tensor
from nnmpi.train.cli import PlaceConfig, ask, launch_use, read_command
from nnmpi.train.config import Config, check_numbers
from nnmpi.train.inputs import load_samples
from nnmpi.train.log import describe_measures
from nnmpi.train.run import Run
from nnmpi.train.signature import BYTES, ModelSignature

# ---- sample by sample ----

LOGITS_BYTES = 2**26  # of one pass, on each rank


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a model made of some samples.

    Attributes:
        labels: (n,) or (n, time), where `IGNORED` is what is not to be predicted; or quantities, (n, *target_shape).
        predicted: of their shape: the class with the largest output, or quantities.
        losses: of their shape, the loss of each; 0 where nothing is to be predicted.
        quantities: whether these are predicted.
    """

    labels: NDArray[Any]
    predicted: NDArray[Any]
    losses: NDArray[np.float64]
    quantities: bool = False

    def measures(self) -> dict[str, float]:
        """Return how good that is, by name: the accuracy, or RMSE and R2."""
        if not self.quantities:
            return {"accuracy": self.correct / max(self.targets, 1)}
        labels = self.labels.astype(np.float64)
        score = -float(np.mean((self.predicted - labels) ** 2))
        return {"rmse": rmse(score), "r2": r2(score, float(np.var(labels, axis=0).mean()))}

    @property
    def targets(self) -> int:
        """How many labels, or samples, count."""
        return len(self.labels) if self.quantities else int((self.labels != IGNORED).sum())

    @property
    def correct(self) -> int:
        """How many of them were predicted."""
        counts = self.quantities or self.labels != IGNORED  # padding is no right answer
        return int(((self.labels == self.predicted) & counts).sum())

    @property
    def loss(self) -> float:
        """The mean loss of what counts."""
        return float(self.losses.sum()) / max(self.losses.size if self.quantities else self.targets, 1)

    def confusion(self, classes: int) -> NDArray[np.int64]:
        """Return how many samples of each class (rows) were taken for each class (columns)."""
        counts = np.zeros((classes, classes), np.int64)
        known = self.labels != IGNORED
        np.add.at(counts, (self.labels[known], self.predicted[known]), 1)
        return counts


def evaluate(run: Run, samples: Samples, batch_size: int) -> Evaluation:
    """Return what a run's model makes of samples. Collective; the replicas share them.

    Args:
        run: opened on these ranks.
        samples: any that fit its model.
        batch_size: how many are taken through the model at once, at most.

    Raises:
        DataError: for samples that do not fit.
    """
    with agreed(run.arrangement.mesh.world):
        labels = match_labels(run.signature, samples)
        loss_of = _loss_of(run)
    if isinstance(samples, Dataset) and samples.x.dtype == np.uint8 and run.signature.stored == BYTES:
        samples = replace(samples, scale=run.signature.scale)  # the run's own bytes, from another file
    dp, numbers = run.arrangement.mesh.dp, run.signature.predicts == "quantities"
    mine = part(len(samples), dp.size, dp.rank)
    predicted: NDArray[Any] = np.zeros(labels.shape) if numbers else np.full(labels.shape, IGNORED, np.int64)
    losses = np.zeros(labels.shape)
    each = 8 * run.signature.outputs * int(np.prod(labels.shape[1:]))
    rows = max(1, min(batch_size, LOGITS_BYTES // each))
    inference = Inference(run.arrangement, run.backend, run.config.run.precision)
    for start in range(mine.start, mine.stop, rows):
        indices = np.arange(start, min(start + rows, mine.stop))
        x, width = _input(run.signature, samples, indices, run.config.run.dtype)
        logits = inference(x)
        wanted = labels[indices] if width is None else labels[indices, :width]
        for whole, values in zip((predicted, losses), _judged(run.signature, logits, wanted, loss_of), strict=True):
            whole[indices if width is None else (indices, slice(width))] = values
    inference.release()
    if dp.size > 1:  # each replica has filled in its own samples
        others = np.ones(len(samples), bool)
        others[mine.start : mine.stop] = False
        predicted[others] = losses[others] = 0
        dp.all_reduce(predicted.reshape(-1))
        dp.all_reduce(losses.reshape(-1))
    if run.signature.predicts == "yes-or-no":
        labels = (labels > 0.5).astype(np.int64)
    return Evaluation(labels, predicted, losses, numbers)


def _loss_of(run: Run) -> Callable[[Array, Array], Array]:
    """Return what gives the loss of each target: of classes the cross-entropy, else what the run was trained with.

    Of numbers that were trained with a loss of the user's it is the squared error.
    """
    if run.signature.predicts == "classes":
        return _losses
    name = run.config.optimization.loss
    function = ERRORS.get(name, mse)
    return lambda outputs, targets: function(Tensor(outputs), targets.astype(outputs.dtype), "none").numpy()


def _judged(
    signature: ModelSignature, outputs: Array, wanted: NDArray[Any], loss_of: Callable[[Array, Array], Array]
) -> tuple[Array, Array]:
    """Return what a model's outputs are taken for, and the loss of each."""
    if signature.predicts == "classes":
        return outputs.argmax(axis=-1), loss_of(outputs, wanted)
    values = outputs.reshape(wanted.shape)
    return values if signature.predicts == "quantities" else values > 0, loss_of(values, wanted)


def match_labels(signature: ModelSignature, samples: Samples) -> NDArray[Any]:
    """Return the labels of samples as numbers of the model's classes, (n,) or (n, time); or quantities.

    Raises:
        DataError: for samples of another shape or kind, and labels that the model does not know.
    """
    fits = samples.is_tokens == signature.is_tokens
    if not fits or (not samples.is_tokens and tuple(samples.sample_shape) != signature.sample_shape):
        kind = "tokens" if samples.is_tokens else f"samples of shape {tuple(samples.sample_shape)}"
        raise DataError(f"{samples.name} has {kind}, which do not fit a model that takes {signature.sample_shape}")
    labels = samples.labels(np.arange(len(samples)))
    predicts = samples.predicts if isinstance(samples, Dataset) else "classes"
    shape = labels.shape[1:] if predicts != "classes" else ()
    if (predicts, shape) != (signature.predicts, signature.target_shape):
        wanted = f"{signature.predicts} of shape {signature.target_shape}"
        raise DataError(f"{samples.name} has {predicts} of shape {shape}, but the model predicts {wanted}")
    theirs = samples.class_names if isinstance(samples, Dataset) else ()
    if theirs and signature.class_names and theirs != signature.class_names:
        unknown = [name for name in theirs if name not in signature.class_names]
        if unknown:
            raise DataError(f"{samples.name} has the class {unknown[0]!r}, which the model does not know")
        numbers = np.array([signature.class_names.index(name) for name in theirs], labels.dtype)
        labels = numbers[labels.astype(np.int64)]  # of yes or no, too, where names stand for 0 and 1
    if predicts == "classes" and labels.size and labels.max() >= signature.classes:
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


# ---- the command ----

PROGRAM = "python -m nnmpi.evaluate"
DESCRIPTION = """Say how well a run's model does: python -m nnmpi.evaluate RUN [options].

Without options: on the run's own test data. On several ranks: mpirun -n 4 python -m nnmpi.evaluate RUN, in any layout,
whatever the run's was."""


@dataclass(frozen=True)
class EvaluationConfig:
    """The data, and what is left behind."""

    dataset: str | None = None
    """Another data set: a name or a path, as the train command takes them (default: the run's own)."""
    data_dir: Path | None = None
    """Folder that holds its files, for data sets that are downloaded (default: the run's)."""
    text_columns: str | None = None
    """Of a .csv or .jsonl: the columns that make up a text, as for the train command (default: the run's)."""
    part: Literal["test", "train"] = "test"
    """Which part of it; one that comes without a test part is split as the run's was."""
    batch_size: int = 256
    """Samples that a replica takes through the model at once, at most."""
    json: bool = False
    """Print JSON, with the confusion matrix (rows: the classes; columns: what they were taken for)."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_numbers(self, "batch_size", 1)


parse = partial(read_command, "RUN", PROGRAM, DESCRIPTION, (EvaluationConfig, PlaceConfig))


def main(words: Sequence[str], group: Group) -> None:
    """Print how well a run's model does. Collective.

    Raises:
        NnmpiError: on all ranks, for everything that has a sentence.
    """
    console, asked = ask(words, parse, group)
    if asked is None:
        return
    folder, options, place = asked
    run = place.open(folder, group)
    train, test = load_samples(_data(run, options), group, group.local_rank(), console.say)
    samples = train if options.part == "train" else test
    found = evaluate(run, samples, options.batch_size)
    console.say(*_lines(run, samples, found, options))


def _data(run: Run, options: EvaluationConfig) -> Config:
    """Return the options of the run with the data that is to be evaluated, in the tokens that it knows."""
    config = run.config
    data = config.data if options.data_dir is None else replace(config.data, data_dir=options.data_dir)
    if options.dataset is not None and options.dataset != data.dataset:
        data = replace(data, dataset=options.dataset, data_dir=options.data_dir, augment="none")
        if options.dataset.endswith((".txt", ".txt.gz")):
            data = replace(data, text_columns="")  # the run's own text may be a table
    if options.text_columns is not None:
        data = replace(data, text_columns=options.text_columns)
    if not run.signature.is_tokens:
        return replace(config, data=data)
    tokenizer, (context, *_) = run.folder.tokenizer, run.signature.sample_shape
    if tokenizer.is_dir():
        data = replace(data, tokenizer=str(tokenizer))
    return replace(config, data=data, model=replace(config.model, context=context))


def _lines(run: Run, samples: Samples, found: Evaluation, options: EvaluationConfig) -> list[str]:
    """Return the result in words, or as JSON."""
    if options.json:
        values: dict[str, Any] = {
            "run": str(run.folder.path),
            "step": run.step,
            "data": samples.name,
            "part": options.part,
            "samples": len(samples),
            "targets": found.targets,
            **{name: value if isfinite(value) else None for name, value in found.measures().items()},
            "loss": found.loss,
        }
        if not found.quantities and found.labels.ndim == 1:
            values |= {"classes": run.class_names, "confusion": found.confusion(run.classes).tolist()}
        return [json.dumps(values)]
    unsure = f", perplexity {perplexity(found.loss):.4g}" if run.signature.is_tokens else ""
    counted = f"{found.targets} samples" if found.quantities else f"{found.correct} of {found.targets} right"
    after = "" if run.step is None else f" after step {run.step}"
    return [
        f"{options.part} {describe_measures(found.measures())} (loss {found.loss:.4f}{unsure}), {counted}, with "
        f"{samples.name} and the weights{after} of {run.folder.path}"
    ]


if __name__ == "__main__":
    launch_use(sys.argv[1:], parse, main)
