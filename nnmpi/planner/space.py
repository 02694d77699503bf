"""Every layout of so many ranks that may be looked at, and what cannot be, with the reason.

    ranks = dp x pp x tp x sp      x  ZeRO 0..3  x  schedule, virtual stages, microbatches, recomputation  x  all-reduce

Those that do not fit the memory may come again with a budget for their activations: see `search`. Left out, since
another one is never slower: the schedule naive, whose stages do one after the other what GPipe's do at once, and
PipeDream, which does not compute what one rank computes.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

from nnmpi.comm.algorithms.registry import ALGORITHMS, AUTO, HIERARCHICAL, NATIVE, SHARED
from nnmpi.compose.layout import Layout
from nnmpi.errors import UsageError
from nnmpi.parallel.zero.units import STAGES
from nnmpi.schedule.registry import make
from nnmpi.schedule.schedule import Schedule
from nnmpi.shard import split
from nnmpi.units import format_bytes

PIPELINES = (("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 4))
MICROBATCHES = (1, 2, 4, 8)  # for each rank of a pipeline
RECOMPUTATION = (False, True)
SHARDED_SUMS = (NATIVE, "ring", "tree")  # those that scatter and gather, too
Refusals: TypeAlias = Counter[str]
"""How many layouts fall out for which reason."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One layout.

    Attributes:
        dp, pp, tp, sp: ranks on each axis.
        zero: what the replicas share out.
        schedule, virtual_stages, microbatches, recompute: of the pipeline.
        allreduce: how gradients are summed; "auto" on one node is the update that is fused with it.
        activation_memory: bytes for activations, of which what passes them is computed again; 0 for any.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sp: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    microbatches: int = 1
    recompute: bool = False
    allreduce: str = AUTO
    activation_memory: int = 0

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.dp * self.pp * self.tp * self.sp

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters, and sum their gradients."""
        return self.dp * self.sp

    def make(self) -> Schedule:
        """Return the schedule of its pipeline, of computation only."""
        return make(self.schedule, self.pp, self.microbatches, self.virtual_stages)

    def rows(self, batch_size: int) -> list[int]:
        """Return how many rows each microbatch of a batch has on the replica that has most."""
        return [-(-len(part) // self.dp) for part in split(batch_size, self.microbatches)]

    @property
    def has_whole_model(self) -> bool:
        """Whether each rank has all layers and no arrangement, so that the update may be fused with the sums."""
        return self.pp == self.tp == self.sp == 1 and not self.zero

    def layout(self) -> Layout:
        """Return it as `arrange` takes it.

        Raises:
            UsageError: for what does not go together.
        """
        return Layout(
            self.dp,
            self.pp,
            self.tp,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            sp=self.sp,
            zero=self.zero,
            activation_memory="least" if self.recompute else self.activation_memory or None,
        )

    def __str__(self) -> str:
        """Return it in a few words."""
        axes = [f"{axis} {size}" for axis, size in zip(("dp", "pp", "tp", "sp"), self.axes, strict=True) if size > 1]
        words = [" x ".join(axes) or "1 rank"]
        if self.zero:
            words.append(f"ZeRO {self.zero}")
        if self.pp > 1:
            virtual = f" of {self.virtual_stages}" if self.virtual_stages > 1 else ""
            words.append(f"{self.schedule}{virtual}, {self.microbatches} microbatches")
        if self.recompute:
            words.append("least activations")
        if self.activation_memory:
            words.append(f"activations in {format_bytes(self.activation_memory)}")
        if self.replicas > 1:
            memory = "fused update" if self.has_whole_model else "shared"
            words.append(memory if self.allreduce == AUTO else self.allreduce)
        return ", ".join(words)

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """dp, pp, tp and sp."""
        return self.dp, self.pp, self.tp, self.sp


def candidates(
    ranks: int,
    batch_size: int,
    shares: Collection[tuple[int, int]],
    layers: int,
    on_one_node: bool,
    levels: bool,
    shared: bool,
) -> tuple[list[Candidate], Refusals]:
    """Return the layouts, and how many fall out for which reason before anything is priced.

    Args:
        ranks: how many.
        batch_size: rows of a global batch.
        shares: (tp, sp) that the model can have.
        layers: of the model's chain.
        on_one_node: whether all ranks can share memory.
        levels: whether there are nodes with several ranks, so that an all-reduce may go in two steps.
        shared: whether it is known what an all-reduce through shared memory takes.
    """
    found: list[Candidate] = []
    refused = Refusals()
    for axes in _meshes(ranks):
        dp, pp, tp, sp = axes
        if (tp, sp) not in shares:
            refused["the model's layers or positions cannot be shared out so (tp, sp), or among so many"] += 1
        elif dp * sp > 1 and dp > batch_size:
            refused["more replicas than rows of a batch"] += 1
        elif pp > layers:
            refused["more stages than the model has layers to cut between"] += 1
        else:
            for each in _pipelines(Candidate(*axes), batch_size, layers, refused):
                found += _sums(each, on_one_node, levels, shared, refused)
    return found, refused


def _meshes(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, tp, sp in product(divisors, divisors, divisors):
        if ranks % (pp * tp * sp) == 0:
            yield ranks // (pp * tp * sp), pp, tp, sp


def _pipelines(plain: Candidate, batch_size: int, layers: int, refused: Refusals) -> Iterator[Candidate]:
    if plain.pp == 1:
        yield plain
        return
    for (schedule, virtual), times, recompute in product(PIPELINES, MICROBATCHES, RECOMPUTATION):
        microbatches = times * plain.pp
        if microbatches * plain.dp > batch_size:
            refused["more microbatches than the replicas have rows"] += 1
        elif plain.pp * virtual > layers:
            refused["more stages than the model has layers to cut between"] += 1
        else:
            yield replace(
                plain,
                schedule=schedule,
                virtual_stages=virtual,
                microbatches=microbatches,
                recompute=recompute,
            )


def _sums(plain: Candidate, on_one_node: bool, levels: bool, shared: bool, refused: Refusals) -> Iterator[Candidate]:
    if plain.replicas == 1:
        yield plain
        return
    names = [name for name in (NATIVE, *ALGORITHMS) if name != HIERARCHICAL or levels]
    if on_one_node and shared and plain.pp == plain.tp == 1:
        names.append(SHARED)
    for zero in (0, *STAGES):
        fused = [AUTO] if on_one_node and shared and not zero and plain.has_whole_model else []
        through_memory = [AUTO] if on_one_node and shared and plain.pp == plain.tp == 1 else []
        for allreduce in (*through_memory, *SHARDED_SUMS) if zero else (*fused, *names):
            one = replace(plain, zero=zero, allreduce=allreduce)
            try:
                one.layout()
            except UsageError as error:
                refused[str(error).partition(",")[0].partition(";")[0]] += 1
            else:
                yield one
