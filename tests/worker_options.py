"""A worker's keyword arguments from flat ones, so that a test's case is one dict."""

from dataclasses import fields
from typing import Any

from nnmpi.compose.layout import GradientExchange, Numerics


def grouped(**options: Any) -> dict[str, Any]:
    """Return keyword arguments for a worker, those of GradientExchange and Numerics put into these.

    grouped(allreduce="ring", clip=1.0, seed=3)
    -> {"exchange": GradientExchange(allreduce="ring"), "numerics": Numerics(clip=1.0), "seed": 3}
    """
    result = dict(options)
    for name, kind in (("exchange", GradientExchange), ("numerics", Numerics)):
        local = {
            field.name: result.pop(field.name) for field in fields(kind) if field.name in result
        }
        if local:
            result[name] = kind(**local)
    return result
