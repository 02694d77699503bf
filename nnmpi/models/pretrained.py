"""Models in Hugging Face's files: a folder with config.json and model.safetensors.

Of large models there are several files, and model.safetensors.index.json, which names them.
config.json says of which type the model is. GPT-2 is described here, Llama and its kin in
`llama_files`; each is a class of sizes, which knows its model and the names of its weights:

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
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, namespace
from nnmpi.backend.kernels import cast
from nnmpi.base.errors import DataError, UsageError, counted, shortened
from nnmpi.base.files import foreign, make_folder, read_json, write_json
from nnmpi.base.shard import Region
from nnmpi.models.adapter import adapted, write_adapter
from nnmpi.models.gpt import gpt
from nnmpi.models.llama_files import FIRST_IN_BLOCK, TYPES, LlamaConfigReader, LlamaSize
from nnmpi.models.torch_weights import open_arrays, read_array, save_arrays
from nnmpi.nn.container import Sequential
from nnmpi.nn.lora import BaseDigest, adapters
from nnmpi.nn.module import Module
from nnmpi.tensor.parameter import Parameter

CONFIG, WEIGHTS = "config.json", "model.safetensors"
GENERATION = "generation_config.json"
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
ELEMENTS = 2**20  # that are read at a time
# names not needed: constant masks and frequencies, the copy
IDLE = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq", OUTPUT)
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

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values, which ranks can share."""
        return self.heads

    def build(self, dropout: float = 0.0) -> Sequential:
        """Return the model, uninitialized."""
        return gpt(**vars(self), dropout=dropout)

    def config(self) -> dict[str, Any]:
        """Return what config.json says of these sizes."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{theirs: getattr(self, ours) for ours, theirs in SIZES.items()},
            "n_ctx": self.context,
            **FIXED,
        }

    def names(self, layers: int) -> Iterator[tuple[str, str, bool]]:
        """Yield each parameter's name here, in a file without its prefix, and that it is as here.

        Args:
            layers: how many blocks.
        """
        parts = [
            (f"{i + 2}.{ours}", f"h.{i}.{theirs}")
            for i in range(layers)
            for ours, theirs in BLOCK.items()
        ]
        yield from (("0.tokens.weight", "wte.weight", False),)
        yield from (("0.positions.weight", "wpe.weight", False),)
        for ours, theirs in (*parts, (f"{self.layers + 2}", "ln_f")):
            for kind in ("weight", "bias"):
                yield f"{ours}.{kind}", f"{theirs}.{kind}", False


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

    def rows(
        self, name: str, region: Region | None = None, transposed: bool = False
    ) -> Iterator[tuple[int, Array]]:
        """Yield a rank's part of an array: some rows after others, and each time their first
        element's number.

        A few MB are read at a time, and of a part that is one range no more than it.

        Args:
            name: in the file.
            region: the part, of the array as it is here; None for all of it.
            transposed: whether the file has it so.
        """
        shape = tuple(self.get_slice(name).get_shape())
        shape = shape[::-1] if transposed else shape
        region = region or Region(shape, 0, 0, shape[0])
        if region.repeats > 1 or region.second:
            array = self.get_tensor(name)
            yield 0, region.take(array.T if transposed else array)
            return
        count, width = region.local_shape[0], prod(region.local_shape[1:])
        step, begin = max(1, ELEMENTS // max(width, 1)), region.start if region.axis == 0 else 0
        axes = [slice(None)] * len(shape)
        axes[region.axis] = slice(region.start, region.stop)
        # safetensors refuses an empty range at an array's end
        for first in range(0, count, step) if width else ():
            axes[0] = slice(begin + first, begin + min(first + step, count))
            index = tuple(reversed(axes) if transposed else axes)
            array = read_array(*self.files[name], name, index)
            yield first * width, array.T if transposed else array


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
                f" AutoModelForCausalLM as M; M.from_pretrained('{folder}')"
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


Size = GPTSize | LlamaSize


def read_size(folder: Path) -> Size:
    """Return the size of the model in a folder.

    Raises:
        DataError: when config.json cannot be read, or describes another architecture than
            `models.gpt`'s or `models.llama`'s; when the weights do not fit config.json.
    """
    values = _read_config(folder)
    if values["model_type"] in TYPES:
        size: Size = LlamaConfigReader(folder / CONFIG, values).size()
        tables = {"0.tokens.weight": "vocabulary"}
    else:
        size = _gpt_size(folder / CONFIG, values)
        tables = {"0.tokens.weight": "vocabulary", "0.positions.weight": "context"}
    with open_folder(folder) as stored:
        # compare with the weights now, before a caller allocates a model of a wrong size
        names = _names_in(stored, size)
        for ours, first in tables.items():
            name, _ = names[ours]
            shape = stored.get_slice(name).get_shape()
            expected = [getattr(size, first), size.features]
            if shape != expected:
                raise DataError(
                    f"{stored.source}: {name} has shape {shape}; {CONFIG} says {expected}"
                )
    return size


def model_named(folder: Path) -> str:
    """Return which of nnmpi's models a folder has: "gpt" or "llama".

    Raises:
        DataError: when config.json cannot be read, or is of another type.
    """
    return "llama" if _read_config(folder)["model_type"] in TYPES else "gpt"


def read_ends(folder: Path) -> list[int]:
    """Return the tokens that end a text, as a folder of Hugging Face names them; none elsewhere.

    Raises:
        DataError: when a file cannot be read, or names something else.
    """
    ends = list[int]()
    for file in (folder / GENERATION, folder / CONFIG):
        if not file.is_file() or not is_pretrained(folder):
            continue
        with foreign(file, DataError, "not as Hugging Face's transformers writes it"):
            named = read_json(file).get("eos_token_id")
        named = named if isinstance(named, list) else [named]
        if any(item is not None and type(item) is not int for item in named):
            raise DataError(f"{file}: eos_token_id is {shortened(repr(named))}; give numbers")
        ends += [item for item in named if item is not None]
    return ends


def from_pretrained(
    folder: str | Path,
    dtype: str = "float32",
    adapter: str | Path | None = None,
    base_dtype: Literal["bf16"] | None = None,
) -> Sequential:
    """Return the model in a folder of Hugging Face's transformers, with its weights.

    GPT-2, Llama, Mistral, Qwen 2 and 3, SmolLM and SmolLM 2, in safetensors. What they compute that
    nnmpi's model does not is refused by its name in config.json.

    Args:
        folder: with config.json and the weights.
        dtype: of the model.
        adapter: a folder of PEFT's, whose adapter the model gets; see `nn.adapt`.
        base_dtype: "bf16" keeps the weights below an adapter in bfloat16, see `nn.adapt`.

    Raises:
        DataError: for a folder that cannot be read, another architecture, or an adapter that was
            trained on other weights.
        UsageError: for a base_dtype without an adapter.
    """
    if base_dtype is not None and adapter is None:
        raise UsageError(
            "base_dtype is for weights that an adapter is added to; give adapter=, or nn.adapt a"
            " base_dtype"
        )
    size = read_size(Path(folder))
    model = size.build()
    leave_undrawn(model, size)
    model.initialize(dtype=dtype)
    load_pretrained(model, Path(folder))
    if adapter is None:
        return model
    return adapted(model, Path(adapter), layer_names(size), base_dtype)


def save_adapter(folder: str | Path, model: Module, base: str | Path) -> None:
    """Write a model's adapters as PEFT reads them.

    Args:
        folder: for adapter_config.json and adapter_model.safetensors; created if missing.
        model: the full model, with adapters of `nn.adapt`.
        base: the folder of the model to which they are added.

    Raises:
        UsageError: for a model without adapters, or with different ranks or factors.
        DataError: for a base that cannot be read.
        OSError: when it cannot be written, or the folder is a link.
    """
    settings = {(layer.rank, layer.alpha, layer.dropout.p) for _, layer in adapters(model)}
    if len(settings) != 1:
        raise UsageError(
            f"the model has {'adapters of several kinds' if settings else 'no adapters'}; PEFT's"
            " folder is written of a model of nn.adapt"
        )
    _, alpha, dropout = settings.pop()
    names = layer_names(read_size(Path(base)))
    digest = BaseDigest.of(model)
    write_adapter(Path(folder), model.state(), alpha, dropout, names, str(base), digest)


def _gpt_size(file: Path, values: Mapping[str, Any]) -> GPTSize:
    """Return the size of a GPT-2.

    Raises:
        DataError: for settings that `models.gpt` does not have.
    """
    sizes: dict[str, Any] = {ours: values.get(theirs) for ours, theirs in SIZES.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise DataError(
                f"{file}: {SIZES[name]} is {shortened(repr(size))}; it must"
                " be a whole number, 1 or more"
            )
    fixed = FIXED if values.get("n_inner") is None else {**FIXED, "n_inner": 4 * sizes["features"]}
    for name, value in fixed.items():
        if values.get(name, value) != value:
            raise DataError(
                f"{file}: {name} is {shortened(repr(values[name]))}; only {value!r} can be read"
            )
    return GPTSize(**sizes)


def read_dropout(folder: Path) -> float:
    """Return the dropout probability of the model in a folder.

    Raises:
        DataError: when config.json cannot be read, or has several probabilities.
    """
    result = _read_config(folder)
    if result["model_type"] != "gpt2":
        return 0.0  # a rate above 0 is refused with the size
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
        model: of the folder's type and size, initialized; a rank of a layout passes its part and
            reads its shards alone. Adapters keep their values.
        folder: written by transformers or `save_pretrained`.

    Raises:
        DataError: when the file cannot be read, names or shapes differ, or the output is not tied
            to the token embedding, but should be. Nothing is changed then.
    """
    size = read_size(folder)
    with open_folder(folder) as stored:
        file, names = stored.source, _names_in(stored, size)
        weights = [item for item in model.named_weights() if item[0] in names]  # no adapters
        for ours, parameter in weights:
            name, transposed = names[ours]
            source = stored.get_slice(name)
            shape = tuple(source.get_shape())
            expected = parameter.shape if parameter.region is None else parameter.region.shape
            expected = expected[::-1] if transposed else expected
            if shape != expected or source.get_dtype() not in DTYPES:
                raise DataError(
                    f"{file}: {name} is {source.get_dtype()} {shape}, but the model needs"
                    f" {expected}, in one of {', '.join(DTYPES)}"
                )
        tokens, _ = names["0.tokens.weight"]
        is_tied = OUTPUT not in {name for name, _ in names.values()}
        if OUTPUT in stored.files and is_tied and not _are_equal(stored, OUTPUT, tokens):
            raise DataError(
                f"{file}: {OUTPUT} is not {tokens}; only a model whose output is tied to its"
                f" embedding, as {CONFIG} says it is, can be read"
            )
        storage = model.storage
        storage.version.meet()
        spans = {span.parameter: span for span in storage.spans}
        for ours, parameter in weights:
            name, transposed = names[ours]
            rows = _here(stored.rows(name, parameter.region, transposed), parameter, storage.dtype)
            if parameter.home is not None:
                for first, values in rows:
                    parameter.home.fill(parameter, values, first)
            elif parameter.is_base:
                parameter.hold(_joined(rows, parameter, storage.dtype), storage.dtype)
            else:
                for first, values in rows:
                    storage.write(spans[parameter], values, first)
        storage.version.meet()


Rows = Iterator[tuple[int, Array]]  # see `StoredArrays.rows`


def _here(rows: Rows, parameter: Parameter, dtype: Dtype) -> Rows:
    """Yield rows in the library of a parameter's values, and in this dtype."""
    like = parameter.stored if parameter.home is None else parameter.home.data[0]
    for first, values in rows:
        part = np.ascontiguousarray(values.astype(dtype, copy=False))
        yield first, namespace(like).asarray(part)


def _joined(rows: Rows, parameter: Parameter, dtype: Dtype) -> Array:
    """Return all rows of a base's weight, in the dtype in which it is kept."""
    like = parameter.stored
    result = np.empty(like.shape, parameter.base_dtype or dtype, like=like)
    flat = result.reshape(-1)
    for first, values in rows:
        flat[first : first + values.size] = cast(values, result.dtype).reshape(-1)
    return result


def _are_equal(stored: StoredArrays, one: str, other: str) -> bool:
    """Return whether two arrays of a model's files have the same shape and values."""
    slices = stored.get_slice(one), stored.get_slice(other)
    return (
        slices[0].get_dtype() in DTYPES
        and slices[0].get_shape() == slices[1].get_shape()
        and all(
            np.array_equal(a, b)
            for (_, a), (_, b) in zip(stored.rows(one), stored.rows(other), strict=True)
        )
    )


def leave_undrawn(model: Module, size: Size) -> None:
    """Have `initialize` draw no weights that `load_pretrained` writes then.

    Drawn on every rank in float64, they would take more memory and time than reading does.

    Args:
        model: built of the size, not initialized.
    """
    names = {ours for ours, _, _ in size.names(size.layers)}
    for name, parameter in model.named_weights():
        if name in names:
            parameter.init = _undrawn


def _undrawn(generator: np.random.Generator, shape: Shape) -> Array:
    """Return zeros that take no memory."""
    return np.broadcast_to(np.float32(0), shape)


def layer_names(size: Size) -> dict[str, str]:
    """Return the names of a model's layers in transformers' model, by their full names here."""
    prefix, end = PREFIX if isinstance(size, GPTSize) else "", ".weight"
    return {
        ours.removesuffix(end): prefix + theirs.removesuffix(end)
        for ours, theirs, _ in size.names(size.layers)
        if ours.endswith(end)
    }


def save_pretrained(
    folder: Path,
    weights: Mapping[str, Array],
    size: Size,
    end: int | None = None,
    dropout: float = 0.0,
) -> None:
    """Write a model as transformers reads it.

    Args:
        folder: for config.json and model.safetensors; created if missing.
        weights: the full model's, by name, as from `model.state()`.
        size: the model's.
        end: the token that ends a text, or None.
        dropout: of a GPT-2: the dropout probability of its training.

    Raises:
        OSError: when it cannot be written, or the folder is a link.
        UsageError: for a model that transformers does not have.
    """
    config, prefix, root = size.config(), "", folder.parent
    if isinstance(size, GPTSize):
        prefix, config = PREFIX, config | dict.fromkeys(DROPOUTS, dropout)
    root.mkdir(parents=True, exist_ok=True)
    make_folder(folder, root)
    arrays = {
        prefix + theirs: weights[ours].T if transposed else weights[ours]
        for ours, theirs, transposed in size.names(size.layers)
    }
    save_arrays(folder / WEIGHTS, arrays, root=root)
    dtype = str(weights["0.tokens.weight"].dtype)
    ends = {"bos_token_id": end, "eos_token_id": end, "dtype": dtype}
    write_json(folder / CONFIG, {**config, **ends}, root)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        DataError: when it cannot be read, or is of a type that is none of nnmpi's models.
    """
    file = folder / CONFIG
    with foreign(file, DataError, "not as Hugging Face's transformers writes it"):
        result = read_json(file)
    kind = result.get("model_type") if isinstance(result, dict) else None
    if kind not in ("gpt2", *TYPES):
        raise DataError(
            f"{file} is of a model of type {shortened(repr(kind))}; only gpt2,"
            f" {', '.join(TYPES)} can be read"
        )
    return result


def _names_in(stored: StoredArrays, size: Size) -> dict[str, tuple[str, bool]]:
    """Return the name in the file of each parameter, and whether it is transposed there.

    Raises:
        DataError: for missing or unknown names.
    """
    available = set(stored.files)
    is_gpt = isinstance(size, GPTSize)
    has_prefix = is_gpt and any(name.startswith(PREFIX) for name in available)
    prefix = PREFIX if has_prefix else ""
    # one block beyond those in the file is enough to report names as missing: config.json is not
    # trusted, and its number of layers may be huge
    first = "ln_1.weight" if is_gpt else FIRST_IN_BLOCK
    blocks = sum(name.endswith(first) for name in available)
    names = {
        ours: (prefix + theirs, transposed)
        for ours, theirs, transposed in size.names(min(size.layers, blocks + 1))
    }
    expected = {name for name, _ in names.values()}
    missing = sorted(expected - available)
    unknown = sorted(name for name in available - expected if not name.endswith(IDLE))
    if missing or unknown:
        kind = "GPT-2" if is_gpt else "Llama"
        raise DataError(
            f"{stored.source} does not fit a {kind} of {counted(size.layers, 'layer')}: missing "
            f"{', '.join(missing[:4]) or 'nothing'}, unknown {', '.join(unknown[:4]) or 'nothing'}"
        )
    return names
