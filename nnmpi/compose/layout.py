"""Layout, GradientExchange and Numerics: the options of a worker.

Incompatible options are refused when they are given; see `compose.refusals`. The commands offer
the same fields as options: a field's docstring is its help.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, TypeAlias

from nnmpi.base.command import as_given, check_numbers, non_defaults, require, settings, spelled
from nnmpi.base.custom import is_custom, name_of
from nnmpi.base.errors import NnmpiError
from nnmpi.base.units import Bytes
from nnmpi.base.wings import Drawn
from nnmpi.comm.algorithms.registry import AUTO, AllReduceName
from nnmpi.comm.collective import Algorithm
from nnmpi.comm.mesh import Mesh
from nnmpi.compose import refusals
from nnmpi.compose.refusals import refuse
from nnmpi.nn.sharding import ALL, OPTIMIZER, STAGES, ULYSSES, ShardingTable
from nnmpi.parallel.compressed import HELP as COMPRESSIONS
from nnmpi.parallel.compressed import compression, parse
from nnmpi.schedule.schedule import Home, Instruction, Schedule, around
from nnmpi.schedule.schedules import (
    PipelineName,
    example_of,
    in_words,
    make,
    named,
    row_of,
    with_any_stages,
)

FAST: Final = "fast"
FIXED: Final = "fixed"
LEAST: Final = "least"

Degree: TypeAlias = int | Literal["auto"]
Precision: TypeAlias = Literal["float32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True)
class Degrees:
    """The ranks on each axis of a layout."""

    dp: Degree = AUTO
    """Data-parallel replicas, which share each batch. dp x pp x tp x sp must be the number of MPI
    ranks. auto: fill up to that.
    """
    pp: Degree = AUTO
    """Pipeline stages, one per rank. auto: fill up to the number of ranks, or 1 if another axis
    does.
    """
    tp: Degree = AUTO
    """Ranks that share each layer (tensor parallelism). auto: as for `pp`."""
    sp: int = 1
    """Ranks that share the positions of each sequence, for models such as gpt whose layers, except
    attention, work position by position. Attention gives each rank all positions of some heads
    (Ulysses), or with fewer heads than ranks passes keys and values around (ring attention).
    """

    def __post_init__(self) -> None:
        check_numbers(self, "dp pp tp sp", 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """dp, pp, tp and sp, with 1 for auto."""
        return tuple(1 if n == AUTO else n for n in (self.dp, self.pp, self.tp, self.sp))


@settings
@dataclass(frozen=True)
class Layout(Drawn, Degrees):
    """Degrees of parallelism, the pipeline's schedule, and memory savings.

    Raises:
        UsageError: for unknown values and incompatible options.

    Example:
        >>> nnmpi.Layout(pp=2, pipeline="gpipe")
        Layout(pp=2, pipeline='gpipe')
        >>> nnmpi.Layout(reduction="fixed", zero=1)
        Traceback (most recent call last):
        nnmpi.base.errors.LayoutError: reduction fixed cannot be combined with zero 1: ZeRO's ...
    """

    _former = MappingProxyType({"schedule": "pipeline"})

    pipeline: PipelineName | Callable[[int, int, int], Sequence[Instruction]] = "1f1b"
    """Pipeline schedule. Or a function (rank, ranks, microbatches) of your own that returns the
    rank's instructions, which are checked before they run; they alone say which stages a rank has
    and when it updates.
    """
    virtual_stages: int = 1
    """Stages per rank, of a schedule that leaves them open; 1 stands for its default."""
    split: Literal["auto"] | Sequence[int] = AUTO
    """Layers in each pipeline stage, such as 5,4,3, which makes the bits repeatable. auto: balance
    measured times.
    """
    reduction: Literal["fast", "fixed"] = FAST
    """fixed: sum the gradients of whole microbatches in an order that does not depend on `dp`. Any
    number of replicas then gives the same bits for the same number of microbatches.
    """
    zero: int = 0
    """ZeRO stage, the state that replicas shard. 1: optimizer state. 2: gradients, too. 3: weights,
    too, gathered block by block for each pass.
    """
    expert_parallel: bool = False
    """Shard the experts of a mixture over the replicas. Tokens travel to their experts and back."""
    memory_limit: Bytes | None = None
    """Bytes a rank may use for parameters (pipedream's older versions, too), gradients and
    optimizer state, such as 512MiB; for `nnmpi train` on a CUDA device, for everything there.
    """
    activation_memory: Bytes | Literal["least"] | None = None
    """Bytes a rank may use for activations, such as 64MiB. The rest is recomputed in the backward
    pass, cheapest first. least: as few as possible; a pipeline's stage keeps only its input.
    """
    offload: str | None = None
    """Where `activation_memory` and `offload_state` put arrays: a folder for a file, or host, the
    memory beside a CUDA device. Activations go there if that is faster than recomputing them.
    """
    offload_state: Literal["optimizer", "all"] | None = None
    """State kept in the file (or host memory) of `offload` and loaded for each use. optimizer: the
    optimizer's state. all: also the weights, but for a rank's own experts, with `zero` 3.
    """
    _: KW_ONLY
    table: ShardingTable | None = None
    """How layers are sharded over `tp`; by default the model's table."""
    state_arrays: int = 2
    """Optimizer arrays per parameter, for `memory_limit` (Adam 2, SGD 0)."""
    sp_attention: Literal["ulysses", "ring"] = ULYSSES
    """Attention over positions sharded by `sp`."""
    unit_bytes: int | None = None
    """Bytes that ZeRO gathers and sums at once; None to choose."""

    def __post_init__(self) -> None:
        """Check the options, as far as that needs no model and no ranks."""
        object.__setattr__(self, "pipeline", named(self.pipeline))
        super().__post_init__()
        check_numbers(self, "virtual_stages split memory_limit activation_memory unit_bytes", 1)
        check_numbers(self, "state_arrays", 0)
        require(
            self._example is None or self._example.trains,
            f"{as_given(self, 'pipeline')} has no backward passes, so it would train nothing; give"
            " each F its B, or I and W",
        )
        usual = self._usual_stages
        require(
            self.virtual_stages in (1, usual)
            or is_custom(self.pipeline)
            or row_of(self.pipeline).any_stages,
            f"{as_given(self, 'virtual_stages')} is for {spelled(self, 'pipeline')}"
            f" {with_any_stages()}; {name_of(self.pipeline)} has {in_words(usual)} per rank",
        )
        require(
            self.zero in (0, *STAGES),
            f"{spelled(self, 'zero')} is {self.zero!r}; ZeRO has stages"
            f" {', '.join(map(str, STAGES))}, and 0 is without",
        )
        self._check_offload()
        check_layout(self)

    def _check_offload(self) -> None:
        require(
            self.offload != "",
            f"{spelled(self, 'offload')} is empty; give a folder or host, or leave it out",
        )
        require(
            self.offload is None or (self.activation_memory, self.offload_state) != (None, None),
            f"{as_given(self, 'offload')} needs a limit of activations, or optimizer state to"
            f" offload; give {spelled(self, 'activation_memory')} or"
            f" {spelled(self, 'offload_state')}, or leave {spelled(self, 'offload')} out",
        )
        if self.offload_state is None:
            return
        require(
            self.offload is not None,
            f"{as_given(self, 'offload_state')} needs a target; give {spelled(self, 'offload')},"
            " too",
        )
        require(
            self.offload_state != ALL or self.zero == STAGES[-1],
            f"{as_given(self, 'offload_state')} takes the units of ZeRO 3, also on one rank; give"
            f" {spelled(self, 'zero')} 3, or {spelled(self, 'offload_state')} {OPTIMIZER}",
        )

    def features(self, mesh: Mesh | None = None) -> dict[str, str]:
        """Return the features in use: their names in `refusals`, and the options as given.

        Args:
            mesh: of the ranks, on which no degree is left open; None before it is known.
        """
        at = mesh or self
        used = {
            refusals.PIPELINE: ("pp", at.pp not in (AUTO, 1)),
            refusals.TENSOR: ("tp", at.tp not in (AUTO, 1)),
            refusals.SEQUENCE: ("sp", self.sp > 1),
            refusals.PIPEDREAM: ("pipeline", self.asynchronous and at.pp != 1),
            refusals.FIXED: ("reduction", self.fixed_order),
            refusals.EXPERTS: ("expert_parallel", self.expert_parallel),
            refusals.ZERO: ("zero", self.zero > 0),
            refusals.LEAST: ("activation_memory", self.activation_memory == LEAST),
            refusals.LIMIT: ("activation_memory", self.limits_activations),
            refusals.STATE_OUT: ("offload_state", self.offload_state is not None),
        }
        return {
            feature: as_given(self, name, mesh)
            for feature, (name, is_used) in used.items()
            if is_used
        }

    def __repr__(self) -> str:
        """Name the options that differ from the default."""
        changed = (f"{name}={value!r}" for name, value in non_defaults(self).items())
        return f"Layout({', '.join(changed)})"

    @property
    def fixed_order(self) -> bool:
        """True if gradients are summed in a fixed order."""
        return self.reduction == FIXED

    @cached_property
    def _example(self) -> Schedule | None:
        """A schedule as the layout's: for a name on two ranks, for a user's function on these.

        None if a function does not suit them, and for one that a command has yet to load.
        """
        if not callable(self.pipeline):
            return None if is_custom(self.pipeline) else example_of(self.pipeline)
        if self.pp == 1:
            return None
        ranks = 2 if self.pp == AUTO else self.pp
        try:
            return make(self.pipeline, ranks, 2 * ranks)
        except NnmpiError:  # the pass that runs it raises it
            return None

    @property
    def _usual_stages(self) -> int:
        return 1 if self._example is None else self._example.virtual

    @property
    def stages_per_rank(self) -> int:
        """The pipeline's stages on each of its ranks."""
        return self._usual_stages if self.virtual_stages == 1 else self.virtual_stages

    @property
    def asynchronous(self) -> bool:
        """True if weights are updated after every microbatch, without a flush (pipedream)."""
        return self._example is not None and self._example.asynchronous

    @property
    def home(self) -> Home:
        """The function (stage, ranks) -> pipeline rank that holds the stage."""
        return around if self._example is None else self._example.home

    @property
    def limits_activations(self) -> bool:
        """True if activations have a limit in bytes."""
        return self.activation_memory not in (None, LEAST)


@settings
@dataclass(frozen=True)
class GradientExchange:
    """How the replicas of a `Worker` sum their gradients and update their weights.

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

    _lists: ClassVar[Mapping[str, str]] = {"compressions": COMPRESSIONS.text}

    allreduce: AllReduceName | Algorithm = AUTO
    """All-reduce of the gradients. Or a function (rank, size) of your own, proved before it
    runs.
    """
    sum: Callable[..., Any] | None = None
    """A way of your own to sum gradients: a class derived from `nnmpi.parallel.GradientSum`, made
    as NAME(group, gradients).
    """
    compress: str | None = None
    """Sum gradients in fewer bytes, for slow links. {compressions} Digits differ from the serial
    run.
    """
    _: KW_ONLY
    bucket_bytes: int | None = None
    """Largest size of a bucket of gradients; None for the algorithm's default."""
    overlap: bool | None = None
    """Sum buckets during the backward pass; None to choose. See `DataParallel`."""
    fused_update: bool | None = None
    """Each rank of a node sums and updates a slice of the parameters, which exist once per node
    (see `parallel.fused`). Change such parameters by hand on one rank only. Where that is
    impossible (no shared memory, or a rank has only parts of the model), the sum and the update are
    separate, with the same numbers, and `Worker.notice` says why. None fuses them on one node, if
    every rank has the full model and the three options above are the default.
    """
    check: bool = False
    """Compare the ranks' weights after every step, by hash."""

    def __post_init__(self) -> None:
        """Check the words of `compress`, and the layout of which a command's options are a part."""
        if self.compress is not None:
            compression(self.compress, spelled(self, "compress"))
        check_rest = getattr(super(), "__post_init__", None)
        if check_rest is not None:
            check_rest()

    @property
    def summing(self) -> Callable[..., Any] | None:
        """What makes a `GradientSum` of (group, gradients); None for the package's exact sums."""
        return self.sum if self.compress is None else compression(self.compress)

    @property
    def leaves_choice(self) -> bool:
        """True if all options for sums of buckets have their defaults."""
        return self.allreduce == AUTO and self.bucket_bytes is None and self.overlap is None


@settings
@dataclass(frozen=True)
class Numerics:
    """Precision, gradient clipping, and an average of the weights.

    Example:
        >>> model = models.mlp((4,), 3, hidden=[16]).initialize(seed=0)
        >>> sgd = optim.SGD(model.storage, lr=0.1)
        >>> numerics = nnmpi.Numerics(clip=0.5)
        >>> group = nnmpi.simulate(lambda group: group, ranks=1)[0]
        >>> worker = nnmpi.Worker(model, sgd, group, numerics=numerics)
        >>> worker.step(np.ones((8, 4)), np.zeros(8, int)).grad_norm > 0.5  # before clipping
        True
    """

    precision: Precision | None = None
    """Input type of matrix products and convolutions; None for that of `nnmpi.use_precision`.
    bf16: rounded to bfloat16; weights and gradients stay float32, activations are bfloat16 on a
    CUDA device alone. Commands need one for tf32, float32 with a 10-bit mantissa, and fp16, half
    precision also for activations: losses are scaled, and all ranks skip an update whose gradient
    overflows on any.
    """
    clip: float | None = None
    """Gradient clipping: the largest global gradient norm. Where ranks do not wait in each step, it
    applies to each worker's gradient.
    """
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999; 0: none. Evaluation and
    the trained run use the average.
    """

    def __post_init__(self) -> None:
        check_numbers(self, "clip", 0, above=True)
        check_numbers(self, "ema", 0, 1)


DEFAULT_EXCHANGE, DEFAULT_NUMERICS = GradientExchange(), Numerics()


def check_layout(
    layout: Layout,
    mesh: Mesh | None = None,
    exchange: GradientExchange = DEFAULT_EXCHANGE,
    precision: str | None = None,
    clip: float | None = None,
    state_out: bool = False,
) -> None:
    """Refuse options that exclude each other, as far as they are known.

    Args:
        layout: whose fields have been checked one by one.
        mesh: of the ranks, whose number gives the degrees that are left open.
        exchange, precision, clip: of the worker.
        state_out: whether the optimizer's state is out of memory.

    Raises:
        LayoutError: naming two.
        UsageError: if nothing is left to offload.
    """
    in_segments = layout.zero > 1 or (mesh or layout).pp not in (AUTO, 1)
    require(
        layout.offload is None
        or layout.offload_state is not None
        or layout.activation_memory != LEAST
        or not in_segments,
        f"with {as_given(layout, 'activation_memory')} a pipeline, as ZeRO 2 and 3, recomputes all"
        " but its segments' inputs, so nothing is left to offload; give a number of bytes, or leave"
        f" {spelled(layout, 'offload')} out",
    )
    way, text = exchange.allreduce, as_given(exchange, "allreduce")
    kind = "" if exchange.compress is None else parse(exchange.compress)[0]
    buckets = [name for name in ("bucket_bytes", "overlap") if getattr(exchange, name) is not None]
    used = {
        refusals.OWN_SUM: as_given(exchange, "sum") if exchange.sum is not None else "",
        refusals.COMPRESSED: as_given(exchange, "compress") if kind else "",
        refusals.LOW_RANK: as_given(exchange, "compress") if kind == "powersgd" else "",
        refusals.BUCKETS: as_given(exchange, buckets[0]) if buckets else "",
        refusals.FUSED: as_given(exchange, "fused_update") if exchange.fused_update else "",
        refusals.STATE_OUT: "state out of memory" if state_out else "",
        refusals.FP16: f"{spelled(layout, 'precision')} fp16" if precision == "fp16" else "",
        refusals.CLIP: f"{spelled(layout, 'clip')} {clip}" if clip is not None else "",
        refusals.CHOSEN: text if way != AUTO else "",
        refusals.UNCUT: text if way not in refusals.CUT else "",
    }
    refuse(layout.features(mesh) | {name: text for name, text in used.items() if text})
