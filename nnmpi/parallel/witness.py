"""Whether all ranks do the same update, and share its batch: compared in messages sent anyway.

A witness is what one rank says of an update. Some of it must agree on all ranks: the rate, the
number of the update, the data and their order, what is frozen. Some must add up: the ranks' rows
cover the batch once, and their losses are as many as the gradient is divided by.

    rank 0    rate 0.1    rows 0-3 of 8    4 losses             h(4) - h(0)    checksum * (1 - size)
    rank 1    rate 0.1    rows 4-7 of 8    4 losses of 8        h(8) - h(4)    checksum
    sum                                                         h(8) - h(0)    0

Each rank adds one number, modulo a power of 2. Checksums of what is equal add up to 0, since the
first rank's is multiplied by 1 - size. A row's place has a random number h, and each interval adds
h(end) - h(begin): the sum is h(rows of the batch) - h(0) if and only if, with near certainty, the
intervals follow one another without a gap. So nothing is sent besides what the ranks sum anyway:
a Worker's losses, the gradients of a loop of one's own. Only if the sum is wrong are the texts
exchanged, to name the rank, the field and the values. A message of its own in every update would
take as long as the sum of the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.recording import active
from nnmpi.base.errors import UsageError
from nnmpi.base.loop import Taken, last_read
from nnmpi.comm.agreement import agreed, refuse_different, require_equal
from nnmpi.comm.group import Group
from nnmpi.data.loader import checksum
from nnmpi.nn.module import Module
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor

SAME_DATA = (
    "give every rank's Loader the group, and the same data and settings: Loader(data, size, group);"
    " a rank's own rows are given as arrays, x and y"
)
# by field: what the user can do
REMEDIES = {
    "learning rate": "set the same on all ranks, as from a loss that is summed over them",
    "number of updates": "call optimizer.step() equally often on all ranks",
    "number of backward passes": "call backward equally often on all ranks",
    "parameters frozen": "set requires_grad alike on all ranks",
    "layers": "build and change the model alike on every rank",
    "optimizer": "make it alike on every rank",
    "weights": (
        "give the optimizers of all ranks the same settings, and change weights equally on all of"
        " them"
    ),
    "rows": (
        "ranks with the same arrangement.data_rank take the same samples and labels, in the same"
        " order, as from data.Loader(dataset, batch_size, arrangement)"
    ),
}
_OTHER_ROWS = "the ranks of one replica were given different rows"
WINDOW = 2048  # words of the weights, which are compared in an update: another part each time


@dataclass(eq=False, slots=True)
class Said:
    """What is compared by a checksum, and shown as lines of text."""

    code: int
    texts: Callable[[], Sequence[str]]

    def __hash__(self) -> int:
        return self.code


@dataclass(frozen=True, slots=True)
class RowShare:
    """A rank's rows of a batch: intervals of 0..whole-1."""

    rows: tuple[tuple[int, int], ...]
    whole: int

    @classmethod
    def of(cls, batch: Taken) -> RowShare:
        """Return this rank's rows of a batch."""
        rows = ((cut.first_row, cut.first_row + cut.stop - cut.start) for cut in batch.cuts)
        return cls(tuple(rows), batch.global_rows)

    def __str__(self) -> str:
        parts = [f"{start}-{stop - 1}" for start, stop in self.rows if start < stop]
        return f"rows {', '.join(parts)}" if parts else "no rows"

    def number(self, salt: int, is_root: bool) -> int:
        """Return this rank's summand: over the ranks they add up to 0 if the rows are complete."""
        ends = [*self.rows, *([(self.whole, 0)] if is_root else [])]
        return sum(_mixed(salt, stop) - _mixed(salt, start) for start, stop in ends)


@dataclass(slots=True)
class Witness:
    """What this rank says of an update to a group's ranks.

    Attributes:
        group: the ranks.
        says: by field, what must agree: numbers, and checksums with their texts.
        shares: of batches, by their place in the update: what must add up.
        window: of the update, in a loop of one's own.
    """

    group: Group
    says: dict[str, Any] = field(default_factory=dict)
    shares: list[RowShare] = field(default_factory=list)
    window: UpdateSoFar | None = None

    def number(self, bits: int, salt: int = 0) -> int:
        """Return this rank's summand, below 2^bits; the sum modulo 2^bits is 0 if all is right."""
        size, is_root = self.group.size, self.group.is_root
        if size == 1 and not self.shares:
            return 0
        # numbers have the same hash in every process
        result = _mixed(salt, hash(tuple(self.says.values()))) * (1 - size * is_root)
        for place, share in enumerate(self.shares):
            result += share.number(salt + 7 * place, is_root)
        return result & ((1 << bits) - 1)

    def refuse(self, update: str) -> None:
        """Refuse what differs between the ranks, or is not complete. Collective.

        Raises:
            UsageError: on all ranks, naming it.
        """
        said = {
            name: [*value.texts()] if isinstance(value, Said) else [f"{value}"]
            for name, value in self.says.items()
        }
        rows = [[*share.rows, share.whole] for share in self.shares]
        updates, *by_rank = zip(*self.group.gather([update, said, rows]), strict=True)
        update = update if len({*updates}) == 1 else "an update"
        by_rank = [*zip(*by_rank, strict=True)]
        for name in dict.fromkeys(name for told, _ in by_rank for name in told):
            rows_differ = name == "rows"
            refuse_different(
                [told.get(name, []) for told, _ in by_rank],
                f"{update}: {_OTHER_ROWS if rows_differ else f'the ranks differ in {name}'}",
                REMEDIES.get(name, SAME_DATA),
                UsageError,
                None if rows_differ else str,
            )
        for given in zip(*(rows for _, rows in by_rank), strict=True):
            shares = [RowShare(tuple(map(tuple, item[:-1])), item[-1]) for item in given]
            parts = sorted(part for share in shares for part in share.rows if part[0] < part[1])
            ends = [0, *(stop for _, stop in parts)]
            if ends != [*(start for start, _ in parts), shares[0].whole]:
                refuse_different(
                    [[f"{share}"] for share in shares],
                    f"{update}: the ranks do not have each of the batch's {shares[0].whole} rows"
                    " once",
                    SAME_DATA,
                    UsageError,
                )
                raise UsageError(  # all have the same: no rows, or a part each
                    f"{update}: each rank has {shares[0]} of the batch's {shares[0].whole};"
                    f" {SAME_DATA}"
                )


def _mixed(salt: int, number: int) -> int:
    """Return 64 bits that look random: the output of splitmix64 (Steele et al., 2014).

    Python's `hash` of (salt, number) is cheaper, but it keeps arithmetic progressions: the rows 0-4
    of 10 on both of two ranks would pass.
    """
    bits = salt * 0x9E3779B97F4A7C15 + number & _WORD
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _WORD
    return bits ^ bits >> 31


_WORD = (1 << 64) - 1


def bits_of(dtype: Any, ranks: int) -> int:
    """Return how many bits each rank's number may have, for a sum without rounding."""
    return max(1, int(np.finfo(dtype).nmant) + 1 - (ranks - 1).bit_length())


class ModelWitness:
    """What a rank says of its model: its layers' settings, part of its weights, what is frozen.

    Layers and frozen parameters are looked at each time, and described again only after a change.

    Args:
        model: initialized.
        is_equal: whether other ranks have the same weights, bit for bit.
    """

    def __init__(self, model: Module, is_equal: bool) -> None:
        self._model, self._storage, self._is_equal = model, model.storage, is_equal
        self._turn, self._moves, self._parts = 0, -1, list[Array]()
        storage = model.storage
        self._parameters = [span.parameter for span in storage.spans]
        self._looks, self._trained, self._frozen = -1, list[bool](), _said([])

    def say(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return layers and weights, and what is frozen."""
        trained = [item.requires_grad for item in self._parameters]
        if trained != self._trained:  # seldom: texts of all parameters cost more than their flags
            self._trained = trained
            frozen = [item.name for item in self._parameters if not item.requires_grad]
            self._frozen = _said(frozen)
        if self._looks != self._storage.looks:
            self._looks, self._layers = self._storage.looks, _said(self._model.settings())
        said = {"layers": self._layers, "weights": self._look()}
        return said, {"parameters frozen": self._frozen}

    def _look(self) -> Said | int:
        """Return what is said of a part of the weights, another in each update."""
        storage = self._storage
        if self._moves != storage.moves:
            self._moves, self._parts = storage.moves, []
            if self._is_equal and not storage.node_shared:  # a device would be waited for
                pairs = zip(storage.data, storage.rank_local, strict=True)
                arrays = [array for array, is_local in pairs if not is_local and array.size]
                self._parts = [a.view(np.int64) for a in arrays if isinstance(a, np.ndarray)]
        if not self._parts:
            return 0
        self._turn += 1
        turn, which = divmod(self._turn, len(self._parts))
        part = self._parts[which]
        start = turn % -(-len(part) // WINDOW) * WINDOW
        # a checksum would take ten times as long as a sum
        return Said(int(np.add.reduce(part[start : start + WINDOW])), self._describe)

    def _describe(self) -> list[str]:
        pairs = ((item.name, item._data) for item in self._parameters if not item.rank_local)
        return [f"{name} with the checksum {checksum(data)}" for name, data in pairs]


def _told(batches: Sequence[Taken]) -> dict[str, Said]:
    """Return which batches an update has, by field."""
    return {
        f"batch {place}" if place else "batch": Said(item.code, item.texts)
        for place, item in enumerate(batches)
    }


def _said(texts: Sequence[str]) -> Said:
    return Said(crc32("\n".join(texts).encode()), lambda: texts)


class StepWitness:
    """What a Worker's ranks compare in each step, in one number among those that they sum anyway.

    Args:
        model: this rank's part.
        world: all ranks.
        copies: the ranks with parts of the same parameters.
        alike: the ranks with the same part of the model.
        sharers: groups whose ranks compute the same rows.
        replicas: the ranks that have a part of each batch each.
        is_equal: see `ModelWitness`.
    """

    def __init__(
        self,
        model: Module,
        world: Group,
        copies: Group,
        alike: Group,
        sharers: Sequence[Group],
        replicas: Group,
        is_equal: bool,
    ) -> None:
        self._world, self._copies, self._alike = world, copies, alike
        self._sharers, self._replicas = sharers, replicas
        self._groups = world, copies, alike, replicas  # of replicas alone it is one
        self._model = ModelWitness(model, is_equal)
        self._bits = bits_of("float64", world.size)
        self._parts: list[Witness] = []

    def begin(self, says: dict[str, Any], batches: Sequence[Taken], rows: Sequence[int]) -> None:
        """Begin a step, or an evaluation.

        Args:
            says: what must agree besides the batches.
            batches: this rank's.
            rows: a checksum of each, where several ranks compute the same ones.
        """
        self._parts = []
        if self._world.size == 1:
            return
        layers, frozen = self._model.say()
        parts = {id(group): Witness(group) for group in self._groups}
        parts[id(self._world)].says = says | _told(batches)
        parts[id(self._copies)].says |= frozen
        parts[id(self._alike)].says |= layers
        parts[id(self._replicas)].shares = [*map(RowShare.of, batches)]
        shared, last = hash(tuple(rows)), parts.pop(id(self._replicas))
        self._parts = [
            *parts.values(),
            *(Witness(group, {"rows": shared}) for group in self._sharers),
            last,  # rows that are not complete may be those of another replica
        ]

    def number(self, salt: int = 0) -> int:
        """Return this rank's summand: the sum modulo `modulus` is 0 if all is right."""
        return sum(part.number(self._bits, salt) for part in self._parts) % self.modulus

    @property
    def modulus(self) -> int:
        """A power of 2."""
        return 1 << self._bits

    def refuse(self, when: str) -> None:
        """Refuse what differs between ranks, or is not complete. Collective.

        Raises:
            UsageError: on all ranks, naming it.
        """
        for part in self._parts:
            with agreed(self._world):
                part.refuse(when)

    def require_same_rows(self, rows: Sequence[object]) -> None:
        """Refuse ranks of one replica that were given different rows. Collective."""
        for group in self._sharers:
            with agreed(self._world):
                require_equal(group, rows, _OTHER_ROWS, REMEDIES["rows"], UsageError, None)


class Losses(NamedTuple):
    """What is known of the losses that a backward pass begins with.

    Attributes:
        counts: how many are summed, in three ways (see `Function.summands`); None if it is unknown.
        kind: of the operation that sums them.
        is_mean: whether it divides by their number.
        is_whole: whether nothing comes behind it, such as a factor.
        says: whether they count at all: a rank without rows may have a loss with weight 0.
    """

    counts: tuple[int, ...] | None
    kind: str
    is_mean: bool
    is_whole: bool
    says: bool

    @classmethod
    def of(cls, loss: Tensor, waits: bool) -> Losses:
        """Return what is known of a loss.

        Args:
            loss: of a backward pass.
            waits: whether to wait for a device, and to end a recording, if that is needed.
        """
        node, on_host = loss.node, isinstance(loss._data, np.ndarray)
        if not waits and (active() is not None or not on_host):
            return cls(None, "", False, False, True)
        while node is not None and not node.summands:
            inner = [edge for edge in node.edges or () if isinstance(edge, Function)]
            node = inner[0] if len(inner) == 1 else None  # below a factor or a cast
        values = loss._data
        says = not on_host or bool(values.item() if values.size == 1 else values.any())
        if node is None:
            return cls(None, "", False, False, says)
        counts = node.summands if says else (0, 0, 0)
        return cls(counts, type(node).__name__, node.averages, node is loss.node, says)


class UpdateSoFar:
    """The passes of an update so far.

    Attributes:
        passes: their number.
        samples: what the last divides by.
        counts: of their losses; None if one of them is unknown.
        kind: of the operations that sum them.
        says: whether any loss counts.
        batches: the batches that were taken, by what identifies them.
    """

    __slots__ = ("batches", "counts", "kind", "passes", "samples", "says")

    def __init__(self) -> None:
        self.passes = self.samples = 0
        self.counts: Sequence[int] | None = (0, 0, 0)
        self.kind, self.says = "", False
        self.batches: dict[Any, Taken] = {}


class UpdateWitness:
    """What this rank says of each update of a loop of its own, in TAIL numbers.

        0   a checksum of what must agree, and of the rows that must add up
        1   a checksum of the number of samples by which the gradient is divided, and of the losses'
            kinds
        2   how many losses this rank sums, by three ways to count; the first rank subtracts the
            samples. In one of these ways, the same in all updates, they add up to 0
        5   1 if this rank cannot count them, or has none, and so no say in the number of samples

    Args:
        model, group: of the strategy.
        is_equal: see `ModelWitness`.
    """

    def __init__(self, model: Module, group: Group, is_equal: bool) -> None:
        self._group, self._storage = group, model.storage
        self._model = ModelWitness(model, is_equal)
        self._bits = bits_of(model.storage.dtype, group.size)
        self._updates = 0
        self._seen: dict[str, _Seen] = {}  # by kind of loss
        self.losses, self._said, self._rule = UpdateSoFar(), Witness(group), _said([""])

    def begin(self) -> None:
        """Begin an update, with its first pass."""
        self.losses = UpdateSoFar()

    def note(self, samples: int, losses: Losses) -> None:
        """Note a backward pass, and the batches of the loops that are open."""
        window = self.losses
        window.passes += 1
        window.samples, window.says = samples, window.says or losses.says
        if losses.counts is None or window.counts is None:
            window.counts = None
        elif window.passes == 1:
            window.kind, window.counts = losses.kind, losses.counts
        else:
            window.kind += f" {losses.kind}"
            window.counts = [*map(add, window.counts, losses.counts)]
        for loop, _ in last_read():
            taken = loop.taken
            # a loop that was left may have been one rank's look at the first batch
            if loop.is_open and taken and taken.source is not None and taken.source.world > 1:
                window.batches[id(taken.source), taken.epoch, taken.number] = taken

    def numbers(self) -> list[int]:
        """Return this rank's TAIL numbers for the update, and begin the next."""
        window, group = self.losses, self._group
        (rule, lr, steps), (layers, frozen) = self._storage.updated, self._model.say()
        if rule != self._rule.texts()[0]:
            self._rule = _said([rule])
        batches = [*window.batches.values()]
        says: dict[str, Any] = {
            "number of updates": steps,
            "number of backward passes": window.passes,
            "learning rate": lr,
            "optimizer": self._rule,
            **layers,
            **frozen,
        }
        self._said = Witness(group, says | _told(batches), [*map(RowShare.of, batches)], window)
        self._updates += 1
        counts = [0, 0, 0] if window.counts is None else window.counts
        samples, mask = window.samples, (1 << self._bits) - 1
        kind = crc32(window.kind.encode())
        numbers = [
            self._said.number(self._bits, self._updates),
            _mixed(self._updates + kind, samples) * (1 - group.size * group.is_root),
            *(count - samples * group.is_root for count in counts),
            window.counts is None or not window.says,
        ]
        return [number & mask for number in numbers]

    def judge(self, sums: Sequence[float]) -> None:
        """Refuse what the sums of all ranks' numbers show to be wrong. Collective if it is.

        Raises:
            UsageError: on all ranks, naming it.
        """
        mask, window = (1 << self._bits) - 1, self._said.window
        assert window is not None
        differ, samples, *counts, flags = [int(number) & mask for number in sums]
        seen = self._seen.get(window.kind)
        if seen is not None and 0 in seen.ways and not (differ or samples or flags or counts[0]):
            seen.is_rule |= window.samples != seen.whole
            return  # as nearly always
        update = f"update {self._updates}"
        if differ:
            self._said.refuse(update)
        # some rank has no losses, or they are unknown; a sum may be weighted
        if flags or "Sum" in window.kind.split():
            return
        if samples:
            have = self._group.gather([window.samples, window.counts])
            refuse_different(
                [[number] for number, _ in have],
                f"{update}: the ranks divide their losses by different numbers of samples",
                "give backward the number of the global batch, over all ranks",
                UsageError,
            )
            return  # of other kinds of losses
        # several losses of the same rows may have a pass each
        whole = max(window.samples, 1)
        ways = {
            way
            for way, count in enumerate(counts)
            if count % whole == 0 and count < window.passes * whole
        }
        seen = self._seen.setdefault(window.kind, _Seen(ways, whole))
        if ways & seen.ways:
            seen.ways &= ways
            seen.is_rule |= whole != seen.whole
        elif not seen.is_rule:
            seen.ways.clear()
        else:
            have = self._group.gather(window.counts)
            (way, *_) = seen.ways
            each = ", ".join(f"rank {rank} has {count[way]}" for rank, count in enumerate(have))
            raise UsageError(
                f"{update}: backward divides by {whole} samples, but the ranks' losses are of"
                f" {sum(count[way] for count in have)}: {each}; give each rank its rows of the"
                " batch, and backward the number of the global batch"
            )


@dataclass(slots=True)
class _Seen:
    """What a kind of loss has shown: the ways to count that were right so far.

    They are a rule only once the number of samples has changed with them: a program may divide by a
    constant, or weigh its losses.
    """

    ways: set[int]
    whole: int
    is_rule: bool = False
