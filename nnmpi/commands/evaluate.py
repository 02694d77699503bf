"""`nnmpi evaluate`: loss and metrics of a run on its test data, or on other data."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from nnmpi.backend.array import Integers
from nnmpi.base.command import check_numbers, read_command
from nnmpi.base.errors import shortened
from nnmpi.base.files import json_text, write_atomically
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.comm.ranks import parse_together
from nnmpi.commands.start import OpeningConfig, TableForm, launch_command
from nnmpi.compose.evaluation import Evaluation
from nnmpi.data.dataset import Dataset, Samples
from nnmpi.metrics.metric import TOKENS, Metric, joined
from nnmpi.metrics.rows import confusion_of, each_class, pair_classes
from nnmpi.train.config import Config, MetricNames
from nnmpi.train.evaluating import evaluate, match_samples
from nnmpi.train.inputs import load_samples
from nnmpi.train.log import describe_asked, describe_result
from nnmpi.train.measures import run_metrics, task_of
from nnmpi.train.run import Run

MOST_SHOWN, NAME_WIDTH = 30, 24  # classes that are printed, and letters of their names
LINE_WIDTH, LETTERS = 80, 8  # of the confusion matrix, and letters of its columns' names
# its state is what the matrix counts
CONFUSION = Metric("confusion matrix", pair_classes, len, joined)


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
    return [*lines, "", *_matrix(matrix, names)]


def _matrix(matrix: Integers, names: Sequence[str]) -> list[str]:
    """Return the confusion matrix as lines; none if they would be too long."""
    first = max(len(name) for name in (*names, "true class"))
    column = 2 + max(len(str(matrix.max())), *(min(len(name), LETTERS) for name in names))
    if first + column * len(names) > LINE_WIDTH:
        return [f"the confusion matrix of {len(names)} classes is on the report's page"]
    heads = "".join(f"{name[:LETTERS]:>{column}}" for name in names)
    return [
        f"{'':<{first}}  predicted class",
        f"{'true class':<{first}}{heads}",
        *(
            f"{name:<{first}}" + "".join(f"{count:>{column}}" for count in row)
            for name, row in zip(names, matrix.tolist(), strict=True)
        ),
    ]


def _sentence(
    run: Run,
    weights: Path,
    samples: Samples,
    result: Evaluation,
    options: EvaluationConfig,
) -> str:
    loss, quality = describe_result(
        result, result.metrics, task_of(run.signature, samples).kind == TOKENS
    )
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
