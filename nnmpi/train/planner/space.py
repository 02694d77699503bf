"""Every layout of so many ranks that may be looked at, and what cannot be, with the reason.

    ranks = dp x pp x tp x sp      x  ZeRO 0..3  x  schedule, virtual stages, microbatches  x  least activations or all

Gradients are summed as `--allreduce auto` sums them. Left out, since another one is never slower: the schedule naive,
whose stages do one after the other what GPipe's do at once, and PipeDream, which does not compute what one rank
computes.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

from nnmpi.compose.layout import Layout
from nnmpi.errors import UsageError
from nnmpi.parallel.zero.units import STAGES
from nnmpi.shard import split

PIPELINES = (("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 4))
MICROBATCHES = (1, 2, 4, 8)  # for each rank of a pipeline
Refusals: TypeAlias = Counter[str]
"""How many layouts fall out for which reason."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One layout.

    Attributes:
        dp, pp, tp, sp: ranks on each axis.
        zero: what the replicas share out.
        schedule, virtual_stages, microbatches: of the pipeline.
        recompute: whether it keeps the least activations, and computes the others again.
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

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """dp, pp, tp and sp."""
        return self.dp, self.pp, self.tp, self.sp

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return self.dp * self.pp * self.tp * self.sp

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters, and sum their gradients."""
        return self.dp * self.sp

    @property
    def kind(self) -> tuple[Any, ...]:
        """What prices of layouts that are alike have in common, and so their errors."""
        return tuple(size > 1 for size in self.axes), self.zero > 0

    def rows(self, batch_size: int) -> list[int]:
        """Return how many rows each microbatch of a batch has on the replica that has most."""
        return [-(-len(part) // self.dp) for part in split(batch_size, self.microbatches)]

    def options(self) -> dict[str, Any]:
        """Return the train command's options that mean this layout, but for the split; defaults are left out."""
        found: dict[str, Any] = dict(zip(("dp", "pp", "tp", "sp"), self.axes, strict=True))
        if self.zero:
            found["zero"] = self.zero
        if self.pp > 1:
            found |= {"pipeline": self.schedule, "microbatches": self.microbatches}
            if self.virtual_stages > 1:
                found["virtual_stages"] = self.virtual_stages
        if self.recompute:
            found["activation_memory"] = "least"
        return found

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
        return ", ".join(words)


def candidates(
    ranks: int, batch_size: int, shares: Collection[tuple[int, int]], layers: int
) -> tuple[list[Candidate], Refusals]:
    """Return the layouts, and how many fall out for which reason before anything is priced.

    Args:
        ranks: how many.
        batch_size: rows of a global batch.
        shares: (tp, sp) that the model can have.
        layers: of the model's chain.
    """
    found: list[Candidate] = []
    refused = Refusals()
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, tp, sp in product(divisors, divisors, divisors):
        dp, left = divmod(ranks, pp * tp * sp)
        if left:
            continue
        if (tp, sp) not in shares:
            refused["the model's layers or positions cannot be shared out so (tp, sp), or among so many"] += 1
        elif dp * sp > 1 and dp > batch_size:
            refused["more replicas than rows of a batch"] += 1
        elif pp > layers:
            refused["more stages than the model has layers to cut between"] += 1
        else:
            for one in _pipelines(Candidate(dp, pp, tp, sp), batch_size, layers, refused):
                for zero, recompute in product((0, *STAGES) if one.replicas > 1 else (0,), (False, True)):
                    found += _checked(replace(one, zero=zero, recompute=recompute), refused)
    return found, refused


def _pipelines(plain: Candidate, batch_size: int, layers: int, refused: Refusals) -> Iterator[Candidate]:
    if plain.pp == 1:
        yield plain
        return
    for (schedule, virtual), times in product(PIPELINES, MICROBATCHES):
        microbatches = times * plain.pp
        if microbatches * plain.dp > batch_size:
            refused["more microbatches than the replicas have rows"] += 1
        elif plain.pp * virtual > layers:
            refused["more stages than the model has layers to cut between"] += 1
        else:
            yield replace(plain, schedule=schedule, virtual_stages=virtual, microbatches=microbatches)


def _checked(one: Candidate, refused: Refusals) -> Iterator[Candidate]:
    try:
        Layout(
            *(one.dp, one.pp, one.tp, one.schedule, one.virtual_stages),
            sp=one.sp,
            zero=one.zero,
            activation_memory="least" if one.recompute else None,
        )
    except UsageError as error:
        refused[str(error).partition(",")[0].partition(";")[0]] += 1
    else:
        yield one
