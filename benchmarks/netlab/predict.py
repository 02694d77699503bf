"""What the cost model says of an algorithm on the lab, from the link's alpha, beta and gamma."""

from __future__ import annotations

from collections.abc import Mapping

from nnmpi.comm.algorithms.registry import ALGORITHMS, find_algorithm
from nnmpi.comm.curve import Curve
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.simulate import simulate


def machine_of(link: Mapping[str, float], hosts: int) -> Machine:
    """Return the machine that the lab is: one rank on every host, and between them links alike.

    Args:
        link: what `calibrate` measured.
    """
    line = Link.line(link["alpha_s"], link["beta_s_per_byte"])
    add = Curve.line(0.0, link["gamma_s_per_byte"])
    return Machine(inside=line, across=line, nodes=tuple(range(hosts)), add=add)


def predict(algorithm: str, hosts: int, nbytes: int, machine: Machine) -> float | None:
    """Return the seconds until the last rank has finished, by simulating the steps; None where there are no steps."""
    if algorithm not in ALGORITHMS:
        return None
    return simulate(find_algorithm(algorithm, machine.nodes), hosts, nbytes, machine).seconds
