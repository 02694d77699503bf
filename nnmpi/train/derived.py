"""What the options become, where they leave something open or more is needed than they say.

    layout                      with a schedule of the user's own; its mesh on these ranks
    attention                   ring or Ulysses, over positions
    microbatches                of a batch
    dropout, size, context      of a model, which may be a pretrained one

An option is checked when its section is made (`config`), once on each rank. The layout is found
before data are read.
"""

from copy import copy
from typing import Literal

from nnmpi.base.command import flag_of, non_defaults, require
from nnmpi.base.custom import load_custom
from nnmpi.base.errors import counted
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.comm.mesh import Mesh
from nnmpi.compose.arrange import find_mesh
from nnmpi.compose.layout import Layout
from nnmpi.data.text import DEFAULT_CONTEXT
from nnmpi.models.adapter import read_adapter
from nnmpi.models.llama import default_hidden
from nnmpi.models.llama_files import LlamaSize
from nnmpi.models.pretrained import GPTSize, Size, layer_names, read_dropout, read_size
from nnmpi.nn.sharding import RING, ULYSSES
from nnmpi.train.config import TRANSFORMERS, Config, ModelConfig, having

MICROBATCHES_PER_STAGE = 4
FIXED_MICROBATCHES = 16  # for every layout, since the bits depend on the number of microbatches


def find_layout(config: Config, group: Group) -> tuple[Layout, Mesh]:
    """Return the layout of the options, and its mesh of these ranks. Collective.

    Raises:
        LayoutError, UsageError: on all ranks, when the layout does not fit the number of ranks, or
            options exclude each other.
    """
    with agreed(group):
        layout = build_layout(config)
    mesh = find_mesh(group, layout)
    for name in non_defaults(config.parallel).keys() & {"pipeline", "virtual_stages", "split"}:
        # a resumed run may have had a pipeline before: its options are ignored then
        require(
            mesh.pp > 1 or config.run.resume is not None,
            f"{flag_of(name)} is for a pipeline, but {mesh} has none; give --pp 2 or more, or leave"
            " it out",
        )
    return layout, mesh


def build_layout(config: Config) -> Layout:
    """Return the layout of the options, which were checked when they were made.

    Raises:
        UsageError: for a pipeline of one's own that trains nothing.
    """
    pipeline = load_custom(config.parallel.pipeline, "--pipeline", "(rank, ranks, microbatches)")
    layout = copy(having(config.parallel, {"pipeline": pipeline}))
    # what follows from other options is none, and needs no check
    vars(layout).update(sp_attention=attention_of(config.model, layout))
    if isinstance(config.optimization.optimizer, str):
        vars(layout).update(state_arrays=config.state_arrays)
    return layout


def attention_of(model: ModelConfig, layout: Layout) -> Literal["ring", "ulysses"]:
    """Return how sequences attend: ring, if they have more ranks than heads of keys, or Ulysses.

    A program that gives its model chooses by itself.
    """
    if not isinstance(model.model, str):
        return layout.sp_attention
    ranks, knows = layout.sp * layout.shape[2], model.model in TRANSFORMERS
    return RING if layout.sp > 1 and knows and size_of(model).kv_heads < ranks else ULYSSES


def count_microbatches(config: Config, stages: int, batch_size: int) -> int:
    """Return the number of microbatches per batch.

    Args:
        config: of the run.
        stages: ranks of the pipeline; 1 without one.
        batch_size: rows of a global batch.

    Raises:
        UsageError: for more microbatches than samples.
    """
    parts = config.parallel.microbatches
    if parts is not None:
        samples = counted(batch_size, "sample")
        require(
            parts <= batch_size,
            f"--microbatches {parts} is more than the {samples} of a batch; give fewer",
        )
        return parts
    if config.parallel.reduction == "fixed":
        return min(FIXED_MICROBATCHES, batch_size)
    return min(MICROBATCHES_PER_STAGE * stages, batch_size) if stages > 1 else 1


def dropout_of(config: ModelConfig) -> float:
    """Return the model's dropout: the option, else the pretrained model's, else 0.

    Raises:
        DataError: for an unreadable pretrained model.
    """
    if config.dropout is None:
        return 0.0 if config.pretrained is None else read_dropout(config.pretrained)
    return config.dropout


def size_of(config: ModelConfig, vocabulary: int = 0, context: int = 0) -> Size:
    """Return the size of a gpt or a llama: the options', or the pretrained model's.

    Args:
        vocabulary, context: of a new one.

    Raises:
        DataError: for an unreadable pretrained model.
    """
    if config.pretrained is not None:
        return read_size(config.pretrained)
    layers, features, heads = config.sizes
    if config.model != "llama":
        return GPTSize(vocabulary, context, features, layers, heads)
    return LlamaSize(
        vocabulary,
        context,
        features,
        layers,
        heads,
        config.kv_heads or heads,
        config.hidden[0] if "hidden" in non_defaults(config) else default_hidden(features),
        features // heads,
        config.theta,
        tied=config.tied,
    )


def with_adapter(config: ModelConfig) -> ModelConfig:
    """Return the model's options, with those in its adapter's folder unless they are there.

    Raises:
        DataError: for a folder that cannot be read, or does not fit the pretrained model.
    """
    if config.adapter is None or config.pretrained is None or config.lora is not None:
        return config
    saved = read_adapter(config.adapter, layer_names(read_size(config.pretrained)))
    values = {
        "lora": saved.rank,
        "lora_alpha": saved.alpha,
        "lora_targets": ",".join(saved.layers),
        "lora_dropout": saved.dropout,
    }
    return having(config, values)


def context_of(config: ModelConfig) -> int:
    """Return the tokens of a sample: the option, else the pretrained model's longest, else 64.

    Raises:
        DataError: for an unreadable pretrained model.
    """
    if config.context is not None:
        return config.context
    return DEFAULT_CONTEXT if config.pretrained is None else read_size(config.pretrained).context
