"""GPT-2 in Hugging Face's files: a folder with config.json and model.safetensors.

Of large models there are several files, and model.safetensors.index.json, which names them.

    transformer.wte.weight            0.tokens.weight          also the tied output, stored once
    transformer.wpe.weight            0.positions.weight
    transformer.h.0.attn.c_attn.*     2.attention.qkv.*        weights are (in, out) in both
    ...                               ...
    transformer.ln_f.*                L+2.*

The published files of OpenAI's weights omit the prefix "transformer." and contain the masks of
attention, which are ignored.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.base.errors import DataError, counted, shortened
from nnmpi.base.files import foreign, make_folder, read_json, write_json
from nnmpi.models.torch_weights import open_arrays, read_array, save_arrays
from nnmpi.nn.module import Module

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PREFIX = "transformer."
BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.0": "mlp.c_fc",
    "mlp.2": "mlp.c_proj",
}
OUTPUT = "lm_head.weight"  # a copy of wte.weight, which some files contain
IDLE = ("attn.bias", "attn.masked_bias", OUTPUT)  # names not needed: constant masks, the copy
DTYPES = ("F16", "BF16", "F32", "F64")
# entries of config.json and their defaults
DROPOUTS = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
SIZES = {
    "vocabulary": "vocab_size",
    "context": "n_positions",
    "features": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
}

# Architecture settings of config.json with the only value that `models.gpt` implements.
FIXED: Mapping[str, Any] = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class GPTSize:
    """The arguments of `models.gpt` that determine a model's size."""

    vocabulary: int
    context: int
    features: int
    layers: int
    heads: int


@dataclass(frozen=True)
class StoredArrays:
    """The arrays of a model's files.

    Attributes:
        source: the file that errors name.
        files: by array, its file, and that file open.
    """

    source: Path
    files: Mapping[str, tuple[Path, Any]]

    def get_slice(self, name: str) -> Any:
        """Return an array's shape and dtype, as safetensors does."""
        return self.files[name][1].get_slice(name)

    def get_tensor(self, name: str) -> Array:
        """Return an array; bfloat16 as float32."""
        return read_array(*self.files[name], name)


@contextmanager
def open_folder(folder: Path) -> Iterator[StoredArrays]:
    """Open the arrays of all files of a folder.

    Raises:
        DataError: when one cannot be read; for a folder with pickled weights alone.
    """
    with ExitStack() as stack:
        opened = dict[str, tuple[Path, Any]]()
        for file in weight_files(folder):
            stored = stack.enter_context(open_arrays(file, DataError))
            opened |= dict.fromkeys(stored.keys(), (file, stored))
        yield StoredArrays(folder / (WEIGHTS if (folder / WEIGHTS).is_file() else INDEX), opened)


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's files of weights, one or those that its index names.

    Raises:
        DataError: when the index cannot be read; for a folder with pickled weights alone.
    """
    file, index = folder / WEIGHTS, folder / INDEX
    if file.is_file() or not index.is_file():
        if not file.is_file() and (pickled := sorted(folder.glob("*.bin"))):
            raise DataError(
                f"{pickled[0]} is a pickle, which can run code as it is read, so nnmpi does not"
                f' read it; write {WEIGHTS} beside it: python -c "from transformers import'
                f" GPT2LMHeadModel as M; M.from_pretrained('{folder}')"
                f".save_pretrained('{folder}')\""
            )
        return [file]
    with foreign(index, DataError, "not as Hugging Face's transformers writes it"):
        names = sorted({*read_json(index)["weight_map"].values()})
        wrong = [name for name in names if Path(name).name != name]
    if wrong or not names:
        raise DataError(f"{index} names {wrong[0] if wrong else 'no file'}; give files beside it")
    return [folder / name for name in names]


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder looks like Hugging Face's, also one that is refused."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX, "pytorch_model.bin"))


def read_size(folder: Path) -> GPTSize:
    """Return the size of the model in a folder.

    Raises:
        DataError: when config.json cannot be read, or describes another architecture than
            `models.gpt`'s; when the weights do not fit config.json.
    """
    result = _read_config(folder)
    sizes: dict[str, Any] = {ours: result.get(theirs) for ours, theirs in SIZES.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise DataError(
                f"{folder / CONFIG}: {SIZES[name]} is {shortened(repr(size))}; it must"
                " be a whole number, 1 or more"
            )
    fixed = FIXED if result.get("n_inner") is None else {**FIXED, "n_inner": 4 * sizes["features"]}
    for name, value in fixed.items():
        if result.get(name, value) != value:
            raise DataError(
                f"{folder / CONFIG}: {name} is {shortened(repr(result[name]))}; only"
                f" {value!r} can be read"
            )
    with open_folder(folder) as stored:
        # compare with the weights now, before a caller allocates a model of a wrong size
        names = _names_in(stored, sizes["layers"])
        for ours, first in (("0.tokens.weight", "vocabulary"), ("0.positions.weight", "context")):
            shape = stored.get_slice(names[ours]).get_shape()
            expected = [sizes[first], sizes["features"]]
            if shape != expected:
                raise DataError(
                    f"{stored.source}: {names[ours]} has shape {shape}; {CONFIG} says {expected}"
                )
    return GPTSize(**sizes)


def read_dropout(folder: Path) -> float:
    """Return the dropout probability of the model in a folder.

    Raises:
        DataError: when config.json cannot be read, or has several probabilities.
    """
    result = _read_config(folder)
    rates = {name: result.get(name, usual) for name, usual in DROPOUTS.items()}
    rate = rates["attn_pdrop"]
    if (
        not isinstance(rate, int | float)
        or not 0 <= rate < 1
        or any(item != rate for item in rates.values())
    ):
        raise DataError(
            f"{folder / CONFIG}: dropouts are {rates}; only one probability in [0, 1) for all three"
            " can be read; choose a dropout for this run"
        )
    return float(rate)


def load_pretrained(model: Module, folder: Path) -> None:
    """Load the weights in a folder into a model.

    Args:
        model: `models.gpt` of the folder's size, initialized; a rank of a layout passes its part
            and reads its shards alone.
        folder: written by transformers or `save_pretrained`.

    Raises:
        DataError: when the file cannot be read, names or shapes differ, or the output is not tied
            to the token embedding. Nothing is changed then.
    """
    layers = read_size(folder).layers
    with open_folder(folder) as stored:
        file, names = stored.source, _names_in(stored, layers)
        for name, parameter in model.named_parameters():
            source = stored.get_slice(names[name])
            shape = tuple(source.get_shape())
            expected = parameter.shape if parameter.region is None else parameter.region.shape
            if shape != expected or source.get_dtype() not in DTYPES:
                raise DataError(
                    f"{file}: {names[name]} is {source.get_dtype()} {shape}, but the model needs"
                    f" {expected}, in one of {', '.join(DTYPES)}"
                )
        tokens = names["0.tokens.weight"]
        if OUTPUT in stored.files and not (
            stored.get_slice(OUTPUT).get_dtype() in DTYPES
            and np.array_equal(stored.get_tensor(OUTPUT), stored.get_tensor(tokens))
        ):
            raise DataError(
                f"{file}: {OUTPUT} is not {tokens}; only a GPT-2 whose output is tied to its"
                " embedding can be read"
            )
        model.storage.version.meet()
        for span in model.storage.spans:
            parameter, full = span.parameter, stored.get_tensor(names[span.parameter.name])
            part = full if parameter.region is None else parameter.region.take(full)
            model.storage.write(
                span, namespace(parameter.data).asarray(part.astype(parameter.data.dtype))
            )
        model.storage.version.meet()


def save_pretrained(
    folder: Path,
    weights: Mapping[str, Array],
    heads: int,
    dropout: float = 0.0,
    end: int | None = None,
) -> None:
    """Write a GPT-2 as transformers reads it.

    Args:
        folder: for config.json and model.safetensors; created if missing.
        weights: the full model's, by name, as from `model.state()`.
        heads: of each attention.
        dropout: the dropout probability of its training.
        end: the token that ends a text, or None.

    Raises:
        OSError: when it cannot be written, or the folder is a link.
    """
    vocabulary, features = weights["0.tokens.weight"].shape
    context = len(weights["0.positions.weight"])
    layers = max(int(name.partition(".")[0]) for name in weights) - 2
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **dict(zip(SIZES.values(), (vocabulary, context, features, layers, heads), strict=True)),
        "n_ctx": context,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": str(weights["0.tokens.weight"].dtype),
        **dict.fromkeys(DROPOUTS, dropout),
        **FIXED,
    }
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    make_folder(folder, root)
    arrays = {PREFIX + theirs: weights[ours] for ours, theirs in _names(layers)}
    save_arrays(folder / WEIGHTS, arrays, root=root)
    write_json(folder / CONFIG, config, root)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        DataError: when it cannot be read, or is not a GPT-2's.
    """
    file = folder / CONFIG
    with foreign(file, DataError, "not as Hugging Face's transformers writes it"):
        result = read_json(file)
    kind = result.get("model_type") if isinstance(result, dict) else None
    if kind != "gpt2":
        raise DataError(
            f"{file} is of a model of type {shortened(repr(kind))}; only gpt2 can be read"
        )
    return result


def _names(layers: int) -> Iterator[tuple[str, str]]:
    """Yield each parameter's name in nnmpi, and its name in the file without the prefix."""
    parts = [
        (f"{i + 2}.{ours}", f"h.{i}.{theirs}")
        for i in range(layers)
        for ours, theirs in BLOCK.items()
    ]
    yield from (("0.tokens.weight", "wte.weight"), ("0.positions.weight", "wpe.weight"))
    for ours, theirs in (*parts, (f"{layers + 2}", "ln_f")):
        for kind in ("weight", "bias"):
            yield f"{ours}.{kind}", f"{theirs}.{kind}"


def _names_in(stored: StoredArrays, layers: int) -> dict[str, str]:
    """Return the name in the file of each parameter.

    Raises:
        DataError: for missing or unknown names.
    """
    available = set(stored.files)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in available) else ""
    # one block beyond those in the file is enough to report names as missing: config.json is not
    # trusted, and its number of layers may be huge
    blocks = sum(name.endswith("ln_1.weight") for name in available)
    names = {ours: prefix + theirs for ours, theirs in _names(min(layers, blocks + 1))}
    missing = sorted(set(names.values()) - available)
    unknown = sorted(name for name in available - set(names.values()) if not name.endswith(IDLE))
    if missing or unknown:
        raise DataError(
            f"{stored.source} does not fit a GPT-2 of {counted(layers, 'layer')}: missing "
            f"{', '.join(missing[:4]) or 'nothing'}, unknown {', '.join(unknown[:4]) or 'nothing'}"
        )
    return names
