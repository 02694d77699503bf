"""Layout, GradientExchange and Numerics: the options of a worker.

Incompatible options are refused when they are given; see `compose.refusals`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from operator import index
from typing import Literal, TypeAlias

from nnmpi.base.custom import name_of
from nnmpi.base.errors import NnmpiError, UsageError, check_int
from nnmpi.comm.algorithms.registry import AUTO, AlgorithmLike
from nnmpi.compose import refusals
from nnmpi.compose.refusals import refuse
from nnmpi.nn.sharding import ALL, OPTIMIZER, STAGES, ULYSSES, WAYS, ShardingTable
from nnmpi.schedule.schedule import Home, Kind, Schedule
from nnmpi.schedule.schedules import (
    INFERENCE,
    INTERLEAVED,
    SCHEDULES,
    Generator,
    home_of,
    make,
    named,
    usual_stages,
)

FAST, FIXED = "fast", "fixed"
LEAST = "least"
PIPEDREAM = "pipedream"
TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != INFERENCE)

Split: TypeAlias = Literal["auto"] | Sequence[int]


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, the pipeline's schedule, and memory savings.

    Attributes:
        dp, pp, tp: replicas, pipeline ranks, ranks that share each layer; None derives the degree
            from the number of ranks.
        schedule: of the pipeline: "naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v",
            "v-half", "v-min" or "pipedream"; or a function (rank, ranks, microbatches) -> the
            rank's instructions, which is checked before it runs. Its instructions alone say whether
            it updates per microbatch, and which stages a rank has.
        virtual_stages: stages per rank, for "interleaved" (2 if left at 1); "zb-v", "v-half" and
            "v-min" have 2.
        split: "auto" balances measured times; or the number of layers (see `nn.chain`) in each
            stage.
        reduction: "fast", or "fixed" to sum in an order that does not depend on dp (see
            `parallel.fixed_reduction`).
        table: how layers are sharded over tp; by default the model's table.
        memory_limit: most bytes per rank of parameters (including pipedream's older versions),
            gradients and optimizer state; None for no limit. Activations and the sums of reduction
            "fixed" are not counted.
        state_arrays: optimizer arrays per parameter, for the limit (Adam 2, SGD 0).
        activation_memory: most bytes of activations per rank; the rest is recomputed (see
            `memory.recompute`). A pipeline recomputes segments of its stages (see
            `memory.fitting`), in the first step all of them, and measures them. "least" saves as
            little as possible: each pipeline stage saves only its input. None saves everything.
        offload: the destination of activations if that is faster than recomputing them: a folder
            (for a file), or "host" for a device's arrays (see `memory.store`); None for none.
        offload_state: the arrays that stay there and are read in when needed: "optimizer" (its
            state) or "all" (also the weights, but for a rank's own experts; requires `zero` 3);
            None for none.
        sp: ranks that share the positions of each sequence.
        sp_attention: attention over sharded positions: "ulysses" or "ring" (see
            `parallel.sequence`).
        zero: what the replicas shard (see `parallel.zero`): 0: nothing; 1: optimizer state; 2: also
            gradients; 3: also parameters.
        expert_parallel: shard the experts of a mixture over the replicas (see `parallel.experts`).
        unit_bytes: bytes that ZeRO gathers and sums at once, see `parallel.zero.storage`; None to
            choose.

    Raises:
        UsageError: for unknown values and incompatible options.

    Example:
        >>> nnmpi.Layout(pp=2, schedule="gpipe")
        Layout(pp=2, schedule='gpipe')
        >>> nnmpi.Layout(reduction="fixed", zero=1)
        Traceback (most recent call last):
        nnmpi.base.errors.LayoutError: reduction fixed cannot be combined with zero 1: ZeRO's ...
    """

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    schedule: Generator = "1f1b"
    virtual_stages: int = 1
    split: Split = "auto"
    reduction: str = FAST
    table: ShardingTable | None = None
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
        """Check the options, as far as that needs no model and no ranks."""
        object.__setattr__(self, "schedule", named(self.schedule))
        if not callable(self.schedule):
            _one_of("schedule", self.schedule, TRAINING_SCHEDULES)
        if self.activation_memory not in (None, LEAST):
            check_int(f"activation_memory (bytes, or {LEAST!r})", self.activation_memory)
        _one_of("reduction", self.reduction, (FAST, FIXED))
        _one_of("sp attention", self.sp_attention, WAYS)
        for name in ("dp", "pp", "tp", "sp", "virtual_stages", "memory_limit", "unit_bytes"):
            if getattr(self, name) != getattr(Layout, name):
                check_int(name, getattr(self, name))
        check_int("state_arrays", self.state_arrays, 0)
        if self._example is not None and not self._example.trains:
            raise UsageError(
                f"the schedule {name_of(self.schedule)} has no backward passes, so it would train"
                " nothing; give each F its B, or I and W"
            )
        usual = usual_stages(self.schedule) if self._example is None else self._example.virtual
        if self.virtual_stages == 1:
            object.__setattr__(self, "virtual_stages", usual)
        if self.schedule != INTERLEAVED and self.virtual_stages != usual:
            raise UsageError(
                f"{self.virtual_stages} virtual stages are for the pipeline schedule interleaved;"
                f" {name_of(self.schedule)} has {'one' if usual == 1 else 'two'} per rank"
            )
        if self.split != AUTO:
            try:
                least = min(map(index, self.split), default=0)  # type: ignore[arg-type]
            except TypeError:
                raise UsageError(
                    f"split {self.split!r} is unknown; give auto, or numbers of layers such as (5,"
                    " 4, 3)"
                ) from None
            if least < 1:
                raise UsageError(
                    f"split {self.split} has a stage without layers; give each at least 1, or auto"
                )
        if self.zero not in (0, *STAGES):
            raise UsageError(
                f"ZeRO has no stage {self.zero!r}; choose one of {', '.join(map(str, STAGES))}"
            )
        self._check_offload()
        refuse(self.features())

    def _check_offload(self) -> None:
        if self.offload is not None and self.activation_memory is self.offload_state is None:
            raise UsageError(
                f"offload {self.offload} needs a limit of activations, or optimizer state to"
                " offload; give activation_memory or offload_state, or leave offload out"
            )
        if self.offload_state is None:
            in_segments = self.pp not in (None, 1) or self.zero > 1
            if self.offload is not None and self.activation_memory == LEAST and in_segments:
                raise UsageError(
                    f"with activation_memory {LEAST} a pipeline, as ZeRO 2 and 3, recomputes all"
                    " but its segments' inputs, so nothing is left to offload; give a number of"
                    " bytes, or leave offload out"
                )
            return
        _one_of("offload_state", self.offload_state, (OPTIMIZER, ALL))
        if self.offload is None:
            raise UsageError(
                f"offload_state {self.offload_state} needs a target; give offload, too"
            )
        if self.offload_state == ALL and self.zero != STAGES[-1]:
            raise UsageError(
                "weights are offloaded in the units of ZeRO 3, also on one rank; give zero 3, or"
                f" offload_state {OPTIMIZER}"
            )

    def features(self) -> dict[str, str]:
        """Return the features in use: their names in `refusals`, and the options as given."""
        sizes = {refusals.PIPELINE: self.pp, refusals.TENSOR: self.tp, refusals.SEQUENCE: self.sp}
        used = {name: f"{name} {size}" for name, size in sizes.items() if size not in (None, 1)}
        zero, memory = f"zero {self.zero}", f"activation_memory {self.activation_memory}"
        for name, is_used, text in (
            (
                refusals.PIPEDREAM,
                self.asynchronous and self.pp != 1,
                "the pipeline schedule pipedream",
            ),
            (refusals.FIXED, self.fixed, f"reduction {FIXED}"),
            (refusals.EXPERTS, self.expert_parallel, "expert_parallel"),
            (refusals.ZERO, self.zero > 0, zero),
            (refusals.LEAST, self.activation_memory == LEAST, memory),
            (refusals.LIMIT, self.limits_activations, memory),
            (
                refusals.STATE_OUT,
                self.offload_state is not None,
                f"offload_state {self.offload_state}",
            ),
        ):
            if is_used:
                used[name] = text
        return used

    def __repr__(self) -> str:
        """Name the options that differ from the default."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        changed = (f"{name}={value!r}" for name, value, default in values if value != default)
        return f"Layout({', '.join(changed)})"

    @property
    def fixed(self) -> bool:
        """True if gradients are summed in a fixed order."""
        return self.reduction == FIXED

    @cached_property
    def _example(self) -> Schedule | None:
        """A user's schedule for these ranks; None for a name, or if it does not suit them."""
        if not callable(self.schedule) or self.pp == 1:
            return None
        try:
            return make(self.schedule, self.pp or 2, 2 * (self.pp or 2))
        except NnmpiError:  # the pass that runs it raises it
            return None

    @property
    def asynchronous(self) -> bool:
        """True if weights are updated after every microbatch, without a flush (pipedream)."""
        if self._example is None:
            return self.schedule == PIPEDREAM
        items = chain.from_iterable(map(self._example.instructions, range(self._example.ranks)))
        return any(item.kind is Kind.STEP and item.microbatch is not None for item in items)

    @property
    def home(self) -> Home:
        """The function (stage, ranks) -> pipeline rank that holds the stage."""
        return home_of(self.schedule) if self._example is None else self._example.home

    @property
    def limits_activations(self) -> bool:
        """True if activations have a limit in bytes."""
        return self.activation_memory not in (None, LEAST)


@dataclass(frozen=True)
class GradientExchange:
    """How the replicas of a `Worker` sum their gradients and update their weights.

    Attributes:
        allreduce: the algorithm of all buckets, a name or a function; or a sequence with one per
            bucket; "auto" chooses by predicted time. See `parallel.data.DataParallel`, also for the
            next two.
        bucket_bytes: largest size of a bucket of gradients; None for the algorithm's default.
        overlap: sum buckets during the backward pass; None to choose.
        fused_update: each rank of a node sums and updates a slice of the parameters, which exist
            once per node (see `parallel.fused`). Change such parameters by hand on one rank only.
            Where that is impossible (no shared memory, or a rank has only parts of the model), the
            sum and the update are separate, with the same numbers, and `Worker.notice` says why.
            None fuses them on one node, if every rank has the full model and the three options
            above are the default.
        check: compare the ranks' weights after every step, by hash.

    Example:
        >>> def program(group):
        ...     model = models.mlp((4,), 3, hidden=[16]).initialize(seed=0)
        ...     exchange = nnmpi.GradientExchange(allreduce="ring")
        ...     sgd = optim.SGD(model.storage, lr=0.1)
        ...     worker = nnmpi.Worker(model, sgd, group, exchange=exchange)
        ...     return worker.step(np.ones((2, 4)), np.zeros(2, int)).samples
        >>> nnmpi.simulate(program, ranks=2)
        [4, 4]
    """

    allreduce: AlgorithmLike | Sequence[AlgorithmLike] = AUTO
    bucket_bytes: int | None = None
    overlap: bool | None = None
    fused_update: bool | None = None
    check: bool = False

    @property
    def algorithm(self) -> str:
        """The algorithm of all buckets; "auto" if it is a function or a sequence."""
        return self.allreduce if isinstance(self.allreduce, str) else AUTO

    @property
    def leaves_choice(self) -> bool:
        """True if all options for sums of buckets have their defaults."""
        return self.allreduce == AUTO and self.bucket_bytes is None and self.overlap is None


@dataclass(frozen=True)
class Numerics:
    """Precision and gradient clipping of a worker.

    Attributes:
        precision: of products, see `backend.precision`; None for the precision of the context in
            which the worker is made. With fp16 losses are scaled, and all ranks skip an update
            whose gradient overflows on any rank. fp16 is for synchronous runs.
        clip: largest gradient norm; None for no limit. A synchronous run without servers clips the
            gradient of the global batch; an asynchronous run clips the gradient of each worker's
            part.

    Example:
        >>> model = models.mlp((4,), 3, hidden=[16]).initialize(seed=0)
        >>> sgd = optim.SGD(model.storage, lr=0.1)
        >>> numerics = nnmpi.Numerics(clip=0.5)
        >>> group = nnmpi.simulate(lambda group: group, ranks=1)[0]
        >>> worker = nnmpi.Worker(model, sgd, group, numerics=numerics)
        >>> worker.step(np.ones((8, 4)), np.zeros(8, int)).grad_norm > 0.5  # before clipping
        True
    """

    precision: str | None = None
    clip: float | None = None


DEFAULT_EXCHANGE, DEFAULT_NUMERICS = GradientExchange(), Numerics()


def _one_of(option: str, value: str, names: Sequence[str]) -> None:
    if value not in names:
        raise UsageError(f"{option} {value!r} is unknown; choose one of {', '.join(names)}")
