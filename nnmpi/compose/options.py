"""A worker's options, and which of them go together with its arrangement, its precision and its backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import MODES, low_dtype
from nnmpi.comm.agreement import require_equal
from nnmpi.comm.algorithms.registry import AUTO, How
from nnmpi.compose import refusals
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


def check_optimizer(model: Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that would update other arrays than the model's.

    Raises:
        UsageError: saying what to do.
    """
    if not isinstance(optimizer, Optimizer):
        what = type(optimizer).__name__
        raise UsageError(f"a {what} stands where the optimizer belongs: nnmpi.Worker(model, optimizer, group)")
    if optimizer.storage is not model.storage:
        raise UsageError(
            "the optimizer works on other arrays than the model's; make it over model.storage, after the last "
            "model.initialize()"
        )


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
    """Return a loss in words: its name and, where it has any, its options."""
    if isinstance(loss, partial):
        return f"{_described(loss.func)} with {loss.keywords}"
    words = repr(loss)
    return words if " at 0x" not in words else str(getattr(loss, "__qualname__", type(loss).__name__))


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
    model: Module,
    arrangement: Arrangement | None,
    fused_update: bool | None,
    clip: float | None,
    scaled: bool,
    backend: Backend,
) -> None:
    """Refuse options that do not go together, and a model that is not the arrangement's.

    Args:
        scaled: whether losses are scaled.

    Raises:
        UsageError: saying which.
    """
    given: dict[str, str] = {}
    if arrangement is not None:
        mesh = arrangement.mesh.mesh
        given = replace(arrangement.layout, dp=mesh.dp, pp=mesh.pp, tp=mesh.tp).features()
    given |= {refusals.STATE_OUT: "state out of memory"} if model.storage.state_store is not None else {}
    given |= {refusals.FUSED: "the fused update"} if fused_update else {}
    given |= {refusals.DEVICE: str(backend.device)} if backend.is_device else {}
    given |= {refusals.FP16: "fp16"} if scaled else {}
    given |= {refusals.CLIP: "clip"} if clip is not None else {}
    refusals.refuse(given)
    if arrangement is None:
        if isinstance(model, ModelPart) or any(parameter.region is not None for parameter in model.parameters()):
            raise UsageError(
                "this rank has a part of the model alone, which the other ranks do not share; give the Worker the "
                "arrangement that made it: arrangement=where"
            )
        return
    if model is not arrangement.model:
        raise UsageError("the model is not the arrangement's; initialize and use arrangement.model")
    if arrangement.layout.zero and not isinstance(model.storage, ShardedStorage):
        raise UsageError(
            f"with zero {arrangement.layout.zero} the model's storage is shared out from the beginning; initialize it "
            "with storage=arrangement.storage"
        )
