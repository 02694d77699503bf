"""`python -m nnmpi.evaluate`: accuracy and loss of a run on its test data, or on other data."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from nnmpi.comm.group import Group
from nnmpi.compose.losses import perplexity
from nnmpi.data.dataset import Samples
from nnmpi.train.cli import ask
from nnmpi.train.config import Config, at_least_one
from nnmpi.train.folder import RunFolder
from nnmpi.train.inputs import load_samples
from nnmpi.train.log import describe_measures
from nnmpi.trained.evaluation import Evaluation, Found, evaluate
from nnmpi.trained.options import PlaceConfig, launch, read_command
from nnmpi.trained.run import TrainedRun

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
        at_least_one("--batch-size", self.batch_size)


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


def _data(run: TrainedRun, options: EvaluationConfig) -> Config:
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
    tokenizer, (context, *_) = RunFolder(run.folder).tokenizer, run.signature.sample_shape
    if tokenizer.is_dir():
        data = replace(data, tokenizer=str(tokenizer))
    return replace(config, data=data, model=replace(config.model, context=context))


def _lines(run: TrainedRun, samples: Samples, found: Found, options: EvaluationConfig) -> list[str]:
    """Return the result in words, or as JSON."""
    if options.json:
        values: dict[str, Any] = {
            "run": str(run.folder),
            "step": run.step,
            "data": samples.name,
            "part": options.part,
            "samples": len(samples),
            "targets": found.targets,
            **{name: value if isfinite(value) else None for name, value in found.measures().items()},
            "loss": found.loss,
        }
        if isinstance(found, Evaluation) and found.labels.ndim == 1:
            values |= {"classes": run.class_names, "confusion": found.confusion(run.classes).tolist()}
        return [json.dumps(values)]
    unsure = f", perplexity {perplexity(found.loss):.4g}" if run.signature.is_tokens else ""
    right = f"{found.correct} of {found.targets} right" if isinstance(found, Evaluation) else ""
    counted = right or f"{found.targets} samples"
    after = "" if run.step is None else f" after step {run.step}"
    return [
        f"{options.part} {describe_measures(found.measures())} (loss {found.loss:.4f}{unsure}), {counted}, with "
        f"{samples.name} and the weights{after} of {run.folder}"
    ]


if __name__ == "__main__":
    launch(sys.argv[1:], parse, main)
