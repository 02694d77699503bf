"""The data of a run: prepared once per node, loaded by every rank, and split into batches."""

import hashlib
import os
import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from nnmpi.backend.random import stream
from nnmpi.base.command import as_words, check_numbers, flag_of, non_defaults, require
from nnmpi.base.custom import call_custom, custom_file, is_custom, names_in
from nnmpi.base.errors import DataError, UsageError
from nnmpi.comm.agreement import agree, agreed, require_equal
from nnmpi.comm.group import Group
from nnmpi.comm.mesh import Mesh
from nnmpi.compose.losses import ERRORS, YES_OR_NO, refuse_weights
from nnmpi.data.catalogue import Wanted, find_text, prepare
from nnmpi.data.dataset import IGNORED, Dataset, LabelKind, Samples, as_yes_or_no, check_pair
from nnmpi.data.loader import Loader
from nnmpi.data.readers import is_table
from nnmpi.data.sampler import check_partition
from nnmpi.data.tables import TableRules
from nnmpi.data.team import Team
from nnmpi.data.text import Text, TextSource, load_text, prepare_tokens
from nnmpi.data.tokenizer import CHARACTERS, Tokenizer, find_tokenizer, load_tokenizer
from nnmpi.data.transform import AUGMENTATIONS, Compose, Normalize, Transform
from nnmpi.train.config import OF_FILES, SEQUENCE_MODELS, Config, DataConfig, flatten
from nnmpi.train.derived import context_of, count_microbatches
from nnmpi.train.signature import BYTES, ModelSignature, versions

NORMALIZED = ERRORS.keys() - {YES_OR_NO}  # losses of which the targets are, too
PACKAGE_SUFFIXES = (".py", ".cu", ".cuh", ".npz", ".gz")  # of the files that are compared
SMALL_BYTES = 2**20  # up to this size a set is scaled and normalized once, not batch by batch


@dataclass(frozen=True)
class Inputs:
    """Data sets and loaders of one rank.

    Attributes:
        train, test: the full sets.
        batch_size: rows of a global batch, at most those of the training set.
        train_loader, test_loader: of this rank's part of every batch. The test loader neither
            shuffles nor augments.
        signature: of a model of these samples.
    """

    train: Samples
    test: Samples
    batch_size: int
    train_loader: Loader
    test_loader: Loader
    signature: ModelSignature

    @property
    def identity(self) -> str:
        """A hash of each set's samples and labels, and the normalization of these."""
        of = self.signature
        scale = f" {of.target_mean} {of.target_std}" if of.target_mean else ""
        return f"{self.train.identity} {self.test.identity}{scale}"

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of a text; None for other data."""
        return self.train.tokenizer if isinstance(self.train, Text) else None


def load_samples(
    config: Config,
    group: Group,
    say: Callable[[str], None],
    signature: ModelSignature | None = None,
) -> tuple[Samples, Samples]:
    """Return training and test set; the ranks of each node prepare them together. Collective.

    Args:
        config: of the run.
        group: all ranks of the run.
        say: called with a sentence when a transfer begins.
        signature: of a trained model, whose encoding a table gets.

    Raises:
        UsageError: for an unknown data set, or options that do not fit it.
        DataError: for missing or damaged files.
        CommError: for ranks with different data or programs.
    """
    data = config.data
    where = f"--dataset {data.dataset}" + (
        "" if data.data_dir is None else f" --data-dir {data.data_dir}"
    )
    team, entry = NodeTeam(group, say), None
    with agreed(group), _prefixed(where):
        if is_custom(data.dataset):
            _refuse_forms(data, "the function makes the samples itself")
        source = text_source(config)
        wanted = None if source or is_custom(data.dataset) else wanted_files(config, signature)
    with agreed(group), _prefixed(where):
        if source is not None:
            prepare_tokens(source, team)
        elif wanted is not None:
            team.first(lambda: str(prepare(data.dataset, data.data_dir, report=say)))
            entry = wanted.prepare(team)
    team.free()
    with agreed(group):
        with _prefixed(where):
            train, test = group.comm.world.once(
                ("data", repr((config, signature))), lambda: _load(config, source, wanted, entry)
            )
            train, test = (match_loss(config.optimization.loss, item) for item in (train, test))
        if isinstance(train, Text):
            check_tokenizer(config, train.tokenizer)
    check_same_start(config, group, train, test, where)
    return train, test


def given_samples(
    config: Config, group: Group, train: Samples, test: Samples
) -> tuple[Samples, Samples]:
    """Return the data sets of a program with labels for the loss. Collective.

    Raises:
        UsageError, DataError, CommError: see `load_samples`.
    """
    with agreed(group):
        if isinstance(train, Dataset) and isinstance(test, Dataset):
            train, test = check_pair(train, test)
        train, test = (match_loss(config.optimization.loss, item) for item in (train, test))
    check_same_start(config, group, train, test, "what nnmpi.fit has been given")
    return train, test


def load_inputs(
    config: Config,
    group: Group,
    say: Callable[[str], None],
    mesh: Mesh,
    samples: tuple[Samples, Samples] | None = None,
) -> Inputs:
    """Return the inputs of this rank. Collective; see `load_samples`.

    Args:
        config: of the run.
        group: all ranks of the run.
        say: called with a sentence when a transfer begins.
        mesh: of the ranks: replicas share each batch; a longer pipeline has more microbatches.
        samples: the result of `load_samples`; None to call it.

    Raises:
        UsageError, DataError, CommError: see `load_samples`.
    """
    data, run = config.data, config.run
    train, test = samples or load_samples(config, group, say)

    with agreed(group):
        if isinstance(train, Dataset) and train.classes == 1:
            raise UsageError(
                f"--dataset {data.dataset} has only one class, so there is nothing to predict"
            )
        _check_weights(config, train)
        batch_size = config.optimization.rows(len(train))
        with _prefixed("--partition"):
            check_partition(len(train), data.partition, mesh.dp)
        parts = count_microbatches(config, mesh.pp, batch_size)
        normalize: Normalize | None = None
        if data.normalize and isinstance(train, Dataset) and not train.is_tokens:
            normalize = Normalize.fit(train)
        after: list[Transform] = [] if normalize is None else [normalize]
        scales = data.normalize and config.optimization.loss in NORMALIZED
        signature = ModelSignature.of(train, normalize, scales)
        changes = [*augmentations(data, train), *after]

        def loader(dataset: Samples, training: bool, transforms: list[Transform]) -> Loader:
            dataset = signature.to_learn(dataset)
            if is_small(dataset, run.dtype) and transforms == after:
                dataset, transforms = as_input(dataset, normalize), []
            return Loader(
                dataset,
                min(batch_size, len(dataset)),
                seed=run.seed,
                rank=mesh.coordinates(group.rank).d,
                world=mesh.dp,
                microbatches=parts if training else 1,
                whole_microbatches=training and config.parallel.reduction == "fixed",
                shuffle=training,
                shuffle_block=data.shuffle_block if training else None,
                balance=training and data.balance,
                partition=data.partition if training else "none",
                transform=Compose(*transforms) if transforms else None,
                dtype=run.dtype,
            )

        loaders = loader(train, True, changes), loader(test, False, after)
        return Inputs(train, test, batch_size, *loaders, signature)


def _check_weights(config: Config, train: Samples) -> None:
    """Refuse weights of samples that are all 0, or whose mean has no whole batch.

    Raises:
        UsageError: see `refuse_weights`.
    """
    if train.weights is None:
        return
    require(
        bool(train.weights.any()),
        f"all weights of the samples of {train.name} are 0, so none counts; give others",
    )
    if config.sync.asynchronous or config.parallel.asynchronous:
        refuse_weights("the samples have")


def is_small(samples: Samples, dtype: str) -> TypeGuard[Dataset]:
    """Return whether the samples as model input take at most SMALL_BYTES, in float32."""
    if not isinstance(samples, Dataset) or samples.is_tokens or dtype != "float32":
        return False
    return prod(samples.x.shape) * np.dtype(dtype).itemsize <= SMALL_BYTES


def as_input(dataset: Dataset, normalize: Normalize | None) -> Dataset:
    """Return the data set scaled and normalized, with the same bits as batch by batch."""
    indices = np.arange(len(dataset))
    x = dataset.rows(indices)
    return replace(dataset, x=x if normalize is None else normalize(x, indices, 0, 0), scale=1.0)


@dataclass(frozen=True)
class SampleConfig:
    """Random samples in place of a data set."""

    shape: tuple[int, ...] | None = None
    """Random samples of this shape, such as 28 28 1, in place of --dataset; for lstm and gpt
    tokens, by their number, such as 64.
    """
    classes: int | None = None
    """Classes of random samples, or tokens of the vocabulary (default: 10)."""

    def __post_init__(self) -> None:
        check_numbers(self, "classes", 1)
        if self.shape is not None:
            require(
                min(self.shape, default=0) > 0,
                f"--shape is {self.shape}; give the lengths of one sample's axes, such as 28 28 1",
            )

    def draw(self, count: int, config: Config) -> Dataset:
        """Return `count` random samples; sequences of tokens have random lengths.

        Raises:
            UsageError: when memory does not suffice.
        """
        shape, classes = self.shape or (), self.classes or 10
        draws = stream(config.run.seed, "random samples")
        try:
            if config.model.model in SEQUENCE_MODELS:
                tokens = draws.integers(0, classes, (count, shape[0] + 1))
                # positions behind a sequence's end do not count
                ends = draws.integers(1, shape[0] + 1, (count, 1))
                labels = np.where(np.arange(shape[0]) < ends, tokens[:, 1:], IGNORED)
                return Dataset("random tokens", tokens[:, :-1], labels, classes)
            x = draws.standard_normal((count, *shape), dtype=np.float32)
            return Dataset("random samples", x, draws.integers(0, classes, count), classes)
        except (MemoryError, ValueError):
            # ValueError: the size exceeds the address space
            raise UsageError(
                f"{count} samples of shape {shape} do not fit this memory; give a smaller --shape"
            ) from None


def match_loss(loss: str, samples: Samples) -> Samples:
    """Return the samples with labels for a loss: yes-or-no labels become probabilities.

    Raises:
        UsageError: for classes with a loss of numbers, and numbers with a loss of classes.
    """
    predicts = samples.predicts if isinstance(samples, Dataset) else "classes"
    if loss == YES_OR_NO and isinstance(samples, Dataset):
        return as_yes_or_no(samples)
    if loss in ERRORS and predicts == "classes":
        raise UsageError(
            f"{samples.name} has classes, but --loss {loss} predicts numbers; give --loss"
            " cross-entropy"
        )
    if loss == "cross-entropy" and predicts != "classes":
        raise UsageError(
            f"{samples.name} has numbers, but --loss {loss} predicts classes; give --loss mse"
        )
    return samples


def check_same_start(
    config: Config, group: Group, train: Samples, test: Samples, where: str
) -> None:
    """Refuse ranks with different data or programs, which train without an error. Collective.

    Args:
        config: of the run, equal on all ranks.
        group: all ranks of the run.
        train, test: this rank's data.
        where: the options that name the data, for messages.

    Raises:
        CommError: on all ranks; names the ranks that differ from rank 0.
    """
    if group.size == 1:
        return
    with agreed(group):
        local = group.comm.world.once(
            ("start", repr(config), train.identity, test.identity),
            partial(_describe_start, config, train, test),
        )
    sizes = f"{where} is not the same on all ranks"
    problems = "the ranks have different versions", "the program's files differ", sizes, sizes
    require_equal(group, local, problems.__getitem__, "give all nodes the same")


def _describe_start(config: Config, train: Samples, test: Samples) -> list[str]:
    """Return versions, a hash of nnmpi's and the user's files, the data's sizes, and their hash."""
    program = hashlib.sha256(_package_digest())
    named = chain.from_iterable(map(names_in, flatten(config).values()))
    custom = {file for name in named if (file := custom_file(name))}
    for path in sorted(custom):
        program.update(path.read_bytes())
    sizes = f"{len(train)} training and {len(test)} test samples"
    return [
        ", ".join(map(" ".join, versions().items())),
        program.hexdigest()[:16],
        sizes,
        f"{train.identity[:16]} {test.identity[:16]}",
    ]


@cache
def _package_digest() -> bytes:
    """Return a hash of nnmpi's own files, as this process has found them first."""
    digest = hashlib.sha256()
    for path in _package_files():
        digest.update(path.read_bytes())
    return digest.digest()


def _package_files() -> list[Path]:
    """Return nnmpi's own files, sorted by name."""
    files: list[str] = []
    for place, folders, names in os.walk(Path(__file__).parents[1]):
        folders[:] = [folder for folder in folders if folder != "__pycache__"]
        files += [f"{place}{os.sep}{name}" for name in names if name.endswith(PACKAGE_SUFFIXES)]
    return [Path(file) for file in sorted(files)]


def text_source(config: Config) -> TextSource | None:
    """Return the text of the options; None for another data set.

    Raises:
        UsageError: for a missing text, and for options of texts without a text.
    """
    data, model = config.data, config.model
    path = None
    if not is_custom(data.dataset):
        path = find_text(data.dataset, data.columns, has_label=bool(data.target))
    if path is None:
        if model.model in SEQUENCE_MODELS and is_table(Path(data.dataset)):
            raise UsageError(
                f"--model {model.model} needs a text; name its columns with --text-columns"
            )
        for name in ("tokenizer", "text_samples"):
            require(
                name not in non_defaults(data),
                f"{flag_of(name)} is for texts, such as paradise-lost or a .txt file; leave it out",
            )
        return None
    _refuse_forms(data, "a text names its file itself, and its tokens are the labels")
    tokenizer = data.tokenizer or (
        CHARACTERS if model.pretrained is None else str(model.pretrained)
    )
    return TextSource(path, tokenizer, data.columns, data.text_samples == "sentences")


def _refuse_forms(data: DataConfig, why: str) -> None:
    """Refuse options of how a file of samples is read, for data that are none.

    Raises:
        UsageError: with the option.
    """
    for name in ("data_dir", *OF_FILES.split()):
        require(name not in non_defaults(data), f"{why}; leave {flag_of(name)} out")


def check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Refuse another tokenizer than the pretrained model's."""
    folder, option = config.model.pretrained, config.data.tokenizer
    if folder is None or option in (None, str(folder)) or find_tokenizer(folder) is None:
        return
    if load_tokenizer(folder).identity != tokenizer.identity:
        raise UsageError(
            f"--tokenizer {option} is not the tokenizer in --pretrained {folder}, whose weights do"
            " not know its tokens; leave --tokenizer out"
        )


class NodeTeam(Team):
    """The ranks of a node, which prepare data sets together.

    Args:
        group: all ranks of the run.
        say: called with a sentence about what takes long.
    """

    def __init__(self, group: Group, say: Callable[[str], None]) -> None:
        super().__init__(say)
        self._node = group.node()
        self.rank, self.size = self._node.rank, self._node.size

    def gather(self, value: Any) -> list[Any]:
        """See `Team`."""
        return self._node.gather(value)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """See `Team`; of several errors the lowest rank's counts."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = self.gather(failure is not None)
        if any(failed):
            first = failed.index(True)
            agree(self._node, failure if self.rank == first else None, speaker=first)

    def free(self) -> None:
        """Free the communicator."""
        self._node.free()


def wanted_files(config: Config, signature: ModelSignature | None) -> Wanted:
    """Return the data set in files that the options name."""
    data, loss = config.data, config.optimization.loss
    predicts: LabelKind = "classes"
    if loss == YES_OR_NO or is_custom(loss):
        predicts = "any"
    elif loss in ERRORS:
        predicts = "quantities"
    rules = TableRules(
        target=signature.target if signature else data.target,
        drop=data.dropped,
        text_columns=data.columns,
        sample_shape=data.sample_shape or (),
        encoding=signature.rules.encoding if signature else (),
        as_bytes=signature.stored == BYTES if signature else None,
        decimal="" if data.decimal == "auto" else data.decimal,
        header=data.header,
        sample_weight="" if signature else data.sample_weight,
    )
    split = config.run.seed, data.test_fraction
    return Wanted(data.dataset, data.data_dir, *split, predicts, rules, data.stratify)


def _load(
    config: Config, source: TextSource | None, wanted: Wanted | None, entry: Path | None
) -> tuple[Samples, Samples]:
    data, seed = config.data, config.run.seed
    if wanted is not None:
        return wanted.load(entry)
    if is_custom(data.dataset):
        pair = call_custom(data.dataset, "--dataset", "()")
        fits = (
            isinstance(pair, tuple | list)
            and len(pair) == 2
            and all(isinstance(item, Dataset) for item in pair)
        )
        if not fits:
            raise UsageError(
                "the function must return two nnmpi.data.Dataset objects, for training and for the"
                " test"
            )
        return check_pair(*pair)
    assert source is not None
    return load_text(source, context_of(config.model), seed, data.test_fraction)


# an argument of `load` with its value, at the end of a sentence
_ARGUMENT = re.compile(
    r"\b(target|drop|text_columns|predicts|decimal|header)=('[^']*'|\"[^\"]*\"|\[[^]]*\]|False)"
)
_LOSSES = {"quantities": "mse", "classes": "cross-entropy"}


@contextmanager
def _prefixed(options: str) -> Iterator[None]:
    """Prefix a UsageError's sentence with the options that caused it, and name options in it.

    The package data has no command line: its sentences cannot name options.
    """
    try:
        yield
    except (DataError, UsageError) as error:
        text = with_options(str(error))
        if isinstance(error, UsageError) and not text.startswith(options):
            # (the error of a user's function names the option already)
            text = f"{options}: {text}"
        named = type(error)(text).with_traceback(error.__traceback__)
        named.exit_status = error.exit_status  # such as that of a full disk
        raise named from error.__cause__


def with_options(text: str) -> str:
    """Return a sentence of the package data with options in place of arguments."""
    return _ARGUMENT.sub(_as_option, text)


def _as_option(argument: re.Match[str]) -> str:
    """Return "--drop Name,Ticket" for "drop=['Name', 'Ticket']"; see `as_words`."""
    name, value = argument[1], literal_eval(argument[2])
    if name == "predicts":
        name, value = "loss", _LOSSES[value]
    return as_words(name, ",".join(value) if isinstance(value, list) else value)


def augmentations(data: DataConfig, train: Samples) -> list[Transform]:
    """Return the transforms of --augment.

    Raises:
        UsageError: for samples other than images, and for a shift of images of one pixel.
    """
    if data.augment == "none":
        return []
    what, shape = f"--augment {data.augment}", train.sample_shape
    require(
        len(shape) == 3,
        f"{what} is for images, but samples of {train.name} have shape {shape}; leave it out",
    )
    side = min(shape[:2])
    require(
        "shift" not in data.augment or side > 1,
        f"{what} moves images of shape {shape} away; leave shift out of it",
    )
    return [make(side) for name, make in AUGMENTATIONS.items() if name in data.augment.split("-")]
