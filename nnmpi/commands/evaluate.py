"""`nnmpi evaluate`: loss and metrics of a run on its test data, or on other data."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nnmpi.backend.array import Integers
from nnmpi.base.command import check_numbers, read_command
from nnmpi.base.errors import DataError, DivergenceError, shortened
from nnmpi.base.files import json_text, write_atomically
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.comm.ranks import parse_together
from nnmpi.commands.start import OpeningConfig, TableForm, launch_command
from nnmpi.compose.evaluation import LOGITS_BYTES, Evaluation, MetricStates, evaluate_all
from nnmpi.compose.inference import Inference, check_finite, nonfinite_rows
from nnmpi.compose.losses import ERRORS, SumCrossEntropy, SumError
from nnmpi.compose.scalars import LOSS, SCORE, DeferredScalars
from nnmpi.data.cells import class_key
from nnmpi.data.dataset import Dataset, Samples
from nnmpi.data.loader import Batch, Loader
from nnmpi.metrics.metric import Metric, joined
from nnmpi.metrics.rows import confusion_of, each_class, pair_classes
from nnmpi.tensor.tensor import Tensor
from nnmpi.train.config import Config, MetricNames
from nnmpi.train.inputs import load_samples
from nnmpi.train.log import describe_asked, describe_result
from nnmpi.train.measures import run_metrics
from nnmpi.train.run import Run
from nnmpi.train.signature import BYTES, ModelSignature

MOST_SHOWN, NAME_WIDTH = 30, 24  # classes that are printed, and letters of their names
# its state is what the matrix counts
CONFUSION = Metric("confusion matrix", pair_classes, len, joined)


def evaluate(
    run: Run, samples: Samples, batch_size: int, metrics: Sequence[Metric] = ()
) -> Evaluation:
    """Return a run's loss, score and metrics on samples. Collective.

    The samples are sharded over the replicas.

    Args:
        run: opened on these ranks.
        samples: must fit the model; see `match_samples`.
        batch_size: the maximum number of samples per forward pass of a replica.
        metrics: of the result.

    Raises:
        DivergenceError: on all ranks, for outputs or a loss that are not finite.
        UsageError: on all ranks, for an exception in a metric.
    """
    signature, mesh = run.signature, run.arrangement.mesh
    rows = max(
        1,
        min(
            batch_size,
            LOGITS_BYTES // (8 * signature.outputs * prod(samples.labels(np.arange(1)).shape)),
        ),
    )
    loader = Loader(
        signature.to_learn(samples),
        rows * mesh.dp.size,
        mesh.dp,
        shuffle=False,
        transform=signature.normalize,
        dtype=run.config.run.dtype,
    )
    # A user's loss may need data that only training has: mse replaces it.
    name = run.config.optimization.loss
    is_classes = signature.predicts == "classes"
    loss = (
        SumCrossEntropy()
        if is_classes
        else SumError(name if name in ERRORS else "mse", signature.target_std)
    )
    inference = Inference(run.arrangement, run.backend, run.config.numerics.precision)
    sums, measured, wrong = DeferredScalars(), MetricStates(metrics, loss), 0
    counts = mesh.model.rank == 0  # all ranks of a replica have its outputs

    def compute(batch: Batch) -> bool:
        nonlocal wrong
        if not len(batch.x):
            return counts
        outputs = Tensor(inference(batch.x))
        if counts:
            wrong += nonfinite_rows(outputs.data)
            total = float(loss(outputs, batch.y).numpy())
            sums.add(LOSS, total * getattr(loss, "factor", 1.0))
            sums.add(SCORE, loss.score(outputs.data, batch.y))
            measured.add(outputs.data, batch.on_host, counts)
        return counts

    with loader.epoch(0) as batches, np.errstate(all="ignore"):  # see the checks below
        result = evaluate_all(run.group, batches, compute, sums, measured)
    inference.release()
    (everywhere,) = run.group.sum_floats([float(wrong)])
    check_finite(result.samples, everywhere)
    if not isfinite(result.loss_sum):
        raise DivergenceError(
            f"the loss on {samples.name} is {result.loss_sum}: its targets are too far from the"
            " predictions for this number type; scale them as in training"
        )
    return result


def match_samples(signature: ModelSignature, samples: Samples) -> Samples:
    """Return the samples with the class numbers and column order of the model's training data.

    Bytes are scaled as in training.

    Raises:
        DataError: for samples of another shape or kind, and for labels outside the model's classes.
    """
    fits = samples.is_tokens == signature.is_tokens
    if not fits or (
        not samples.is_tokens and tuple(samples.sample_shape) != signature.sample_shape
    ):
        kind = "tokens" if samples.is_tokens else f"samples of shape {tuple(samples.sample_shape)}"
        raise DataError(
            f"{samples.name} has {kind}, which do not fit a model that takes"
            f" {signature.sample_shape}"
        )
    if not isinstance(samples, Dataset):
        return samples
    x = samples.x
    if not samples.is_tokens and not (x.dtype == np.uint8 and signature.stored == BYTES):
        x = signature.scaled(x, name=f"samples of {samples.name}")
    labels, predicts, shape = samples.y, samples.predicts, samples.target_shape
    if predicts != signature.predicts or (
        predicts != "classes" and shape != signature.target_shape
    ):
        expected = f"{signature.predicts} of shape {signature.target_shape}"
        raise DataError(
            f"{samples.name} has {predicts} of shape {shape}, but the model predicts {expected}"
        )
    names, model_names = samples.class_names, signature.class_names
    keys = [*map(class_key, names)]
    if predicts == "classes" and not model_names and all(map(str.isdecimal, keys)):
        model_names = tuple(map(str, range(signature.classes)))  # a table's 3 is class 3
    if names and model_names:
        known = [*map(class_key, model_names)]
        for key, name in zip(keys, names, strict=True):
            if key not in known:
                raise DataError(
                    f"{samples.name} has the class {name!r}, which is none of the model's; remove"
                    " its samples"
                )
        numbers = np.array([known.index(key) for key in keys], labels.dtype)
        # also for yes or no, whose two names stand for 0 and 1
        labels = numbers[labels.astype(np.int64)]
    notes = samples.notes
    if model_names and not names and [*model_names] != [*map(str, range(len(model_names)))]:
        notes += (f"labels are numbers of the model's classes, 0 for {model_names[0]!r}",)
    if names and not model_names:
        notes += (f"the model's classes have no names; 0 is taken for {names[0]!r}",)
    classes = max(signature.classes, 2 * (predicts == "yes-or-no"))
    return replace(
        samples,
        notes=notes,
        x=signature.in_order(x, samples.columns, samples.name),
        y=labels,
        classes=classes,
        class_names=signature.class_names,
        scale=signature.scale if x.dtype == np.uint8 else 1.0,
        columns=signature.columns,
    )


# ---- the command ----

PROGRAM = "nnmpi evaluate"
DESCRIPTION = """Evaluate a run's model: nnmpi evaluate RUN [options].

Default: the run's own test data. On several ranks: mpirun -n 4 nnmpi evaluate RUN, with any
layout, not only the run's."""


@dataclass(frozen=True)
class EvaluationConfig(TableForm):
    """Data and output."""

    dataset: str | None = None
    """Another data set, a name or a path as for the train command (default: the run's own)."""
    data_dir: Path | None = None
    """Folder of its files, for data sets that are downloaded (default: the run's)."""
    text_columns: str | None = None
    """Columns of text of a table, as for the train command (default: the run's)."""
    part: Literal["test", "train"] = "test"
    """Part of the data set. A data set without a test part is split as in the run."""
    batch_size: int = 256
    """Maximum number of samples per forward pass of a replica."""
    metric: MetricNames = ()
    """Further metrics, as for the train command, beside those of the training."""
    json: bool = False
    """Print JSON, with the confusion matrix (rows: true classes; columns: predicted classes) and
    the metrics of each class.
    """

    def __post_init__(self) -> None:
        check_numbers(self, "batch_size", 1)


parse = partial(read_command, "RUN", PROGRAM, DESCRIPTION, (EvaluationConfig, OpeningConfig))


def main(words: Sequence[str], group: Group) -> None:
    """Print the loss and metrics of a run's model. Collective.

    Raises:
        NnmpiError: on all ranks.
    """
    console, (folder, options, opening) = parse_together(words, parse, group)
    run = opening.open(folder, group)
    train, test = load_samples(_data(run, options), group, console.say, run.signature)
    with agreed(group):
        samples = match_samples(run.signature, train if options.part == "train" else test)
        metrics = run_metrics(run.config.run, run.signature, samples, options.metric)
    for note in samples.notes if isinstance(samples, Dataset) else ():
        console.say(f"{samples.name}: {note}")
    has_matrix = run.signature.predicts == "classes" and samples.targets is None
    result = evaluate(
        run, samples, options.batch_size, [*metrics.chosen, *[CONFUSION] * has_matrix]
    )
    weights = opening.weights or run.folder.path
    text = _as_json(run, weights, samples, result, options)
    if group.is_root and not opening.weights:  # the page shows the file as the run's own result
        with suppress(OSError):  # another user's run may be read-only
            write_atomically(run.folder.evaluation, text.encode())
    if not options.json:
        text = _sentence(run, weights, samples, result, options)
        asked = describe_asked(options.part, result.metrics, metrics.asked)
        text = "\n".join([*_table(run, result), *asked, text])
    console.finish(text)


def _data(run: Run, options: EvaluationConfig) -> Config:
    """Return the run's options with the data to evaluate; texts keep the run's tokenizer."""
    config, values = run.config, dict[str, Any]()
    is_other = options.dataset not in (None, config.data.dataset)
    if is_other or options.data_dir is not None:
        values["data_dir"] = options.data_dir
    if is_other:
        values |= {"dataset": options.dataset, "augment": "none"}
        if str(options.dataset).endswith((".txt", ".txt.gz")):
            values["text_columns"] = ""  # the run's, if its text is a table, do not apply
    options.check(Path(options.dataset or config.data.dataset))
    values |= options.having(run)
    if options.text_columns is not None:
        values["text_columns"] = options.text_columns
    if run.signature.is_tokens:
        values["context"] = run.signature.sample_shape[0]
        if run.folder.tokenizer.is_dir():
            values["tokenizer"] = str(run.folder.tokenizer)
    return config.having(**values)


def _as_json(
    run: Run,
    weights: Path,
    samples: Samples,
    result: Evaluation,
    options: EvaluationConfig,
) -> str:
    """Return the result as JSON."""
    values: dict[str, Any] = {
        "run": str(run.folder.path),
        "weights": str(weights),
        "step": run.step,
        "data": samples.name,
        "part": options.part,
        "samples": len(samples),
        "targets": result.targets,
        "loss": result.loss,
    }
    matrix = _confusion(run, result)
    values |= {
        name: value if isfinite(value) else None
        for name, value in result.metrics.items()
        if name != CONFUSION.name
    }
    if matrix is not None:
        values |= {
            "classes": run.class_names,
            "confusion": matrix.tolist(),
            "each_class": {name: each.tolist() for name, each in each_class(matrix).items()},
        }
    return json_text(values)


def _confusion(run: Run, result: Evaluation) -> Integers | None:
    """Return the confusion matrix, true classes in rows; None unless samples have one class."""
    pairs = result.state_of(CONFUSION)
    return None if pairs is None else confusion_of(pairs, run.signature.classes)


def _table(run: Run, result: Evaluation) -> list[str]:
    """Return precision, recall, F1 and support of each class as lines; none without classes."""
    matrix = _confusion(run, result)
    if matrix is None or len(matrix) > MOST_SHOWN:
        return []
    table = each_class(matrix)
    names = [shortened(str(name), NAME_WIDTH) for name in run.class_names]
    width = max(len(name) for name in (*names, "class"))
    lines = [f"{'class':<{width}}" + "".join(f"{name:>11}" for name in table)]
    for number, name in enumerate(names):
        *shares, support = (values[number] for values in table.values())
        lines.append(
            f"{name:<{width}}"
            + "".join(f"{share:>11.4f}" for share in shares)
            + f"{support:>11.0f}"
        )
    return lines


def _sentence(
    run: Run,
    weights: Path,
    samples: Samples,
    result: Evaluation,
    options: EvaluationConfig,
) -> str:
    loss, quality = describe_result(result, result.metrics, run.signature.is_tokens)
    is_classes = run.signature.predicts == "classes"
    counted = (
        f"{result.score_sum:.0f} of {result.targets} right"
        if is_classes
        else f"{result.targets} samples"
    )
    after = "" if run.step is None else f" after step {run.step}"
    return (
        f"{options.part} {quality} ({loss}), {counted} on {samples.name}, with the weights{after}"
        f" of {weights}"
    )


if __name__ == "__main__":
    launch_command(parse, main)
