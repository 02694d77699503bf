"""What ranks that share layers (tp) or positions (sp) exchange in a step: counted, and of a GPT by the formulas.

A rank of a tensor group that has t of T positions of B rows, F features and L blocks puts into all-reduces, elements:

    forward     2 L B t F behind attentions and mlps, B t F behind the table of tokens
    backward    2 L B t F before them, B t F before the output, which is the table
    loss        3 B t: of each position the largest logit, the sum of the powers and the target's logit

What attention sends where positions are shared stands in `parallel.sequence.ulysses` and `parallel.sequence.ring`; the
features there are those of this rank's heads.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import nan

from nnmpi.comm.gradients import Traffic
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.trainer import Trainer
from nnmpi.models.gpt import GPTEmbedding
from nnmpi.nn.activation import Dropout
from nnmpi.nn.linear import TiedLinear
from nnmpi.nn.module import Module
from nnmpi.nn.norm import LayerNorm
from nnmpi.nn.transformer import CausalSelfAttention, TransformerBlock
from nnmpi.parallel.sequence.group import RING
from nnmpi.parallel.sharded.collectives import CATEGORY
from nnmpi.shard import split
from nnmpi.timeline import Timeline, current, recording

LAYERS = (GPTEmbedding, Dropout, TransformerBlock, LayerNorm, TiedLinear)


class Meter:
    """Adds up the exchanges of sharded layers, step by step.

    Args:
        needed: whether there are such layers; otherwise it does nothing.

    Attributes:
        needed: as given.
        traffic: of the last body that ran.
        shape: of the whole samples that it was about; None before.
    """

    def __init__(self, needed: bool) -> None:
        self.traffic = Traffic()
        self.needed = needed
        self.shape: tuple[int, ...] | None = None

    def running(self) -> AbstractContextManager[None]:
        """Count what the body exchanges; where a trace is recorded, its events serve."""
        return self._counting() if self.needed else nullcontext()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        timeline = current() or Timeline()
        first = len(timeline.events)
        with recording(timeline):
            yield
        events = [event for event in timeline.events[first:] if event.category == CATEGORY]
        seconds = sum(event.end_s - event.begin_s for event in events)
        count = sum(int((event.args or {}).get("bytes", 0)) for event in events)
        self.traffic = Traffic(seconds, 0.0, count, len(events), nan if events else 0.0)

    def lines(self, trainer: Trainer) -> list[str]:
        """Return what ranks that share layers or positions exchanged in the last step, and what the formulas say."""
        shape, where, traffic = self.shape, trainer.arrangement, self.traffic
        if shape is None or where is None:
            return []
        elements = exchanged_elements(trainer.model, where, *shape) if len(shape) == 2 else None
        formula = "no formula for this model"
        if elements is not None and trainer.precision == "float32":  # then all is in the dtype of the weights
            formula = f"by the formulas {elements * trainer.model.storage.grads[0].dtype.itemsize:,}"
        return [
            f"layers and positions that ranks share: {traffic.calls} exchanges in the last step, {traffic.bytes:,} "
            f"bytes of rank {trainer.group.rank}; {formula}"
        ]


def exchanged_elements(model: Module, where: Arrangement, rows: int, time: int) -> int | None:
    """Return how many elements this rank exchanges with those that share its layers or positions, in a step.

    Args:
        model: this rank's layers.
        where: how they lie on the ranks.
        rows: of this rank's part of a batch.
        time: positions of the whole sequences.

    Returns:
        None for a model of other layers, or one whose activations are computed again, for which nothing is known here.
    """
    layers = [layer for name, layer in model.named_modules() if name and "." not in name]
    again = where.layout.activation_memory is not None
    if again or not all(isinstance(layer, LAYERS) for layer in layers):
        return None
    found = 0
    attentions = [each for _, each in model.named_modules() if isinstance(each, CausalSelfAttention)]
    if where.sequence is not None:
        found += sum(_attention(each, where, rows, time) for each in attentions)
        placement = where.sequence.placement(time)
        time = sum(map(len, placement.ranges(where.mesh.sp.size, where.mesh.sp.rank)))
    if where.mesh.tp.size > 1:
        tables = [layer for layer in layers if isinstance(layer, GPTEmbedding | TiedLinear)]
        features = _features(model)
        found += rows * time * features * (4 * len(attentions) + len(tables))
        found += 3 * rows * time * any(isinstance(layer, TiedLinear) for layer in layers)
    return found


def _features(model: Module) -> int:
    """Return the width of the model, of which every layer has a norm or a table."""
    norms = [each for _, each in model.named_modules() if isinstance(each, LayerNorm)]
    tables = [each.positions for _, each in model.named_modules() if isinstance(each, GPTEmbedding)]
    weights = [each.weight for each in (*norms, *tables)]
    return int(weights[0].shape[-1]) if weights else 0


def _attention(attention: CausalSelfAttention, where: Arrangement, rows: int, time: int) -> int:
    """Return what a rank sends for one attention, forward and backward."""
    mesh, sequence = where.mesh, where.sequence
    assert sequence is not None
    size, rank, heads = mesh.sp.size, mesh.sp.rank, len(split(attention.heads, mesh.tp.size)[mesh.tp.rank])
    placement, width = sequence.placement(time), attention.features // attention.heads
    lengths = [sum(map(len, placement.ranges(size, each))) for each in range(size)]
    if sequence.way == RING:
        return 2 * rows * heads * width * (3 * time - 2 * lengths[(rank + 1) % size] - lengths[rank])
    own = len(split(heads, size)[rank])
    return 4 * rows * width * (lengths[rank] * (heads - own) + own * (time - lengths[rank]))
