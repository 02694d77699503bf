"""Whether all ranks do the same, and share each batch: compared in some updates, by words.

A witness is what one rank says of an update. Some of it must agree on all ranks: the rate, the
number of the update, the data and their order, the loss, the weights. Some must add up: the ranks'
rows cover the batch once, and their losses are as many as the gradient is divided by.

    update    1  2  3  4  5  6  7  8  ...  16  ...  1000  ...  1024  ...  2000
    compared  x  x     x           x        x         x          x          x

So what one rank does differently is named before the run is twice as long, and costs nothing in the
updates between. The ranks gather a checksum of each field; only if some differ are the words
themselves exchanged, to name the rank, the field and the values. A field may be None: this rank has
no say in it, such as in the loss if it has no rows.

    compare          the comparison of what ranks say, by fields
    StepWitness      of a Worker's steps and evaluations, in the groups of its layout
    UpdateWitness    of a loop of one's own, and what its losses are the sums of
    loss_as_words    what the graph of a loss tells of it

A step that is compiled is done by Python where an update is compared (`recording.eager_while`), so
that replays contain none of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from nnmpi.backend.array import namespace
from nnmpi.backend.program.record import bare
from nnmpi.base.errors import UsageError, is_own
from nnmpi.base.loop import Taken, last_read
from nnmpi.comm.agreement import agreed, refuse_different, require_equal
from nnmpi.comm.buffers import to_host, to_hosts
from nnmpi.comm.group import Group
from nnmpi.data.loader import checksum
from nnmpi.nn.mode import last_masks
from nnmpi.nn.module import Module
from nnmpi.ops.loss import Reduced
from nnmpi.optim.optimizer import Optimizer
from nnmpi.tensor.elementwise import Pointwise
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor

Words: TypeAlias = Mapping[str, Sequence[str] | None]
"""By field: lines of text that all ranks have; None where this rank has no say."""

SAME_DATA = (
    "give every rank's Loader the group, and the same data and settings: Loader(data, size, group);"
    " a rank's own rows are given as arrays, x and y"
)
GLOBAL_SAMPLES = "give backward the number of the global batch, over all ranks"
_OTHER_ROWS = "the ranks of one replica were given different rows"

LOSS, FACTOR, MODE = "loss", "factor of the loss", "mode"
TRANSFORMED, PASSES, ROWS, WEIGHTS = "transform", "number of backward passes", "rows", "weights"

# by field: what the user can do
REMEDIES = {
    "learning rate": "set the same on all ranks, as from a loss that is summed over them",
    "number of updates": "call optimizer.step() equally often on all ranks",
    PASSES: "call backward equally often on all ranks",
    "parameters frozen": "set requires_grad alike on all ranks",
    "layers": "build and change the model alike on every rank",
    "optimizer": "make it alike on every rank",
    WEIGHTS: (
        "give the optimizers of all ranks the same settings, and change weights equally on all of"
        " them"
    ),
    ROWS: (
        "ranks with the same arrangement.data_rank take the same samples and labels, in the same"
        " order, as from data.Loader(dataset, batch_size, arrangement)"
    ),
    LOSS: "compute the same loss on all ranks, with the same options",
    FACTOR: "multiply the sum of the losses by the same number on all ranks",
    MODE: (
        "compute the loss on all ranks within nn.training(...) of the same seed and step, or on all"
        " of them outside"
    ),
    TRANSFORMED: "give every rank's Loader the same transform",
}
# of these a rank may use fewer than another, such as one of two losses
_SETS = LOSS, MODE
EVERY = 1000  # updates, after which ranks compare one that is no power of 2


def is_due(number: int) -> bool:
    """Return whether ranks compare an update, counted from 1."""
    return number & (number - 1) == 0 or number % EVERY == 0


# ---- the words of a group's ranks ----


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


@dataclass(frozen=True, slots=True)
class Field:
    """What the ranks of a team have alike.

    Attributes:
        name: of the field, the same on all ranks.
        texts: its lines; None where this rank has no say.
        team: a number that the ranks of a team have in common, and no others.
    """

    name: str
    texts: Sequence[str] | None
    team: int = 0


def _told(group: Group, value: Any) -> list[Any]:
    """Return what each rank says. The seconds are those of an exchange, not of computing."""
    with group.collective("comparison"):
        return group.gather(value)


def compare(
    group: Group, when: str, fields: Sequence[Field], shares: Sequence[RowShare], team: int = 0
) -> None:
    """Refuse what differs between the ranks of a team, or is not complete. Collective.

    Args:
        group: all ranks.
        when: the update, as text.
        fields: what this rank says.
        shares: its rows of the update's batches.
        team: of the ranks that have a part of each batch each.

    Raises:
        UsageError: on all ranks, naming it.
    """
    told = {item.name: (item.team, _code(item.name, item.texts)) for item in fields}
    rows = [[*share.rows, share.whole] for share in shares]
    whens, *by_field = zip(*_told(group, [when, told, team, rows]), strict=True)
    by_rank = [*zip(*by_field, strict=True)]
    if len({*whens}) > 1:  # the number is what they differ in
        when = "a step"
    for name in dict.fromkeys(name for said, *_ in by_rank for name in said):
        nothing = 0, _code(name, [])
        of_all = [said.get(name, nothing) for said, *_ in by_rank]
        for members in _teams([number for number, _ in of_all]):
            if not _agree([of_all[rank][1] for rank in members]):
                mine = next((item.texts for item in fields if item.name == name), [])
                _refuse(when, name, _told(group, mine), members)
    for members in _teams([number for _, number, _ in by_rank]):
        # a batch that only some ranks have is named by its words
        for given in zip(*(by_rank[rank][2] for rank in members), strict=False):
            parts = [RowShare(tuple(map(tuple, item[:-1])), item[-1]) for item in given]
            _refuse_incomplete(when, parts, members)


def _teams(numbers: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each team."""
    teams: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        teams.setdefault(number, []).append(rank)
    return [*teams.values()]


def _refuse(
    when: str, name: str, by_rank: Sequence[Sequence[str] | None], members: Sequence[int]
) -> None:
    """Name what differs in a field between some ranks."""
    told = [by_rank[rank] for rank in members]
    heard = next(texts for texts in told if texts is not None)
    is_rows = name.startswith(ROWS)
    refuse_different(
        [heard if texts is None else texts for texts in told],
        f"{when}: {_OTHER_ROWS if is_rows else f'the ranks differ in {name}'}",
        next((text for start, text in REMEDIES.items() if name.startswith(start)), SAME_DATA),
        UsageError,
        None if is_rows else str,
        members,
    )


def _code(name: str, texts: Sequence[str] | None) -> int | list[int] | None:
    """Return what is compared of a field's lines: a checksum, or one of each."""
    if texts is None:
        return None
    if name in _SETS:
        return sorted({crc32(text.encode()) for text in texts})
    return crc32("\n".join(texts).encode())


def _agree(codes: Sequence[Any]) -> bool:
    """Return whether the ranks that have a say agree; of sets, whether the largest has all."""
    said = [code for code in codes if code is not None]
    if not said or not isinstance(said[0], list):
        return len({*said}) <= 1
    largest = {*max(said, key=len)}
    return all(largest.issuperset(code) and bool(code) == bool(largest) for code in said)


def _refuse_incomplete(when: str, shares: Sequence[RowShare], members: Sequence[int]) -> None:
    """Refuse ranks that do not have each of a batch's rows once."""
    parts = sorted(part for share in shares for part in share.rows if part[0] < part[1])
    ends = [0, *(stop for _, stop in parts)]
    if ends == [*(start for start, _ in parts), shares[0].whole]:
        return
    refuse_different(
        [[f"{share}"] for share in shares],
        f"{when}: the ranks do not have each of the batch's {shares[0].whole} rows once",
        SAME_DATA,
        UsageError,
        str,
        members,
    )
    raise UsageError(  # all have the same: no rows, or a part each
        f"{when}: each rank has {shares[0]} of the batch's {shares[0].whole}; {SAME_DATA}"
    )


# ---- words ----


def _of_batches(batches: Sequence[Taken]) -> Iterator[Field]:
    """Yield which batches an update has, and what the transform makes of some samples."""
    for place, batch in enumerate(batches):
        number = f" {place}" if place else ""
        yield Field(f"batch{number}", batch.texts())
        made = None if batch.source is None else batch.source.transformed()
        yield Field(f"{TRANSFORMED}{number}", None if made is None else [made])


def _of_optimizer(optimizer: Optimizer | None, team: int = 0) -> Iterator[Field]:
    """Yield an optimizer's number of updates, rate and rule.

    Args:
        optimizer: None if there is none (any more): then this rank has no say.
        team: the ranks with the same groups of parameters.
    """
    updates = rate = rule = None
    if optimizer is not None:
        updates, rate = [f"{optimizer.steps}"], [f"{float(optimizer.lr)!r}"]
        rule = [type(optimizer).__name__]
        if is_own(type(optimizer)):  # of a user's, other attributes may be the rank's own
            changing = "lr ", "steps "
            rule = [text for text in optimizer.rule() if not text.startswith(changing)]
    yield Field("number of updates", updates)
    yield Field("learning rate", rate)
    yield Field("optimizer", None if rule is None else [", ".join(rule)], team)


def _frozen_as_words(model: Module) -> Sequence[str]:
    parameters = (span.parameter for span in model.storage.spans)
    return [item.name for item in parameters if not item.requires_grad]


def _weights_as_words(model: Module, uncut: bool = False) -> Sequence[str]:
    """Return a checksum of the bytes of each array that other ranks have, in their order.

    Args:
        uncut: whether to leave out shards, for the ranks that divide the model.
    """
    arrays: dict[str, Any] = {
        span.parameter.name: span.parameter
        for span in model.storage.spans
        if model.storage.is_whole and not span.parameter.rank_local
    }
    arrays |= {
        name: buffer
        for path, module in model.named_modules()
        if is_own(type(module))  # what a user's module keeps may be the rank's own
        for name, buffer in module.own_buffers(path)
    }
    return [
        f"{name} with the checksum {checksum(to_host(bare(item._data)))}"
        for name, item in arrays.items()
        if not (uncut and item.region is not None)
    ]


# ---- a Worker ----


class StepWitness:
    """What a Worker's ranks compare in a step, or in an evaluation.

    Args:
        model: this rank's part.
        world: all ranks.
        copies: the ranks with parts of the same parameters.
        alike: the ranks with the same part of the model.
        replicas: the ranks that have a part of each batch each.
        is_equal: whether the ranks of `alike` have the same weights, bit for bit.
        shards: the ranks that divide the same layers, and have alike what is not cut; or None.
        sharers: groups whose ranks compute the same rows.
        optimizer: of the model; None if it does not make each step's update.

    Attributes:
        is_on: whether they compare at all.
    """

    is_on = True

    def __init__(
        self,
        model: Module,
        *,
        world: Group,
        copies: Group,
        alike: Group,
        replicas: Group,
        is_equal: bool,
        shards: Group | None = None,
        sharers: Sequence[Group] = (),
        optimizer: Optimizer | None = None,
    ) -> None:
        self._model, self._optimizer, self._is_equal = model, optimizer, is_equal
        self._world, self._sharers = world, sharers
        self._steps = self._evaluations = 0  # all ranks have done as many
        self._compares = False

        def team_of(group: Group) -> int:
            """Return the number of a group's first rank."""
            return 0 if group is world else int(group.share(world.rank))

        self._copies, self._alike, self._replicas = map(team_of, (copies, alike, replicas))
        self._shards = None if shards is None else team_of(shards)
        self._same_rows = [*map(team_of, sharers)]

    def begin_step(self, step: int, batch: Taken, rows: Sequence[int]) -> bool:
        """Refuse what differs between the ranks, if they compare this step. Collective then.

        It is done before the ranks compute: layers that communicate would wait for other rows.

        Args:
            step: its number in the run, which the ranks may count differently.
            batch: this rank's.
            rows: a checksum of the batch, where several ranks compute the same ones.

        Returns:
            Whether they compare it.

        Raises:
            UsageError: on all ranks, naming it.
        """
        self._compares = self.is_on and self._world.size > 1 and is_due(self._steps + 1)
        if self._compares:
            fields = [*_of_optimizer(self._optimizer, self._copies)]
            self._compare(f"step {step + 1}", fields, [batch], rows, True)
        return self._compares

    def end_step(self, step: int, of_loss: Words) -> None:
        """Compare losses and weights before the update, if this step is compared: see `begin_step`.

        The losses come first: what is different of one changes the weights.

        Args:
            of_loss: see `loss_as_words`; empty where no loss was computed.
        """
        self._steps += 1
        if self._compares:
            fields = [Field(name, of_loss.get(name)) for name in (LOSS, FACTOR)]
            compare(self._world, f"step {step + 1}", [*fields, *self._of_weights()], [])

    def compare_evaluation(self, batches: Sequence[Taken], rows: Sequence[int]) -> None:
        """Refuse what differs between the ranks in an evaluation. Collective.

        The data are compared in each one, as what it reports is theirs alone.
        """
        if self._world.size > 1:
            self._evaluations += 1
            fields = [Field("number of batches", [f"{len(batches)}"])]
            is_compared = is_due(self._evaluations)
            self._compare("evaluation", fields, batches, rows, is_compared)
            if is_compared:
                compare(self._world, "evaluation", [*self._of_weights()], [])

    def _compare(
        self,
        when: str,
        fields: list[Field],
        batches: Sequence[Taken],
        rows: Sequence[int],
        looks_at_model: bool,
    ) -> None:
        fields += _of_batches(batches)
        if looks_at_model:
            fields += self._of_model()
        shared = [f"{number}" for number in rows]
        fields += [
            Field(f"{ROWS} {place}", shared, team) for place, team in enumerate(self._same_rows)
        ]
        shares = [*map(RowShare.of, batches)]
        compare(self._world, when, fields, shares, self._replicas)

    def _of_model(self) -> Iterator[Field]:
        model = self._model
        yield Field("parameters frozen", _frozen_as_words(model), self._copies)
        yield Field("layers", model.settings(), self._alike)

    def _of_weights(self) -> Iterator[Field]:
        if self._is_equal:
            yield Field(WEIGHTS, _weights_as_words(self._model), self._alike)
            if self._shards is not None:
                uncut = _weights_as_words(self._model, uncut=True)
                yield Field(f"{WEIGHTS} that are not cut", uncut, self._shards)

    def require_same_rows(self, rows: Sequence[object]) -> None:
        """Refuse ranks of one replica that were given different rows. Collective."""
        for group in self._sharers:
            with agreed(self._world):
                require_equal(group, rows, _OTHER_ROWS, REMEDIES[ROWS], UsageError, None)


# ---- a loop of one's own ----


class Losses(NamedTuple):
    """What is known of the losses that a backward pass begins with.

    Attributes:
        counts: how many are summed, in three ways (see `Function.summands`); None if it is unknown.
        kind: of the operation that sums them.
        is_mean: whether it divides by their number.
        is_whole: whether nothing comes behind it, such as a factor.
        says: whether they count at all: a rank without rows may have a loss with weight 0.
    """

    counts: Sequence[int] | None
    kind: str
    is_mean: bool
    is_whole: bool
    says: bool

    @classmethod
    def of(cls, loss: Tensor) -> Losses:
        """Return what is known of a loss. A device is waited for."""
        node, values = loss.node, loss._data
        says = bool(to_host(values).any())
        while node is not None and not node.summands:
            inner = [edge for edge in node.edges or () if isinstance(edge, Function)]
            node = inner[0] if len(inner) == 1 else None  # below a factor or a cast
        if node is None:
            return cls(None, "", False, False, says)
        counts = node.summands if says else (0, 0, 0)
        return cls(counts, type(node).__name__, node.averages, node is loss.node, says)


@dataclass(slots=True)
class LossTally:
    """Of how many losses an update's gradient is, on one rank.

    Attributes:
        passes: that were noted.
        samples: what the last one divides by.
        counts: of their losses, see `Losses`; None if that of some pass is unknown.
        kinds: of the operations that sum them.
        says: whether some losses count.
        is_mean, is_whole: of the last pass.
        fits: whether it is divided by the rows of the batch that a Loader made for all ranks, if
            the ranks compare it.
        times: as many updates in a row are alike.
    """

    passes: int = 0
    samples: int = 0
    counts: Sequence[int] | None = (0, 0, 0)
    kinds: list[str] = field(default_factory=list)
    says: bool = False
    is_mean: bool = False
    is_whole: bool = False
    fits: bool = False
    times: int = field(default=1, compare=False)

    def add(self, losses: Losses, samples: int) -> None:
        """Add a pass."""
        self.passes, self.samples = self.passes + 1, samples
        if losses.kind not in self.kinds:
            self.kinds.append(losses.kind)
        self.says = self.says or losses.says
        self.is_mean, self.is_whole = losses.is_mean, losses.is_whole
        if self.counts is None or losses.counts is None:
            self.counts = None
        else:
            self.counts = [*map(add, self.counts, losses.counts)]

    def told(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class UpdateWitness:
    """What this rank says of the updates of a loop of its own.

    Args:
        model, group: of the strategy.
        is_equal: whether all ranks have the same weights, bit for bit.
        meets: whether the ranks meet in each backward pass.

    Attributes:
        updates: those that are complete; all ranks have done as many.
    """

    def __init__(self, model: Module, group: Group, is_equal: bool, meets: bool) -> None:
        self._group, self._model, self._is_equal, self._meets = group, model, is_equal, meets
        self.updates, self._due = 0, 1
        self._judge, self._now = _RowJudge(), LossTally()
        self._look_anew()
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._passes, self._noted = 0, 0  # since the last comparison; replays note nothing
        self._rows: list[LossTally] = []  # of each update since then

    def _look_anew(self) -> None:
        self._words: dict[str, Sequence[str] | None] = {LOSS: None, FACTOR: None, MODE: None}
        self._batches: dict[Any, Taken] = {}

    def is_due(self) -> bool:
        """Whether the ranks compare the update that is under way, or comes next."""
        return self.updates + 1 == self._due

    def begin_pass(self, is_first: bool) -> None:
        """Count a pass; begin an update with the first one."""
        self._passes += 1
        if is_first:
            self._now = LossTally()
            if self.updates + 1 == self._due:
                self._look_anew()

    def note(self, loss: Tensor, samples: int, last: bool) -> None:
        """Note a pass of an update that is not compared. A device is not waited for."""
        if isinstance(loss._data, np.ndarray):
            self._add(Losses.of(loss), samples, last)

    def _add(self, losses: Losses, samples: int, last: bool) -> None:
        self._noted += 1
        self._now.add(losses, samples)
        if last and self._rows and self._rows[-1] == self._now:
            self._rows[-1].times += 1
        elif last:
            self._rows.append(self._now)

    def compare(self, loss: Tensor, samples: int, last: bool) -> None:
        """Note a pass of an update that is compared; with the last one, compare it. Collective.

        Raises:
            UsageError: on all ranks, naming what differs, or is not complete.
        """
        when = f"update {self.updates + 1}"
        if self._meets:
            answers = _told(self._group, "the last" if last else "not the last")
            _refuse_passes(when, [[answer] for answer in answers])
        losses = Losses.of(loss)
        if losses.says and self._words[LOSS] is None:
            self._words = {**loss_as_words(loss), MODE: _mode_as_words(loss, self._model)}
        for loop, _ in last_read():
            taken = loop.taken
            # a loop that was left may have been one rank's look at the first batch
            if loop.is_open and taken and taken.source is not None and taken.source.world > 1:
                self._batches[id(taken.source), taken.epoch, taken.number] = taken
        if last and self._batches:
            self._now.fits = samples == sum(item.global_rows for item in self._batches.values())
        self._add(losses, samples, last)
        if last:
            self._compare_words(when)
            self._compare_rows(when)
            number = self.updates + 1
            self._due = min(1 << number.bit_length(), (number // EVERY + 1) * EVERY)
            self._begin_stretch()

    def _compare_words(self, when: str) -> None:
        model, batches = self._model, [*self._batches.values()]
        made = model.storage.updated_by
        fields = [
            *_of_optimizer(None if made is None else made()),
            Field("layers", model.settings()),
            Field("parameters frozen", _frozen_as_words(model)),
            *_of_batches(batches),
            *(Field(name, texts) for name, texts in self._words.items()),
        ]
        if self._is_equal:
            fields.append(Field(WEIGHTS, _weights_as_words(model)))
        compare(self._group, when, fields, [*map(RowShare.of, batches)])

    def _compare_rows(self, when: str) -> None:
        """Refuse gradients that are not divided by the number of all ranks' losses. Collective.

        Each update is looked at since the last comparison; if there were replays, this one alone.
        """
        is_known = self._passes == self._noted
        rows = self._rows if is_known else [self._now]
        by_rank = _told(self._group, [self._passes, is_known, [item.told() for item in rows]])
        told = [[LossTally(**item) for item in items] for *_, items in by_rank]
        each = [[item for item in items for _ in range(item.times)] for items in told]
        count = min(map(len, each))
        if not all(known for _, known, _ in by_rank):
            _refuse_passes(when, [[f"{passes}"] for passes, *_ in by_rank])
            count = 1
        numbers = range(self.updates + 2 - count, self.updates + 2)
        for number, ranks in zip(
            numbers, zip(*(items[-count:] for items in each), strict=True), strict=True
        ):
            self._judge(number, ranks)


class _RowJudge:
    """Refuses updates whose ranks' losses are not as many as their gradient is divided by.

    By kind of loss it knows the ways to count that were right so far. They are a rule only once the
    number of samples has changed with them, or was a Loader's twice: a program may divide by a
    constant, or weigh its losses.
    """

    def __init__(self) -> None:
        self._ways: dict[str, set[int]] = {}
        self._samples: dict[str, int] = {}
        self._rules: set[str] = set()
        self._fitting = Counter[str]()

    def __call__(self, number: int, by_rank: Sequence[LossTally]) -> None:
        """Judge an update by what all ranks say.

        Raises:
            UsageError: naming what the ranks have.
        """
        when, heard = f"update {number}", next((r for r in by_rank if r.says), by_rank[0])
        refuse_different(
            [[rows.samples if rows.says else heard.samples] for rows in by_rank],
            f"{when}: the ranks divide their losses by different numbers of samples",
            GLOBAL_SAMPLES,
            UsageError,
        )
        if number == 1:  # later, a short batch may happen to have as many rows
            _refuse_denominator(heard.samples, by_rank)
        ways = _right_ways(by_rank)
        if not ways:  # otherwise ranks may accumulate the gradients of unequal numbers of batches
            _refuse_passes(when, [[f"{rows.passes}"] for rows in by_rank])
        if ways is None:
            return
        kind, samples = " ".join(_kinds(by_rank)), by_rank[0].samples
        fits = all(rows.fits for rows in by_rank)
        seen = self._ways.setdefault(kind, {*ways})
        if ways & seen:
            seen &= ways
            self._fitting[kind] += fits
            if samples != self._samples.setdefault(kind, samples):
                self._rules.add(kind)
        elif kind in self._rules or (fits and self._fitting[kind] > 1):
            counts = [rows.counts[min(seen)] for rows in by_rank if rows.counts is not None]
            each = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
            raise UsageError(
                f"{when}: backward divides by {samples} samples, but the ranks' losses are of"
                f" {sum(counts)}: {each}; give each rank its rows of the batch, and backward the"
                " number of the global batch"
            )
        elif self._fitting[kind] < 2:
            seen.clear()


def _kinds(by_rank: Sequence[LossTally]) -> list[str]:
    return sorted({kind for rows in by_rank for kind in rows.kinds})


def _right_ways(by_rank: Sequence[LossTally]) -> set[int] | None:
    """Return in which ways to count all ranks' losses are as many as their gradient is divided by.

    Several losses of the same rows may have a pass each, so that the losses are a multiple.

    Returns:
        None if that is not known: losses have no kind, a sum of a user's own may be weighted, and a
        rank whose losses do not count has no say in the number.
    """
    counts = [rows.counts for rows in by_rank if rows.counts is not None and rows.says]
    if len(counts) < len(by_rank) or {"", "Sum"}.intersection(_kinds(by_rank)):
        return None
    whole = max(by_rank[0].samples, 1)
    most = max(rows.passes for rows in by_rank) * whole
    totals = [sum(column) for column in zip(*counts, strict=True)]
    return {
        way for way, total in enumerate(totals) if total % whole == 0 and whole <= total <= most
    }


def _refuse_passes(when: str, by_rank: Sequence[Sequence[str]]) -> None:
    refuse_different(by_rank, f"{when}: the ranks differ in {PASSES}", REMEDIES[PASSES], UsageError)


def _refuse_denominator(samples: int, by_rank: Sequence[LossTally]) -> None:
    """Refuse ranks that divide each by the number of its own samples, or twice."""
    counts = [rows.counts for rows in by_rank if rows.counts is not None]
    if len(counts) < len(by_rank):
        return
    passes = max(rows.passes for rows in by_rank)
    kinds = [*zip(*counts, strict=True)]  # by way to count, then by rank
    is_mean = any(rows.is_mean and rows.says for rows in by_rank)
    is_whole = all(rows.is_whole for rows in by_rank if rows.says)
    for kind in kinds:
        # 1 may also say that the sum is wanted
        is_own = {*kind} == {samples} and samples not in (0, 1, len(by_rank) * is_mean)
        is_all = is_own or 1 < max(kind) < sum(kind) == samples
        if is_mean and is_whole and is_all:
            raise UsageError(
                f"backward divides by {samples} samples, and the loss is a mean already; give"
                ' it with reduction="sum"'
            )
        # the elements of a rank's rows may be as many as the rows of all ranks
        # several losses of the same rows may have a pass each
        rights = samples, samples * passes
        if is_own and not any(sum(counts) in rights for counts in kinds):
            raise UsageError(
                f"each rank divides its losses by its own {samples} samples; {GLOBAL_SAMPLES};"
                " several losses of the same rows are added, for one backward"
            )


# ---- what a graph tells ----


def loss_as_words(loss: Tensor) -> dict[str, Sequence[str] | None]:
    """Return by which operations, options and factor a loss was computed, as its graph tells."""
    losses = {node.alike for node in _operations(loss) if isinstance(node, Reduced)}
    return {LOSS: sorted(losses), FACTOR: _factor(loss)}


def _mode_as_words(loss: Tensor, model: Module) -> Sequence[str]:
    """Return in which mode a loss was computed, as its graph tells, and with which masks."""
    modes = {node.alike for node in _operations(loss) if not isinstance(node, Reduced)}
    drawn = last_masks(model)
    masks = [] if drawn is None else [f"dropout with seed {drawn.seed} and step {drawn.step}"]
    return [*sorted(modes - {""}), *masks]


def _operations(loss: Tensor) -> Iterator[Function]:
    """Yield the operations of a loss, each once."""
    waiting, seen = [loss.node], set[int]()
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += [edge for edge in node.edges or () if isinstance(edge, Function)]


def _has_own_factors(node: Function, place: int) -> bool:
    """Return whether an operation may multiply each element's gradient by another number.

    Those of a rank's elements may be equal by chance: of its only row, or of its only class.

    Args:
        place: of the input with a gradient.
    """
    saved = node.saved
    if isinstance(node, Pointwise) and node.name in ("multiply", "divide"):
        others = [item for i, item in zip(node.rule.saves, saved, strict=True) if i == 1 - place]
        saved = tuple(others) if node.name == "multiply" or place == 0 else saved
    return any(getattr(item, "ndim", 0) > 0 for item in saved)


def _factor(loss: Tensor) -> Sequence[str] | None:
    """Return by what the sum of the losses is multiplied behind it.

    It is the gradient at the loss's operation, so the operations behind are asked for it, as long
    as each has one input with a gradient.

    Returns:
        None if that is not known, or the losses have factors of their own.
    """
    node, grad = loss.node, namespace(loss._data).ones_like(loss._data)
    while node is not None and not isinstance(node, Reduced):
        edges = [(i, edge) for i, edge in enumerate(node.edges or ()) if edge is not None]
        if len(edges) != 1 or not is_own(type(node)) or node.is_call:
            return None
        ((place, edge),) = edges
        if not isinstance(edge, Function) or _has_own_factors(node, place):
            return None
        grad, node = node.backward(grad)[place], edge
    if node is None or node.averages or not grad.size:
        return None
    least, most = (float(value) for value in to_hosts([grad.min(), grad.max()]))
    return [f"{most:.4g}"] if least == most else None
