"""Adapters in PEFT's files: a folder with adapter_config.json and adapter_model.safetensors.

    base_model.model.transformer.h.0.attn.c_attn.lora_A.weight (rank, in)    2.attention.qkv.lora_a
                                                .lora_B.weight (out, rank)   2.attention.qkv.lora_b

PEFT is Hugging Face's library of adapters. Its names are those of transformers' model, which
`pretrained` knows; a model of another kind has the same names in PyTorch as here. What PEFT can do
and `nn.LoRA` cannot is refused by its name in adapter_config.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.base.errors import DataError, shortened
from nnmpi.base.files import foreign, make_folder, read_json, write_json
from nnmpi.models.torch_weights import open_arrays, read_array, save_arrays
from nnmpi.nn.container import Sequential
from nnmpi.nn.lora import BaseDigest, adapt
from nnmpi.nn.module import Module

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}  # each transposed there
BASE = "nnmpi_base"  # in the weights' metadata: a hash of the weights that they are added to
# Entries of adapter_config.json that say nothing of what an adapter computes, or that are read.
READ = ("r", "lora_alpha", "lora_dropout", "peft_type", "bias", "init_lora_weights")
IDLE = """base_model_name_or_path exclude_modules fan_in_fan_out inference_mode layers_pattern
    layers_to_transform megatron_core peft_version qalora_group_size revision target_modules
    task_type auto_mapping runtime_config"""


@dataclass(frozen=True)
class Adapter:
    """An adapter's settings, as arguments of `nn.adapt`.

    Attributes:
        rank, alpha, dropout: see `nn.LoRA`.
        layers: the full names of the layers that it adapts.
        base: a hash of the weights that it was trained on; empty if another program wrote it.
    """

    rank: int
    alpha: float
    dropout: float
    layers: tuple[str, ...]
    base: str = ""


def read_adapter(folder: Path, names: Mapping[str, str]) -> Adapter:
    """Return the settings of an adapter.

    Args:
        folder: PEFT's.
        names: the base's layers -> their names in transformers' model; empty if they are the same.

    Raises:
        DataError: for a folder that cannot be read, and for an adapter of another kind or base.
    """
    file = folder / CONFIG
    with foreign(file, DataError, "not as PEFT writes it"):
        config = read_json(file)
        settings = config["r"], float(config["lora_alpha"]), float(config["lora_dropout"])
        usual = {"peft_type": "LORA", "bias": "none"}
        wrong = [name for name, value in usual.items() if config.get(name, value) != value]
        start = config.get("init_lora_weights", True)
        if start not in (True, False, "gaussian"):  # others change the base
            wrong.append("init_lora_weights")
        wrong += [name for name in config.keys() - {*IDLE.split(), *READ} if config[name]]
    if wrong:
        raise DataError(
            f"{file}: {wrong[0]} is {shortened(repr(config[wrong[0]]))}, which nn.LoRA does not"
            " have; only plain LoRA without biases can be read"
        )
    rank, alpha, dropout = settings
    ours = {theirs: name for name, theirs in names.items()}
    layers = dict[str, set[str]]()
    with open_arrays(folder / WEIGHTS, DataError) as stored:
        base = (stored.metadata() or {}).get(BASE, "")
        for name in stored.keys():  # noqa: SIM118  it is no mapping
            theirs, kind = _split(name)
            layer = ours.get(theirs, "" if names else theirs)
            shape = stored.get_slice(name).get_shape()
            place = 0 if kind == "lora_A.weight" else 1
            if not layer or kind not in FACTORS.values() or shape[place : place + 1] != [rank]:
                raise DataError(
                    f"{folder / WEIGHTS}: {shortened(name)} of shape {shape} is no part of an"
                    f" adapter of rank {rank} for this base"
                )
            layers.setdefault(layer, set()).add(kind)
    if not layers or any(len(kinds) < len(FACTORS) for kinds in layers.values()):
        raise DataError(f"{folder / WEIGHTS} lacks one of the two factors of a layer")
    return Adapter(rank, alpha, dropout, tuple(layers), base)


def load_adapter(model: Module, folder: Path, names: Mapping[str, str]) -> None:
    """Load an adapter's weights into a model.

    Args:
        model: with adapters of the same layers, initialized; a rank of a layout passes its part.
        folder, names: see `read_adapter`.

    Raises:
        DataError: see `read_adapter`; also for other layers or shapes. Nothing is changed then.
    """
    known = read_adapter(folder, names)
    values = dict[str, Array]()
    with open_arrays(folder / WEIGHTS, DataError) as stored:
        for name, parameter in model.named_parameters():
            layer, _, factor = name.rpartition(".")
            source = f"{PREFIX}{names.get(layer, layer)}.{FACTORS.get(factor, factor)}"
            shape = parameter.shape if parameter.region is None else parameter.region.shape
            is_there = layer in known.layers and factor in FACTORS
            found = read_array(folder / WEIGHTS, stored, source).T if is_there else np.zeros(0)
            if found.shape != shape:
                raise DataError(f"{folder} has no {name} of shape {shape}, as this model needs it")
            values[name] = found if parameter.region is None else parameter.region.take(found)
    storage = model.storage
    storage.version.meet()
    for span in storage.spans:
        parameter = span.parameter
        if parameter.name in values:
            part = values[parameter.name].astype(parameter.data.dtype)
            storage.write(span, namespace(parameter.data).asarray(part))
    storage.version.meet()


def adapted(
    model: Sequential,
    folder: Path,
    names: Mapping[str, str],
    base_dtype: Literal["bf16"] | None = None,
) -> Sequential:
    """Give a full model with values the adapter in a folder of PEFT's; return the model.

    Args:
        model: the base.
        folder, names: see `read_adapter`.
        base_dtype: see `adapt`.

    Raises:
        DataError: see `load_adapter`; also for an adapter that says that it was trained on others.
    """
    known, dtype = read_adapter(folder, names), model.storage.dtype.name
    adapt(model, known.rank, known.alpha, ",".join(known.layers), known.dropout, base_dtype)
    model.initialize(dtype=dtype)
    if known.base and known.base != BaseDigest.of(model):
        raise DataError(
            f"{folder} was trained on other weights than this model's, or on these with another"
            " base_dtype; give what it was trained on"
        )
    load_adapter(model, folder, names)
    return model


def write_adapter(
    folder: Path,
    values: Mapping[str, Array],
    alpha: float | None,
    dropout: float,
    names: Mapping[str, str],
    path: str = "",
    base: str = "",
) -> None:
    """Write an adapter as PEFT reads it.

    Args:
        folder: created if missing.
        values: of all adapters by name, as from `model.state()`; others are left out.
        alpha, dropout, names: see `read_adapter`; an alpha of None is the rank.
        path: where the base is, for `AutoPeftModel.from_pretrained`.
        base: its hash.

    Raises:
        OSError: when it cannot be written, or the folder is a link.
    """
    arrays, layers, rank = dict[str, Array](), list[str](), 0
    for name, value in values.items():
        layer, _, factor = name.rpartition(".")
        if factor in FACTORS:
            theirs = names.get(layer, layer)
            arrays[f"{PREFIX}{theirs}.{FACTORS[factor]}"] = value.T
            rank = value.shape[1] if factor == "lora_a" else rank
            layers += [theirs] if factor == "lora_a" else []
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if names else None,
        "base_model_name_or_path": path,
        "r": rank,
        "lora_alpha": float(rank if alpha is None else alpha),
        "lora_dropout": dropout,
        "target_modules": _targets(layers, [*names.values()]),
        "fan_in_fan_out": any(name.endswith(".c_attn") for name in names.values()),
        "bias": "none",
        "inference_mode": True,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_folder(folder, folder.parent)
    save_arrays(folder / WEIGHTS, arrays, {BASE: base} if base else None, folder.parent)
    write_json(folder / CONFIG, config, folder.parent)


def _split(name: str) -> tuple[str, str]:
    """Return the layer's name in an array's, and which of its arrays it is."""
    layer, dot, kind = name.removeprefix(PREFIX).rpartition(".lora_")
    return layer, f"lora_{kind}" if dot and name.startswith(PREFIX) else ""


def _targets(layers: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return PEFT's target_modules: ends of names where they fit these layers alone, else names.

    Args:
        layers: the adapted ones.
        every: all of the model.
    """
    ends = sorted({_end(name) for name in layers})
    fitting = {name for name in every if _end(name) in ends}
    return ends if fitting == {*layers} else sorted(layers)


def _end(name: str) -> str:
    """Return what layers of all blocks have in common: "attn.c_attn" of transformer.h.0."""
    return ".".join(name.split(".")[-2:])
