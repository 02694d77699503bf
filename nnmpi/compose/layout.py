"""Layout: how a model is to be spread over ranks, as the user says it, with the pairs that make no sense refused."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from nnmpi.errors import UsageError
from nnmpi.nn.sharding import Table
from nnmpi.parallel.sequence.group import ULYSSES, WAYS
from nnmpi.parallel.zero.units import ALL, OPTIMIZER, STAGES
from nnmpi.schedule.registry import SCHEDULES, Generator, name_of

AUTO = "auto"
FAST, FIXED = "fast", "fixed"
LEAST = "least"
PIPEDREAM, INFERENCE = "pipedream", "inference"
TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != INFERENCE)

Split: TypeAlias = Literal["auto"] | Sequence[int]


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and how the pipeline runs.

    Attributes:
        dp, pp, tp: replicas, pipeline ranks, ranks that share each layer; one that is None is derived from the world.
        schedule: of the pipeline: "naive", "gpipe", "1f1b", "interleaved", "zero-bubble" or "pipedream"; or a function
            of one's own, (rank, ranks, microbatches) -> what the rank computes, which is checked before it runs.
        virtual_stages: stages per rank, for "interleaved".
        split: "auto" balances measured times; or the number of layers (see `nn.chain`) in each stage.
        reduction: "fast", or "fixed" for sums in an order that does not depend on dp (see
            `parallel.fixed_reduction`).
        table: how layers are shared out over tp; by default the model's own.
        memory_limit: bytes that a rank may use for parameters (with pipedream's older versions of them), gradients and
            optimizer state; None for any. Activations and the sums of reduction "fixed" come on top.
        state_arrays: how many arrays of each parameter's size the optimizer keeps, for the limit (Adam 2, SGD 0).
        activation_memory: bytes that a pass may take on each rank for its activations, some of which are then computed
            again (see `memory.recompute`), without a pipeline; "least" for as few as possible: in a pipeline each stage
            keeps its input alone; None for any.
        offload: where to activations may go and come back, if that is quicker: a folder for a file, or "host" for those
            of a device (see `memory.store`); None for nowhere.
        offload_state: what lies there for good, and comes when it is needed: "optimizer", its state, or "all", the
            weights, too, which takes `zero` 3; None for nothing.
        sp: ranks that share the positions of each sequence.
        sp_attention: how attention sees the positions of other ranks: "ulysses" or "ring" (see `parallel.sequence`).
        zero: what the replicas share out (see `parallel.zero`): 0: nothing; 1: the optimizer's state; 2: gradients,
            too; 3: parameters, too.
        unit_bytes: what they gather and sum at once, see `parallel.zero.storage`; None to choose.

    Raises:
        UsageError: for values that do not exist, and pairs without sense.
    """

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    schedule: Generator = "1f1b"
    virtual_stages: int = 1
    split: Split = "auto"
    reduction: str = FAST
    table: Table | None = None
    memory_limit: int | None = None
    state_arrays: int = 2
    sp: int = 1
    sp_attention: str = ULYSSES
    zero: int = 0
    unit_bytes: int | None = None
    activation_memory: int | Literal["least"] | None = None
    offload: str | None = None
    offload_state: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a model and a world."""
        if isinstance(self.schedule, str):
            _one_of("schedule", self.schedule, TRAINING_SCHEDULES)
        if isinstance(self.activation_memory, str):
            _one_of("activation_memory", self.activation_memory, (LEAST,))
        _one_of("reduction", self.reduction, (FAST, FIXED))
        _one_of("sp attention", self.sp_attention, WAYS)
        if self.virtual_stages < 1:
            raise UsageError(f"{self.virtual_stages} virtual stages are not possible; give 1 or more")
        if self.virtual_stages > 1 and self.schedule != "interleaved":
            raise UsageError(
                f"{self.virtual_stages} virtual stages belong to the pipeline schedule interleaved; "
                f"{name_of(self.schedule)} has one per rank"
            )
        if self.split != AUTO and (isinstance(self.split, str) or any(int(each) != each for each in self.split)):
            raise UsageError(f"split {self.split!r} is unknown; give auto, or numbers of layers such as (5, 4, 3)")
        if self.split != AUTO and (not self.split or min(map(int, self.split)) < 1):
            raise UsageError(f"split {self.split} has a stage without layers; give each at least 1, or auto")
        for axis, size in (("pp", self.pp), ("tp", self.tp), ("sp", self.sp)):
            if self.fixed and size not in (None, 1):
                raise UsageError(
                    f"a fixed order of sums covers replicas; ranks of {axis} {size} add in parts, whose rounding "
                    f"depends on it: leave {axis} at 1, or reduction fixed out"
                )
        self._check_offload()
        if self.zero:
            self._check_zero()
        if self.asynchronous:
            for name, given in (
                ("reduction fixed", self.fixed),
                ("activation_memory", self.activation_memory is not None),
            ):
                if given:
                    raise UsageError(
                        f"{name} does not go with pipedream, whose forward and backward see different weights' "
                        "versions; choose another pipeline schedule, such as 1f1b"
                    )

    def _check_offload(self) -> None:
        if self.offload is not None and self.activation_memory is None and self.offload_state is None:
            raise UsageError(
                f"activations go to {self.offload} when they are more than a limit, and there is none; give "
                "activation_memory, too, or offload_state, or leave offload out"
            )
        if self.offload_state is None:
            return
        _one_of("offload_state", self.offload_state, (OPTIMIZER, ALL))
        if self.offload is None:
            raise UsageError(f"offload_state {self.offload_state} needs a place; give offload, too")
        if self.offload_state == ALL and self.zero != STAGES[-1]:
            raise UsageError(
                "weights leave memory unit by unit, as ZeRO 3 computes with them, also on one rank; give zero 3, or "
                f"offload_state {OPTIMIZER}"
            )
        if self.asynchronous:
            raise UsageError(
                "the optimizer's state cannot go out of memory with pipedream, which updates after every microbatch; "
                "choose another pipeline schedule, such as 1f1b, or leave offload_state out"
            )

    def _check_zero(self) -> None:
        if self.zero not in STAGES:
            raise UsageError(f"ZeRO has no stage {self.zero}; choose one of {', '.join(map(str, STAGES))}")
        if self.zero > 1 and self.pp not in (None, 1):
            raise UsageError(
                f"ZeRO {self.zero} would sum and gather for each of a pipeline's microbatches, whose stages hold their "
                f"gradients over the whole pass; take zero 1 with pp {self.pp}, or pp 1 with zero {self.zero}"
            )
        if self.fixed:
            raise UsageError(
                f"ZeRO {self.zero} scatters sums as they come, which is not the fixed order; leave reduction fixed or "
                "zero out"
            )
        if self.asynchronous:
            raise UsageError(
                f"ZeRO {self.zero} does not go with pipedream, whose stages keep several versions of the weights; "
                "choose another pipeline schedule, such as 1f1b"
            )

    def __repr__(self) -> str:
        """Name what is not as it is by default, which is one rank with everything."""
        given = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return f"Layout({', '.join(f'{name}={value!r}' for name, value, plain in given if value != plain)})"

    @property
    def fixed(self) -> bool:
        """Whether gradients are summed in a fixed order."""
        return self.reduction == FIXED

    @property
    def asynchronous(self) -> bool:
        """Whether weights are updated after every microbatch, without a flush."""
        return self.schedule == PIPEDREAM

    @property
    def recomputes(self) -> bool:
        """Whether a pipeline's stages keep their inputs alone, and compute the rest again for the backward."""
        return self.activation_memory == LEAST


def _one_of(what: str, value: str, names: Sequence[str]) -> None:
    if value not in names:
        raise UsageError(f"{what} {value!r} is unknown; choose one of {', '.join(names)}")
