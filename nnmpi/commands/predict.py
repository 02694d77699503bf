"""`nnmpi predict`: predict classes with probabilities, or numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.base.command import complain, read_command
from nnmpi.base.errors import DataError, UsageError, raised_as
from nnmpi.base.files import OutputFile, json_text, write_text
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.ranks import parse_together
from nnmpi.commands.start import OpeningConfig, TableForm, launch_command
from nnmpi.data import images
from nnmpi.data.arrays import read_samples
from nnmpi.data.readers import find_reader, split_names, unread
from nnmpi.train.config import SEQUENCE_MODELS
from nnmpi.train.inputs import with_options
from nnmpi.train.run import Run, read_rows
from nnmpi.train.signature import BYTES, FULL, ModelSignature


def read_file(
    file: Path,
    signature: ModelSignature,
    dtype: str,
    invert: bool = False,
    say: Callable[[str], None] = complain,
    header: bool = True,
    decimal: str = "",
) -> Array:
    """Return the samples of a file as model input: (n, *sample_shape).

    Args:
        file: .npz, HDF5, a table, or an image that Pillow reads.
        signature: the model's.
        dtype: the model's.
        invert: whether to invert an image's brightness.
        say: called with what was replaced in a table.
        header, decimal: of a table; see `TableRules`.

    Raises:
        UsageError: for a file of another kind.
        DataError: for a damaged file, or samples that do not fit the model.
    """
    path, names = split_names(str(file))
    reader = find_reader(Path(path), has_label=True)
    gives = None if reader is None else reader.gives
    try:
        if reader is not None and gives == "arrays":
            read = partial(reader.read, given=names) if names else reader.read
            return signature.prepare(read_samples(Path(path), read), dtype)
        if gives == "table":
            return signature.prepare(read_rows(file, signature, say, header, decimal), dtype)
    except DataError as error:
        text = with_options(str(error))
        raise DataError(text if str(file) in text else f"{file}: {text}") from None
    if gives != "image":
        raise unread(file)
    return read_image(file, signature, dtype, invert)


def find_samples(paths: Sequence[Path]) -> list[Path]:
    """Return the files among the paths, and those in folders: tables, .npz and images, by name.

    Raises:
        UsageError: for a missing path, for a folder without such files, and for a file in one that
            is of another kind: it would be left out.
    """
    files = list[Path]()
    for path in paths:
        if path.is_dir():
            files += _samples_in(path)
        elif not Path(split_names(str(path))[0]).is_file():
            raise UsageError(f"there is no file {path}; give an .npz, a .csv or an image")
        else:
            files.append(path)
    return files


def _samples_in(folder: Path) -> list[Path]:
    """Return the files with samples in a folder and those below it, without hidden ones."""
    inside = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    found = [
        file
        for file in inside
        if (reader := find_reader(file, has_label=True)) and reader.gives != "text"
    ]
    if not found:
        raise UsageError(f"folder {folder} has neither tables nor images nor .npz files")

    left = [file for file in inside if file not in found]
    if other := next((file for file in left if file.suffix.lower() not in images.BESIDE), None):
        raise UsageError(
            f"{other} would be left out, since it is neither a table nor an image nor an .npz;"
            " convert it, or move it elsewhere"
        )
    return found


def read_image(file: Path, signature: ModelSignature, dtype: str, invert: bool = False) -> Array:
    """Return an image as model input (1, height, width, channels), resized for the model.

    It is converted to gray for a model of one channel. Before normalization, black is 0, white 1.

    Args:
        file: an image that Pillow reads.
        signature, dtype, invert: see `read_file`.

    Raises:
        UsageError: without Pillow, and for a model whose samples are not images of bytes.
        DataError: for a file that cannot be read.
    """
    shape = signature.sample_shape
    if len(shape) != 3 or shape[2] not in (1, 3) or signature.stored != BYTES:
        raise UsageError(
            f"{file} is read as an image, but the model's samples are {signature.stored} of shape"
            f" {shape}; give an .npz or a .csv"
        )
    pixels = images.read_image(file, shape).astype(dtype)[None] * np.asarray(1 / FULL, dtype)
    return signature.normalized(1 - pixels if invert else pixels)


PROGRAM = "nnmpi predict"
DESCRIPTION = """\
Predict classes or numbers with a run's model: nnmpi predict RUN FILE... [options].

FILE is an .npz or .h5 with x (or sim.h5:NAME), a .csv with the run's columns (a label is not
needed), an image such as digit.png, or a folder of them. The run's encoding, scaling and
normalization are applied. The output has a line per sample: its class and the probability of every
class, or the predicted numbers; and its file, if there are several."""


@dataclass(frozen=True)
class PredictionConfig(TableForm):
    """Output."""

    format: Literal["csv", "json"] = "csv"
    """csv: a line per sample. json: one object."""
    out: OutputFile | None = None
    """Output file (default: printed)."""
    replace: bool = False
    """Replace a file that is there."""
    invert: bool = False
    """Invert an image's brightness: MNIST's digits are white on black."""


parse = partial(
    read_command, "RUN FILE...", PROGRAM, DESCRIPTION, (PredictionConfig, OpeningConfig)
)


def main(words: Sequence[str], group: Group) -> None:
    """Print or write the predictions of a run's model. Collective.

    Raises:
        NnmpiError: on all ranks.
    """
    console, (folder, paths, options, device) = parse_together(words, parse, group)
    run = device.open(folder, group)
    if run.config.model.model in SEQUENCE_MODELS:
        raise UsageError(
            f"a run of model {run.config.model.model} generates text: see nnmpi generate"
        )
    with agreed(group):
        files = find_samples(paths)
        dtype = run.config.run.dtype
        say = complain if group.is_root else lambda _: None
        for file in files:
            options.check(file)
        form = options.having(run)
        decimal = form["decimal"].replace("auto", "")
        parts = [
            read_file(file, run.signature, dtype, options.invert, say, form["header"], decimal)
            for file in files
        ]
        x = np.concatenate(parts)
    sources = [str(file) for file, part in zip(files, parts, strict=True) for _ in part]
    is_one = len(files) == 1 and paths == files
    text = format_predictions(run, run.answers(x), options.format, [] if is_one else sources)

    def write() -> None:
        if options.out is None:
            console.finish(text)
        else:
            with raised_as(UsageError, f"--out {options.out} cannot be written"):
                write_text(options.out, text + "\n")

    on_root(group, write)


def format_predictions(run: Run, answers: Array, kind: str, files: Sequence[str] = ()) -> str:
    """Return predictions as text: classes and their probabilities, or quantities.

    Args:
        run: the model's run.
        answers: what `Run.answers` returned.
        kind: "csv" or "json".
        files: of each sample; empty to leave them out.
    """
    rows, names, best = answers.reshape(len(answers), -1), run.class_names, answers.argmax(axis=-1)
    is_classes = run.signature.predicts != "quantities" and not run.signature.target_shape
    if kind == "json":
        samples = [{"values": row.tolist()} for row in answers]
        if is_classes:
            samples = [
                {"class": names[i], "probabilities": row.tolist()}
                for i, row in zip(best, rows, strict=True)
            ]
        for sample, file in zip(samples, files, strict=False):
            sample["file"] = file
        about = {"classes": names} if is_classes else {}
        return json_text({"run": str(run.folder.path), **about, "samples": samples})
    count = rows.shape[1]
    header = ["value"] if count == 1 else [f"value_{number}" for number in range(1, count + 1)]
    first = [[names[number]] for number in best] if is_classes else [[]] * len(rows)
    head = ["class", *names] if is_classes else header
    if files:
        first = [[file, *item] for file, item in zip(files, first, strict=True)]
        head = ["file", *head]
    # quantities with all their digits
    form = "" if run.signature.predicts == "quantities" else ".6g"
    lines = (
        [*head, *(format(item, form) for item in row)]
        for head, row in zip(first, rows, strict=True)
    )
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([head, *lines])
    return stream.getvalue().rstrip("\n")


if __name__ == "__main__":
    launch_command(parse, main)
