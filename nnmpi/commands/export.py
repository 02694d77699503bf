"""`nnmpi export`: a run's weights as a file for other programs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from nnmpi.base.command import check_known, read_command
from nnmpi.base.errors import UsageError, raised_as
from nnmpi.base.files import OutputFile
from nnmpi.base.wings import offered
from nnmpi.comm.agreement import on_root
from nnmpi.comm.group import Group
from nnmpi.comm.ranks import parse_together
from nnmpi.commands.start import WeightsConfig, launch_command
from nnmpi.models.pretrained import CONFIG, save_pretrained
from nnmpi.models.torch_weights import last_linear, write_torch
from nnmpi.nn.lora import merge
from nnmpi.train.build import build_model
from nnmpi.train.config import NO_ADAPTERS
from nnmpi.train.derived import size_of
from nnmpi.train.folder import RunFolder
from nnmpi.train.run import Run, load

PROGRAM = "nnmpi export"
DESCRIPTION = """Export a run's weights for other programs: nnmpi export RUN [options].

Writes a state_dict as safetensors, with PyTorch's names and layouts, for
safetensors.torch.load_file; or with --format onnx the model itself, for ONNX's runtimes. Numbers
are predicted in the units of the data. To import a state_dict, give --weights FILE to nnmpi
evaluate, predict or export. (A run of --model gpt also has a folder for
Hugging Face's transformers, RUN/model, or with --lora one for PEFT, RUN/adapter.)"""


@dataclass(frozen=True)
class ExportConfig(WeightsConfig):
    """Output, and the weights."""

    out: OutputFile | None = None
    """The file (default: RUN/torch.safetensors, RUN/model.onnx)."""
    replace: bool = False
    """Replace a file that is there."""

    format: Literal["safetensors", "onnx"] = "safetensors"
    """safetensors: the weights; onnx: the model, for batches of any size."""

    merge: bool = False
    """Of a run with --lora: add the adapters to the weights that they change, and write the full
    model, as a folder for transformers and --pretrained (default: RUN/merged), or as ONNX.
    """

    channels: Literal["last", "first"] = "last"
    """With onnx: where images have their channels; first is PyTorch's."""


parse = partial(read_command, "RUN", PROGRAM, DESCRIPTION, (ExportConfig,))


def main(words: Sequence[str], group: Group) -> None:
    """Write the file, on rank 0. Collective.

    Raises:
        NnmpiError: on all ranks.
    """
    console, (folder, options) = parse_together(words, parse, group)
    console.finish(on_root(group, partial(export, folder, options)))


def export(folder: Path, options: ExportConfig) -> str:
    """Write a run's weights, and return a sentence about them.

    Raises:
        UsageError: for a folder without a run, and for a file that cannot be written.
        CheckpointError: for a run without a checkpoint.
    """
    is_onnx, of_run = options.format == "onnx", RunFolder(folder)
    if options.merge and not is_onnx:
        return export_merged(folder, options.out or of_run.merged, options)
    file = options.out or (of_run.onnx if is_onnx else of_run.torch)
    if file.suffix not in ("", f".{options.format}"):
        raise UsageError(f"--out {file} must end in .{options.format}, the format of the file")
    if options.channels == "first" and not is_onnx:
        raise UsageError("--channels first is for --format onnx; PyTorch's weights are so anyway")
    check_known(file, f"{file}", options.replace)
    run = load_full(folder, options)
    kind = np.int64 if run.signature.is_tokens else run.config.run.dtype
    sample = np.zeros((1, *run.signature.sample_shape), kind)
    of, units = run.signature, ""
    if of.target_mean:
        layer = last_linear(run.model, sample)
        if layer is not None:
            run.model.load_state(of.with_units(run.model.state(), layer))
        else:
            units = (
                ". The model ends in no linear layer that could take the units of the data: they"
                f" are its outputs times {of.target_std:.9g}, plus"
                f" {', '.join(f'{mean:.9g}' for mean in of.target_mean)}"
            )
    if is_onnx:
        to_onnx = offered("to_onnx")
        count = to_onnx(run.model, sample, file, channels=options.channels, metadata=run.metadata())
        return f"{count} nodes of ONNX are in {file}{units}"
    with raised_as(UsageError, f"--out {file} cannot be written"):
        count = write_torch(file, run.model, sample, run.metadata())
    return f"{count} arrays, with PyTorch's names and layouts, are in {file}{units}"


def load_full(folder: Path, options: ExportConfig) -> Run:
    """Return a run whose model is a full one: with adapters they must be merged, and are.

    Raises:
        UsageError: for adapters without --merge, and for --merge without adapters.
    """
    run = load(folder, options.best, options.weights, options.trust)
    model = run.config.model
    if (model.lora is not None) != options.merge:
        raise UsageError(
            f"{folder} has no adapters to merge; leave --merge out"
            if options.merge
            else f"{folder} has adapters to the weights of --pretrained, which PEFT reads in"
            f" {run.folder.adapter}; give --merge for the full model"
        )
    if options.merge:
        plain = replace(model, **NO_ADAPTERS, dropout=0.0)
        full = build_model(plain, run.signature.sample_shape, run.signature.outputs)
        full.load_state(merge(run.model))
        run = replace(run, model=full, config=replace(run.config, model=plain))
    return run


def export_merged(folder: Path, out: Path, options: ExportConfig) -> str:
    """Write a run's model with its adapters merged as transformers reads it; return a sentence.

    Raises:
        UsageError: see `load_full`; also for a folder that is there, or cannot be written.
    """
    if out.exists() and not (options.replace and (out / CONFIG).is_file()):
        raise UsageError(
            f"{out} is there; give another folder as --out, or --replace for one with a model"
        )
    run = load_full(folder, options)
    tokenizer, model = run.tokenizer, run.config.model
    with raised_as(UsageError, f"{out} cannot be written"):
        end = None if tokenizer is None else tokenizer.end
        save_pretrained(out, run.model.state(), size_of(model), end)
        if tokenizer is not None:
            tokenizer.save(out)
    return f"the model with its adapters merged is in {out}, for transformers and --pretrained"


if __name__ == "__main__":
    launch_command(parse, main)
