"""What the cost model says of the lab, from the measured alpha, beta and gamma, and what `auto` would choose by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnmpi.comm.curve import Curve
from nnmpi.comm.fit import Fit
from nnmpi.comm.machine import Link, Machine


def fit_of(link: Mapping[str, Any], hosts: int, mpi: str) -> Fit:
    """Return the fit of a lab: one rank on every host, and between them links alike.

    What is made of steps is predicted by simulating them with alpha, beta and gamma. Of MPI's own all-reduce there are
    no steps to look at: it was measured, apart from the rows.

    Args:
        link: what the worker measured before its first row.
        mpi: the library.
    """
    line = Link.line(link["alpha_s"], link["beta_s_per_byte"])
    nodes = tuple(range(hosts))
    add = Curve.line(0.0, link["gamma_s_per_byte"])
    native = Curve(tuple((nbytes, seconds) for nbytes, seconds in link["native"]))
    return Fit(
        machine=Machine(inside=line, across=line, nodes=nodes, add=add),
        native=native,
        native_started=native,
        shared=None,
        facts={"ranks": hosts, "nodes": list(nodes), "mpi": mpi},
    )
