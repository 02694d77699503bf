"""One run as a value: configuration, data, model, optimizer, trainer and folder.

    set_up      returns a run to train, made from options
    open_run    returns a trained run: its model in any layout, and the transform of its inputs

`open_run` reads two kinds of folders:

    RUN/checkpoints/latest -> step-00000900/model.safetensors   a run of nnmpi, with options and
                                                                signature in the file's metadata
    RUN/config.json, RUN/model.safetensors                      a GPT-2 in Hugging Face's format
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.base.errors import CheckpointError, DataError, UsageError
from nnmpi.base.wings import Drawn
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.algorithms.registry import AUTO
from nnmpi.comm.group import Group
from nnmpi.comm.saved_fit import find_fit
from nnmpi.compose.arrange import Arrangement, arrange
from nnmpi.compose.inference import Inference, check_finite, nonfinite_rows
from nnmpi.compose.layout import Layout
from nnmpi.compose.state import base_digest, model_state
from nnmpi.compose.trainer import Trainer
from nnmpi.data.dataset import Samples, read_array
from nnmpi.data.readers import read_table
from nnmpi.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from nnmpi.metrics.metric import TOKENS as LANGUAGE
from nnmpi.models.pretrained import is_pretrained, load_pretrained, model_named, read_size
from nnmpi.models.torch_weights import from_torch, last_linear, read_torch, torch_weights
from nnmpi.nn.module import Module
from nnmpi.optim.schedule import RateSchedule
from nnmpi.parallel.model_state import ArraySpec
from nnmpi.train.build import (
    TOO_LARGE,
    build_extent,
    build_full_model,
    build_model,
    build_schedule,
    build_trainer,
)
from nnmpi.train.checkpoint import Checkpoint, Extent, find
from nnmpi.train.computing import choose_computing, computing, explain_errors
from nnmpi.train.config import (
    Config,
    ModelConfig,
    assemble,
    check_positions,
    flatten,
    read_on_root,
    to_json,
)
from nnmpi.train.derived import attention_of, find_layout
from nnmpi.train.folder import RunFolder, check_trust, read_run, refuse_of_program
from nnmpi.train.inputs import Inputs, given_samples, load_inputs, text_source
from nnmpi.train.measures import RunMetrics, run_metrics, task_of
from nnmpi.train.signature import TOKENS, ModelSignature, read_metadata, to_metadata

ONE_RANK = Layout(1, 1, 1)
NOWHERE = RunFolder(Path(os.devnull))  # of a run that writes nothing
ROWS = (
    16  # of a forward pass: one sample alone costs as many, and a million little more than by 256
)


def read_rows(
    source: Any,
    signature: ModelSignature,
    say: Callable[[str], Any],
    header: bool = True,
    decimal: str = "",
) -> Array:
    """Return a table's samples by the rules of the model's, and say what was replaced in it.

    Args:
        source: see `read_table`.
        signature: the model's.
        say: called with each sentence.
        header, decimal: see `TableRules`.

    Raises:
        DataError: for a table that does not fit the model.
    """
    rules = replace(signature.rules, header=header, decimal=decimal)
    shape = signature.sample_shape
    if not rules.encoding:
        raise DataError(f"rows of a table do not fit a model that takes {shape}; give an array")
    table = read_table(source, rules, labelled=False)
    for note in table.notes:
        say(f"{table.source}: {note}")
    return table.features


def _is_nested(row: Any) -> bool:
    return (
        isinstance(row, list | tuple)
        and bool(row)
        and isinstance(row[0], list | tuple)
        or (getattr(row, "ndim", 1) > 1)
    )


@dataclass(frozen=True, eq=False)
class Run(Drawn):
    """A run on one rank, during or after its training.

    Attributes:
        config: its options.
        group: all ranks.
        backend: of this rank.
        folder: the run's files.
        signature: the model's inputs and outputs, and the transform of samples.
        tokenizer: the text's tokenizer, or None; in an opened run on rank 0 only.
        model: this rank's shard, initialized.
        arrangement: the layout of the model on the ranks.
        step: updates of the initial weights; None for a model in Hugging Face's format, and with
            the weights of another file.
    """

    config: Config
    group: Group
    backend: Backend
    folder: RunFolder
    signature: ModelSignature
    tokenizer: Tokenizer | None
    model: Module
    arrangement: Arrangement
    step: int | None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.signature.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        return tuple(map(self.signature.name_of, range(self.classes)))

    def metadata(self) -> dict[str, str]:
        """Return the metadata of a file with its weights; see `train.signature`."""
        return to_metadata(self.signature, to_json(self.config.model))

    def transform(self, x: Any) -> Array:
        """Return samples as model input; see `predict` and `ModelSignature.prepare`."""
        of, many = self.signature, isinstance(x, list | tuple)
        is_table = hasattr(x, "columns") or isinstance(x, Mapping)
        is_table |= many and bool(x) and isinstance(x[0], Mapping)
        kind = getattr(getattr(x, "dtype", None), "kind", "")
        # pictures as lists are none of a table
        is_rows = kind in ("O", "U") or (many and not (x and _is_nested(x[0])))
        if is_table or (of.encoding and is_rows):
            samples = read_rows(x, of, partial(warnings.warn, stacklevel=4))
        else:
            samples = read_array(x, "samples")
        return of.prepare(samples, self.config.run.dtype)

    def predict(self, x: Any) -> Array:
        """Return predictions for samples. Collective over the ranks of a replica.

        Args:
            x: (n, *sample_shape), samples as in the data set. For a model of a table also its
                rows: a DataFrame, a mapping of columns, a list of mappings or of rows. They are
                read by the run's rules, as a file is: columns by name, texts, dates, missing cells.

        Returns:
            The probability of each class: (n, classes); or quantities: (n, *target_shape).

        Raises:
            DataError: for samples that do not fit the model.
        """
        return self.answers(self.transform(x))

    def answers(self, x: Array) -> Array:
        """Return predictions for model input; see `predict`. Collective over a replica's ranks.

        For several yes-or-no targets: the probability of each yes, (n, *target_shape).
        """
        logits = self.outputs(x)
        if self.signature.predicts != "classes":
            values = logits.reshape(len(x), *self.signature.target_shape)
            if self.signature.predicts == "quantities":
                return self.signature.in_units(values)
            yes = 0.5 + 0.5 * np.tanh(0.5 * values)  # the sigmoid, without overflow
            return yes if self.signature.target_shape else np.stack([1 - yes, yes], axis=-1)
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return shifted / shifted.sum(axis=-1, keepdims=True)

    def outputs(self, x: Array) -> Array:
        """Return the model's outputs for inputs (n, ...). Collective over a replica's ranks.

        A row's bits do not depend on the others: each forward pass has `ROWS` rows, the last one
        filled up, since a library's products of other shapes add in another order.

        Args:
            x: (n, *sample_shape).

        Raises:
            DivergenceError: for outputs that are not finite.
        """
        inference = Inference(self.arrangement, self.backend, self.config.numerics.precision)
        places = np.arange(-(-len(x) // ROWS) * ROWS).reshape(-1, ROWS)
        parts = [inference(x[np.minimum(some, len(x) - 1)]) for some in places]
        inference.release()
        if not parts:
            return np.zeros((0, self.signature.outputs), self.config.run.dtype)
        outputs = np.concatenate(parts)[: len(x)]
        check_finite(len(x), nonfinite_rows(outputs))
        return outputs

    def __repr__(self) -> str:
        after = "" if self.step is None else f", after {self.step} steps"
        return (
            f"Run({str(self.folder.path)!r}: {self.config.model.model} on"
            f" {self.signature.data}{after})"
        )


@dataclass(frozen=True, eq=False)
class TrainingRun(Run):
    """A run to train. Only the weights change later.

    Attributes:
        inputs: the data sets, and this rank's loaders.
        metrics: of its evaluations.
        trainer: of the model, with its optimizer.
        schedule: the learning rate as a function of the step.
        extent: the run's length.
        kernels: the header's line on the choice of kernels; empty without a choice.
    """

    inputs: Inputs
    metrics: RunMetrics
    trainer: Trainer
    schedule: RateSchedule
    extent: Extent
    kernels: str

    @property
    def predicts_tokens(self) -> bool:
        """Whether it is a language model: its samples and its labels are tokens."""
        return task_of(self.signature, self.inputs.train).kind == LANGUAGE

    @property
    def has_folder(self) -> bool:
        """Whether the run writes files; `folder` is none otherwise."""
        return self.folder is not NOWHERE

    def settled(self) -> dict[str, Any]:
        """Return the options by name with derived values: layout, microbatches and tokenizer.

        config.json holds them, since a run resumed on other ranks must split model and batches as
        before.
        """
        mesh, source = self.arrangement.mesh.sizes, text_source(self.config)
        options = flatten(self.config)
        options |= {axis: n for axis, n in (("pp", mesh.pp), ("tp", mesh.tp)) if n > 1}
        if self.tokenizer is not None and source is not None:
            options["tokenizer"] = source.tokenizer
        if self.arrangement.is_pipeline:
            options["microbatches"] = self.inputs.train_loader.microbatches
        return options


def set_up(
    config: Config,
    group: Group,
    backend: Backend,
    folder: RunFolder,
    last: Checkpoint | None,
    say: Callable[[str], None],
    stack: ExitStack,
    samples: tuple[Samples, Samples] | None = None,
) -> TrainingRun:
    """Load the data and build everything. Collective.

    Args:
        config: of the run.
        group: all ranks.
        backend: of this rank.
        folder: of the run; it is not touched here.
        last: the checkpoint to resume from, or None. The pipeline keeps its stages.
        say: called with a sentence when a download begins.
        stack: receives the context of `computing`, which lasts to the end of the run.
        samples: of training and test, of a program; None to load them.

    Raises:
        UsageError: on all ranks, for options that do not fit the data or the number of ranks.
        DataError, DeviceError: on all ranks, for unavailable data, and for a device that is missing
            or too small.
    """
    layout, mesh = find_layout(config, group)
    config.sync.check(group.size)
    config.sync.slowness(config.run.seed).check(group.size)
    if samples is not None:
        samples = given_samples(config, group, *samples)
    inputs = load_inputs(config, group, say, mesh, samples)
    with agreed(group):
        extent = build_extent(config.optimization, inputs)
        schedule = build_schedule(config.optimization, extent)
        metrics = run_metrics(config.run, inputs.signature, inputs.test)
    if group.size > 1 and not config.sync.asynchronous:
        group.fit = find_fit(group)
    cuts = None if last is None else last.cuts(mesh, layout.stages_per_rank)
    if cuts is not None and layout.split == AUTO:  # a new measurement might split elsewhere
        layout = replace(layout, split=cuts)
    model = build_full_model(config, inputs.train, backend, group)
    with agreed(group):
        if last is not None:
            last.check_model(model)
    config, kernels = choose_computing(config, model, inputs.train, backend, group)
    stack.enter_context(computing(config))
    trainer = build_trainer(config, model, group, inputs, backend, layout)
    if callable(config.optimization.optimizer):  # which knows its rate
        config = config.having(lr=float(trainer.optimizer.lr))
        with agreed(group):
            schedule = build_schedule(config.optimization, extent)
    return TrainingRun(
        config=config,
        group=group,
        backend=backend,
        folder=folder,
        signature=inputs.signature,
        tokenizer=inputs.tokenizer,
        model=trainer.model,
        arrangement=trainer.arrangement,
        step=0 if last is None else last.values["step"],
        inputs=inputs,
        metrics=metrics,
        trainer=trainer,
        schedule=schedule,
        extent=extent,
        kernels=kernels,
    )


# ---- opening one ----


def load(
    run: str | Path, best: bool = False, weights: str | Path | None = None, trust: bool = False
) -> Run:
    """Open a run in this process alone, for predictions.

    Args:
        run: the folder of a run, or of a GPT-2 in Hugging Face's format.
        best: use the best evaluation's weights, which `--keep-best` saved, instead of the last.
        weights: use those of a PyTorch state_dict instead: a .safetensors file with the names that
            `nnmpi export` writes.
        trust: execute the user code, FILE.py:NAME, that the run names.

    Raises:
        UsageError: without such a run, or if it names code and `trust` is False.
        CheckpointError: for a run without a checkpoint, or with a damaged one.

    Example:
        >>> from nnmpi.train.cli import main
        >>> words = "--dataset iris --model mlp --epochs 2 --quiet --out runs/iris".split()
        >>> _ = nnmpi.simulate(lambda group: main(words, group), ranks=1)
        >>> run = nnmpi.load("runs/iris")
        >>> run.signature.sample_shape
        (4,)
    """
    # One simulated rank needs no MPI, and shares the code of several ranks. Imported here: ranks
    # of MPI start without it.
    file = None if weights is None else Path(weights)
    from nnmpi.comm.simulated.simulated_world import simulate

    (result,) = simulate(
        lambda group: open_run(Path(run), group, best=best, weights=file, trust=trust), 1
    )
    return result


def open_run(
    folder: Path,
    group: Group,
    layout: Layout = ONE_RANK,
    backend: Backend | None = None,
    best: bool = False,
    weights: Path | None = None,
    trust: bool = False,
) -> Run:
    """Open a run on the ranks of a group, in any layout. Collective.

    Args:
        folder: of the run, or of a GPT-2 in Hugging Face's format.
        group: all ranks.
        layout: of the model; it need not be that of training.
        backend: of this rank; NumPy by default.
        best: use the best evaluation's weights.
        weights: use a PyTorch state_dict's weights instead.
        trust: execute the user code that the run names.

    Raises:
        UsageError: on all ranks, without such a run, if it names code and `trust` is False, and for
            a layout that does not fit.
        CheckpointError: on all ranks, for a run without a checkpoint, or with a damaged one.
    """
    backend = numpy_backend() if backend is None else backend
    config = read_on_root(group, lambda: _read_config(folder, trust))
    is_run, files = config.model.pretrained != folder, RunFolder(folder)
    with agreed(group):
        check_positions(config.model, layout.sp)
        if best and not is_run:
            raise UsageError(
                f"{folder}: a model in Hugging Face's files has no best weights; leave --best out"
            )
        if best and not config.run.keeps_best:
            # It may have them by chance; but its last evaluation is in none of its checkpoints.
            raise CheckpointError(
                f"{files.checkpoints} has no best checkpoint; train with --keep-best"
            )
    last = find(files, group, writes=False, best=best) if is_run else None
    if last is None and is_run:
        raise CheckpointError(
            f"{folder} has no checkpoint yet; wait for one, or continue training with --resume"
            f" {folder}"
        )
    if last is not None:
        last.warn(group)
    signature = _read_signature(folder, last, group)
    dtype = config.run.dtype
    layout = replace(layout, sp_attention=attention_of(config.model, layout))
    with explain_errors(backend, TOO_LARGE):
        with agreed(group):
            # Inference needs no dropout, and the pretrained folder with its value may be gone.
            model = (
                replace(config.model, dropout=0.0)
                if config.model.pretrained is not None
                else config.model
            )
            build = partial(build_model, model, signature.sample_shape, signature.outputs)
            full = build()
            if last is not None:
                last.check_model(full)
        sample = np.zeros((1, *signature.sample_shape), np.int64 if signature.is_tokens else dtype)
        where = arrange(full, group, layout, sample, dtype, backend)
        with agreed(group):
            where.model.initialize(dtype=dtype, backend=backend)
            if model.lora is not None or (last is None and weights is None):
                assert model.pretrained is not None
                load_pretrained(where.model, model.pretrained)
        if last is not None:
            last.check_base(base_digest(where))
        if weights is not None:
            make = lambda: build().initialize(dtype=dtype)  # noqa: E731
            _load_torch(weights, make, sample, group, where, signature)
        elif last is not None:
            model_state(where).scatter(*last.weights())
    path = files.tokenizer if is_run else folder
    with agreed(group):  # without a file there is none: the samples were tokens already
        tokenizer = (
            load_tokenizer(path) if group.is_root and find_tokenizer(path) is not None else None
        )
    step = None if last is None or weights is not None else last.values["step"]
    return Run(config, group, backend, files, signature, tokenizer, where.model, where, step)


def _load_torch(
    file: Path,
    build: Callable[[], Module],
    sample: Array,
    group: Group,
    where: Arrangement,
    signature: ModelSignature,
) -> None:
    """Load a PyTorch state_dict into a distributed model. Collective.

    Args:
        file: the state_dict, on rank 0.
        build: returns the full model, initialized with any values.
        sample: model input.
        group: all ranks.
        where: the layout of the model.
        signature: the model's. The file's outputs are in the data's units, if they can be (see
            `commands.export`).

    Raises:
        CheckpointError: on all ranks, for a file that is unreadable or does not fit.
    """
    result: dict[str, Array] = {}

    def read() -> None:
        # the full model on rank 0: its forward pass shows which images are flattened
        full = build()
        values = from_torch(torch_weights(full, sample), read_torch(file), file)
        layer = last_linear(full, sample) if signature.target_mean else None
        result.update(values if layer is None else signature.with_units(values, layer, back=True))

    on_root(group, read)
    specs = {name: ArraySpec.of(array) for name, array in result.items()} if group.is_root else None
    model_state(where).scatter(result.__getitem__, specs, file)


def _read_config(folder: Path, trust: bool) -> Config:
    """Return a run's options; a GPT-2 in Hugging Face's format gets those of a new run from it.

    Raises:
        UsageError: for another kind of folder, and for code without `trust`.
    """
    if is_pretrained(folder):
        return Config(ModelConfig(model_named(folder), pretrained=folder))
    options, final = read_run(folder, str(folder)), RunFolder(folder).model
    options.pop("callback", None)  # which training alone calls
    refuse_of_program(folder, options)
    check_trust(folder, options, {}, trust)
    config = assemble(options)
    if config.model.pretrained is None or not final.is_dir():
        return config
    return config.having(pretrained=final)  # the pretrained folder may be gone


def _read_signature(folder: Path, last: Checkpoint | None, group: Group) -> ModelSignature:
    """Return the signature in the weights' metadata, or of a GPT-2 in Hugging Face's format."""

    def read() -> dict[str, Any]:
        if last is None:
            size = read_size(folder)
            return {
                "data": folder.name,
                "sample_shape": [size.context],
                "classes": size.vocabulary,
                "stored": TOKENS,
            }
        file = last.model
        assert file is not None  # on rank 0
        return read_metadata(file.metadata, file.file)["signature"]

    return ModelSignature.from_json(on_root(group, read))
