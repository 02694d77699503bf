"""The wings: what is built on the core. It knows them by this table and by that of commands alone.

    asynchronous/    ranks that need not wait for one another: a Trainer of its own
    lab/             plans, measurements, pictures, pages, diagnoses, the supervisor of runs
    teaching/        exercises, grades, mpi4py programs on simulated ranks

A wing imports the core. Without its folder the core trains on, and says what is missing.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nnmpi.base.errors import NnmpiError, UsageError
from nnmpi.base.picture import preformat

WINGS = {
    "asynchronous": "training whose ranks do not wait for one another",
    "lab": "plans, measurements, pages and diagnoses",
    "teaching": "exercises, grades, and mpi4py programs on simulated ranks",
}
NEEDS = {"teaching": ("asynchronous", "lab")}  # a wing's exercises draw, and judge a server's rules
# What the core and users ask a wing for, and where it is; without a colon the module itself.
OFFERS = {
    "AsynchronousWorker": "asynchronous.worker:AsynchronousWorker",
    "as_text": "lab.render.notebook:draw",
    "choose_layout": "lab.planner.auto_layout:choose",
    "exercise": "teaching.exercise",
    "foresee_layout": "lab.planner.auto_layout:foresee",
    "find_launcher": "lab.launching:find_launcher",
    "to_onnx": "lab.onnx.export:to_onnx",
}


def module_of(path: str) -> str:
    """Return the full name of a module, given without `nnmpi`.

    Raises:
        UsageError: for one of a wing that this installation lacks.
    """
    first = path.partition(".")[0]
    for wing in (first, *NEEDS.get(first, ())):
        if wing in WINGS and find_spec(f"nnmpi.{wing}") is None:
            raise UsageError(
                f"this installation of nnmpi lacks its folder nnmpi/{wing}, which is for"
                f" {WINGS[wing]}; install nnmpi again, whole"
            )
    return f"nnmpi.{path}"


def offered(name: str) -> Any:
    """Return what a wing offers by this name; the wing is imported then.

    Raises:
        UsageError: see `module_of`.
    """
    path, _, attribute = OFFERS[name].partition(":")
    module = import_module(module_of(path))
    return getattr(module, attribute) if attribute else module


class Drawn:
    """A value that a notebook draws, if the wing that does it is there."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        try:
            return preformat(offered("as_text")(self))
        except NnmpiError:
            return None  # the notebook shows its text
