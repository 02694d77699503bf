"""A worker's options, and which of them go together with its arrangement, its precision and its backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getclosurevars
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import MODES, low_dtype
from nnmpi.comm.agreement import require_equal
from nnmpi.comm.algorithms.registry import AUTO, How
from nnmpi.compose.arrange import Arrangement
from nnmpi.errors import UsageError
from nnmpi.nn.chain import ModelPart
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.zero.storage import ShardedStorage

if TYPE_CHECKING:
    from nnmpi.compose.trainer import Trainer


@dataclass(frozen=True)
class GradientExchange:
    """How the replicas of a `Worker` sum their gradients and update their weights. By default what pays is chosen.

        Worker(model, optimizer, group, exchange=GradientExchange(allreduce="ring", overlap=False))

    Attributes:
        allreduce: the algorithm for every bucket, a name or a function of one's own; or one for each bucket in order;
            "auto" chooses by predicted time. See `parallel.data.DataParallel`, also for the next two.
        bucket_bytes: how large a bucket of gradients may become; None for what suits the algorithm.
        overlap: whether buckets are summed while backward goes on; None for what pays.
        fused_update: whether each rank of a node sums and updates a part of the parameters, which then stand once per
            node (see `parallel.fused`): whoever changes them by hand does so for all, on one rank. Where there is no
            shared memory, gradients are summed and used one after the other, and `Worker.notice` says why. None for
            what pays: it is fused on one node, where every rank has the whole model and the three options above are
            the default.
        check: compare the ranks' weights after every step, by hash.
    """

    allreduce: How | Sequence[How] = AUTO
    bucket_bytes: int | None = None
    overlap: bool | None = None
    fused_update: bool | None = None
    check: bool = False

    @property
    def algorithm(self) -> str:
        """The one algorithm of all buckets; "auto" where each has one of its own, chosen for buckets of another run."""
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
        precision: of products, see `backend.precision`; None for that of the context in which the worker is made. With
            fp16 losses are scaled, and an update whose gradient overflows on any rank is left out on all; it is for
            synchronous runs.
        clip: the largest length of the gradient; None for any. A synchronous run without servers clips the gradient of
            the whole batch, an asynchronous one that of each worker's part.
    """

    precision: str | None = None
    clip: float | None = None


DEFAULT_EXCHANGE, DEFAULT_NUMERICS = GradientExchange(), Numerics()


def check_numerics(trainer: Trainer) -> None:
    """Refuse ranks that would compute or update in different ways, and a precision that they cannot have; collective.

    Replicas of different optimizers go apart without a word, or wait for one another for ever; the gradients of
    different losses would be added up.

    Raises:
        UsageError: on all ranks, where they ask for different precisions, losses, seeds, clipping or optimizers; for an
            unknown precision, bf16 without ml_dtypes, tf32 without a device, and any but float32 for one of float64.
    """
    mode, model, backend = trainer.precision, trainer.model, trainer.backend
    losses = [_described(each) for each in (trainer.loss, trainer.evaluation_loss)]
    problems = (
        "the ranks compute in different precisions",
        *["the ranks' losses differ"] * 2,
        "the ranks' seeds differ",
    )
    require_equal(
        trainer.group,
        [mode, *losses, trainer.seed, *describe_update(trainer)],
        lambda number: problems[number] if number < len(problems) else UPDATES_DIFFER,
        "give all the same",
        UsageError,
    )
    if mode not in MODES:
        raise UsageError(f"precision {mode!r} is unknown; choose one of {', '.join(MODES)}")
    low_dtype(mode)
    if mode == "tf32" and not backend.is_device:
        raise UsageError(
            f"precision tf32 needs a CUDA device, and backend {backend.name} has none; use float32, bf16 or fp16, "
            "or backend cupy"
        )
    if mode != "float32" and any(array.dtype == np.float64 for array in model.storage.data):
        raise UsageError(
            f"precision {mode} is for models of float32, and this one is of float64, which nothing rounds; "
            "use one of the two"
        )


UPDATES_DIFFER = "the ranks' updates differ"


def describe_update(trainer: Trainer) -> list[str]:
    """Return how this rank would update, in words: the rule and its numbers."""
    optimizer = trainer.optimizer
    names = update_numbers(optimizer, trainer.model)
    numbers = [f"{name.replace('_', ' ')} {getattr(optimizer, name)}" for name in names]
    return [type(optimizer).__name__, *numbers, f"clip {trainer.clip}"]


def update_numbers(optimizer: Optimizer, model: Module) -> list[str]:
    """Return the names of the optimizer's numbers that must be the same on all ranks, such as lr.

    How groups of parameters decay is left out in a pipeline, whose stages have different ones.
    """
    names = [name for name, each in vars(optimizer).items() if isinstance(each, int | float) and name[0] != "_"]
    names += ["betas"] * hasattr(optimizer, "betas")
    return names if isinstance(model, ModelPart) else [*names, "weight_decay"]


def _described(loss: Any) -> str:
    """Return a loss in words: its name, its options, and of a function a sum of its code and the floats that it sees.

    Arrays are not looked at, nor whole numbers, among which may be a rank's own.
    """
    if isinstance(loss, partial):
        return _with(_described(loss.func), loss.keywords, bool, int, float, str)
    code = getattr(loss, "__code__", None)
    if code is None:
        words = repr(loss)
        values = getattr(loss, "__dict__", {})
        return words if " at 0x" not in words else _with(type(loss).__name__, values, float, str)
    constants = [each for each in (*code.co_consts, *(loss.__defaults__ or ())) if isinstance(each, float | int | str)]
    number = crc32(repr([code.co_code, code.co_names, constants]).encode())
    return _with(f"{loss.__qualname__} (code {number:08x})", getclosurevars(loss).nonlocals, float, str)


def _with(name: str, values: Mapping[str, Any], *kinds: type) -> str:
    listed = [f"{key.strip('_')} {each}" for key, each in values.items() if isinstance(each, kinds)]
    return f"{name} with {', '.join(listed)}" if listed else name


def check_fused_update(fused_update: bool | None, backend: Backend) -> None:
    """Refuse a fused update of a model that does not live in the host's memory.

    Raises:
        UsageError: saying so.
    """
    if fused_update and backend.is_device:
        raise UsageError(
            f"the fused update works on weights in memory that the ranks of a node share, and these live on "
            f"{backend.device}; leave it out"
        )


def refuse_scaling(mode: str, what: str) -> None:
    """Refuse fp16 where ranks do not decide together, step by step, whether an update is made.

    Raises:
        UsageError: naming what does so.
    """
    if mode == "fp16":
        raise UsageError(
            f"with fp16 all ranks leave out an update that overflows on one of them, and {what} they do not meet in "
            "every step; use bf16, which needs no loss scaling, or a synchronous run without servers"
        )


def has_whole_model(arrangement: Arrangement | None) -> bool:
    """Whether every rank has all of the model, and sums are taken as they come."""
    if arrangement is None:
        return True
    mesh = arrangement.mesh.mesh
    return mesh.pp == 1 and mesh.tp == 1 and not arrangement.layout.fixed and not arrangement.layout.zero


def check_pairs(
    model: Module, arrangement: Arrangement | None, fused_update: bool | None, clip: float | None, scaled: bool
) -> None:
    """Refuse options that do not go together.

    Args:
        scaled: whether losses are scaled.

    Raises:
        UsageError: saying which.
    """
    if fused_update and model.storage.state_keeper is not None:
        raise UsageError(
            "the fused update shares out the optimizer's state among a node's ranks, and here it lies out of memory; "
            "leave one of them out"
        )
    if arrangement is None:
        if isinstance(model, ModelPart) or any(parameter.region is not None for parameter in model.parameters()):
            raise UsageError(
                "this rank has a part of the model alone, which the other ranks do not share; give the Worker the "
                "arrangement that made it: arrangement=where"
            )
        return
    layout, mesh = arrangement.layout, arrangement.mesh.mesh
    if model is not arrangement.model:
        raise UsageError("the model is not the arrangement's; initialize and use arrangement.model")
    if layout.zero and not isinstance(model.storage, ShardedStorage):
        raise UsageError(
            f"with zero {layout.zero} the model's storage is shared out from the beginning; initialize it with "
            "storage=arrangement.storage"
        )
    if fused_update and layout.zero:
        raise UsageError(
            f"the fused update keeps the parameters once per node by itself, and zero {layout.zero} shares them out; "
            "leave one of them out"
        )
    if fused_update and not has_whole_model(arrangement):
        raise UsageError(
            f"the fused update is for replicas of a whole model, summed as they come, not for {mesh} with reduction "
            f"{layout.reduction}; leave it out"
        )
    if layout.asynchronous and scaled:
        raise UsageError(
            "with fp16 an update whose gradient overflows is left out on all ranks, but with pipedream each stage "
            "updates when its own gradient is there; use bf16, or another pipeline schedule, such as 1f1b"
        )
    if layout.asynchronous and mesh.pp > 1 and clip is not None:
        raise UsageError(
            "clipping needs the gradient of all stages at once, but with pipedream each stage updates when its own is "
            "there; leave one of them out"
        )
