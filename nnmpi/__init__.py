"""nnmpi: neural networks on MPI.

    import nnmpi
    from nnmpi import data, models, nn, ops, optim

    group = nnmpi.start()                        # MPI, once; rank and size
    model = models.cnn((28, 28, 1), 10).initialize(seed=0)
    worker = nnmpi.Worker(model, optim.Adam(model.storage), group)

MPI is started by `start()` and not by the import: the engine alone (`Tensor`, `nn`, `ops`, `optim`)
needs no MPI.
"""

import sys

from nnmpi.base.early import command_of, explain_signals, say_nothing_of_ctrl_c

match command_of(sys.argv, sys.orig_argv):  # before the slow imports
    case "train":
        explain_signals()
    case str(command) if command:
        sys.excepthook = say_nothing_of_ctrl_c

from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from nnmpi.base.errors import NnmpiError  # noqa: E402
from nnmpi.base.launcher import limit_threads  # noqa: E402
from nnmpi.base.version import VERSION  # noqa: E402
from nnmpi.base.wings import OFFERS, offered  # noqa: E402
from nnmpi.base.words import missing_from, nearest  # noqa: E402

limit_threads()  # must come before NumPy is loaded

if sys.argv[:1] == ["-m"]:  # Python looks for the module that it is to run
    import_module("nnmpi.commands.table").refuse_old_spelling(sys.orig_argv)

if TYPE_CHECKING:
    from nnmpi import (
        backend,
        comm,
        data,
        memory,
        metrics,
        models,
        nn,
        ops,
        optim,
        parallel,
        tensor,
    )
    from nnmpi.asynchronous.worker import AsynchronousWorker
    from nnmpi.backend.kernels import jit
    from nnmpi.backend.precision import use_precision
    from nnmpi.base.errors import StopTraining
    from nnmpi.comm.group import Group
    from nnmpi.comm.mpi.start import start
    from nnmpi.comm.simulated.simulated_world import simulate
    from nnmpi.comm.synchrony.sync import Sync
    from nnmpi.compose.arrange import arrange
    from nnmpi.compose.layout import GradientExchange, Layout, Numerics
    from nnmpi.compose.worker import Worker
    from nnmpi.lab.onnx.export import to_onnx
    from nnmpi.nn.compiled import compile
    from nnmpi.parallel.data import DataParallel
    from nnmpi.parallel.zero.strategy import ShardedDataParallel
    from nnmpi.teaching import exercise
    from nnmpi.tensor import Tensor, no_grad
    from nnmpi.train.checkpoint import resume, save
    from nnmpi.train.fit import fit
    from nnmpi.train.run import load

__version__ = VERSION

__all__ = [
    "AsynchronousWorker",
    "DataParallel",
    "GradientExchange",
    "Group",
    "Layout",
    "NnmpiError",
    "Numerics",
    "ShardedDataParallel",
    "StopTraining",
    "Sync",
    "Tensor",
    "Worker",
    "arrange",
    "backend",
    "comm",
    "compile",
    "data",
    "exercise",
    "fit",
    "jit",
    "load",
    "memory",
    "metrics",
    "models",
    "nn",
    "no_grad",
    "ops",
    "optim",
    "parallel",
    "resume",
    "save",
    "simulate",
    "start",
    "tensor",
    "to_onnx",
    "use_precision",
]

# What is imported when it is first used: a program that proves a collective needs no engine, and
# the engine no MPI.
_WHEN_USED = {
    "DataParallel": "nnmpi.parallel.data",
    "GradientExchange": "nnmpi.compose.layout",
    "Group": "nnmpi.comm.group",
    "Layout": "nnmpi.compose.layout",
    "Numerics": "nnmpi.compose.layout",
    "ShardedDataParallel": "nnmpi.parallel.zero.strategy",
    "StopTraining": "nnmpi.base.errors",
    "Sync": "nnmpi.comm.synchrony.sync",
    "Tensor": "nnmpi.tensor.tensor",
    "Worker": "nnmpi.compose.worker",
    "arrange": "nnmpi.compose.arrange",
    "compile": "nnmpi.nn.compiled",
    "fit": "nnmpi.train.fit",
    "jit": "nnmpi.backend.kernels",
    "load": "nnmpi.train.run",
    "resume": "nnmpi.train.checkpoint",
    "save": "nnmpi.train.checkpoint",
    "no_grad": "nnmpi.tensor.function",
    "simulate": "nnmpi.comm.simulated.simulated_world",
    "start": "nnmpi.comm.mpi.start",
    "use_precision": "nnmpi.backend.precision",
}


def __dir__() -> list[str]:
    """Return the public names only."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _WHEN_USED:
        # the next look does not come here
        value = globals()[name] = getattr(import_module(_WHEN_USED[name]), name)
        return value
    if name in __all__:  # a package, or what a wing offers
        return offered(name) if name in OFFERS else import_module(f"nnmpi.{name}")
    close = nearest(name, __all__)
    return missing_from("nnmpi", name, f"; did you mean {close[0]!r}?" if close else "")
