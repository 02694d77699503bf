"""What a user says of a worker: how the model is spread over ranks, gradients are summed, and
products computed.

Pairs that make no sense are refused; see `compose.refusals`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from nnmpi.comm.algorithms.registry import AUTO, How
from nnmpi.compose import refusals
from nnmpi.compose.refusals import refuse
from nnmpi.custom import name_of
from nnmpi.errors import UsageError
from nnmpi.nn.sharding import ALL, OPTIMIZER, STAGES, ULYSSES, WAYS, Table
from nnmpi.schedule.schedule import Home
from nnmpi.schedule.schedules import (
    INTERLEAVED,
    SCHEDULES,
    TURNING,
    Generator,
    home_of,
    usual_stages,
)

FAST, FIXED = "fast", "fixed"
LEAST = "least"
PIPEDREAM, INFERENCE = "pipedream", "inference"
TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != INFERENCE)

Split: TypeAlias = Literal["auto"] | Sequence[int]


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and how the pipeline runs.

    Attributes:
        dp, pp, tp: replicas, pipeline ranks, ranks that share each layer; one that is None is
            derived from the world.
        schedule: of the pipeline: "naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v",
            "v-half", "v-min" or "pipedream"; or a function of your own, (rank, ranks,
            microbatches) -> what the rank computes, which is checked before it runs.
        virtual_stages: stages per rank, for "interleaved"; "zb-v", "v-half" and "v-min" have 2.
        split: "auto" balances measured times; or the number of layers (see `nn.chain`) in each
            stage.
        reduction: "fast", or "fixed" for sums in an order that does not depend on dp (see
            `parallel.fixed_reduction`).
        table: how layers are sharded over tp; by default the model's own.
        memory_limit: bytes that a rank may use for parameters (with pipedream's older versions of
            them), gradients and optimizer state; None for any. Activations and the sums of
            reduction "fixed" come on top.
        state_arrays: how many arrays of each parameter's size the optimizer keeps, for the limit
            (Adam 2, SGD 0).
        activation_memory: bytes that a pass may take on each rank for its activations, some of
            which are then computed again (see `memory.recompute`), without a pipeline; "least" for
            as few as possible: in a pipeline each stage keeps its input alone; None for any.
        offload: where activations may be moved to and read back from, where that is faster than
            computing them again: a folder for a file, or "host" for those of a device (see
            `memory.store`); None for nowhere.
        offload_state: what is kept in that place all the time, and read in when it is needed:
            "optimizer", its state, or "all", the weights, too, which takes `zero` 3; None for
            nothing.
        sp: ranks that share the positions of each sequence.
        sp_attention: how attention sees the positions of other ranks: "ulysses" or "ring" (see
            `parallel.sequence`).
        zero: what the replicas shard (see `parallel.zero`): 0: nothing; 1: the optimizer's
            state; 2: gradients, too; 3: parameters, too.
        expert_parallel: whether the replicas shard the experts of a mixture (see
            `parallel.experts`).
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
    expert_parallel: bool = False
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
            raise UsageError(
                f"{self.virtual_stages} virtual stages are not possible; give 1 or more"
            )
        if self.virtual_stages == 1 and self.schedule in TURNING:
            object.__setattr__(self, "virtual_stages", usual_stages(self.schedule))
        if self.schedule != INTERLEAVED and self.virtual_stages not in (
            1,
            usual_stages(self.schedule),
        ):
            raise UsageError(
                f"{self.virtual_stages} virtual stages belong to the pipeline schedule interleaved;"
                f" {name_of(self.schedule)} has {'two' if self.schedule in TURNING else 'one'} per"
                " rank"
            )
        if self.split != AUTO and (
            isinstance(self.split, str) or any(int(each) != each for each in self.split)
        ):
            raise UsageError(
                f"split {self.split!r} is unknown; give auto, or numbers of layers such as (5,"
                " 4, 3)"
            )
        if self.split != AUTO and (not self.split or min(map(int, self.split)) < 1):
            raise UsageError(
                f"split {self.split} has a stage without layers; give each at least 1, or auto"
            )
        if self.zero not in (0, *STAGES):
            raise UsageError(
                f"ZeRO has no stage {self.zero}; choose one of {', '.join(map(str, STAGES))}"
            )
        self._check_offload()
        refuse(self.features())

    def _check_offload(self) -> None:
        if (
            self.offload is not None
            and self.activation_memory is None
            and self.offload_state is None
        ):
            raise UsageError(
                f"activations go to {self.offload} when they are more than a limit, and there is"
                " none; give activation_memory, too, or offload_state, or leave offload out"
            )
        if self.offload_state is None:
            return
        _one_of("offload_state", self.offload_state, (OPTIMIZER, ALL))
        if self.offload is None:
            raise UsageError(f"offload_state {self.offload_state} needs a place; give offload, too")
        if self.offload_state == ALL and self.zero != STAGES[-1]:
            raise UsageError(
                "weights leave memory unit by unit, as ZeRO 3 computes with them, also on one"
                f" rank; give zero 3, or offload_state {OPTIMIZER}"
            )

    def features(self) -> dict[str, str]:
        """Return which features are asked for, by their names in `refusals`, as the user says
        them.
        """
        sizes = {refusals.PIPELINE: self.pp, refusals.TENSOR: self.tp, refusals.SEQUENCE: self.sp}
        found = {name: f"{name} {size}" for name, size in sizes.items() if size not in (None, 1)}
        zero, memory = f"zero {self.zero}", f"activation_memory {self.activation_memory}"
        for name, given, words in (
            (
                refusals.PIPEDREAM,
                self.asynchronous and self.pp != 1,
                "the pipeline schedule pipedream",
            ),
            (refusals.FIXED, self.fixed, f"reduction {FIXED}"),
            (refusals.EXPERTS, self.expert_parallel, "expert_parallel"),
            (refusals.ZERO, self.zero > 0, zero),
            (refusals.ZERO_2, self.zero > 1, zero),
            (refusals.LEAST, self.recomputes, memory),
            (refusals.LIMIT, self.activation_memory not in (None, LEAST), memory),
            (
                refusals.ACTIVATIONS_OUT,
                self.offload is not None and self.offload_state is None,
                "offload",
            ),
            (
                refusals.STATE_OUT,
                self.offload_state is not None,
                f"offload_state {self.offload_state}",
            ),
        ):
            if given:
                found[name] = words
        return found

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
    def home(self) -> Home:
        """Which rank of the pipeline has which stage."""
        return home_of(self.schedule)

    @property
    def recomputes(self) -> bool:
        """Whether a pipeline's stages keep their inputs alone, and compute the rest again for the
        backward.
        """
        return self.activation_memory == LEAST


@dataclass(frozen=True)
class GradientExchange:
    """How the replicas of a `Worker` sum their gradients and update their weights. By default what
    pays is chosen.

        Worker(model, optimizer, group, exchange=GradientExchange(allreduce="ring", overlap=False))

    Attributes:
        allreduce: the algorithm for every bucket, a name or a function of your own; or one for
            each bucket in order; "auto" chooses by predicted time. See
            `parallel.data.DataParallel`, also for the next two.
        bucket_bytes: how large a bucket of gradients may become; None for what suits the algorithm.
        overlap: whether buckets are summed while backward continues; None for what pays.
        fused_update: whether each rank of a node sums and updates a part of the parameters, which
            then stand once per node (see `parallel.fused`): whoever changes them by hand does so
            for all, on one rank. Where there is no shared memory, gradients are summed and used one
            after the other, and `Worker.notice` says why. None for what pays: it is fused on one
            node, where every rank has the whole model and the three options above are the default.
        check: compare the ranks' weights after every step, by hash.
    """

    allreduce: How | Sequence[How] = AUTO
    bucket_bytes: int | None = None
    overlap: bool | None = None
    fused_update: bool | None = None
    check: bool = False

    @property
    def algorithm(self) -> str:
        """The one algorithm of all buckets; "auto" where each has one of its own, chosen for
        buckets of another run.
        """
        return self.allreduce if isinstance(self.allreduce, str) else AUTO

    @property
    def leaves_choice(self) -> bool:
        """Whether nothing is asked for that only a sum of buckets can give."""
        return self.allreduce == AUTO and self.bucket_bytes is None and self.overlap is None


@dataclass(frozen=True)
class Numerics:
    """How a worker computes and bounds its gradients.

        Worker(model, optimizer, group, numerics=Numerics(precision="bf16", clip=1.0))

    Attributes:
        precision: of products, see `backend.precision`; None for that of the context in which the
            worker is made. With fp16 losses are scaled, and an update whose gradient overflows on
            any rank is left out on all; it is for synchronous runs.
        clip: the largest gradient norm; None for any. A synchronous run without servers
            clips the gradient of the whole batch, an asynchronous one that of each worker's part.
    """

    precision: str | None = None
    clip: float | None = None


DEFAULT_EXCHANGE, DEFAULT_NUMERICS = GradientExchange(), Numerics()


def _one_of(what: str, value: str, names: Sequence[str]) -> None:
    if value not in names:
        raise UsageError(f"{what} {value!r} is unknown; choose one of {', '.join(names)}")
